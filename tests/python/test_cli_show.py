"""`flowforge show`."""

import json
import re

from flowforge import Client, Workflow, exits
from flowforge.cli.changes import Changes
from flowforge.cli.snapshots import snapshots
from flowforge.config import Config
from flowforge.log import visible
from tests.python.orders import ESCAPES, broken, fails_at_first, glad, on_terminal, sad, ten, work
from tests.python.running import running
from tests.python.shell import Shell
from tests.services.database import Clock, Database


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


def test_show_takes_what_was_cancelled_in_line_for_no_execution(shell: Shell, db: Database) -> None:
    shell("trigger", "orders", "-i", '{"count": 3}')
    with db.connect() as connection:
        work(connection, "succeeded", "[1, 2, 3]")
        connection.execute(
            "select flowforge.settle_finished(), flowforge.expand_map(), flowforge.dispatch_ready()"
        )
        shell("cancel", 1)
        connection.execute("select flowforge.settle_finished()")
        shell("retry", 1)
        work(connection, "succeeded", "1", how_many=3)
    shown = shell("show", 1).stdout
    assert re.search(r"^price +\w+ .*3", shown, re.MULTILINE), shown
    assert "more than one execution" not in shown


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
