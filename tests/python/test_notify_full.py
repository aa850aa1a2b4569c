"""HD-22: the server's notification queue is full. Whatever was said to a handler's end still counts, and all
goes on by looking.

Only versions from 17 on can be told to keep a small queue; this asks for one of its own.
"""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from flowforge.config import Config
from flowforge.errors import is_transient
from flowforge.metrics import Figures
from flowforge.migrate import migrate
from tests.python.cluster import Cluster
from tests.services.database import Database, prepare_template
from tests.services.postgres import Connection, PostgresServer, binaries
from tests.services.process import wait_until


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    with PostgresServer(*binaries("18"), {"max_notify_queue_pages": "64"}) as server:
        yield server


def fill(connection: Connection, share: float) -> None:
    """Fill the queue up to a share, or until the server takes no more."""
    usage = "select pg_notification_queue_usage() >= %s"
    while connection.execute(usage, [share]).fetchone() == (False,):
        connection.execute("select pg_notify('other', repeat('x', 7000) || g) from generate_series(1, 4) g")


def test_hd_22_a_full_notification_queue_loses_no_result(server: PostgresServer) -> None:
    dsn = f"host={server.host} port={server.port} user={server.user} dbname={server.dbname}"
    migrate(dsn)
    with psycopg.connect(dsn) as listener, psycopg.connect(dsn, autocommit=True) as connection:
        listener.execute("listen other")
        listener.commit()
        listener.execute("select 1")  # and its transaction stays open
        # A scheduler that sleeps is what makes a finish notify.
        connection.execute("""select flowforge.define_workflow('{"name": "w", "tasks": [{"name": "a"}]}')""")
        connection.execute("select flowforge.trigger('w'), flowforge.dispatch_ready()")
        connection.execute("select flowforge.declare_scheduler(true)")
        claim = b"""select task_run_id, fencing_token
            from flowforge.claim_next('{default}', 'me', gen_random_uuid(), '1 h')"""
        claimed = connection.execute(claim).fetchone()
        with pytest.raises(psycopg.errors.ProgramLimitExceeded) as caught:
            fill(connection, 2)
        assert is_transient(caught.value), "the fault that a commit is told of passes by itself"
        finish = "select flowforge.finish_task_run(%s, %s, 'succeeded', '1')"
        assert connection.execute(finish, claimed).fetchone() == ("accepted",)
        for call in ("settle_finished()", "dispatch_ready()", "trigger('w')", "reap_expired_leases()"):
            connection.execute(f"select flowforge.{call}".encode())
        ended = "select count(*) from flowforge.run where state = 'succeeded'"
        assert connection.execute(ended).fetchone() == (1,)
        assert connection.execute("select * from flowforge.violations()").fetchall() == []


@pytest.fixture
def cluster(server: PostgresServer, tmp_path: Path) -> Iterator[Cluster]:
    server.create_database("migrated")
    prepare_template(server.host, server.port, server.user, "migrated", server.password, True)
    with Cluster(Database(server, "migrated"), tmp_path) as cluster:
        yield cluster


def test_hd_22_daemons_go_on_while_the_queue_is_full(cluster: Cluster) -> None:
    """A session that listens on FlowForge's channel keeps its transaction. How full the queue is can be seen;
    daemons that start meanwhile say what fails, and listen when it can be done; all of them work by looking.
    None ever listens in a transaction: once that one is gone, the queue is empty."""
    old = cluster.daemons(workers=1)
    assert cluster.wait_ended(cluster.trigger("one")) == ["succeeded"]
    begun: set[tuple[str, bool]] = set()

    def ended(runs: list[int]) -> bool:
        """Whether the runs have; looks at the listeners each time."""
        begun.update(
            cluster.rows(
                "select application_name, state like 'idle in transaction%%' or backend_xid is not null"
                " from pg_stat_activity where datname = current_database() and application_name in"
                " ('flowforge scheduler listen', 'flowforge worker claim') and state <> 'active'"
            )
        )
        return {cluster.run_state(run) for run in runs} == {"failed"}

    with cluster.db.connect(autocommit=False) as stuck, cluster.db.connect() as other:
        stuck.execute("listen flowforge_outbox")
        stuck.commit()
        stuck.execute("select 1")
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):
            fill(other, 2)
        assert _exported(cluster) > 0.9
        new = cluster.daemons(workers=1)
        said = ("listening connection lost; reconnecting", "LISTEN cannot be tried; polling until it can")
        wait_until(lambda: all(each.said(event) for each, event in zip(new, said, strict=True)), "the errors")
        mixed = cluster.trigger_many("mixed", [{"broken": {"fail": True}, "flaky": {"attempts": 2}}] * 5)
        wait_until(lambda: ended(mixed), "the runs' end")
        (entry,) = [each for each in new[0].entries() if each["event"] == said[0]]
        assert entry["error"] == "ProgramLimitExceeded"
        stuck.rollback()
        stuck.execute("unlisten *")
        stuck.commit()
    cluster.trigger("one")  # which looks how full it is, and so moves its end on
    wait_until(lambda: new[0].said("listening again on a new connection") == 1, "the scheduler's ears")
    usage = "select pg_notification_queue_usage()"
    wait_until(lambda: cluster.value(usage) == 0, "an empty queue")
    assert _exported(cluster) == 0
    assert begun == {("flowforge scheduler listen", False), ("flowforge worker claim", False)}
    assert set(cluster.wait_ended()) == {"succeeded", "failed"}
    assert all(each.running() for each in old + new)
    cluster.check()


def _exported(cluster: Cluster) -> float:
    """The share in use, as it is told by the metrics."""
    figures = Figures(Config(database_url=cluster.db.dsn))
    try:
        (found,) = [each for each in figures.metrics() if each.name == "notification_queue"]
    finally:
        figures.close()
    return found.values[""]
