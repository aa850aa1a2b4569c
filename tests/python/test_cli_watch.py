"""What is shown of a run while it is under way: in a pipe, as JSON, and on a terminal."""

import io
import json
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import pytest
from click.testing import Result
from psycopg.conninfo import conninfo_to_dict
from rich.console import Console

from flowforge import Client, Workflow, exits
from flowforge.cli.changes import Changes, change_line
from flowforge.cli.common import acting, database, duration
from flowforge.cli.snapshots import Snapshot, lasting_snapshots, snapshot, snapshots
from flowforge.cli.watch import picture
from flowforge.config import Config
from flowforge.db import Connection
from flowforge.errors import DatabaseUnavailable
from tests.python.orders import ESCAPES, fails_at_first, glad, on_terminal, sad, work
from tests.python.running import running
from tests.python.shell import Shell
from tests.services.database import Clock, Database
from tests.services.process import wait_until


def test_watch_tells_changes_until_the_end(live: Shell) -> None:
    live("trigger", "orders")
    lines = live("watch", 1).stdout.splitlines()
    assert re.fullmatch(r"run 1 of orders: succeeded after .*", lines[-1])
    events = live.documents("watch", 1)
    assert [event["task"] for event in events if event["event"] == "task"] == ["fetch", "price", "total"]
    assert events[-1]["event"] == "run"
    assert events[-1]["state"] == "succeeded"


def test_watch_tells_the_progress_of_a_map(shell: Shell, db: Database) -> None:
    """Told while it goes on: the run is brought half way through by hand, then to its end."""
    shell("trigger", "orders", "-i", '{"count": 10}')
    with db.connect() as connection:

        def step(how_many: int) -> None:
            for call in ("settle_finished()", "expand_map()", "dispatch_ready()"):
                connection.execute(f"select flowforge.{call}")
            connection.execute(
                "select flowforge.finish_task_run(c.task_run_id, c.fencing_token, 'succeeded', %s::jsonb) "
                "from flowforge.claim_next('{default}', 'w', gen_random_uuid(), '1 min', %s) c",
                ["[1,2,3,4,5,6,7,8,9,10]", how_many],
            )

        step(1)
        step(5)
        events: list[dict[str, Any]] = []
        watching = threading.Thread(target=lambda: events.extend(shell.documents("watch", 1)))
        query = (
            "select from pg_stat_activity where datname = current_database() and state = 'idle' "
            "and application_name = 'flowforge cli' and query = 'COMMIT'"
        )
        watching.start()
        wait_until(lambda: connection.execute(query).rowcount > 0, "the first look")
        step(5)
        step(1)
        connection.execute("select flowforge.settle_finished()")
        watching.join()
    progress = [event for event in events if event["event"] == "progress"]
    assert progress[0]["fraction"] == 0.5
    assert (progress[0]["task"], progress[0]["done"], progress[0]["total"]) == ("price", 5, 10)
    assert events[-1]["state"] == "succeeded"


def test_watch_tells_what_a_handler_says_of_its_progress(shell: Shell, db: Database) -> None:
    """At every tenth, and each new message at one place: a phase. Not each of many messages on the way."""
    shell("trigger", "orders")
    changes = Changes()
    with db.connect() as connection:

        def told(fraction: float, message: str | None) -> list[str]:
            connection.execute("select flowforge.report_progress(1, 1, %s, %s)", (fraction, message))
            found = list(changes.since(snapshot(connection, 1)))
            assert all(each.get("message", message) == message for each in found)
            return [change_line(each) for each in found if each["event"] == "progress"]

        connection.execute("select flowforge.dispatch_ready()")
        connection.execute("select flowforge.claim_next('{default}', 'w1', gen_random_uuid(), '1 min')")
        assert told(0, "looking\nfor it") == ["fetch: 0% looking for it"]
        assert told(0, "looking\nfor it") == []
        assert told(0, "found it") == ["fetch: 0% found it"]
        assert told(0.01, "row 1") == []
        assert told(0.25, "row 25") == ["fetch: 25% row 25"]
        assert told(0.5, None) == ["fetch: 50%"]


def test_watch_of_a_failure_and_of_one_without_end(live: Shell) -> None:
    live("trigger", "orders", "-i", '{"bad": 0}', "-w", code=1)
    assert live.documents("watch", 1, code=exits.EXIT_FAILED)[-1]["state"] == "failed"
    live("trigger", "orders", "--delay", "1h")
    assert "goes on" in live("watch", 2, "--timeout", "0.1", code=exits.EXIT_TIMEOUT).stderr


def test_a_pipe_is_told_what_is_waited_for(shell: Shell, db: Database) -> None:
    """Of what has stayed for a while, once; nothing of tasks that wait for others."""
    shell("trigger", "orders")
    clock = [0.0]
    changes = Changes(now=lambda: clock[0])
    with db.connect() as connection:

        def told() -> list[str]:
            lines = [change_line(change) for change in changes.since(snapshot(connection, 1))]
            return [line for line in lines if "waits: " in line]

        def stays() -> list[str]:
            first = told()
            clock[0] += 10
            return first + told() + told()

        assert stays() == ["fetch: waits: for a scheduler: none is running"]
        connection.execute("select flowforge.pause_queue('default')")
        assert stays() == ["fetch: waits: queue default is paused"]
        connection.execute("select flowforge.resume_queue('default'), flowforge.dispatch_ready()")
        assert stays() == ["fetch: waits: for a worker of queue default"]
        work(connection, "succeeded", "[1, 2, 3]")
        connection.execute("select flowforge.settle_finished(), flowforge.expand_map()")
        connection.execute("select flowforge.dispatch_ready()")
        assert stays() == ["price: waits: for a worker of queue default"], "as all of its elements do"


def test_a_map_of_which_nothing_has_begun_says_what_it_waits_for(shell: Shell, db: Database) -> None:
    """The same in the picture of `watch`, which has room for it on any terminal, as in `show`; then that it
    runs."""
    shell("trigger", "orders")
    with db.connect() as connection:

        def shown() -> list[str]:
            out = Console(width=80, record=True, file=io.StringIO())
            out.print(picture(snapshot(connection, 1), 40))
            told = (out.export_text(), shell("show", 1).stdout)
            lines = [next(line for line in each.splitlines() if " price " in f" {line} ") for each in told]
            assert len({state for line in lines for state in ("pending", "running") if state in line}) == 1
            return [" ".join(re.sub("[━○●-]", "", line).split()) for line in lines]

        connection.execute("select flowforge.dispatch_ready()")
        work(connection, "succeeded", "[1, 2, 3]")
        connection.execute("select flowforge.settle_finished(), flowforge.expand_map()")
        connection.execute("select flowforge.dispatch_ready()")
        waits = "waits: for a worker of queue default"
        assert shown() == [f"pending price 0 of 3, {waits}", f"price pending 0 of 3 done; {waits}"]
        connection.execute("select flowforge.claim_next('{default}', 'w', gen_random_uuid(), '1 min')")
        assert shown() == ["running price 0 of 3", "price running 0 of 3 done, 1 running"]


def test_watch_tells_failed_attempts(db: Database, clock: Clock) -> None:
    """Those that another one follows, which no state tells. Of a map's elements a few, then their number."""
    fails_at_first(db, delay=0, elements=30)
    with Client(db.dsn) as client, db.connect() as connection:
        run = client.trigger("shaky", list(range(30)))
        changes, looks = Changes(), snapshots(connection, run)

        def told() -> list[str]:
            found = changes.since(next(looks))
            return [change_line(each) for each in found if each["event"] in ("attempt", "repetitions")]

        assert told() == []
        work(connection, "failed", "no luck\nat all")
        assert told() == ["solo: attempt 1 failed: no luck"]
        assert told() == []
        work(connection, "crashed")
        assert re.fullmatch(r"solo: attempt 2 crashed: [^\n]+", "\n".join(told()))
        clock.advance("1 min")
        work(connection, "succeeded", json.dumps(list(range(30))))
        connection.execute("select flowforge.settle_finished(), flowforge.expand_map()")
        assert told() == []
        work(connection, "failed", "no", how_many=3)
        assert [re.sub(r"\d+", "N", line) for line in told()] == ["each[N]: attempt N failed: no"] * 3
        work(connection, "failed", "no", how_many=27)
        lines = told()
        assert len(lines) == 3
        assert lines[-1] == "each: 30 attempts at elements have failed or were lost so far"


def test_watch_begins_with_the_attempts_whose_successors_wait(db: Database) -> None:
    """And leaves out those before them. How long that takes is told."""
    fails_at_first(db, delay=3600)
    shell = Shell(db.dsn)
    shell("trigger", "shaky")
    with db.connect() as connection:
        work(connection, "crashed")
        work(connection, "failed", "no luck")
    lines = shell("watch", 1, "--timeout", "0", code=exits.EXIT_TIMEOUT).stdout.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"solo: attempt 1 failed: no luck; again in .*(h|min).*", lines[1])


def test_a_map_in_a_pipe_tells_what_runs(shell: Shell, db: Database, clock: Clock) -> None:
    """From its expansion on, before anything is done; so does `show`, also while the run is cancelled."""
    shell("trigger", "orders")
    with db.connect() as connection:
        changes, looks = Changes(), snapshots(connection, 1)

        def told() -> list[str]:
            return [change_line(each) for each in changes.since(next(looks))]

        work(connection, "succeeded", "[1, 2, 3]")
        connection.execute("select flowforge.settle_finished(), flowforge.expand_map()")
        assert told()[1:] == ["fetch: succeeded after 0 ms", "price: 0 of 3 done"]
        connection.execute("select flowforge.dispatch_ready()")
        claim = "select flowforge.claim_next('{default}', 'w', gen_random_uuid(), '1 min', %s)"
        for more, running in ((1, 1), (2, 3)):
            connection.execute(claim, [more])
            assert told() == [f"price: 0 of 3 done, {running} running"]
            assert told() == []
        assert re.search(
            r"^price +running .*  0 of 3 done, 3 running$", shell("show", 1).stdout, re.MULTILINE
        )
        shell("cancel", 1)
        shown = shell("show", 1).stdout
        assert re.search(r"^price +\w+ .*3 elements, 3 still running$", shown, re.MULTILINE), shown


def test_changes_are_told_in_the_order_of_the_graph(db: Database) -> None:
    """Those of one look, too: no failed attempt stands before the success that it needed."""
    retry = {"max_attempts": 3, "delay": 0, "backoff": 1, "jitter": 0}
    with Client(db.dsn) as client, db.connect() as connection:
        tasks = [{"name": "a_last", "after": ["middle"], "retry": retry}]
        tasks += [{"name": "middle", "map": "z_first", "retry": retry}, {"name": "z_first", "retry": retry}]
        client.define({"name": "backwards", "tasks": tasks})
        changes, looks = Changes(), snapshots(connection, client.trigger("backwards"))

        def told() -> list[str]:
            events = [each for each in changes.since(next(looks)) if each["event"] in ("task", "attempt")]
            return [f"{each['task']} {each.get('outcome', each.get('state'))}" for each in events]

        assert told() == []
        for output in ("[1]", "1", None):
            work(connection, "failed", "no luck")
            if output is not None:
                work(connection, "succeeded", output)
                connection.execute("select flowforge.settle_finished(), flowforge.expand_map()")
        lines = ["z_first failed", "z_first succeeded", "middle failed", "middle succeeded", "a_last failed"]
        assert told() == lines


def test_a_database_that_goes_away_is_waited_for(shell: Shell, db: Database) -> None:
    """And when it comes back for others only, the error stands before what is left to do."""
    shell("trigger", "orders")
    dsn = db.create_login("flowforge_reader")
    login = conninfo_to_dict(dsn)["user"]
    ended: list[Result] = []
    watching = threading.Thread(target=lambda: ended.append(Shell(dsn)("watch", 1, code=exits.EXIT_DATABASE)))
    with db.connect() as connection:

        def look(not_by: int) -> int:
            query = (
                "select coalesce(max(pid), 0) from pg_stat_activity "
                "where usename = %s and pid <> %s and state = 'idle' and query = 'COMMIT'"
            )
            row = connection.execute(query, [login, not_by]).fetchone()
            assert row is not None
            return int(row[0])

        watching.start()
        wait_until(lambda: look(0) != 0, "the first look")
        first = look(0)
        connection.execute("select pg_terminate_backend(%s)", [first])
        wait_until(lambda: look(first) != 0, "a look on another connection")
        second = look(first)
        connection.execute(f'alter role "{login}" nologin'.encode())
        connection.execute("select pg_terminate_backend(%s)", [second])
        watching.join()
    [result] = ended
    assert result.stdout == "run 1 of orders: pending\n"
    assert re.fullmatch(
        r"(Waiting for the database to come back: .*\nThe database is back\.\n)?"
        r"Waiting for the database to come back: .*\n"
        r"error: .*the login may not connect to this database.*\n"
        r"Run 1 goes on: flowforge watch 1, or flowforge cancel 1\n",
        result.stderr,
    ), result.stderr
    assert "is back" in result.stderr


def test_who_reads_no_more_ends_the_waiting_for_a_result(db: Database, shell: Shell) -> None:
    """Of which nothing is told before its end but, then, which run it is."""
    asks = [sys.executable, "-m", "flowforge", "trigger", "orders", "--wait", "--json", "--delay", "1h"]
    reader, writer = os.pipe()
    with (
        db.connect() as connection,
        subprocess.Popen(
            asks, env=os.environ | shell.environment, stdout=writer, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        os.close(writer)
        try:
            wait_until(lambda: connection.execute("select from flowforge.run").rowcount == 1, "the run")
            os.close(reader)
            _, told = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == exits.EXIT_PIPE
    assert told == "The run's id is 1.\n"


@pytest.mark.parametrize("command", ["watch 1", "watch 1 --json", "trigger orders --wait"])
def test_who_reads_no_more_ends_the_watching(shell: Shell, command: str) -> None:
    """As `head` does, whatever there is to tell; also where the picture is on standard error."""
    shell("trigger", "orders", "--delay", "1h")
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", "flowforge", *command.split()],
        env=os.environ | shell.environment,
        stdout=writer,
        stderr=writer,
    ) as process:
        os.close(writer)
        with open(reader) as told:  # noqa: PTH123 - a descriptor
            for says in ("pending", "waits"):  # after which there is nothing more to tell
                assert says in told.readline()
        try:
            assert process.wait(60) == exits.EXIT_PIPE
        finally:
            process.kill()


def test_who_reads_no_more_ends_the_waiting_for_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: float | None) -> NoReturn:
        raise DatabaseUnavailable("away")

    told: list[str] = []
    reader, writer = os.pipe()
    with open(writer, "w") as output:  # noqa: PTH123 - a descriptor
        monkeypatch.setattr(sys, "stdout", output)
        os.close(reader)
        with pytest.raises(BrokenPipeError):
            list(lasting_snapshots(refuse, 1, 60, told.append, found=True))
    assert told == ["Waiting for the database to come back: away"]


def test_a_terminal_that_dies_without_a_signal_ends_the_watching(shell: Shell) -> None:
    """As one does whose session another program leads."""
    shell("trigger", "orders", "--delay", "1h")
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "flowforge", "watch", "1"],
        env=os.environ | shell.environment | {"TERM": "xterm"},
        stdin=follower,
        stdout=follower,
        stderr=follower,
    ) as process:
        os.close(follower)
        try:
            assert os.read(leader, 1)
            os.close(leader)
            assert process.wait(60) == exits.EXIT_FAILED
        finally:
            process.kill()


def test_a_server_that_stands_still_is_not_waited_for(
    shell: Shell, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond --timeout; and without one no longer than for a minute."""
    shell("trigger", "orders")
    monkeypatch.setattr("flowforge.cli.common.ANSWER_LIMIT", 0.2)
    for limit in ("flowforge.cli.snapshots._LAST_LOOK", "flowforge.cli.runs._MOMENT"):
        monkeypatch.setattr(limit, 0.1)
    with db.connect() as other, other.transaction():
        other.execute("lock table flowforge.run in access exclusive mode")
        error = "error: no answer within 0.2 s: is PostgreSQL running at the given address?\n"
        for command in ("runs",), ("show", 1), ("redispatch", "default"):
            assert shell(*command, code=exits.EXIT_DATABASE).stderr == error
        monkeypatch.setattr("flowforge.cli.common.ANSWER_LIMIT", 600)
        told = shell("watch", 1, "--timeout", "0.05", code=exits.EXIT_TIMEOUT).stderr
        assert told.startswith("error: not ended after 0.05 s, as far as is known: no answer within 0.")
        told = shell("trigger", "orders", "-w", "--timeout", "0.05", code=exits.EXIT_TIMEOUT).stderr
        assert re.fullmatch(r"error: no answer within 0\.\d s; whether there is a run now is .*\n", told)


def test_a_database_that_goes_away_after_the_trigger_is_waited_for(
    live: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    outages = [DatabaseUnavailable("gone")]

    @contextmanager
    def away_at_first(*arguments: Any, **options: Any) -> Iterator[Connection]:
        if outages:
            raise outages.pop()
        with database(*arguments, **options) as connection:
            yield connection

    monkeypatch.setattr("flowforge.cli.watch.database", away_at_first)
    result = live("trigger", "orders", "-w")
    assert result.stdout == "total: 30\n"
    assert result.stderr.startswith("Waiting for the database to come back: gone\nThe database is back.\n")
    outages.append(DatabaseUnavailable("gone"))
    assert "error: gone" in live("watch", 1, code=exits.EXIT_DATABASE).stderr


# -- terminals


def test_terminal_has_colours_unless_told_otherwise(live: Shell) -> None:
    live("trigger", "orders", "-w")
    for command in (["runs"], ["show", "1"], ["watch", "1"]):
        coloured = on_terminal(live, *command)
        assert "\x1b[32m✔ succeeded" in coloured
        plain = on_terminal(live, *command, NO_COLOR="1")
        assert "✔ succeeded" in plain
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", plain)
    assert "\x1b[" not in on_terminal(live, "runs", "--json")


def test_live_picture_ends_with_the_run(live: Shell) -> None:
    picture = ESCAPES.sub("", on_terminal(live, "trigger", "orders", "--input", '{"count": 40}', "--wait"))
    last = picture.rpartition("run 1")[2]
    assert re.search(r"✔ succeeded +price +━+ +40 of 40", last)
    assert "total: 780" in last


def test_live_picture_of_many_tasks_fits_the_terminal(db: Database) -> None:
    """The tasks that tell most are shown, such as a failure, and the rest in numbers."""
    wide = Workflow("wide")
    for number in range(50):
        wide.task(name=f"t{number}", after=[] if number % 10 else ["t1"] * (number > 0))(
            sad if number == 33 else glad
        )
    with running(Config(database_url=db.dsn), wide):
        picture = ESCAPES.sub("", on_terminal(Shell(db.dsn), "trigger", "wide", "--wait", LINES="20"))
    last = picture.rpartition("run 1")[2]
    assert "✖ failed     t33" in last
    assert re.search(r"… and \d+ more tasks: \d+ succeeded", last)
    assert sum("succeeded  t" in line for line in last.splitlines()) < 20


def test_the_rest_in_numbers_is_as_it_would_be_shown() -> None:
    """A map of which something has begun is running."""
    a_map = {"state": "pending", "map_count": 3, "done": 1, "running": 1, "failed": 0, "duration": None}
    a_map |= {"waits": None, "available_at": None, "next_waits": None, "next_at": None, "progress": None}
    a_map |= {"error": None, "attempt": 1, "max_attempts": 1, "progress_message": None}
    tasks = [a_map | {"task_run_id": number, "task": f"t{number}"} for number in range(9)]
    run = {"run_id": 1, "workflow": "w", "version": 1, "state": "running", "duration": None}
    file = io.StringIO()
    Console(file=file, width=100).print(picture(Snapshot(run, tasks), 8))
    assert "… and 6 more tasks: 6 running" in file.getvalue()


def test_durations_read_well() -> None:
    told = [
        duration(timedelta(seconds=each)) for each in (0.0123, 0.9996, 59.94, 59.96, 3599.6, 86399, 90000)
    ]
    assert told == ["12 ms", "1.0 s", "59.9 s", "1 min 00 s", "1 h 00 min", "23 h 59 min", "1 d 01 h"]
    assert duration(None) is None


def test_what_the_server_itself_said_is_told_as_it_is() -> None:
    """It runs at the given address."""
    with pytest.raises(DatabaseUnavailable, match=r"^terminating connection$"), acting():
        raise DatabaseUnavailable("terminating connection", "57P01")
