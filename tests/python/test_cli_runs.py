"""Commands that trigger, list, show, cancel and retry runs: what each prints for people and for programs, and
how it ends."""

import itertools
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from flowforge import Client, Workflow, exits
from flowforge.cli.changes import Changes
from flowforge.cli.runs import runs_query
from flowforge.cli.snapshots import snapshots
from flowforge.config import Config
from flowforge.log import visible
from tests.python.orders import ESCAPES, broken, fails_at_first, flow, glad, on_terminal, sad, ten, work
from tests.python.running import running
from tests.python.shell import Shell
from tests.services.database import Clock, Database
from tests.services.process import wait_until

# -- trigger


def test_trigger_prints_the_id_and_wait_the_outputs(live: Shell) -> None:
    run_id = int(live("trigger", "orders").stdout)
    assert live.document("trigger", "orders") == {"run_id": run_id + 1, "workflow": "orders"}
    waited = live("trigger", "orders", "--input", '{"count": 4}', "--wait", "--timeout", "60")
    assert waited.stdout == "total: 60\n"
    assert "total: succeeded" in waited.stderr
    document = live.document("trigger", "orders", "--wait")
    assert document["state"] == "succeeded"
    assert document["outputs"] == {"total": 30}


def test_trigger_wait_ends_with_the_run(live: Shell) -> None:
    failed = live("trigger", "orders", "-i", '{"bad": 1}', "-w", code=exits.EXIT_FAILED)
    assert failed.stdout == ""
    assert re.search(r"^price failed: .+\nMore: flowforge show 1\n$", failed.stderr, re.MULTILINE)
    assert live.document("trigger", "orders", "-i", '{"bad": 1}', "-w", code=1)["state"] == "failed"


def test_trigger_wait_gives_up_in_time(shell: Shell) -> None:
    result = shell("trigger", "orders", "-w", "--timeout", "0.1s", code=exits.EXIT_TIMEOUT)
    assert "Run 1 goes on: flowforge watch 1, or flowforge cancel 1" in result.stderr
    result = shell("trigger", "orders", "-w", "--timeout", "0.1s", "--json", code=exits.EXIT_TIMEOUT)
    assert json.loads(result.stdout) == {"run_id": 2, "workflow": "orders"}
    assert "flowforge watch 2" in result.stderr


def test_commands_that_are_told_name_the_database_that_was_given(shell: Shell) -> None:
    """Else they would not work as they stand. Never a password."""
    dsn = shell.environment["FLOWFORGE_DATABASE_URL"]
    shell.environment["FLOWFORGE_DATABASE_URL"] = ""
    wait = ("trigger", "orders", "-w", "--timeout", "0", "--database-url")
    told = shell(*wait, dsn, code=exits.EXIT_TIMEOUT).stderr
    command = re.search(r"flowforge (watch 1 --database-url .*), or flowforge cancel 1 --database-url", told)
    assert command is not None
    assert "goes on" in shell(*shlex.split(command[1]), "--timeout", "0", code=exits.EXIT_TIMEOUT).stderr
    told = shell(*wait, make_conninfo(dsn, password="secret"), code=exits.EXIT_TIMEOUT).stderr
    assert "flowforge watch 2, or flowforge cancel 2\n" in told


def test_trigger_wait_needs_the_clients_role_alone(live: Shell, db: Database) -> None:
    """Without the views there is no picture, and the result all the same, of one run."""
    client = Shell(db.create_login("flowforge_client"))
    waited = client("trigger", "orders", "-w", "--timeout", "60")
    assert waited.stdout == "total: 30\n"
    assert waited.stderr == "Waiting for run 1 (a live picture takes flowforge_reader).\n"
    assert client.document("trigger", "orders", "-w")["outputs"] == {"total": 30}
    failed = client("trigger", "orders", "-w", "-i", '{"bad": 1}', code=exits.EXIT_FAILED)
    assert "price failed" in failed.stderr
    late = client("trigger", "orders", "-w", "--delay", "1h", "--timeout", "0.1", code=exits.EXIT_TIMEOUT)
    assert "Run 4 goes on: flowforge watch 4 (takes flowforge_reader), or" in late.stderr
    with db.connect() as connection:
        assert connection.execute("select from flowforge.run").rowcount == 4


@pytest.mark.parametrize(
    ("number", "ignored"),
    [(signal.SIGINT, False), (signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGHUP, False)],
    ids=["foreground", "background", "terminated", "hung up"],
)
@pytest.mark.usefixtures("hears_hang_ups")
@pytest.mark.parametrize(
    "command", [("trigger", "orders", "--wait"), ("watch", "1")], ids=["trigger", "watch"]
)
def test_ctrl_c_says_that_the_run_goes_on(
    shell: Shell, command: tuple[str, ...], number: int, ignored: bool
) -> None:
    """Also where the shell of a script has SIGINT ignored in what it starts in the background, and when a job
    runs out of its time."""
    if command[0] == "watch":
        shell("trigger", "orders")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "flowforge", *command],
            env=os.environ | shell.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        pictures = process.stdout if command[0] == "watch" else process.stderr
        assert pictures is not None
        assert pictures.readline() == "run 1 of orders: pending\n"
        process.send_signal(number)
        _, err = process.communicate()
    assert process.returncode == exits.EXIT_INTERRUPTED
    assert err == "\nRun 1 goes on: flowforge watch 1, or flowforge cancel 1\n"


@pytest.mark.parametrize(
    ("number", "options", "advice"),
    [
        (signal.SIGINT, [], "flowforge runs --workflow orders. With --idempotency-key "),
        (signal.SIGINT, ["--idempotency-key", "k"], "the same command gives it, or starts it."),
        (signal.SIGTERM, [], "flowforge runs --workflow orders. With --idempotency-key "),
        (signal.SIGTERM, ["--wait"], "flowforge runs --workflow orders. With --idempotency-key "),
        (signal.SIGTERM, ["--wait", "--json"], "flowforge runs --workflow orders. With --idempotency-key "),
    ],
    ids=["ctrl-c", "with a key", "terminated", "waiting", "json"],
)
def test_a_request_for_a_run_that_is_interrupted_says_that_nobody_knows(
    shell: Shell, db: Database, number: int, options: list[str], advice: str
) -> None:
    with db.connect() as connection, connection.transaction():
        connection.execute("lock table flowforge.run in access exclusive mode")
        with subprocess.Popen(
            [sys.executable, "-m", "flowforge", "trigger", "orders", *options],
            env=os.environ | shell.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            waiting = "select from pg_locks where not granted and relation = 'flowforge.run'::regclass"
            wait_until(lambda: connection.execute(waiting).rowcount > 0, "the request")
            process.send_signal(number)
            out, err = process.communicate()
    assert (process.returncode, out) == (exits.EXIT_INTERRUPTED, "")
    assert err.startswith(f"\nWhether there is a run now is not known: {advice}")


@pytest.mark.parametrize(
    "options", [["--json"], ["--wait"], ["--wait", "--json"]], ids=["started", "waiting", "waiting json"]
)
def test_a_run_is_named_whenever_the_command_is_interrupted(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """Also after the trigger, before anything is printed."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"flowforge.cli.runs.{'_await' if '--wait' in options else 'print_json'}", interrupt)
    result = shell("trigger", "orders", *options, code=exits.EXIT_INTERRUPTED)
    assert "Run 1 goes on: flowforge watch 1, or flowforge cancel 1\n" in result.stderr
    assert options != ["--wait", "--json"] or json.loads(result.stdout) == {"run_id": 1, "workflow": "orders"}


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("trigger orders", "The run's id is 1."),
        ("trigger orders --json", "The run's id is 1."),
        ("trigger orders --wait --json --timeout 0.1", "The run's id is 1."),
        ("trigger orders --wait --json --idempotency-key ended", "The run's id is 1."),
        ("retry 1", "Run 1: 3 task runs to run again."),
        ("retry 1 --json", "Run 1: 3 task runs to run again."),
    ],
)
def test_what_is_not_safe_to_repeat_is_told_when_the_output_cannot_be_written(
    shell: Shell, db: Database, command: str, told: str
) -> None:
    if "retry" in command or "ended" in command:
        shell("trigger", "orders", "--idempotency-key", "ended")
        shell("cancel", 1)
        with db.connect() as connection:
            connection.execute("select flowforge.cancel_leftovers(100), flowforge.settle_finished()")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "flowforge", *command.split()],
            env=os.environ | shell.environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == exits.EXIT_FAILED
    assert done.stderr == f"{told}\nerror: cannot write to standard output: No space left on device\n"


CONTROLLED = """
import fcntl, termios
from flowforge import cli
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
cli.main()
"""
EARLY = """
import importlib, os, signal
from flowforge import cli
find = importlib.import_module
def interrupted(name):
    os.kill(os.getpid(), signal.SIGTERM)
    return find(name)
importlib.import_module = interrupted
cli.main()
"""
AT_ONCE = """
from flowforge import cli, stopping
stopping.AT_ONCE = 600.0
cli.main()
"""


@pytest.mark.parametrize("command", ["trigger orders", "watch 1", "demo", "conformance"])
def test_what_waits_ends_as_by_ctrl_c_before_it_has_begun(command: str) -> None:
    """Its imports take a while."""
    done = subprocess.run(
        [sys.executable, "-c", EARLY, *command.split()], stderr=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (exits.EXIT_INTERRUPTED, "\n")


@pytest.mark.usefixtures("hears_hang_ups")
@pytest.mark.parametrize(
    "numbers",
    [[signal.SIGTERM], [signal.SIGINT], [signal.SIGHUP, signal.SIGTERM, signal.SIGINT]],
    ids=["terminated", "ctrl-c", "all"],
)
@pytest.mark.parametrize(
    "command", [("trigger", "orders", "--wait"), ("watch", "1")], ids=["trigger", "watch"]
)
def test_further_signals_change_no_end(shell: Shell, command: tuple[str, ...], numbers: list[int]) -> None:
    """Whenever they come, to the very last."""
    if command[0] == "watch":
        shell("trigger", "orders")
    with subprocess.Popen(
        [sys.executable, "-c", AT_ONCE, *command],
        env=os.environ | shell.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        pictures = process.stdout if command[0] == "watch" else process.stderr
        assert pictures is not None
        assert pictures.readline() == "run 1 of orders: pending\n"
        for number in itertools.cycle(numbers):
            process.send_signal(number)
            if process.poll() is not None:
                break
            time.sleep(0.002)
        _, err = process.communicate()
    assert process.returncode == exits.EXIT_INTERRUPTED
    assert err == "\nRun 1 goes on: flowforge watch 1, or flowforge cancel 1\n"


@pytest.mark.usefixtures("hears_hang_ups")
@pytest.mark.parametrize(
    ("command", "asks"),
    [(("watch", "1"), "task_run_status"), (("trigger", "orders", "--wait", "--json"), "run_result")],
    ids=["watch", "trigger"],
)
def test_a_terminal_that_hangs_up_ends_the_waiting_as_ctrl_c(
    shell: Shell, db: Database, command: tuple[str, ...], asks: str
) -> None:
    """Though what cleans up cannot write to it any more."""
    if command[0] == "watch":
        shell("trigger", "orders")
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLED, *command],
        env=os.environ | shell.environment | {"TERM": "xterm"},
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    with db.connect() as connection:
        waiting = "select from pg_stat_activity where query like %s and pid <> pg_backend_pid()"
        wait_until(lambda: connection.execute(waiting, [f"%{asks}%"]).rowcount > 0, "the waiting")
    os.close(leader)
    assert process.wait(60) == exits.EXIT_INTERRUPTED


def test_trigger_takes_input_from_everywhere(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "input.json"
    file.write_text('{"from": "file ä"}', encoding="utf-8")
    shell("trigger", "orders", "--input", f"@{file}")
    shell("trigger", "orders", "--input", "-", stdin='{"from": "pipe"}')
    options = ["--priority", "5", "--delay", "2h", "-l", "team=data", "-l", "x=a=b", "--version", "1"]
    shell("trigger", "orders", "--idempotency-key", "k", *options)
    assert shell("trigger", "orders", "--idempotency-key", "k").stdout == "3\n"
    with Client(shell.environment["FLOWFORGE_DATABASE_URL"]) as client:
        assert client.result(3).state == "running"
    third = shell.document("show", 3)["run"]
    assert third["labels"] == {"team": "data", "x": "a=b"}
    assert third["priority"] == 5
    assert third["idempotency_key"] == "k"
    assert "until" in shell.document("show", 3)["tasks"][0]["waits"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--input", "{"], "not JSON"),
        (["--input", '{"x": NaN}'], "NaN is not JSON"),
        (["--input", "@/nonexistent"], "/nonexistent"),
        (["--input", r'"\u0000"'], r"U\+0000"),
        (["--delay", "soon"], "'soon' is not a length of time"),
        (["--delay", "-1"], "not a length of time"),
        (["--label", "novalue"], "KEY=VALUE"),
        (["--priority", "high"], "integer"),
        (["--version", "abc"], "'abc' is not a valid integer\\."),
        (["-l", "team=a", "-l", "team=b"], "given twice"),
        (["--timeout", "5"], "--timeout is for --wait"),
        (["--nonsense"], "No such option"),
    ],
)
def test_wrong_use_is_told(shell: Shell, arguments: list[str], says: str) -> None:
    assert re.search(says, shell("trigger", "orders", *arguments, code=exits.EXIT_USAGE).stderr)


def test_refusals_of_the_database_are_one_line(shell: Shell) -> None:
    shell("trigger", "orders", "--idempotency-key", "k")
    see = "see which there are: flowforge"
    for arguments, code, says in (
        (("trigger", "nosuch"), exits.EXIT_USAGE, "flowforge workflows; register it: flowforge define"),
        (("trigger", "nosuch", "--version", 2), exits.EXIT_USAGE, "workflows; register it: flowforge define"),
        (("trigger", "orders", "--version", "7"), exits.EXIT_USAGE, f"no version 7; {see} workflows"),
        (("runs", "--workflow", "nosuch"), exits.EXIT_USAGE, f"no workflow 'nosuch'; {see} workflows"),
        (("pause", "nosuch"), exits.EXIT_USAGE, f"no queue 'nosuch'; {see} queues"),
        (("redispatch", "nosuch"), exits.EXIT_USAGE, f"no queue 'nosuch'; {see} queues"),
        (("retry", "1", "--from", "nosuch"), exits.EXIT_USAGE, f"no task 'nosuch'; {see} show 1"),
        (("show", "99", "--output", "x"), exits.EXIT_USAGE, f"no run 99; {see} runs"),
        (("trigger", "orders", "--idempotency-key", "k", "-i", "1"), exits.EXIT_REFUSED, "'k'"),
        (("trigger", "orders", "--priority", "1000000000"), exits.EXIT_USAGE, "priority"),
        (("show", "99"), exits.EXIT_USAGE, f"no run 99; {see} runs"),
        (("show", "1", "--output", "nosuch"), exits.EXIT_USAGE, f"'nosuch' in run 1; {see} show 1"),
        (("watch", "99"), exits.EXIT_USAGE, f"no run 99; {see} runs"),
        (("cancel", "99"), exits.EXIT_USAGE, f"no run 99; {see} runs"),
        (("retry", "99"), exits.EXIT_USAGE, f"no run 99; {see} runs"),
    ):
        result = shell(*arguments, code=code)
        assert result.stdout == ""
        assert re.fullmatch(rf"error: .*{re.escape(says)}.*\n", result.stderr), result.stderr


# -- runs and show


def test_runs_lists_pages_and_filters(shell: Shell, db: Database) -> None:
    other = Workflow("other")
    other.task(name="t")(lambda ctx: None)
    with Client(db.dsn) as client:
        client.define(other)
        client.trigger_many(flow, [{}] * 5)
        client.trigger("other")
        client.cancel(2)
    assert [run["run_id"] for run in shell.documents("runs")] == [6, 5, 4, 3, 2, 1]
    assert [run["run_id"] for run in shell.documents("runs", "--limit", 2)] == [6, 5]
    assert [run["run_id"] for run in shell.documents("runs", "--limit", 2, "--after", 5)] == [4, 3]
    assert [run["run_id"] for run in shell.documents("runs", "--workflow", "other")] == [6]
    assert [run["run_id"] for run in shell.documents("runs", "--state", "cancelled")] == [2]
    page = shell("runs", "--limit", 2)
    assert "--after 5" in page.stderr
    assert "--after" not in shell("runs", "--limit", 6).stderr
    assert shell("runs", "--state", "failed", code=exits.EXIT_FAILED).stderr == "No runs found.\n"
    unknown = shell("runs", "--workflow", "nosuch", code=exits.EXIT_USAGE)
    assert "there is no workflow 'nosuch'" in unknown.stderr
    assert shell.documents("runs", "--after", 1, code=exits.EXIT_FAILED) == []


def test_lists_are_plain_in_a_pipe(shell: Shell) -> None:
    """One run a line, whole, in columns that other programs can take apart, without signs and colours."""
    shell("trigger", "orders")
    heading, line = shell("runs").stdout.splitlines()
    assert heading.split() == ["run", "workflow", "state", "tasks_done", "failed", "triggered", "duration"]
    assert re.fullmatch(r"1 +orders v1 +pending +0/3 +- +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +\S+ \S+", line)


def test_show_tells_states_waits_attempts_and_errors(live: Shell) -> None:
    live("trigger", "orders", "-i", '{"bad": 1}', "-w", code=1)
    shown = live("show", 1).stdout
    assert shown.startswith("Run 1 of orders v1\n  state      failed\n")
    assert re.search(r"^fetch +succeeded +1/1 +\S+ \S+ +\S+", shown, re.MULTILINE)
    assert re.search(r"^price +failed .*3 elements; 1 of 3", shown, re.MULTILINE)
    assert re.search(r"^price\[1\] +failed +1/1 .*item 1 has no price", shown, re.MULTILINE)
    assert re.search(r"^total +skipped .*rule all_succeeded was not met", shown, re.MULTILINE)
    assert "price[0]" not in shown
    assert re.search(r"^price\[0\] +succeeded", live("show", 1, "--elements").stdout, re.MULTILINE)
    document = live.document("show", 1)
    assert document["run"]["state"] == "failed"
    assert document["run"]["duration"] > 0
    assert [(task["task"], task["map_index"]) for task in document["tasks"]] == [
        ("fetch", None),
        ("price", None),
        ("total", None),
        ("price", 1),
    ]


def test_show_tells_how_earlier_executions_ended(live: Shell) -> None:
    live("trigger", "orders", "-i", '{"bad": 1}', "-w", code=1)
    assert "Earlier executions" not in live("show", 1).stdout
    live("retry", 1)
    live("watch", 1, code=1)
    shown = live("show", 1).stdout.partition("Earlier executions:\n")[2]
    assert re.search(r"^price\[1\] +1 +failed +\S+ \S+ +\S+ +.*item 1 has no price", shown, re.MULTILINE)
    attempts = live.document("show", 1)["attempts"]
    found = [(each["task"], each["map_index"], each["attempt"], each["outcome"]) for each in attempts]
    assert found == [("price", 1, 1, "failed"), ("price", 1, 2, "failed")]


def test_show_tells_of_what_a_stopping_worker_gave_back(shell: Shell, db: Database) -> None:
    """Before it is claimed again, too: its handler has begun, and may have done something."""
    shell("trigger", "orders")
    with db.connect() as connection:
        connection.execute("select flowforge.dispatch_ready()")
        connection.execute("select flowforge.claim_next('{default}', 'w1', gen_random_uuid(), '1 min')")
        connection.execute("select flowforge.release_task_run(1, 1, 'shutdown')")
        shown = shell("show", 1).stdout.partition("Earlier executions:\n")[2]
        assert re.search(r"^fetch +1 +released +\S+ \S+ +w1 +given back by a worker", shown, re.MULTILINE)
        changes = Changes().since(next(snapshots(connection, 1)))
        assert any(each.get("outcome") == "released" for each in changes)


def test_show_tells_of_a_silent_worker_while_it_holds_the_lease(shell: Shell, db: Database) -> None:
    """In the reader's own time."""
    shell("trigger", "orders")
    with db.connect() as connection:
        connection.execute("select flowforge.dispatch_ready()")
        connection.execute("select flowforge.claim_next('{default}', 'w1', gen_random_uuid(), '1 h')")
        assert "silent" not in shell("show", 1).stdout
        connection.execute(
            "update flowforge.task_run set lease_expires_at = now() + '20 min' where task_run_id = 1"
        )
    note = r"its worker is silent: held by w1 until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d$"
    assert re.search(rf"^fetch +running .*{note}", shell("show", 1).stdout, re.MULTILINE)


def test_show_says_why_a_task_waits(shell: Shell, db: Database) -> None:
    shell("trigger", "orders")
    assert re.search(r"^total .*waits: 1 of 1 upstreams", shell("show", 1).stdout, re.MULTILINE)
    with db.connect() as connection:
        connection.execute("select flowforge.pause_queue('default')")
    assert re.search(r"^fetch .*waits: queue default is paused", shell("show", 1).stdout, re.MULTILINE)


def test_show_tells_whose_error_it_is_while_the_next_attempt_waits(db: Database) -> None:
    """It is the error of the attempt before. And when that is, as the clock of the reader shows it."""
    shell = Shell(db.dsn)
    fails_at_first(db, delay=3600)
    shell("trigger", "shaky")
    with db.connect() as connection:
        work(connection, "failed", "no luck")
    shown = shell("show", 1).stdout
    assert "\nsolo, attempt 1:\n  no luck\n" in shown
    assert re.search(r"^solo +pending .*waits: until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d$", shown, re.MULTILINE)


def test_show_counts_the_elements_that_it_does_not_list(shell: Shell, db: Database, clock: Clock) -> None:
    """Of those that were executed more than once. And of what was lost too often it tells one thing once."""
    shell("trigger", "orders", "-i", '{"count": 3}')
    with db.connect() as connection:
        work(connection, "succeeded", "[1, 2, 3]")
        connection.execute("select flowforge.settle_finished(), flowforge.expand_map()")
        for _ in range(2):
            work(connection, "crashed", how_many=2)
            clock.advance("1 min")
        work(connection, "succeeded", "1", how_many=3)
    shown = shell("show", 1).stdout
    assert "2 elements took more than one execution; flowforge show 1 --elements\n" in shown
    assert "price[0]" not in shown
    shown = shell("show", 1, "--elements").stdout
    assert "more than once" not in shown
    assert len(re.findall(r"^price\[\d\] +1 +crashed", shown, re.MULTILINE)) == 4
    shell("trigger", "orders")
    with db.connect() as connection:
        for _ in range(3):
            work(connection, "crashed")
            clock.advance("1 min")
    shown = shell("show", 2).stdout
    assert re.search(r"^fetch +failed .*given up after 3 executions", shown, re.MULTILINE)
    assert "taken back" not in shown


def test_nothing_of_the_database_is_obeyed_by_a_terminal(db: Database) -> None:
    """Names, errors, reasons and outputs may hold what moves its cursor or sets its title: it is shown."""
    hostile = "boom\x1b[2J\x1b]0;title\x07\r\x9b31m\u202e"
    shell = Shell(db.dsn)
    with Client(db.dsn) as client, db.connect() as connection:
        client.define({"name": "w\u202e", "tasks": [{"name": "a\u202eb"}]})
        for _ in range(2):
            client.trigger("w\u202e", labels={"team": hostile})
        work(connection, "failed", hostile, owner="me\u202e")
        work(connection, "succeeded", json.dumps(hostile))
        connection.execute("select flowforge.settle_finished()")
    for command, code in (
        ("show 1", exits.EXIT_OK),
        ("show 1 --json", exits.EXIT_OK),
        ("show 2 --output a\u202eb", exits.EXIT_OK),
        ("show 1 --output a\u202eb", exits.EXIT_FAILED),
        ("watch 1", exits.EXIT_FAILED),
        ("watch 1 --json", exits.EXIT_FAILED),
        ("runs", exits.EXIT_OK),
        ("runs --json", exits.EXIT_OK),
        ("workflows", exits.EXIT_OK),
    ):
        result = shell(*command.split(), code=code)
        assert visible(result.output) == result.output, command
        if "--json" in command or "--output" in command:
            assert code or json.loads(result.stdout.splitlines()[0])
    for words in (["show", "1"], ["watch", "1"], ["runs"]):
        shown = ESCAPES.sub("", on_terminal(shell, *words)).replace("\r\n", "\n").replace("\r", "")
        assert visible(shown) == shown
        assert words == ["runs"] or "\\x1b[2J" in shown


def test_show_output_is_the_bare_json(live: Shell) -> None:
    live("trigger", "orders", "-w")
    assert live("show", 1, "--output", "price").stdout == "[0, 10, 20]\n"
    assert live("show", 1, "--output", "total").stdout == "30\n"


def test_show_input_is_the_bare_json(shell: Shell) -> None:
    shell("trigger", "orders", "-i", '{"day":  "\\u00e9", "n": 1.5}')
    assert shell("show", 1, "--input").stdout == '{"n": 1.5, "day": "é"}\n'
    assert "there is no run 2" in shell("show", 2, "--input", code=exits.EXIT_USAGE).stderr


def test_show_output_of_what_did_not_succeed_is_an_error(db: Database) -> None:
    """An output that is null is one."""
    mixed = Workflow("mixed")
    mixed.task(name="nothing")(glad)
    mixed.task(name="broken")(sad)
    shell = Shell(db.dsn)
    with running(Config(database_url=db.dsn), mixed):
        shell("trigger", "mixed", "-w", code=exits.EXIT_FAILED)
        assert shell("show", 1, "--output", "nothing").stdout == "null\n"
        refused = shell("show", 1, "--output", "broken", code=exits.EXIT_FAILED)
        assert refused.stdout == ""
        assert refused.stderr == "error: task 'broken' of run 1 has not succeeded: it has no output\n"
        assert shell("retry", 1).stdout == "Run 1: 1 task run to run again.\n"


def test_show_tells_the_errors_of_a_big_map_in_short(db: Database) -> None:
    """The tracebacks of the last three, and how many more there are; each has its line in the table."""
    wide = Workflow("wide")
    wide.task(name="numbers")(ten)
    wide.task(name="work", map="numbers")(broken)
    shell = Shell(db.dsn)
    with running(Config(database_url=db.dsn), wide):
        shell("trigger", "wide", "-w", code=exits.EXIT_FAILED)
    shown = shell("show", 1).stdout
    assert shown.count('raise ValueError("no luck")') == 3
    assert "\nLeft out: 7 more errors; flowforge show 1 --json\n" in shown
    assert len(re.findall(r"^work\[\d\] +failed .* no luck", shown, re.MULTILINE)) == 10


def test_show_of_a_cancelled_run_does_not_say_so_for_each_task(shell: Shell, db: Database) -> None:
    shell("trigger", "orders")
    shell("cancel", 1, "--reason", "too early")
    with db.connect() as connection:
        connection.execute("select flowforge.cancel_leftovers(100), flowforge.settle_finished()")
    shown = shell("show", 1).stdout
    assert re.search(r"^  cancelled  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d: too early$", shown, re.MULTILINE)
    assert re.search(r"^fetch +cancelled", shown, re.MULTILINE)
    assert "the run was cancelled" not in shown


def test_show_of_a_retried_task_has_no_attempt_beyond_its_budget(live: Shell) -> None:
    live("trigger", "orders", "-i", '{"bad": 1}', "-w", code=1)
    live("retry", 1)
    live("watch", 1, code=1)
    assert re.search(r"^price\[1\] +failed +2 ", live("show", 1).stdout, re.MULTILINE)


def test_a_page_of_runs_is_read_from_the_end_of_an_index(db: Database) -> None:
    """However long the history: what is rare in it is not looked for among all the rest."""
    with db.connect() as connection:
        for name in ("frequent", "rare"):
            spec = f'{{"name": "{name}", "tasks": [{{"name": "a"}}]}}'
            connection.execute("select flowforge.define_workflow(%s)", [spec])
        connection.execute(
            """
            select flowforge.trigger_many('frequent', array_fill('{}'::jsonb, array[10000]));
            select flowforge.trigger('rare');
            update flowforge.run set finished_at = now(), unsettled = 0,
                state = (case when run_id in (1, 7) then 'failed' else 'succeeded' end)::flowforge.run_state
            where run_id < 10000;
            """
        )
        for table in ("run", "task_run", "workflow", "workflow_version"):
            connection.execute(f"vacuum analyze flowforge.{table}".encode())
        rare = connection.execute("select workflow_id from flowforge.workflow where name = 'rare'").fetchone()
        assert rare is not None
        for workflow_id, state, index in (
            (None, None, "run_pkey"),
            (rare[0], None, "run_of_workflow"),
            (rare[0], "succeeded", "run_of_workflow"),
            (None, "failed", "run_unsuccessful"),
            (None, "cancelled", "run_unsuccessful"),
            (None, "running", "run_active"),
            (None, "pending", "run_active"),
        ):
            query, params = runs_query(workflow_id, state, None, 20)
            plan = "\n".join(row[0] for row in connection.execute(f"explain {query}".encode(), params))
            assert f"Index Scan Backward using {index} on run r" in plan, (workflow_id, state, plan)
            assert "Sort" not in plan


def test_a_wait_that_is_given_up_tells_what_is_waited_for(shell: Shell) -> None:
    """However short it was."""
    result = shell("trigger", "orders", "--wait", "--timeout", "1s", code=exits.EXIT_TIMEOUT)
    assert re.search(r"^fetch: waits: for a scheduler.*\nerror: ", result.stderr, re.MULTILINE), result.stderr


# -- cancel, retry


def test_cancel_and_retry(live: Shell) -> None:
    live("trigger", "orders", "--delay", "1h")
    assert live("cancel", 1, "--reason", "too early").stdout == "Run 1 is being cancelled.\n"
    assert live.documents("watch", 1, code=1)[-1]["state"] == "cancelled"
    assert "too early" in live("show", 1).stdout
    assert "not changed: it has ended (cancelled)" in live("cancel", 1, code=exits.EXIT_FAILED).stdout
    assert live.document("cancel", 1, code=exits.EXIT_FAILED) == {"run_id": 1, "changed": False}
    assert live.document("retry", 1, "--request-id", "a") == {"run_id": 1, "reset": 3}
    assert live.documents("watch", 1)[-1]["state"] == "succeeded"
    assert "nothing" in live("retry", 1, code=exits.EXIT_FAILED).stdout
    assert "run again" in live("retry", 1, "--from", "price").stdout
    assert live.documents("watch", 1)[-1]["state"] == "succeeded"


def test_cancel_of_a_run_whose_output_is_beyond_python(shell: Shell, db: Database) -> None:
    """Which says no more than that it has ended."""
    with db.connect() as connection, Client(db.dsn) as client:
        client.define({"name": "odd", "tasks": [{"name": "a"}]})
        client.trigger("odd")
        connection.execute("select flowforge.dispatch_ready()")
        connection.execute(
            "select flowforge.finish_task_run(task_run_id, fencing_token, 'succeeded', %s::jsonb)"
            " from flowforge.claim_next('{default}', 'w', gen_random_uuid(), '1 min', 1)",
            ["9" * 5000],
        )
        connection.execute("select flowforge.settle_finished()")
    result = shell("cancel", 1, code=exits.EXIT_FAILED)
    assert (result.stdout, result.stderr) == ("Run 1 was not changed: it has ended.\n", "")


def test_retry_of_what_is_under_way_is_refused(shell: Shell, db: Database) -> None:
    shell("trigger", "orders")
    with db.connect() as connection:
        connection.execute("select flowforge.dispatch_ready()")
    result = shell("retry", 1, "--from", "fetch", code=exits.EXIT_REFUSED)
    assert "fetch" in result.stderr
