"""The workers of this project conform to the protocol over both deliveries, and conformance finds mistakes.
All of them are examined at the same time, each on a database of its own."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest
from psycopg import OperationalError, connect
from psycopg.conninfo import conninfo_to_dict

from flowforge import exits
from flowforge.config import Config
from flowforge.conformance import CLAUSES, Verdict, examine, target
from flowforge.conformance.engine import Engine
from flowforge.conformance.proxy import Proxy
from flowforge.errors import DatabaseUnavailable
from tests.python.shell import Shell
from tests.services import node
from tests.services.amqp_tools import shell_path
from tests.services.database import Database, prepare_template
from tests.services.postgres import PostgresServer, binaries
from tests.services.process import wait_until
from tests.services.rabbitmq import RabbitServer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PYTHON = [sys.executable, "-m", "flowforge", "worker", "flowforge.conformance.handlers"]
PATIENCE = 60.0
IMPATIENCE = 8.0  # with what is to be seen as violated, most of which is seen by nothing happening


class Mistake(NamedTuple):
    """A mistake put into the worker in Node, or in shell, and the clauses that it violates."""

    old: str
    new: str
    violates: set[str]
    by_broker: bool = False
    in_shell: bool = False


# In a loop, but a slow one.
GIVE_BACK = """
function give_back(channel, message) {
  setTimeout(() => { try { channel.nack(message, false, true); } catch (error) { tell(error); } }, 100);
}
"""

MISTAKES = {
    "acknowledges at once": Mistake(
        "await claimed.then(() => from.ack(message), () => from.nack(message, false, false))",
        "from.ack(message);\n  await claimed.then(() => {}, () => {})",
        {"acknowledges_after_claim"},
        by_broker=True,
    ),
    "claims anew after an unknown outcome": Mistake(
        "pool.query(text, values)",
        'pool.query(text, text.includes("flowforge.claim") ? values.with(1, randomUUID()) : values)',
        {"claim_repeated"},
    ),
    "has one claim_id for a dispatch": Mistake(
        "worker, randomUUID(), lease, ...values",
        "worker, JSON.parse(values[0]).dispatch_id, lease, ...values",
        {"doubled_message"},
        by_broker=True,
    ),
    "gives the unreadable back": Mistake(
        "from.nack(message, false, false)",
        "give_back(from, message)",
        {"unreadable_message"},
        by_broker=True,
    ),
    "ends its handlers when the broker is away": Mistake(
        "channel = null; noMessage();",
        'channel = null; noMessage(); stopping.signal.dispatchEvent(new Event("abort"));',
        {"broker_lost"},
        by_broker=True,
    ),
    "gives back what cannot be": Mistake(
        "const claimed = claim(",
        f"if (/{2**53}/.test(message.content)) return give_back(from, message);\n  const claimed = claim(",
        {"stale_message"},
        by_broker=True,
    ),
    "overlooks that its queue is gone": Mistake(
        "flowforge.${queue}`, found)",
        "flowforge.${queue}`, (each) => each && found(each))",
        {"queue_deleted"},
        by_broker=True,
    ),
    "overlooks it in shell": Mistake(
        "-ge 10 ]", "-ge 600 ]", {"queue_deleted"}, by_broker=True, in_shell=True
    ),
    "renews by its own lease": Mistake("task.lease / 3", "10", {"renews", "cancel"}),
    "never renews": Mistake("renew().catch(() => {});", "", {"renews", "cancel", "lost"}),
    "ignores cancel": Mistake(' || outcome === "cancel"', "", {"cancel"}),
    "ignores the loss": Mistake('outcome === "lost" || ', "", {"lost"}),
    "ignores the time limit": Mistake("if (task.limit < 2e6)", "if (false)", {"time_limit"}),
    "finishes under its first token": Mistake(
        "const finish = (outcome",
        "const first = ((globalThis.tokens ??= {})[id] ??= token);\n  const finish = (outcome",
        {"failure"},
    ),
    "tells a result only once": Mistake(
        "tell(answer);",
        'if (text.includes("finish")) return [];',
        {"finish_repeated"},
    ),
    "retries what cannot be stored": Mistake(
        "${message}`, false)", "${message}`)", {"unstorable_output"}
    ),
    "takes what is nested too deep for unanswered": Mistake(
        "(22|23|54|WF)", "(22|23|WF)", {"unreadable_message"}, by_broker=True
    ),
    "takes it so in shell": Mistake(
        "(22|23|54|WF)",
        "(22|23|WF)",
        {"unreadable_message", "unstorable_output"},
        by_broker=True,
        in_shell=True,
    ),
    "acknowledges at once in shell": Mistake(
        "    consumer=$!\n",
        '    consumer=$!\n    touch "$message.answered"\n',
        {"acknowledges_after_claim"},
        by_broker=True,
        in_shell=True,
    ),
    "hands over no upstream outputs": Mistake(
        "upstream_outputs as upstream", "upstream_states as upstream", {"hands_over"}
    ),
    "fails what it does not know": Mistake(
        'return giveBack("unknown_handler")', 'return finish("failed", null, "unknown")', {"unknown_handler"}
    ),
    "ends without giving back": Mistake(
        "function stopAll() {",
        "function stopAll() { process.exit(0);",
        {"sigterm"},
    ),
}  # fmt: skip


def command(directory: Path, mistake: Mistake | None = None) -> list[str]:
    """The worker in Node, with the mistake."""
    source = (EXAMPLES / "worker.mjs").read_text()
    if mistake is not None:
        source = mistaken(source, mistake) + GIVE_BACK
        if "first = " in mistake.new:
            source = source.replace('$6)", id, token, outcome', '$6)", id, first, outcome')
    directory.mkdir()
    (directory / "node_modules").symlink_to(node.modules())
    (directory / "worker.mjs").write_text(source)
    return [str(node.program()), str(directory / "worker.mjs"), str(EXAMPLES / "handlers.mjs")]


def mistaken(source: str, mistake: Mistake) -> str:
    assert source.count(mistake.old) == 1, mistake.old
    return source.replace(mistake.old, mistake.new)


NO_JSON = "Node, whose outputs may be no JSON at all"


def without_json(directory: Path) -> list[str]:
    """The worker in Node with handlers of which one answers what JSON does not know."""
    *program, handlers = command(directory)
    source = Path(handlers).read_text()
    assert source.count(r'() => "\0"') == 1
    (directory / "handlers.mjs").write_text(source.replace(r'() => "\0"', "() => 1n"))
    return [*program, str(directory / "handlers.mjs")]


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[list[Verdict]]]]:
    """By worker, and by mistake, what came of each clause."""
    amqp = os.environ.get("FLOWFORGE_TEST_AMQP_URL", "")
    if not amqp:
        rabbit: RabbitServer = request.getfixturevalue("_session_rabbit_server")
        amqp = rabbit.url
    directory = tmp_path_factory.mktemp("workers")
    programs, library_path = binaries("18")
    path = shell_path(tmp_path_factory.mktemp("path"))
    shell = ["env", f"PATH={path}", str(EXAMPLES / "worker.sh"), str(EXAMPLES / "handlers")]
    jobs: dict[str, tuple[list[str], bool]] = {
        "shell": (shell, False),
        "shell, RabbitMQ": (shell, True),
        "Python": (PYTHON, False),
        "Python, RabbitMQ": (PYTHON, True),
        "Node": (command(directory / "right"), False),
        "Node, RabbitMQ": (command(directory / "right with RabbitMQ"), True),
        NO_JSON: (without_json(directory / "no JSON"), False),
    }
    for name, mistake in MISTAKES.items():
        if mistake.in_shell:
            wrong = directory / name
            wrong.write_text(mistaken((EXAMPLES / "worker.sh").read_text(), mistake))
            wrong.chmod(0o755)
            jobs[name] = [*shell[:2], str(wrong), shell[3]], mistake.by_broker
        else:
            jobs[name] = command(directory / name, mistake), mistake.by_broker
    with PostgresServer(programs, library_path, {"max_connections": "400"}) as server:
        server.create_database("template")
        prepare_template(server.host, server.port, server.user, "template", server.password, autocommit=True)
        databases = {name: Database(server, "template") for name in jobs}
        logins = {name: db.create_login("flowforge_worker") for name, db in databases.items()}

        def run(name: str) -> list[Verdict]:
            worker, by_broker = jobs[name]
            config = Config(database_url=databases[name].dsn, amqp_urls=(amqp,) if by_broker else ())
            clauses = [each for each in CLAUSES if by_broker or not each.needs_broker]
            if name == NO_JSON:
                clauses = [each for each in clauses if each.name == "unstorable_output"]
            violates = MISTAKES[name].violates if name in MISTAKES else set()
            broken = [each for each in clauses if each.name in violates]
            kept = [each for each in clauses if each not in broken]
            found = list(examine(config, logins[name], worker, kept, PATIENCE))
            if broken:
                found += examine(config, logins[name], worker, broken, IMPATIENCE)
            assert not databases[name].forbidden_transitions()
            with databases[name].connect() as connection:
                assert connection.execute("select * from flowforge.violations()").fetchall() == []
            return found

        with ThreadPoolExecutor(len(jobs)) as pool:
            yield {name: pool.submit(run, name) for name in jobs}


@pytest.fixture
def alone(verdicts: dict[str, Future[list[Verdict]]]) -> None:
    """No other thread examines a worker, which would be hit by what a test puts in a module's place."""
    for future in verdicts.values():
        future.exception()


def violated(future: Future[list[Verdict]]) -> dict[str, str]:
    return {each.clause: each.seen for each in future.result() if not each.holds}


@pytest.mark.parametrize(
    "worker", ["shell", "shell, RabbitMQ", "Python", "Python, RabbitMQ", "Node", "Node, RabbitMQ", NO_JSON]
)
def test_a_worker_conforms(worker: str, verdicts: dict[str, Future[list[Verdict]]]) -> None:
    assert violated(verdicts[worker]) == {}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_violates_the_clause_that_is_about_it(
    mistake: str, verdicts: dict[str, Future[list[Verdict]]]
) -> None:
    found = violated(verdicts[mistake])
    assert found.keys() == MISTAKES[mistake].violates, found


def test_a_run_that_does_not_end_is_told_of_as_it_is_then(verdicts: dict[str, Future[list[Verdict]]]) -> None:
    told = violated(verdicts["finishes under its first token"])["failure"]
    assert "the run did not end; task: " in told
    assert "token 0" not in told, "as it was when the waiting began"


def test_every_clause_is_violated_by_some_mistake() -> None:
    untried = {each.name for each in CLAUSES} - set().union(*(each.violates for each in MISTAKES.values()))
    assert untried == {"finishes", "database_lost"}, "of which each other clause makes use"


def test_the_command_tells_people_and_programs(db: Database) -> None:
    shell = Shell(db.dsn)
    right = shell("conformance", "--clause", "finishes", "--clause", "failure", "--", *PYTHON)
    assert right.stdout.splitlines()[-1] == (
        "2 clauses of the protocol, delivered by PostgreSQL alone: all hold"
    )
    assert right.stdout.startswith("holds    finishes ")
    arguments = ["conformance", "--json", "--clause", "sigterm", "false"]
    [wrong] = map(json.loads, shell(*arguments, code=exits.EXIT_FAILED).stdout.splitlines())
    assert (wrong["clause"], wrong["holds"]) == ("sigterm", False)
    assert wrong["seen"] == "the worker ended by itself, with exit code 1"
    with db.connect() as connection:
        states = connection.execute("select distinct state::text from flowforge.run order by 1").fetchall()
        assert [state for (state,) in states] == ["cancelled", "failed", "succeeded"]


@pytest.mark.usefixtures("alone")
def test_the_worker_has_a_login_of_its_own(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing would be known of its rights; also where the connection string names it by a service."""
    mine, its = (conninfo_to_dict(dsn) for dsn in (db.dsn, db.create_login("flowforge_worker")))
    monkeypatch.setenv("PGUSER", str(mine["user"]))
    monkeypatch.setenv("PGPASSWORD", str(mine.get("password") or ""))
    for nobody in ("postgresql://127.0.0.1/x", "dbname=x", f"user={mine['user']}"):
        told = Shell(db.dsn)("conformance", "--worker-url", nobody, "x", code=exits.EXIT_CONFIG)
        assert f"names no other login than {mine['user']}" in told.stderr
    services = tmp_path / "services"
    password = its.get("password", "secret")  # not asked for where the server trusts
    services.write_text(f"[its]\nuser={its['user']}\npassword={password}\n")
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    engine = Engine(Config(database_url=db.dsn), "service=its", [], 1)
    with engine:
        told_worker = engine.environment()
    assert (told_worker["PGUSER"], told_worker["PGPASSWORD"]) == (its["user"], password)


def test_no_login_is_to_become_the_owner_for_it(db: Database) -> None:
    shell = Shell(db.create_login("flowforge_reader"))
    told = shell("conformance", "x", code=exits.EXIT_PRIVILEGE).stderr
    assert told.rstrip().endswith("; remedy: give it the login that migrated its database")


@pytest.mark.usefixtures("alone")
def test_what_the_system_refuses_is_not_laid_at_the_worker_s_door(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    told = Shell(db.dsn)("conformance", "--clause", "finishes", "x", code=exits.EXIT_FAILED).stderr
    assert "conformance cannot go on, whatever the worker is like: [Errno 28] No space left" in told


@pytest.mark.usefixtures("alone")
def test_a_database_that_is_lost_is_not_laid_at_the_worker_s_door_either(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object) -> NoReturn:
        raise OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(target, "in_use", lose)
    told = Shell(db.dsn)("conformance", "--clause", "finishes", "x", code=exits.EXIT_DATABASE).stderr
    assert "server closed the connection" in told


@pytest.mark.usefixtures("hears_hang_ups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_worker_behind(db: Database, tmp_path: Path, number: int) -> None:
    """It is in a session of its own."""
    pid = tmp_path / "pid"
    worker = ["sh", "-c", f"echo $$ >{pid}.new && mv {pid}.new {pid} && exec sleep 600"]
    command = [*PYTHON[:3], "conformance", "--database-url", db.dsn, "--clause", "finishes", "--", *worker]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        wait_until(pid.exists, "the worker")
        process.send_signal(number)
        assert process.wait(60) == exits.EXIT_INTERRUPTED
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_database_in_use_is_refused(db: Database) -> None:
    """Each evidence by itself; and what conformance has left behind is none."""
    shell = Shell(db.dsn)
    arguments = "conformance", "--clause", "finishes", "--", *PYTHON
    spec = '{"name": "etl", "tasks": [{"name": "a", "handler": "a"}]}'

    def refused() -> str:
        return shell(*arguments, code=exits.EXIT_USAGE).stderr

    with connect(db.dsn, autocommit=True) as connection:
        with ThreadPoolExecutor(1) as pool:
            connection.execute("select flowforge.reap_expired_leases(1)")
            told = pool.submit(refused)
            while not told.done():
                connection.execute("select flowforge.reap_expired_leases(1)")
            assert "a scheduler is at work" in told.result()
        shell(*arguments)
        shell(*arguments)
        with connect(db.dsn, application_name="flowforge scheduler"):
            assert "a scheduler is connected" in refused()
        connection.execute("select flowforge.announce_worker('theirs', array['default'], 1)")
        assert "there is the worker 'theirs'" in refused()
        connection.execute("delete from flowforge.worker where name = 'theirs'")
        connection.execute("select flowforge.define_workflow(%s)", [spec])
        assert "there is the workflow 'etl'" in refused()
        shell("conformance", "--force", *arguments[1:])


@pytest.mark.usefixtures("alone")
def test_whatever_fails_at_the_end_the_rest_is_cleaned_up(
    db: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(_: Engine) -> NoReturn:
        raise DatabaseUnavailable("lost")

    config = Config(database_url=db.dsn, health_file=str(tmp_path / "health"))
    engine = Engine(config, "", ["sleep", "60"], 1)
    monkeypatch.setattr(Engine, "clear", fail)
    with pytest.raises(DatabaseUnavailable, match="lost"), engine:
        pass
    assert not any(thread.is_alive() for thread in engine._threads)
    assert engine._conn.closed
    assert not Path(engine._files.name).exists()
    assert not (tmp_path / "health").exists(), "two daemons would write it in turn"


@pytest.mark.usefixtures("alone")
def test_what_ended_it_is_told_whatever_fails_at_the_end(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C while the database is away."""

    def fail(_: Engine) -> NoReturn:
        raise DatabaseUnavailable("lost")

    monkeypatch.setattr(Engine, "clear", fail)
    with pytest.raises(KeyboardInterrupt), Engine(Config(database_url=db.dsn), "", ["sleep", "60"], 1):
        raise KeyboardInterrupt


@pytest.mark.usefixtures("alone")
def test_a_connection_for_which_there_is_no_thread_is_closed_and_the_next_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy = Proxy(server.getsockname())
        with monkeypatch.context() as patch:

            def none(_: threading.Thread) -> NoReturn:
                raise RuntimeError("can't start new thread")

            patch.setattr(threading.Thread, "start", none)
            with socket.create_connection(("127.0.0.1", proxy.port)) as refused:
                refused.settimeout(60)
                assert refused.recv(1) == b""
        with socket.create_connection(("127.0.0.1", proxy.port)) as served:
            server.settimeout(60)
            peer, _ = server.accept()
            with peer:
                peer.sendall(b"x")
                served.settimeout(60)
                assert served.recv(1) == b"x"
        proxy.close()


def test_the_command_refuses_what_it_cannot_do(db: Database) -> None:
    shell = Shell(db.dsn)
    assert "there is no clause nonsense" in shell("conformance", "--clause", "nonsense", "x", code=2).stderr
    told = shell("conformance", "--worker-url", "nonsense s3cret", "x", code=exits.EXIT_CONFIG)
    assert "--worker-url is not a PostgreSQL connection string" in told.stderr
    assert "s3cret" not in told.stderr
    told = shell("conformance", "--worker-url", "user=nobody", "x", code=exits.EXIT_CONFIG)
    assert re.match("error: --worker-url: .*nobody", told.stderr)
    tls = shell("conformance", "--amqp-url", "amqps://127.0.0.1", "x", code=exits.EXIT_CONFIG)
    assert "amqp://" in tls.stderr
    assert subprocess.run([*PYTHON[:3], "conformance"], capture_output=True, check=False).returncode == 2
    for _ in range(2):  # what it has left in the database is not somebody else's
        absent = shell("conformance", "--clause", "finishes", "/nowhere/worker", code=exits.EXIT_CONFIG)
        assert "the worker cannot be started" in absent.stderr
