"""`flowforge up`: everything in one process, which ends cleanly, and with a failing part as a whole."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from psycopg.conninfo import make_conninfo

from flowforge import Client, Context, Workflow, exits, up
from flowforge.config import Config
from flowforge.embedded import EmbeddedPostgres, running_dsn
from flowforge.errors import ConfigError, InvalidDefinition
from flowforge.health import Health, read_health
from flowforge.migrate import _LOCK
from flowforge.stopping import Stop
from tests.python.running import running
from tests.python.shell import Shell
from tests.services.database import Database
from tests.services.process import kill_tree, wait_for_end, wait_until
from tests.services.rabbitmq import Broker

PROJECT = """
import atexit, concurrent.futures, pathlib, time
from flowforge import Context, Workflow

atexit.register(pathlib.Path("own_end").touch)

slow = Workflow("slow")

@slow.task
def work(ctx: Context) -> str:
    begun = pathlib.Path(ctx.input["begun"])
    begun.touch()
    while not begun.with_suffix(".go").exists():
        time.sleep(0.01)
    return "done"

elsewhere = Workflow("else where")

@elsewhere.task(queue="reports")
def report(ctx: Context) -> str:
    return "reported"

leaving = Workflow("leaving")

@leaving.task
def leave(ctx: Context) -> None:
    concurrent.futures.ThreadPoolExecutor(1).submit(time.sleep, 3600)
"""

flow = Workflow("greeting")


@flow.task
def greet(ctx: Context) -> str:
    return f"hello {ctx.input['name']}"


@pytest.fixture
def project() -> Iterator[Path]:
    """A directory that every user can pass through, with a module of workflows."""
    with tempfile.TemporaryDirectory(prefix="ff-") as directory:
        Path(directory).chmod(0o711)
        (Path(directory) / "jobs.py").write_text(PROJECT)
        yield Path(directory)


def test_what_is_stopped_before_it_was_ready_says_so(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> int:
        return exits.EXIT_OK

    monkeypatch.setattr("flowforge.up.run", stopped)
    assert Shell(db.dsn)("up").stdout == "Stopped before it was ready.\n"


@contextlib.contextmanager
def command_up(project: Path, *arguments: str, database_url: str = "") -> Iterator[subprocess.Popen[str]]:
    """`flowforge up jobs` in the project, once it has said that it is ready; that is in the file `told`."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("FLOWFORGE_")}
    command = [sys.executable, "-m", "flowforge", "up", "jobs", *arguments]
    command += ["--database-url", database_url] if database_url else ["--data-dir", str(project / "pg")]
    with subprocess.Popen(
        command,
        cwd=project,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line == "FlowForge is ready.\n", process.communicate()
            told = line
            while "Ctrl-C" not in line:
                line = process.stdout.readline()
                told += line
            (project / "told").write_text(told)
            yield process
        finally:
            if process.poll() is None:
                kill_tree(process)  # the server too, whose files are about to be removed


def test_ctrl_c_lets_handlers_finish_and_stops_everything(project: Path) -> None:
    """The signal goes to the whole foreground group, as a terminal sends it. The result of the handler that
    was running is in the database, which was there to take it."""
    with command_up(project) as process:
        below = psutil.Process(process.pid).children(recursive=True)
        [line] = re.findall("^  database   (.+)$", (project / "told").read_text(), re.MULTILINE)
        [dsn] = shlex.split(line)  # as pasted into a shell
        assert dsn == running_dsn(project / "pg")
        with Client(dsn) as client:
            run_id = client.trigger("slow", {"begun": str(project / "begun")})
        wait_until(lambda: (project / "begun").exists(), "the handler's start")
        os.killpg(process.pid, signal.SIGINT)
        (project / "begun.go").touch()
        out, _ = process.communicate()
        assert process.returncode == 0
        assert out == "Stopped.\n"
        assert (project / "own_end").exists()
        assert below
        wait_for_end(below)
    with EmbeddedPostgres(project / "pg") as server, Client(server.dsn) as client:
        assert client.result(run_id, "work") == "done"


def test_ctrl_c_says_what_is_waited_for_and_the_second_one_stops(project: Path) -> None:
    """The handler would never end: it is waited for, with a word of it, until Ctrl-C comes again."""
    with command_up(project, "--grace", "10m") as process:
        assert process.stderr is not None
        dsn = running_dsn(project / "pg")
        assert dsn is not None
        with Client(dsn) as client:
            client.trigger("slow", {"begun": str(project / "begun")})
        wait_until(lambda: (project / "begun").exists(), "the handler's start")
        os.killpg(process.pid, signal.SIGINT)
        while "waiting for what still runs" not in (line := process.stderr.readline()):
            assert line, "it ended without a word"
        assert "a second Ctrl-C or SIGTERM stops at once" in line
        assert "600 s" in line
        os.killpg(process.pid, signal.SIGINT)
        process.communicate()
        assert process.returncode == exits.EXIT_INTERRUPTED
    # Nothing of the program ends while the handler still runs.
    assert not (project / "own_end").exists()


def test_what_a_handler_has_left_running_keeps_nothing(project: Path, db: Database) -> None:
    """The interpreter would wait for the threads of a pool, whatever they are."""
    with command_up(project, database_url=db.dsn) as process:
        with Client(db.dsn) as client:
            assert client.wait(client.trigger("leaving"), timeout=60).state == "succeeded"
        process.terminate()
        out, _ = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "Stopped.\n")


def next_step(project: Path) -> str:
    [line] = [line for line in (project / "told").read_text().splitlines() if "another terminal" in line]
    return line.partition(": ")[2]


def test_the_next_step_works_as_it_is_told(project: Path) -> None:
    """Where the data is in a place of its own, the command names the database. It is this program's."""
    with command_up(project, "--queue", "default", "--queue", "reports") as process:
        told = (project / "told").read_text()
        assert "  workflow   slow v1 (new)\n  workflow   else where v1 (new)\n" in told
        command = next_step(project).replace("slow", "'else where'").split(maxsplit=1)
        done = subprocess.run(
            ["sh", "-c", f"{sys.executable} -m {command[0]} {command[1]}"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == 'report: "reported"\n'
        process.terminate()
        process.communicate()
    with command_up(project):
        assert "  workflow   slow v1\n" in (project / "told").read_text()


def test_the_next_step_with_a_given_database(project: Path, db: Database) -> None:
    """A password is not shown: the command says where the connection string belongs instead."""
    secret = make_conninfo(db.dsn, password=db.server.password)
    with command_up(project, database_url=secret):
        told = (project / "told").read_text()
    assert db.server.password not in told
    assert "with FLOWFORGE_DATABASE_URL set to" in told
    assert next_step(project) == "flowforge trigger slow --input '{}' --wait"


def test_queues_are_those_of_the_tasks_unless_told(project: Path) -> None:
    """Without a word of it, a task on a queue of its own would wait for ever."""
    with command_up(project) as process:
        dsn = running_dsn(project / "pg")
        assert dsn is not None
        with Client(dsn) as client:
            assert client.wait(client.trigger("else where"), timeout=60).outputs == {"report": "reported"}
        process.terminate()
        _, log = process.communicate()
        assert "queues=default,reports" in log
    with command_up(project, "--queue", "default") as process:
        process.terminate()
        _, log = process.communicate()
    assert "tasks on these queues wait for another worker queue=reports" in log


def test_invalid_definition_is_told_before_anything_is_started(project: Path) -> None:
    (project / "bad.py").write_text(PROJECT + "slow.task(name='late', after='nosuch')(work)")
    command = [sys.executable, "-m", "flowforge", "up", "bad", "--data-dir", str(project / "pg")]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == exits.EXIT_USAGE
    assert "depends on 'nosuch'" in done.stderr
    assert not (project / "pg").exists()


def test_it_ends_when_its_server_dies(project: Path) -> None:
    with command_up(project) as process:
        [server] = [
            each for each in psutil.Process(process.pid).children() if each.name().startswith("postgres")
        ]
        server.kill()
        _, log = process.communicate()
        assert process.returncode == exits.EXIT_DATABASE
        assert "the embedded PostgreSQL ended" in log
        assert "Traceback" not in log


def test_it_works_again_after_being_killed(project: Path) -> None:
    with command_up(project) as process:
        below = psutil.Process(process.pid).children(recursive=True)
        assert process.stderr is not None
        assert process.stderr.readline() == "Starting PostgreSQL …\n"
        process.kill()
        process.wait()
    with command_up(project) as process:
        wait_for_end(below)
        process.terminate()
        process.communicate()
        assert process.returncode == 0


def test_without_workflows_nothing_is_taken(db: Database) -> None:
    """A worker without handlers would only take work from those who have them."""
    with running(Config(database_url=db.dsn)) as state, Client(db.dsn) as client:
        client.define(flow)
        run_id = client.trigger(flow, {"name": "you"})
        with db.connect() as connection:
            query = "select from flowforge.task_run where state = 'ready'"
            wait_until(lambda: connection.execute(query).rowcount > 0, "the dispatch")
            workers = connection.execute("select count(*) from flowforge.worker").fetchone()
        assert workers == (0,)
        assert client.result(run_id).state == "running"
    assert state.code == exits.EXIT_OK


def test_broker_is_served_when_one_is_configured(db: Database, rabbit: Broker, amqp_namespace: str) -> None:
    """Publisher and worker travel by RabbitMQ: without a publisher the run would not go on. On a queue that
    was unknown to the broker before, too."""
    other = Workflow("other")
    other.task(name="greet", queue="new ones")(greet.function)
    config = Config(database_url=db.dsn, amqp_urls=(rabbit.url,), namespace=amqp_namespace)
    config = config.replace(queues=sorted(flow.queues | other.queues))
    with running(config, flow, other) as state, Client(db.dsn) as client:
        for each in (flow, other):
            result = client.wait(client.trigger(each, {"name": "you"}), timeout=60)
            assert result.outputs == {"greet": "hello you"}
    assert state.code == exits.EXIT_OK


def test_part_that_fails_ends_the_others(db: Database, rabbit: Broker, amqp_namespace: str) -> None:
    """A wrong password is for ever: the whole ends, with the code that tells why."""
    place = urlsplit(rabbit.url)
    wrong = place._replace(netloc=f"nobody:wrong@{place.hostname}:{place.port}").geturl()
    config = Config(database_url=db.dsn, amqp_urls=(wrong,), namespace=amqp_namespace)
    assert up.run(config, [flow], stop=Stop()) == exits.EXIT_BROKER


def test_an_error_of_ready_stops_the_daemons_before_the_server(project: Path) -> None:
    """Its output may be closed. Daemons left behind would meet a server that is being stopped."""

    def ready(_: up.Up) -> None:
        raise BrokenPipeError("closed")

    daemons = {"flowforge-scheduler", "flowforge-worker"}
    left: list[set[str]] = []

    class Watched(EmbeddedPostgres):
        def __exit__(self, *failure: Any) -> None:
            left.append({thread.name for thread in threading.enumerate()} & daemons)
            super().__exit__(*failure)

    with pytest.raises(BrokenPipeError):
        up.run(Config(), [flow], server=Watched(project / "data"), ready=ready, stop=Stop())
    assert left == [set()]


def test_of_handlers_that_are_left_is_told_also_after_an_error(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter's end might hang in them. Of `ready` it comes when nobody reads its output."""

    def closed(_: object) -> None:
        raise BrokenPipeError

    stop, told = Stop(), list[bool]()
    health = Health("worker")
    health.ticked()
    part = up._Part("worker", lambda: int(not stop.wait()), health, 1.0, lambda: True)
    monkeypatch.setattr(up, "_parts", lambda *_: [part])
    with pytest.raises(BrokenPipeError):
        up.run(Config(database_url=db.dsn), [], ready=closed, abandoned=lambda: told.append(True), stop=stop)
    assert told == [True]


def test_a_signal_interrupts_the_start(db: Database) -> None:
    """As long as another migration of the database lasts, that waits for it."""
    ended, in_time = threading.Event(), list[bool]()

    def ask() -> None:
        query = """
            select from pg_locks l join pg_database d on d.oid = l.database
            where datname = current_database() and locktype = 'advisory' and not granted
        """
        wait_until(lambda: connection.execute(query).rowcount > 0, "the wait")
        os.kill(os.getpid(), signal.SIGTERM)
        in_time.append(ended.wait(20))
        connection.execute("select pg_advisory_unlock_all()")

    with db.connect() as connection:
        connection.execute("select pg_advisory_lock(%s)", [_LOCK])
        other = threading.Thread(target=ask)
        other.start()
        assert up.run(Config(database_url=db.dsn), [flow]) == exits.EXIT_OK
        ended.set()
        other.join()
    assert in_time == [True]


def test_a_request_before_the_start_starts_nothing(project: Path) -> None:
    stop = Stop()
    stop.request()
    assert up.run(Config(), [flow], server=EmbeddedPostgres(project / "data"), stop=stop) == exits.EXIT_OK
    assert not (project / "data").exists()


def test_what_cannot_start_says_so(db: Database) -> None:
    with pytest.raises(ConfigError, match="FLOWFORGE_DATABASE_URL"):
        up.run(Config(), [flow], stop=Stop())
    circle = Workflow("circle")
    circle.task(name="a", after="b")(lambda ctx: None)
    circle.task(name="b", after="a")(lambda ctx: None)
    with pytest.raises(InvalidDefinition):
        up.run(Config(database_url=db.dsn), [circle], stop=Stop())


def test_health_file_tells_of_all_parts(db: Database, tmp_path: Path) -> None:
    file = tmp_path / "health"
    config = Config(database_url=db.dsn, health_file=str(file))
    with running(config, flow):
        wait_until(lambda: read_health(file)[0], "a report that all is well")
    well, line = read_health(file)
    assert not well
    assert "stopping" in line
