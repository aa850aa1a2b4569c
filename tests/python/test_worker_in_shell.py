"""What conformance does not show of the worker in shell: texts that are none, servers that answer nothing,
and amqp-tools that fail, which programs of the same names play."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from psycopg import Connection, connect
from psycopg.conninfo import conninfo_to_dict

from tests.services.amqp_tools import shell_path
from tests.services.database import Database
from tests.services.process import descendants, free_port, is_alive, wait_until

WORKER = Path(__file__).resolve().parents[2] / "examples" / "worker.sh"

TELL = 'echo $$ >"$D/pid.new"; mv "$D/pid.new" "$D/pid"; '
HANDLERS = {
    "bad_error": "printf 'caf\\351\\000!' >&2; exit 1",
    "bad_item": "echo looking at it >&2; echo bad item >&2; echo '   ' >&2; exit 3",
    "bad_output": "printf '\"caf\\351\"'",
    "right": "echo 1",
    "blank_error": "echo '   ' >&2; exit 4",
    "endless": TELL + "exec sleep 600",
    "endless_1": "trap 'exit 1' TERM HUP; " + TELL + "while :; do sleep 0.1; done",
    "endless_0": "trap 'exit 0' TERM HUP; " + TELL + "while :; do sleep 0.1; done",
    "told_to_end": TELL + 'until [ -e "$D/go" ]; do sleep 0.1; done; echo 1',
    "broken_pipe": "sh -c 'kill -s PIPE $$'; echo $?",
}

# Runs the command with the body and notes how that ended; or with as many bytes as "cut" says, and dies.
CONSUME = """
[ -e "$D/body" ] || exec sleep 600
while [ "$1" != -- ]; do shift; done; shift
if [ -e "$D/cut" ]; then
    head -c "$(cat "$D/cut")" "$D/body" | "$@" &
    rm "$D/cut"; exit 1
fi
"$@" <"$D/body"; code=$?
echo "$code" >>"$D/acknowledged"
[ "$code" != 0 ] || rm "$D/body"
"""
SIGNAL_AT_ITS_END = r"""
call=$(cat)
printf '%s\n' "$call" | PATH=${PATH#*:} psql "$@"
case $call in *finish_task_run*)
    mkdir "$D/signalled" || exit 0
    worker=$(ps -o ppid= $PPID)
    while read -r _ _ state _ </proc/$PPID/stat && [ "$state" != Z ]; do :; done 2>/dev/null && kill $worker &
esac
"""
PUBLISH = """
cat >>"$D/dead"
if [ -e "$D/refuses" ]; then rm "$D/refuses"; exit 1; fi
"""

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the worker in shell with handlers of its own on a database."""
    (tmp_path / "path").mkdir()
    path = shell_path(tmp_path / "path")
    (tmp_path / "handlers").mkdir()
    for name, text in HANDLERS.items():
        write(tmp_path / "handlers" / name, text)
    started = []

    def start(dsn: str, amqp: str = "", stderr: int | None = None) -> subprocess.Popen[bytes]:
        given = {f"PG{key.upper()}": str(value) for key, value in conninfo_to_dict(dsn).items()}
        given["PGDATABASE"] = given.pop("PGDBNAME")
        given |= {"PATH": path, "FLOWFORGE_AMQP_URL": amqp, "D": str(tmp_path)}
        with (tmp_path / "log").open("wb") as log:
            started.append(
                subprocess.Popen(
                    [WORKER, tmp_path / "handlers"], env=given, stderr=stderr or log, start_new_session=True
                )
            )
        return started[-1]

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def tools(start: Start, tmp_path: Path) -> Path:
    """Amqp-tools that do as they are told by the files of this directory."""
    write(tmp_path / "path" / "amqp-consume", CONSUME)
    write(tmp_path / "path" / "amqp-publish", PUBLISH)
    return tmp_path


def write(program: Path, text: str) -> None:
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


def trigger(connection: Connection, *handlers: str) -> None:
    tasks = [{"name": name, "handler": name} for name in handlers]
    connection.execute("select flowforge.define_workflow(%s)", [json.dumps({"name": "w", "tasks": tasks})])
    connection.execute("select flowforge.trigger('w')")
    connection.execute("select flowforge.dispatch_ready()")


def offer(connection: Connection, tools: Path) -> None:
    """The message of one task run."""
    trigger(connection, "right")
    [row] = connection.execute("select task_run_id, dispatch_id::text from flowforge.task_run").fetchall()
    (tools / "body").write_text(json.dumps({"task_run_id": row[0], "dispatch_id": row[1]}))


def end(worker: subprocess.Popen[bytes]) -> None:
    worker.terminate()
    assert worker.wait(60) == 0


def test_what_is_no_text_is_reported(db: Database, start: Start) -> None:
    with connect(db.dsn, autocommit=True) as connection:
        trigger(connection, "bad_error", "bad_item", "bad_output", "blank_error")
        worker = start(db.create_login("flowforge_worker"))
        query = "select error from flowforge.task_run where state = 'failed' order by 1"
        wait_until(lambda: connection.execute(query).rowcount == 4, "all failures", 60)
        assert connection.execute(query).fetchall() == [
            ("exit code 1: caf!",),
            ("exit code 3: bad item\nlooking at it\nbad item\n   ",),
            ("exit code 4\n   ",),
            ("the output cannot be stored",),
        ]
    end(worker)


def test_what_it_has_no_handler_for_is_named(db: Database, start: Start, tmp_path: Path) -> None:
    """Whose it is, too: it is offered more than once."""
    with connect(db.dsn, autocommit=True) as connection:
        trigger(connection, "nowhere")
        worker = start(db.create_login("flowforge_worker"))
        given_back = "select from flowforge.unknown_handlers"
        wait_until(lambda: connection.execute(given_back).rowcount == 1, "what nobody knows", 60)
        row = connection.execute("select task_run_id from flowforge.task_run").fetchone()
        assert row is not None
    end(worker)
    assert f"there is no handler nowhere, for task run {row[0]}\n" in (tmp_path / "log").read_text()


def test_it_says_what_it_lacks(tmp_path: Path) -> None:
    def said(*arguments: object, amqp: str = "") -> str:
        given = {"PATH": str(tmp_path), "FLOWFORGE_AMQP_URL": amqp}
        command = [shutil.which("bash") or "bash", str(WORKER), *map(str, arguments)]
        done = subprocess.run(command, env=given, stderr=subprocess.PIPE, check=False)
        assert done.returncode == 2
        return done.stderr.decode()

    assert "usage: " in said()
    assert "a directory of programs" in said(tmp_path / "nowhere")
    assert said(tmp_path) == "there is no psql\n"
    write(tmp_path / "psql", "")
    assert said(tmp_path, amqp="amqp://nowhere") == "there is no amqp-consume\n"


def test_it_ends_though_nothing_answers(start: Start, tmp_path: Path) -> None:
    worker = start(f"host=127.0.0.1 port={free_port()} user=nobody dbname=none")
    wait_until(lambda: b"refused" in (tmp_path / "log").read_bytes(), "the first answer", 60)
    end(worker)


def test_it_ends_though_an_answer_never_comes(start: Start, tmp_path: Path) -> None:
    """In a few seconds, not in the minute that a call may take: a supervisor waits for no longer."""
    # To the call that has a minute: what is optional has little time anyway.
    calls = 'case $(cat) in *announce_worker*) exit 0 ;; esac; touch "$D/asked"; exec sleep 600'
    write(tmp_path / "path" / "psql", calls)
    worker = start("host=nowhere user=nobody dbname=none")
    wait_until((tmp_path / "asked").exists, "the claim", 60)
    worker.terminate()
    assert worker.wait(40) == 0


def test_it_ends_though_its_message_is_never_acknowledged(db: Database, start: Start, tools: Path) -> None:
    """As when the broker falls silent just then. Nothing else is made of the last answer."""
    write(tools / "path" / "amqp-consume", CONSUME + '[ -e "$D/body" ] || exec sleep 600')
    with connect(db.dsn, autocommit=True) as connection:
        offer(connection, tools)
        worker = start(db.create_login("flowforge_worker"), "amqp://nowhere")
        query = "select 1 from flowforge.task_run where state = 'succeeded'"
        wait_until(lambda: connection.execute(query).rowcount == 1, "the task run", 60)
    worker.terminate()
    assert worker.wait(40) == 0
    assert (tools / "log").read_text() == ""


@pytest.mark.parametrize("_", range(4))  # bash loses what it just learned in about half of them
def test_it_ends_though_the_signal_comes_with_the_end_of_a_call(
    db: Database, start: Start, tools: Path, _: int
) -> None:
    """As above, and told to end at the moment at which the call that finishes has ended, and nobody knows."""
    write(tools / "path" / "amqp-consume", CONSUME + '[ -e "$D/body" ] || exec sleep 600')
    write(tools / "path" / "psql", SIGNAL_AT_ITS_END)
    with connect(db.dsn, autocommit=True) as connection:
        offer(connection, tools)
        worker = start(db.create_login("flowforge_worker"), "amqp://nowhere")
        assert worker.wait(60) == 0
        query = "select state from flowforge.task_run"
        assert connection.execute(query).fetchall() == [("succeeded",)]


@pytest.mark.parametrize("slowly", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_its_handler_ends_with_it(
    db: Database, start: Start, tmp_path: Path, slowly: bool, number: signal.Signals
) -> None:
    """And is given back, to run once only; also when it has hardly begun."""
    if slowly:
        setsid = shutil.which("setsid")
        write(tmp_path / "path" / "setsid", f'touch "$D/pid"; sleep 30; exec {setsid} "$@"')
    with connect(db.dsn, autocommit=True) as connection:
        trigger(connection, "endless")
        worker = start(db.create_login("flowforge_worker"))
        wait_until((tmp_path / "pid").exists, "the handler", 60)
        worker.send_signal(number)
        assert worker.wait(20) == 0
        assert connection.execute("select state from flowforge.task_run").fetchall() == [("ready",)]
    if not slowly:
        assert not is_alive(int((tmp_path / "pid").read_text()))
    assert (tmp_path / "log").read_text() == ""


@pytest.mark.parametrize("handler", ["endless", "endless_1", "endless_0"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_its_handler_is_given_back_when_the_signal_comes_to_all(
    db: Database, start: Start, tmp_path: Path, handler: str, number: signal.Signals
) -> None:
    """As from systemd: however the handler ends by it, it has not failed."""
    with connect(db.dsn, autocommit=True) as connection:
        trigger(connection, handler)
        worker = start(db.create_login("flowforge_worker"))
        wait_until((tmp_path / "pid").exists, "the handler", 60)
        worker.send_signal(signal.SIGSTOP)  # so that the handler has ended when the worker looks
        for pid in [worker.pid, *(each.pid for each in descendants(worker.pid))]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())), "the handler's end", 60)
        worker.send_signal(signal.SIGCONT)
        assert worker.wait(60) == 0
        assert connection.execute("select state from flowforge.task_run").fetchall() == [("ready",)]


def test_what_succeeds_as_the_signal_comes_is_reported(db: Database, start: Start, tmp_path: Path) -> None:
    with connect(db.dsn, autocommit=True) as connection:
        trigger(connection, "told_to_end")
        worker = start(db.create_login("flowforge_worker"))
        wait_until((tmp_path / "pid").exists, "the handler", 60)
        worker.send_signal(signal.SIGSTOP)
        (tmp_path / "go").touch()
        wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())), "the handler's end", 60)
        worker.terminate()
        worker.send_signal(signal.SIGCONT)
        assert worker.wait(60) == 0
        query = "select state, output from flowforge.task_run"
        assert connection.execute(query).fetchall() == [("succeeded", 1)]


def test_it_goes_on_when_nobody_reads_what_it_tells(db: Database, start: Start) -> None:
    """And its handlers end by a broken pipe as ever."""
    reader, writer = os.pipe()
    os.close(reader)
    with connect(db.dsn, autocommit=True) as connection:
        trigger(connection, "nowhere", "broken_pipe")
        worker = start(db.create_login("flowforge_worker"), stderr=writer)
        os.close(writer)
        given_back = "select 1 from flowforge.unknown_handlers"
        wait_until(lambda: connection.execute(given_back).rowcount == 1, "what nobody knows", 60)
        query = "select output from flowforge.task_run where state = 'succeeded'"
        wait_until(lambda: connection.execute(query).rowcount == 1, "the task run", 60)
        assert connection.execute(query).fetchall() == [(128 + signal.SIGPIPE,)]
    end(worker)


def test_half_a_message_is_no_dead_letter(db: Database, start: Start, tools: Path) -> None:
    """A consumer that dies while it hands one over leaves what cannot be read; the broker offers it again."""
    with connect(db.dsn, autocommit=True) as connection:
        offer(connection, tools)
        (tools / "cut").write_text("20")
        worker = start(db.create_login("flowforge_worker"), "amqp://nowhere")
        query = "select 1 from flowforge.task_run where state = 'succeeded'"
        wait_until(lambda: connection.execute(query).rowcount == 1, "the task run", 60)
    end(worker)
    assert not (tools / "cut").exists(), "no half message was handed over"
    assert (tools / "acknowledged").read_text() == "0\n"
    assert not (tools / "dead").exists()


def test_what_cannot_be_read_is_kept_until_the_dead_letters_have_it(
    db: Database, start: Start, tools: Path
) -> None:
    (tools / "body").write_text("no json")
    (tools / "refuses").touch()
    worker = start(db.create_login("flowforge_worker"), "amqp://nowhere")
    wait_until(lambda: not (tools / "body").exists(), "the message to be acknowledged", 60)
    end(worker)
    assert (tools / "dead").read_text() == "no json" * 2
    assert (tools / "acknowledged").read_text() == "0\n"
