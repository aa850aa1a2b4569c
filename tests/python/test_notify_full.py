"""HD-22: the server's notification queue is full. Whatever was said to a handler's end still counts.

Only versions from 17 on can be told to keep a small queue; this asks for one of its own.
"""

from collections.abc import Iterator

import psycopg
import pytest

from flowforge.errors import is_transient
from flowforge.migrate import migrate
from tests.services.postgres import Connection, PostgresServer, binaries


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
