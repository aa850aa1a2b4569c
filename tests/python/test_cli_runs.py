"""`flowforge trigger`, `runs`, `cancel`, `retry`."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from flowforge import Client, Workflow, exits
from flowforge.cli.runs import runs_query
from tests.python.orders import flow
from tests.python.shell import Shell
from tests.services.database import Database


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


def test_trigger_takes_input_from_everywhere(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "input.json"
    file.write_text('{"from": "file ä"}', encoding="utf-8")
    shell("trigger", "orders", "--input", f"@{file}")
    shell("trigger", "orders", "--input", "-", stdin='{"from": "pipe"}')
    assert json.loads(shell("show", 2, "--input").stdout) == {"from": "pipe"}
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
    fourth = shell("trigger", "orders", "--input", "@-", stdin='{"from": "pipe, too"}').stdout.strip()
    assert json.loads(shell("show", fourth, "--input").stdout) == {"from": "pipe, too"}


def test_what_is_read_is_utf_8_whatever_the_locale(shell: Shell) -> None:
    """As files are."""
    command = [sys.executable, "-m", "flowforge", "trigger", "orders", "--input", "-"]
    environment = {**os.environ, **shell.environment, "PYTHONIOENCODING": "latin-1"}
    subprocess.run(command, env=environment, input='{"a": "ü"}'.encode(), check=True)
    assert json.loads(shell("show", 1, "--input").stdout) == {"a": "ü"}
    done = subprocess.run(command, env=environment, input=b'{"a": "\xff"}', capture_output=True, check=False)
    assert done.returncode == exits.EXIT_USAGE
    assert b"not JSON: 'utf-8' codec can't decode byte 0xff" in done.stderr


@pytest.mark.parametrize(
    "arguments", [["trigger", "orders", "-i", "-"], ["define", "-"]], ids=["trigger", "define"]
)
def test_standard_input_that_is_closed_is_told(shell: Shell, arguments: list[str]) -> None:
    command = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-m", "flowforge", *arguments]
    done = subprocess.run(command, env={**os.environ, **shell.environment}, capture_output=True, check=False)
    assert done.returncode == exits.EXIT_USAGE
    assert b"cannot read standard input: it is closed" in done.stderr
    assert b"Traceback" not in done.stderr


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
