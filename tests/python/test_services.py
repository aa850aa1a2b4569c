"""The servers for the tests keep what they promise: what other tests prove rests on it."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
from pika.exceptions import AMQPConnectionError
from psycopg import sql

from tests.services import debian, postgres
from tests.services.database import Clock, Database
from tests.services.postgres import PostgresServer
from tests.services.process import MEMORY, Scratch, descendants, has_ended, wait_for_end, wait_until
from tests.services.rabbitmq import Broker, RabbitServer

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def own_pg_server(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A server that no other test uses."""
    with PostgresServer(*postgres.binaries(request.config.getoption("--pg"))) as server:
        yield server


def test_what_a_durable_server_commits_reaches_a_disk(request: pytest.FixtureRequest) -> None:
    """Figures of benchmarks would be of another world."""
    with PostgresServer(*postgres.binaries(request.config.getoption("--pg")), durable=True) as server:
        assert MEMORY not in server.directory.parents
        with psycopg.connect(server.dsn()) as connection:
            assert connection.execute("show fsync").fetchone() == ("on",)


def publish(broker: Broker, queue: str, count: int) -> None:
    with broker.channel() as channel:
        channel.confirm_delivery()
        for _ in range(count):
            channel.basic_publish("", queue, b"", mandatory=True)


def test_postgres_is_what_was_asked_for(request: pytest.FixtureRequest, pg_server: PostgresServer) -> None:
    """The whole suite runs on the version that --pg names, over both ways in, as UTF-8."""
    asked = request.config.getoption("--pg")
    for tcp in (False, True):
        with psycopg.connect(pg_server.dsn(tcp=tcp)) as connection:
            row = connection.execute(
                "select current_setting('server_version_num')::int / 10000,"
                " current_setting('server_encoding')"
            ).fetchone()
        assert row == (pg_server.version, "UTF8")
    assert not asked.isdigit() or pg_server.version == int(asked)


def test_postgres_over_tcp_asks_for_the_password(pg_server: PostgresServer) -> None:
    """A port of this machine is open to all its users; the superuser of this server must not be."""
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(pg_server.dsn(tcp=True), password="wrong")


@pytest.mark.parametrize("end", ["restart", "kill"])
def test_postgres_keeps_its_data(own_pg_server: PostgresServer, end: str) -> None:
    """Committed rows survive a stop in order and a SIGKILL of all processes, on the same port."""
    with own_pg_server.connect() as connection:
        connection.execute("create table kept as select 42 as value")
        assert own_pg_server.process is not None
        processes = descendants(own_pg_server.process.pid)
        own_pg_server.stop() if end == "restart" else own_pg_server.kill()
        assert not own_pg_server.is_running()
        assert all(map(has_ended, processes))
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select")
    own_pg_server.start()
    with own_pg_server.connect() as connection:
        assert connection.execute("select value from kept").fetchone() == (42,)


def test_postgres_that_cannot_start_shows_its_log(own_pg_server: PostgresServer) -> None:
    own_pg_server.stop()
    own_pg_server.configure({"max_connections": "none"})
    with pytest.raises(RuntimeError, match="max_connections"):
        own_pg_server.start()


def test_each_test_has_its_own_database(pg_server: PostgresServer, db: Database) -> None:
    """Two copies of the template share nothing, and dropping one ends the sessions in it."""
    template = db.template
    other = Database(pg_server, template)
    with db.connect() as here, other.connect() as there:
        here.execute("create table mine ()")
        assert there.execute("select to_regclass('mine')").fetchone() == (None,)
        other.drop()
        with pytest.raises(psycopg.OperationalError):
            there.execute("select")
        assert here.execute("select to_regclass('mine')::text").fetchone() == ("mine",)


def test_a_login_has_its_groups_rights_and_goes_with_its_database(
    pg_server: PostgresServer, db: Database
) -> None:
    other = Database(pg_server, db.template)
    with psycopg.connect(other.create_login("flowforge_reader")) as connection:
        row = connection.execute(
            "select current_user, pg_has_role(g, 'usage'), pg_has_role(w, 'usage')"
            " from (values ('flowforge_reader', 'flowforge_worker')) as v (g, w)"
        ).fetchone()
    assert row is not None
    assert row[1:] == (True, False)
    other.drop()
    with db.connect() as connection:
        assert connection.execute("select to_regrole(%s)", (row[0],)).fetchone() == (None,)


def test_the_clock_is_flowforges_and_stands_until_moved(db: Database, clock: Clock) -> None:
    """Every session reads the test's clock, with the rights of FlowForge's own functions."""
    with db.connect() as connection:

        def reading() -> datetime:
            row = connection.execute("select flowforge._clock()").fetchone()
            assert row is not None
            value: datetime = row[0]
            return value

        connection.execute("set role flowforge_owner")
        started = clock.now()
        assert reading() == started
        clock.advance(timedelta(hours=1))
        clock.advance("30 minutes")
        assert reading() == started + timedelta(minutes=90)
        clock.set(datetime(2030, 1, 1, tzinfo=UTC))
        assert reading() == datetime(2030, 1, 1, tzinfo=UTC)


# The state machine's table, for rows as `put` below leaves them: no map, the run not cancelled.
ALLOWED = {
    *(("pending", new) for new in ("ready", "skipped", "cancelled")),
    *(("ready", new) for new in ("running", "failed", "cancelled")),
    *(("running", new) for new in ("succeeded", "failed", "pending", "ready")),
    *((old, "pending") for old in ("succeeded", "failed", "cancelled", "skipped")),
}
STATES = ("pending", "ready", "running", "succeeded", "failed", "cancelled", "skipped")


def put(connection: postgres.Connection, state: str, attempt: int, token: int) -> None:
    """Write one task run's state with all that the table's constraints want beside it."""
    running, terminal = state == "running", state not in ("pending", "ready", "running")
    stage = {"pending": "eligible", "ready": "dispatched", "running": "leased"}.get(state, "unsettled")
    columns = {
        "state": state,
        "stage": stage,
        "attempt": attempt,
        "fencing_token": token,
        "dispatch_id": None if state == "pending" else "00000000-0000-0000-0000-000000000001",
        "claim_id": "00000000-0000-0000-0000-000000000002" if running else None,
        "lease_owner": "w" if running else None,
        "lease_expires_at": "infinity" if running else None,
        "lease_length": "1 minute" if running else None,
        "finished_at": "now" if terminal else None,
    }
    assignments = sql.SQL(", ").join(sql.SQL("{} = %s").format(sql.Identifier(name)) for name in columns)
    connection.execute(
        sql.SQL("update flowforge.task_run set {}").format(assignments), list(columns.values())
    )


# Transitions of the table, with an attempt or a token that does not go with them: old, new, attempt, token.
WRONG = [
    ("ready", "running", 1, 7),  # claimed without a new token
    ("ready", "running", 2, 8),  # claimed as another attempt
    ("running", "ready", 2, 7),  # reaped into another attempt
    ("running", "pending", 1, 7),  # retried as the same attempt
    ("running", "succeeded", 1, 8),  # finished with a token that nobody was given
    ("running", "running", 1, 6),  # the token goes back
    ("failed", "pending", 0, 7),  # the attempt goes back
]


@pytest.fixture
def stage(pg_server: PostgresServer, db: Database) -> Iterator[Database]:
    """A database with one task run, apart from `db`, whose log must stay clean."""
    stage = Database(pg_server, db.template)
    with stage.connect() as connection:
        connection.execute("""select flowforge.define_workflow('{"name": "w", "tasks": [{"name": "t"}]}')""")
        connection.execute("select flowforge.trigger('w')")
    yield stage
    stage.drop()


def change(stage: Database, old: str, new: str, attempt: int, token: int) -> bool:
    """Whether the task run may go from `old` (attempt 1, token 7) to this."""
    with stage.connect() as connection:
        connection.execute("set session_replication_role = replica")  # no triggers: any state may be set up
        put(connection, old, 1, 7)
        connection.execute("set session_replication_role = origin")
        try:
            put(connection, new, attempt, token)
        except psycopg.errors.AssertFailure:
            return False
        return True


def test_exactly_the_transitions_of_the_state_machine_pass(stage: Database) -> None:
    """What the state machine's table lacks raises, and is found in the log if somebody swallows the error."""
    allowed = {
        (old, new)
        for old, new in itertools.permutations(STATES, 2)
        if change(
            stage, old, new, 2 if (old, new) == ("running", "pending") else 1, 8 if new == "running" else 7
        )
    }
    assert allowed == ALLOWED
    assert len(stage.forbidden_transitions()) == len(STATES) * (len(STATES) - 1) - len(ALLOWED)


def test_transitions_with_a_wrong_attempt_or_token_are_rejected(stage: Database) -> None:
    assert [case for case in WRONG if change(stage, *case)] == []


def test_a_run_ends_once(stage: Database) -> None:
    """From one end to another there is no way but through a retry."""
    with stage.connect() as connection:
        connection.execute("update flowforge.run set state = 'failed', unsettled = 0, finished_at = now()")
        with pytest.raises(psycopg.errors.AssertFailure, match="forbidden transition of run"):
            connection.execute("update flowforge.run set state = 'succeeded'")
        connection.execute("update flowforge.run set state = 'running', unsettled = 1, finished_at = null")


def test_the_broker_keeps_confirmed_messages(rabbit_server: RabbitServer, amqp_namespace: str) -> None:
    """Confirmed messages in a quorum queue survive a stop in order and a SIGKILL, on the same port."""
    queue = f"{amqp_namespace}.kept"
    rabbit_server.declare(queue)
    for end in (rabbit_server.stop, rabbit_server.kill):
        publish(rabbit_server, queue, 3)
        end()
        assert not rabbit_server.is_running()
        rabbit_server.start()
        wait_until(lambda: rabbit_server.counts(queue) == (3, 0), "the queue's recovery")
        rabbit_server.purge(queue)
        assert rabbit_server.counts(queue) == (0, 0)
    rabbit_server.delete_queue(queue)
    assert rabbit_server.counts(queue) is None


def test_the_broker_application_stops_and_starts(rabbit_server: RabbitServer, amqp_namespace: str) -> None:
    queue = f"{amqp_namespace}.q"
    rabbit_server.declare(queue)
    rabbit_server.stop_app()
    with pytest.raises(AMQPConnectionError):
        rabbit_server.counts(queue)
    rabbit_server.start_app()
    wait_until(lambda: rabbit_server.counts(queue) == (0, 0), "the queue's recovery")


def test_a_policy_limits_a_queue(rabbit_server: RabbitServer, amqp_namespace: str) -> None:
    queue = f"{amqp_namespace}.limited"
    rabbit_server.declare(queue)
    rabbit_server.set_policy(amqp_namespace, f"^{queue}$", '{"max-length": 1}')
    publish(rabbit_server, queue, 3)
    wait_until(lambda: rabbit_server.queues()[queue] == (1, 0, 0), "the policy's effect")
    rabbit_server.clear_policy(amqp_namespace)


def test_a_namespace_is_cleaned_and_no_other(rabbit_server: RabbitServer, amqp_namespace: str) -> None:
    """One broker serves all tests, none of which sees another's queues."""
    mine, other = f"{amqp_namespace}x.q", f"{amqp_namespace}.q"
    rabbit_server.declare(mine)
    rabbit_server.declare(other)
    rabbit_server.delete_namespace(f"{amqp_namespace}x")
    assert rabbit_server.counts(mine) is None
    assert rabbit_server.counts(other) == (0, 0)


ORPHANAGE = """
import sys
from tests.services import postgres, rabbitmq
database = postgres.PostgresServer(*postgres.binaries(sys.argv[1]))
broker = rabbitmq.RabbitServer()
database.start()
broker.start()
print(database.directory, broker.directory, flush=True)
sys.stdin.read()
"""


def test_no_server_outlives_a_killed_test_run(request: pytest.FixtureRequest) -> None:
    """SIGKILL of who started them ends PostgreSQL, RabbitMQ and its epmd; the next run removes their data."""
    with subprocess.Popen(
        [sys.executable, "-c", ORPHANAGE, request.config.getoption("--pg")],
        cwd=CHECKOUT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as starter:
        assert starter.stdout is not None
        directories = starter.stdout.readline().split()  # they run now
        processes = descendants(starter.pid)
        assert {"postgres", "beam.smp", "epmd"} <= {process.name() for process in processes}
        os.kill(starter.pid, signal.SIGKILL)
        starter.wait()
    wait_for_end(processes)
    Scratch("later").remove()
    assert not any(Path(directory).exists() for directory in directories)


@pytest.mark.parametrize("apt_get", [None, "#!/bin/sh\necho no route to the mirror >&2\nexit 100\n"])
def test_servers_that_cannot_be_fetched_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], apt_get: str | None
) -> None:
    """Without apt-get, or its servers out of reach: a message that says what to do, nothing half made."""
    programs, cache = tmp_path / "bin", tmp_path / "cache"
    programs.mkdir()
    cache.mkdir()
    if apt_get:
        for name in ("apt-get", "dpkg-deb"):
            (programs / name).write_text(apt_get)
            (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("FLOWFORGE_TEST_AMQP_URL", raising=False)
    monkeypatch.setattr(debian, "cache_directory", lambda: cache)
    assert debian.main(["rabbitmq"]) == 1
    message = capsys.readouterr().err
    assert "FLOWFORGE_TEST_AMQP_URL" in message
    assert ("no route to the mirror" if apt_get else "apt-get") in message
    assert [path.name for path in cache.iterdir()] == ["rabbitmq.lock"]
