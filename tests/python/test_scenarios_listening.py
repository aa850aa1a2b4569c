"""Scenarios of notifications: listeners that are cut off or dropped, and a pooler that passes none on.
Ids as in docs/scenarios.md."""

from collections.abc import Iterator

import pytest
from psycopg.conninfo import make_conninfo

from tests.python.cluster import Cluster
from tests.python.proxy import Proxy
from tests.services.database import Database
from tests.services.pgbouncer import PgBouncer
from tests.services.postgres import Connection, PostgresServer
from tests.services.process import wait_until

# Nothing is found soon but by notification: the scheduler looks by itself every five seconds, the others
# hardly ever.
ONLY_NOTIFIED = {
    "FLOWFORGE_POLL_INTERVAL": "600",
    "FLOWFORGE_REAP_INTERVAL": "5",
    "FLOWFORGE_RECOVER_INTERVAL": "3600",
    "FLOWFORGE_SWEEP_INTERVAL": "3600",
}


@pytest.fixture
def path(db: Database) -> Iterator[Proxy]:
    """The way to the database."""
    with Proxy(db.server.port) as proxy:
        yield proxy


@pytest.fixture(params=["postgresql", "rabbitmq"])
def either(request: pytest.FixtureRequest, path: Proxy) -> Cluster:
    """Either delivery, set up after the path, so that it ends before."""
    found: Cluster = request.getfixturevalue("cluster" if request.param == "postgresql" else "rabbit_cluster")
    return found


def by(path: Proxy, db: Database) -> str:
    """The database's address on that path."""
    return make_conninfo(db.server.dsn(db.name, tcp=True), port=path.port)


def run_in_turn(cluster: Cluster, count: int) -> None:
    """Runs, each after the other's end. A task ends when the scheduler is asleep: one that nobody wakes needs
    longer for twenty than is waited for, and a publisher or worker like that for one."""
    runs: list[int] = []

    def done() -> bool:
        if not runs or cluster.run_state(runs[-1]) == "succeeded":
            runs.append(cluster.trigger("one", {"work": {"sleep": 0.15}}))
        return len(runs) > count

    wait_until(done, "runs in turn")
    assert cluster.wait_ended(runs[-1]) == ["succeeded"]


def test_hd_23_listeners_terminated(either: Cluster, path: Proxy) -> None:
    """Each listener is replaced, says so, hears, and looks at what was committed while it was away."""
    cluster = either
    cluster.start("scheduler", FLOWFORGE_DATABASE_URL=by(path, cluster.db), **ONLY_NOTIFIED)
    names = ("publisher", "worker") if cluster.broker else ("worker",)
    cluster.start(*names, FLOWFORGE_DATABASE_URL=by(path, cluster.db), **ONLY_NOTIFIED)
    listeners = ("scheduler listen", "publisher listen" if cluster.broker else "worker claim")
    if cluster.broker:
        cluster.wait_declared()
    run_in_turn(cluster, 1)
    before = cluster.sessions()
    cluster.terminate(*listeners)
    run_in_turn(cluster, 3 if cluster.broker else 20)
    after = cluster.sessions()
    for name in listeners:
        assert after[name].isdisjoint(before[name])
        assert len(after[name]) == 1
    # The scheduler goes on being woken, and the other one is away when it is told.
    path.refusing = True
    cluster.terminate(listeners[1])
    run = cluster.trigger("one")
    cluster.wait_task(run, "work", "ready")
    path.refusing = False
    assert cluster.wait_ended(run) == ["succeeded"]
    scheduler, other = cluster.processes[:2]
    for process, times in (scheduler, 1), (other, 2):
        lost, again = "listening connection lost; reconnecting", "listening again on a new connection"
        if "worker" in process.name:
            lost, again = "database connection lost; trying again", "database answers again"
        assert (process.said(lost), process.said(again)) == (times, times)
    cluster.check()


def test_hd_23_listeners_dropped_silently(path: Proxy, rabbit_cluster: Cluster) -> None:
    """Work goes on by looking for it, and the listeners are replaced."""
    cluster = rabbit_cluster
    daemons = cluster.daemons(
        workers=1,
        FLOWFORGE_DATABASE_URL=by(path, cluster.db),
        FLOWFORGE_POLL_INTERVAL="1",
        FLOWFORGE_CONNECT_TIMEOUT="2",
    )
    cluster.wait_declared()
    assert cluster.wait_ended(cluster.trigger("one")) == ["succeeded"]
    listeners = ("scheduler listen", "publisher listen")
    wait_until(lambda: all(cluster.sessions()[name] for name in listeners), "the listeners")
    before = cluster.sessions()
    path.stall(*(f"flowforge {name}" for name in listeners))
    assert cluster.wait_ended(cluster.trigger("chain")) == ["succeeded"]
    path.stall()
    again = "listening again on a new connection"
    wait_until(lambda: [each.said(again) for each in daemons] == [1, 1, 0], "their replacement")
    assert [each.said("listening connection lost; reconnecting") for each in daemons] == [1, 1, 0]
    for name in listeners:
        # The server does not know yet that nobody is at the end of the earlier one.
        assert before[name] < cluster.sessions()[name]
    assert cluster.wait_ended(cluster.trigger("chain")) == ["succeeded"]
    cluster.check()


POOL = 4


@pytest.fixture
def pooler(pg_server: PostgresServer) -> Iterator[PgBouncer]:
    with PgBouncer(pg_server, POOL) as pooler:
        yield pooler


def test_hd_24_pooler_in_transaction_mode(pooler: PgBouncer, rabbit_cluster: Cluster) -> None:
    """One warning by each that would listen; everything works by looking for it, and leaves nothing in the
    sessions, which are anybody's."""
    cluster = rabbit_cluster
    cluster.execute("create table public.effect (task_run_id bigint)")
    daemons = cluster.everyone(
        FLOWFORGE_DATABASE_URL=pooler.dsn(cluster.db.name),
        FLOWFORGE_PREPARED_STATEMENTS="off",
        FLOWFORGE_LEASE="6",
    )
    scheduler, publisher, _, worker = daemons
    warning = "LISTEN hears nothing (a pooler?); going on by polling only"
    wait_until(lambda: all(each.said(warning) for each in (scheduler, publisher, worker)), "the warnings")
    go = cluster.directory / "go"
    held = cluster.trigger("one", {"work": {"until": str(cluster.directory / "never")}})
    writing = cluster.trigger_many("one", [{"work": {"transaction": str(go)}}] * 2)
    mixed = cluster.trigger_many("mixed", [{"broken": {"fail": True}, "flaky": {"attempts": 2}}] * 10)
    assert set(cluster.wait_ended(*mixed)) == {"failed"}
    assert cluster.states(mixed[0]) == {
        "a": "succeeded", "flaky": "succeeded", "broken": "failed",
        "rescue": "succeeded", "skipped": "skipped", "end": "succeeded",
    }  # fmt: skip
    assert {cluster.task(run, "flaky")["attempt"] for run in mixed} == {2}
    cluster.wait_task(held, "work", "running")
    cluster.rows("select flowforge.cancel_run(%s)", held)
    assert cluster.wait_ended(held) == ["cancelled"]
    wait_until(lambda: bool(cluster.sessions()["worker transaction"]), "an open transaction")
    go.touch()
    assert cluster.wait_ended(*writing) == ["succeeded"] * 2
    assert cluster.rows("select task_run_id from public.effect order by 1") == [
        (cluster.task(run, "work")["task_run_id"],) for run in writing
    ]
    assert {each.stop() for each in daemons} == {0}
    assert [each.said(warning) for each in daemons] == [1, 1, 0, 1]
    assert not [
        entry for each in daemons for entry in each.entries() if entry["level"] in ("error", "critical")
    ]
    _check_sessions_are_clean(cluster, pooler)
    cluster.check()


def _check_sessions_are_clean(cluster: Cluster, pooler: PgBouncer) -> None:
    """What the next client of the pooler gets is as the server has made it, but for what the pooler itself
    sets for each client."""
    clients: list[Connection] = []
    seen: dict[int, tuple[object, ...]] = {}
    for _ in range(POOL):
        client = Database.connect(cluster.db, host="127.0.0.1", port=pooler.port, autocommit=False)
        clients.append(client)
        pid, *rest = client.execute(
            """
            select pg_backend_pid(),
                array(select name from pg_settings where source = 'session' and name not in
                    ('application_name', 'client_encoding', 'DateStyle', 'TimeZone',
                     'standard_conforming_strings')),
                array(select pg_listening_channels()),
                array(select name from pg_prepared_statements),
                array(select mode from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()),
                array(select relname::text from pg_class where relpersistence = 't')
            """
        ).fetchone() or (0,)
        seen[pid] = tuple(rest)
    pooled = cluster.rows(
        "select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        " and backend_type = 'client backend'"
    )
    for client in clients:
        client.close()
    assert {pid for (pid,) in pooled} == set(seen), "a session of the pooler was not looked at"
    assert set(map(repr, seen.values())) == {repr(([],) * 5)}
