"""The commands of operators: what each changes, prints, and answers to a mistake."""

import re

import pytest
from psycopg.conninfo import conninfo_to_dict

from flowforge import Client, Context, Workflow, exits
from tests.python.shell import Shell
from tests.services.database import Database

flow = Workflow("reports")


@flow.task(queue="slow")
def render(_: Context) -> None: ...


@pytest.fixture
def shell(db: Database) -> Shell:
    """Commands against a database that knows the workflow, where nothing runs it."""
    with Client(db.dsn) as client:
        client.define(flow)
    return Shell(db.dsn)


def dispatch(db: Database) -> None:
    with db.connect() as connection:
        connection.execute("select flowforge.dispatch_ready()")


def test_queues_tell_what_waits(shell: Shell, db: Database) -> None:
    shell("trigger", "reports")
    heading, line = shell("queues").stdout.splitlines()
    assert heading.split()[:5] == ["queue", "state", "waiting", "oldest", "dispatched"]
    assert re.match(r"slow +open +1 +", line)
    dispatch(db)
    [found] = shell.documents("queues")
    assert (found["queue"], found["eligible"], found["dispatched"]) == ("slow", 0, 1)


def test_without_any_there_is_a_hint(db: Database) -> None:
    empty = Shell(db.dsn)
    assert "a definition makes them: flowforge define" in empty("queues", code=exits.EXIT_FAILED).stderr
    assert empty("workers", code=exits.EXIT_FAILED).stderr == "No worker has announced itself.\n"


def test_workers_tell_what_each_runs(shell: Shell, db: Database) -> None:
    shell("trigger", "reports")
    dispatch(db)
    with db.connect() as connection:
        connection.execute("select flowforge.announce_worker('w1', '{slow,other}', 4)")
        connection.execute("select flowforge.claim_next('{slow}', 'w1', gen_random_uuid(), '1 min')")
        connection.execute("select flowforge.announce_worker('w2', '{slow}', 1)")
        connection.execute("update flowforge.worker set seen_at = now() - interval '5 min' where name = 'w2'")
    _, first, second = shell("workers").stdout.splitlines()
    assert re.match(r"w1 +alive +1 +4 +slow, other +\d", first)
    assert re.match(r"w2 +silent +0 +1 +slow +\d", second)
    assert [each["running"] for each in shell.documents("workers")] == [1, 0]


def test_a_paused_queue_dispatches_nothing_until_it_is_resumed(shell: Shell, db: Database) -> None:
    shell("trigger", "reports")
    assert shell("pause", "slow").stdout == "Queue slow is paused.\n"
    assert shell.document("pause", "slow") == {"queue": "slow", "changed": False}
    dispatch(db)
    [found] = shell.documents("queues")
    assert (found["eligible"], found["dispatched"]) == (1, 0)
    assert re.search(r"^slow +paused", shell("queues").stdout, re.MULTILINE)
    assert shell("resume", "slow").stdout == "Queue slow is open again.\n"
    assert shell("resume", "slow").stdout == "Queue slow was not paused.\n"
    dispatch(db)
    assert shell.document("queues")["dispatched"] == 1


def test_redispatch_publishes_again(shell: Shell, db: Database) -> None:
    shell("trigger", "reports")
    dispatch(db)
    with db.connect() as connection:
        connection.execute("select flowforge.mark_published(array_agg(outbox_id)) from flowforge.outbox")
        assert shell.document("redispatch", "slow") == {"queue": "slow", "published_again": 1}
        orders = connection.execute("select count(*), count(distinct dispatch_id) from flowforge.outbox")
        assert orders.fetchone() == (2, 1)


def test_a_name_cannot_lead_a_terminal_astray(shell: Shell, db: Database) -> None:
    name = "slow\u200b\u200e"
    with Client(db.dsn) as client:
        client.define({"name": "odd", "tasks": [{"name": "t", "queue": name}]})
    assert shell("pause", name).stdout == r"Queue slow\u200b\u200e is paused." + "\n"


@pytest.mark.parametrize("command", ["pause", "resume", "redispatch"])
def test_an_unknown_queue_is_named(shell: Shell, command: str) -> None:
    assert "there is no queue 'nosuch'" in shell(command, "nosuch", code=exits.EXIT_USAGE).stderr


def test_prune_deletes_what_ended_long_ago(shell: Shell, db: Database) -> None:
    for _ in range(3):
        shell("trigger", "reports")
    for run in (1, 2):
        shell("cancel", run)
    with db.connect() as connection:
        connection.execute(
            "update flowforge.run set finished_at = now() - interval '2 days' where run_id = 1"
        )
    assert shell.document("prune", "--older-than", "1d") == {"runs_deleted": 1}
    assert shell("prune", "--older-than", "0s").stdout == "1 run deleted.\n"
    assert shell("prune", "--older-than", "0s").stdout == "0 runs deleted.\n"
    assert [run["run_id"] for run in shell.documents("runs")] == [3]
    assert "not a length of time" in shell("prune", "--older-than", "soon", code=exits.EXIT_USAGE).stderr
    for bare in ("30", "30.", "30 "):
        told = shell("prune", "--older-than", bare, code=exits.EXIT_USAGE).stderr
        assert "has no unit; write 30s, 30m, 30h or 30d" in told
    assert "--older-than" in shell("prune", code=exits.EXIT_USAGE).stderr


def test_a_login_that_may_not_is_told_which_role_it_needs(shell: Shell, db: Database) -> None:
    reader = Shell(db.create_login("flowforge_reader"))
    assert reader.document("queues")["queue"] == "slow"
    refused = reader("pause", "slow", code=exits.EXIT_PRIVILEGE).stderr
    login = conninfo_to_dict(reader.environment["FLOWFORGE_DATABASE_URL"])["user"]
    assert f'remedy: grant flowforge_operator to "{login}"\n' in refused
