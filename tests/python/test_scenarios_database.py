"""Scenarios of the database's condition: failover, time-outs of sessions, no free connections, old runs.
Ids as in docs/scenarios.md."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from psycopg import OperationalError
from psycopg.errors import ReadOnlySqlTransaction

from tests.python.cluster import Cluster, Process
from tests.services import postgres
from tests.services.database import Database, prepare_template
from tests.services.postgres import Connection, PostgresServer
from tests.services.process import wait_until


class Gap:
    """Tasks on all kinds of daemons, which end while the database is of no use."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        # Three for each worker.
        self.daemons = cluster.everyone(FLOWFORGE_CONNECT_TIMEOUT="2", FLOWFORGE_CONCURRENCY="3")
        self._workers = self.daemons[2:]
        cluster.wait_declared()
        # Twice, so that each has all its connections, and loses them.
        first, self._go = cluster.directory / "first", cluster.directory / "go"
        before = self._begin(first)
        first.touch()
        cluster.wait_ended(*before)
        self._runs = self._begin(self._go)
        assert len(cluster.sessions()["worker finish"]) == 2

    def _begin(self, until: Path) -> list[int]:
        count = len(self.cluster.executions()) + 6
        runs = self.cluster.trigger_many("one", [{"work": {"until": str(until)}}] * 6)
        wait_until(lambda: len(self.cluster.executions()) == count, "the executions")
        return runs

    def end_tasks(self) -> None:
        """Let the tasks end, and their workers know of it."""
        self._go.touch()
        wait_until(lambda: len(self.cluster.executions("end")) == 12, "their end")

    def wait_lost(self) -> None:
        """Wait until nobody could tell the database of its tasks' end."""
        wait_until(lambda: all(map(_told_of_finish, self._workers)), "the lost connections")

    def check(self) -> None:
        """What ended in the gap is accepted, as it was; all daemons are there and work."""
        cluster = self.cluster
        assert set(cluster.wait_ended(*self._runs)) == {"succeeded"}
        later = cluster.trigger_many("chain", [{}] * 5)
        assert set(cluster.wait_ended(*later)) == {"succeeded"}
        outcome = "select distinct attempt, fencing_token, reaps from flowforge.task_run"
        assert cluster.rows(outcome) == [(1, 1, 0)]
        assert len(cluster.executions()) == 12 + 15
        assert all(each.running() for each in self.daemons)
        wait_until(lambda: {each.health() for each in self.daemons} == {"ok"}, "their health")
        for each in self.daemons[:2]:
            assert each.said("no database; trying again") > 0
            assert each.said("connected to PostgreSQL again") == 1
        for each in self._workers:
            assert _told_of_finish(each) == [
                "database connection lost; trying again", "database answers again",
            ]  # fmt: skip
        cluster.check()


def _told_of_finish(worker: Process) -> list[str]:
    """What the worker's log tells of the connection for its tasks' ends."""
    return [entry["event"] for entry in worker.entries() if entry.get("connection") == "finish"]


def test_hd_42_read_only(rabbit_cluster: Cluster) -> None:
    """Whoever meets a server that is read-only gives up its connection, and waits for one that is not."""
    cluster, gap = rabbit_cluster, Gap(rabbit_cluster)
    before = cluster.sessions()
    _set(cluster, "alter system set default_transaction_read_only = on")
    try:
        with pytest.raises(ReadOnlySqlTransaction):
            cluster.trigger("one")
        gap.end_tasks()
        gap.wait_lost()
        wait_until(lambda: all("read-only" in each.log.read_text() for each in gap.daemons), "their notice")
    finally:
        _set(cluster, "alter system reset default_transaction_read_only")
    gap.check()
    after = cluster.sessions()
    for name in ("scheduler", "publisher", "worker finish"):
        assert after[name].isdisjoint(before[name])


def _set(cluster: Cluster, statement: str) -> None:
    """Change the server's configuration, and see it hold."""
    with cluster.db.server.connect() as operator:
        operator.execute("set default_transaction_read_only = off")
        operator.execute(statement.encode())
        operator.execute("select pg_reload_conf()")
    wanted = "on" if statement.endswith("on") else "off"
    shown = "show default_transaction_read_only"
    wait_until(lambda: cluster.value(shown) == wanted, "the new configuration")


def test_hd_42_restart(rabbit_cluster: Cluster) -> None:
    """The server is stopped, and started again when all tasks have ended."""
    cluster, gap = rabbit_cluster, Gap(rabbit_cluster)
    cluster.db.server.stop()
    gap.end_tasks()
    gap.wait_lost()
    cluster.db.server.start()
    cluster.reconnect()
    gap.check()


def test_hd_42_all_sessions_terminated(rabbit_cluster: Cluster) -> None:
    """Every session ends in the middle of a statement that waits."""
    cluster, gap = rabbit_cluster, Gap(rabbit_cluster)
    before = cluster.sessions()
    waiting = """
        select application_name from pg_stat_activity
        where wait_event_type = 'Lock' and datname = current_database()
    """
    with cluster.db.connect(autocommit=False) as other:
        other.execute("lock table flowforge.task_run, flowforge.outbox in access exclusive mode")
        gap.end_tasks()
        wanted = {"flowforge worker finish", "flowforge scheduler", "flowforge publisher"}
        wait_until(lambda: wanted <= {name for (name,) in cluster.rows(waiting)}, "statements that wait")
        cluster.terminate()
    gap.check()
    pids = set().union(*before.values())
    assert not pids & set().union(*cluster.sessions().values())


def test_hd_43_time_outs_of_sessions(rabbit_cluster: Cluster) -> None:
    """Statements are killed and asked again; of transactions only the publisher's batch and a handler's own
    ever stand idle, and the handler's has limits of its own."""
    cluster = rabbit_cluster
    cluster.execute("create table public.effect (task_run_id bigint)")
    other = cluster.db.connect(autocommit=False)  # as the cluster's own, it has no limits yet
    for limit in ("idle_in_transaction_session_timeout", "statement_timeout"):
        cluster.execute(f"alter database {cluster.db.name} set {limit} = '1 s'")
    daemons = cluster.everyone()
    cluster.wait_declared()
    idle: set[str] = set()

    def killed(why: str) -> set[str]:
        """Whose statements or sessions the server has ended for that. Each time others are looked at, too."""
        idle.update(
            name for (name,) in cluster.rows(
                "select application_name from pg_stat_activity where state = 'idle in transaction'"
                " and datname = current_database() and application_name like 'flowforge%%'"
            )
        )  # fmt: skip
        told = re.compile(rf"@{cluster.db.name}/(.*) (?:ERROR|FATAL): .*{why}")
        lines = cluster.db.log()
        return {found[1].removeprefix("flowforge ") for line in lines if (found := told.search(line))}

    go, now = cluster.directory / "go", cluster.directory / "now"
    reporting = cluster.trigger_many("one", [{"work": {"progress": "half", "until": str(go)}}] * 2)
    writing = cluster.trigger("one", {"work": {"transaction": str(now)}})
    reported = "select count(*) from flowforge.progress"
    wait_until(lambda: cluster.value(reported) == 2, "two reports")
    wait_until(lambda: (killed(""), "flowforge worker transaction" in idle)[1], "a handler's transaction")
    with cluster.db.connect(autocommit=False, application_name="bystander") as bystander:
        bystander.execute("select")
        wait_until(lambda: killed("idle-in-transaction timeout") == {"bystander"}, "the bystander's end")
        bystander.close()
    now.touch()
    assert cluster.wait_ended(writing) == ["succeeded"]
    with other:
        other.execute("lock table flowforge.task_run, flowforge.outbox in access exclusive mode")
        everywhere = {"scheduler", "publisher", "worker claim", "worker renew"}
        wait_until(lambda: everywhere <= killed("statement timeout"), "killed statements")
        go.touch()
        wait_until(lambda: "worker finish" in killed("statement timeout"), "a killed finish")
        other.rollback()
    assert cluster.wait_ended(*reporting) == ["succeeded"] * 2
    assert cluster.rows("select distinct attempt, fencing_token, reaps from flowforge.task_run") == [
        (1, 1, 0)
    ]
    assert cluster.rows("select message, count(*) from flowforge.progress group by 1") == [("half", 2)]
    assert cluster.wait_ended(cluster.trigger("chain")) == ["succeeded"]
    assert len(cluster.executions()) == 3 + 3
    assert killed("idle-in-transaction timeout") == {"bystander"}
    assert idle <= {"flowforge publisher", "flowforge worker transaction"}
    # A killed statement passes by itself, and leaves its connection as it was.
    entries = [entry for each in daemons for entry in each.entries()]
    assert [entry for entry in entries if entry["level"] == "error"] == []
    assert [entry for entry in entries if "connection lost" in entry["event"]] == []
    assert all(each.running() for each in daemons)
    cluster.check()


def test_hd_48_connections_of_each_process(rabbit_cluster: Cluster) -> None:
    """As documented: two, two, three, and one more for each open transaction of a handler."""
    cluster = rabbit_cluster
    cluster.execute("create table public.effect (task_run_id bigint)")
    cluster.daemons(workers=1)
    cluster.wait_declared()
    assert cluster.wait_ended(*cluster.trigger_many("diamond", [{}] * 5)) == ["succeeded"] * 5
    go = cluster.directory / "go"
    runs = cluster.trigger_many("one", [{"work": {"transaction": str(go)}}] * 2)
    documented = dict.fromkeys(
        ("scheduler", "scheduler listen", "publisher", "publisher listen"), 1
    ) | dict.fromkeys(("worker claim", "worker finish", "worker renew"), 1)

    def counted() -> dict[str, int]:
        return {name: len(pids) for name, pids in cluster.sessions().items()}

    wait_until(lambda: counted() == documented | {"worker transaction": 2}, "the documented connections")
    go.touch()
    assert cluster.wait_ended(*runs) == ["succeeded"] * 2
    wait_until(lambda: counted() == documented, "the end of the transactions")
    cluster.check()


@pytest.fixture
def small_cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """On a server of its own with few connections."""
    binaries = postgres.binaries(request.config.getoption("--pg"))
    with PostgresServer(*binaries, settings={"max_connections": "20"}) as server:
        server.create_database("migrated")
        prepare_template(server.host, server.port, server.user, "migrated", server.password, True)
        with Cluster(Database(server, "migrated"), tmp_path) as cluster:
            yield cluster


@pytest.fixture
def hoard() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_hd_48_no_connection_left(hoard: ExitStack, small_cluster: Cluster) -> None:
    """Daemons without one wait, each for a time of its own; ends of tasks are told when there are some."""
    cluster = small_cluster
    settings = {"FLOWFORGE_CONCURRENCY": "1", "FLOWFORGE_CONNECT_TIMEOUT": "2", "FLOWFORGE_LEASE": "60"}
    working = cluster.start("scheduler", "worker", "worker", "worker", **settings)
    go = cluster.directory / "go"
    runs = cluster.trigger_many("one", [{"work": {"until": str(go)}}] * 3)
    wait_until(lambda: len(cluster.executions()) == 3, "the executions")
    taken: list[Connection] = []

    def all_taken() -> bool:
        with suppress(OperationalError):
            while True:
                taken.append(hoard.enter_context(cluster.db.connect()))
        cluster.terminate()
        return len(taken) == 19

    wait_until(all_taken, "the last connection")
    more = cluster.start(*["worker"] * 6, **settings)
    go.touch()
    wait_until(lambda: len(cluster.executions("end")) == 3, "the ends of the tasks")
    wait_until(lambda: all(map(_told_of_finish, working[1:])), "ends that cannot be told")
    refused = "too many clients already"
    wait_until(lambda: all(refused in each.log.read_text() for each in cluster.processes), "all refusals")
    delays = [
        entry["seconds"] for each in more for entry in each.entries()
        if entry["event"] == "no database; waiting for it"
    ]  # fmt: skip
    assert len(delays) == len(more), "one line by each"
    assert len(set(delays)) > 1
    assert all(each.running() for each in cluster.processes)
    # For all ten there are too few.
    assert {each.stop() for each in more[:4]} == {0}
    hoard.close()
    assert cluster.wait_ended(*runs) == ["succeeded"] * 3
    assert cluster.rows("select distinct attempt, fencing_token, reaps from flowforge.task_run") == [
        (1, 1, 0)
    ]
    left = working + more[4:]
    wait_until(lambda: {each.health() for each in left} == {"ok"}, "their health")
    assert set(cluster.wait_ended(*cluster.trigger_many("chain", [{}] * 5))) == {"succeeded"}
    assert len(cluster.executions()) == 3 + 15
    cluster.check()


def test_hd_48_prune_under_load(cluster: Cluster) -> None:
    """Runs that ended long ago go, a few at a time; one that only began long ago does not, nor an order."""
    cluster.daemons(workers=2)
    old = cluster.trigger_many("mixed", [{"broken": {"fail": True}, "flaky": {"attempts": 2}}] * 50)
    recent = cluster.trigger_many("one", [{}] * 10)
    cluster.wait_ended(*old, *recent)
    elsewhere = {
        "name": "elsewhere",
        "tasks": [{"name": "work", "handler": "one.work", "queue": "elsewhere"}],
    }
    cluster.rows("select version from flowforge.define_workflow(%s)", json.dumps(elsewhere))
    go = cluster.directory / "go"
    active = cluster.trigger("one", {"work": {"until": str(go)}})
    waiting = cluster.trigger("elsewhere")
    before = cluster.wait_task(active, "work", "running"), cluster.wait_task(waiting, "work", "ready")
    cluster.execute(
        "update flowforge.run set created_at = created_at - interval '2 days',"
        " finished_at = finished_at - interval '1 day' where run_id = any(%s)",
        [*old, active, waiting],
    )
    unpublished = "select count(*) from flowforge.outbox where published_at is null and queue = 'elsewhere'"
    assert cluster.value(unpublished) == 1
    load = cluster.trigger_many("diamond", [{}] * 100)
    deleted: list[int] = []
    while not deleted or deleted[-1]:
        deleted.append(cluster.value("select flowforge.prune('1 hour', 20)"))
    under_way = "select count(*) from flowforge.run where finished_at is null and run_id = any(%s)"
    assert cluster.value(under_way, load) > 0, "there was no load any more"
    assert deleted == [20, 20, 10, 0]
    left = cluster.rows("select run_id from flowforge.run order by 1")
    assert [run for (run,) in left] == sorted([*recent, active, waiting, *load])
    assert cluster.value("select count(*) from flowforge.attempt") == 0
    assert cluster.task(waiting, "work") == before[1]
    assert cluster.task(active, "work")["fencing_token"] == before[0]["fencing_token"]
    assert cluster.value(unpublished) == 1
    cluster.start("worker", FLOWFORGE_QUEUES="elsewhere")
    go.touch()
    assert set(cluster.wait_ended()) == {"succeeded"}
    cluster.check()
