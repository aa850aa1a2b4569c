"""Commands that are interrupted, or whose output nobody takes: what they end with and say."""

import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flowforge import exits
from tests.python.shell import Shell
from tests.services.database import Database
from tests.services.process import wait_until


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
    "command", [("watch", "1"), ("trigger", "orders", "--wait", "--json")], ids=["watch", "trigger"]
)
def test_a_terminal_that_hangs_up_ends_the_waiting_as_ctrl_c(
    shell: Shell, db: Database, command: tuple[str, ...]
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
        query = """select state_change from pg_stat_activity where state = 'idle' and lower(query) = 'commit'
            and pid <> pg_backend_pid() and datname = current_database()"""
        ends = set[Any]()  # of its transactions: the request, and looks that each end in one

        def waiting() -> bool:
            ends.update(connection.execute(query).fetchall())
            return len(ends) > 3

        wait_until(waiting, "the waiting")
    os.close(leader)
    assert process.wait(60) == exits.EXIT_INTERRUPTED
