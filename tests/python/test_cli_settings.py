"""What commands take from settings, and what they say of a database that will not do."""

import dataclasses
import json
import re
import shlex
import socket
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from flowforge import Client, Workflow, exits
from flowforge.cli.common import database
from flowforge.config import Config
from tests.python.shell import Shell
from tests.services.database import Database

flow = Workflow("orders")
flow.task(name="fetch")(lambda ctx: None)


# -- settings


@pytest.mark.parametrize(("setting", "threshold"), [("off", None), ("on", 5)])
def test_commands_prepare_no_statements_where_that_is_off(
    db: Database, monkeypatch: pytest.MonkeyPatch, setting: str, threshold: int | None
) -> None:
    """Behind a pooler in transaction mode another command would meet them."""
    monkeypatch.setenv("FLOWFORGE_PREPARED_STATEMENTS", setting)
    with database(db.dsn) as connection:
        assert connection.prepare_threshold == threshold


@pytest.fixture
def settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A settings file; --config of a command leaves its name in the environment, which ends with the test."""
    monkeypatch.setenv("FLOWFORGE_CONFIG", "")
    path = tmp_path / "flowforge.toml"
    path.write_text('database_url = "postgresql://u:s3cret@h/d"\nqueues = ["a", "b"]\nlease = 5\n')
    return path


def test_config_tells_what_holds_and_whence_without_passwords(settings_file: Path) -> None:
    shell = Shell("")
    shell.environment |= {"FLOWFORGE_LEASE": "7", "FLOWFORGE_AMQP_URL": "amqp://u:s3cret@h,amqps://h"}
    found = {each.pop("setting"): each for each in shell.documents("--config", settings_file, "config")}
    assert found["database_url"] == {
        "value": "postgresql://u:***@h/d",
        "from": f"database_url in {settings_file}",
        "variable": "FLOWFORGE_DATABASE_URL",
    }
    assert (found["lease"]["value"], found["lease"]["from"]) == (7.0, "FLOWFORGE_LEASE")
    assert found["amqp_url"]["value"] == ["amqp://u:***@h", "amqps://h"]
    assert (found["queues"]["value"], found["grace"]["from"]) == (["a", "b"], "default")
    assert (found["prepared_statements"]["value"], len(found)) == (True, len(dataclasses.fields(Config)))
    text = shell("--config", settings_file, "config").stdout
    assert re.search(r"^queues +a,b +queues in ", text, re.MULTILINE)
    assert re.search(r"^prepared_statements +on +default$", text, re.MULTILINE)
    assert "s3cret" not in text


def test_config_tells_of_the_database_of_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowforge.embedded.running_dsn", lambda: "postgresql://flowforge@/flowforge")
    [found] = [each for each in Shell("").documents("config") if each["setting"] == "database_url"]
    assert (found["value"], found["from"]) == ("postgresql://flowforge@/flowforge", "flowforge up")


def test_the_database_of_up_is_not_taken_in_silence_for_one_whose_variable_is_misspelled(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowforge.embedded.running_dsn", lambda *_: db.dsn)
    monkeypatch.setenv("FLOWFORGE_DATABSE_URL", "host=elsewhere")
    told = Shell("")("runs", code=exits.EXIT_FAILED).stderr
    assert "there is no setting FLOWFORGE_DATABSE_URL, did you mean FLOWFORGE_DATABASE_URL?" in told
    assert "This is the database of `flowforge up`" in told


def test_a_database_of_the_file_is_used_and_blamed(db: Database, settings_file: Path) -> None:
    shell = Shell("")
    settings_file.write_text(f"database_url = {json.dumps(db.dsn)}")
    assert "No workflows" in shell("--config", settings_file, "workflows", code=exits.EXIT_FAILED).stderr
    settings_file.write_text('database_url = "nonsense"')
    said = shell("--config", settings_file, "workflows", code=exits.EXIT_CONFIG).stderr
    assert f"database_url in {settings_file} is not a PostgreSQL connection string" in said


def test_a_variable_that_is_misspelled_is_told(tmp_path: Path) -> None:
    shell = Shell("")
    shell.environment |= {"FLOWFORGE_DATABSE_URL": "host=x", "XDG_DATA_HOME": str(tmp_path)}
    says = "there is no setting FLOWFORGE_DATABSE_URL, did you mean FLOWFORGE_DATABASE_URL?"
    assert shell("config").stderr == f"warning: {says}\n"
    assert shell("runs", code=exits.EXIT_CONFIG).stderr.endswith(f"`flowforge up`; {says}\n")
    shell.environment["FLOWFORGE_DATABASE_URL"] = "host=nowhere.invalid"
    for command in ("worker", "up"):
        assert f"warning settings: {says}\n" in shell(command, "nosuch", code=exits.EXIT_USAGE).stderr


def test_a_setting_is_called_as_it_was_given(settings_file: Path) -> None:
    """By the option, or by its place in the file."""
    shell = Shell("host=nowhere.invalid")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        told = shell("scheduler", "--metrics-port", port, code=exits.EXIT_CONFIG).stderr
        assert f"--metrics-port: cannot listen on 127.0.0.1 port {port}" in told
        settings_file.write_text(f"metrics_port = {port}")
        told = shell("--config", settings_file, "scheduler", code=exits.EXIT_CONFIG).stderr
        assert f"metrics_port in {settings_file}: cannot listen on" in told


# -- the database


def test_migrate_brings_up_a_new_database_and_can_be_repeated(db: Database) -> None:
    with db.connect() as connection:
        connection.execute("drop schema flowforge cascade")
    shell = Shell(db.dsn)
    assert "run `flowforge migrate`\n" in shell("runs", code=exits.EXIT_SCHEMA).stderr
    for command in (("runs",), ("trigger", "x")):
        told = Shell("")(*command, "--database-url", db.dsn, code=exits.EXIT_SCHEMA).stderr
        assert told.endswith(f"run `flowforge migrate --database-url {shlex.quote(db.dsn)}`\n")
        secret = make_conninfo(db.dsn, password="secret")
        told = Shell("")(*command, "--database-url", secret, code=exits.EXIT_SCHEMA).stderr
        assert told.endswith("run `flowforge migrate` with the same --database-url\n")
    report = shell.document("migrate")
    assert report["applied"]
    assert report["functions"] > 40
    assert "no migration was pending" in shell("migrate").stdout
    shell("runs", code=exits.EXIT_FAILED)


def test_database_that_is_not_there(tmp_path: Path) -> None:
    nowhere = Shell("postgresql://someone:secret@127.0.0.1:1/x?connect_timeout=2")
    result = nowhere("runs", code=exits.EXIT_DATABASE)
    assert re.match("error: connection to server .*: is PostgreSQL running", result.stderr)
    assert "secret" not in result.stderr
    for command in (("trigger", "x"), ("show", 1), ("watch", 1), ("cancel", 1), ("migrate",)):
        assert nowhere(*command, code=exits.EXIT_DATABASE).stderr.count("\n") == 1
    without = Shell("")
    without.environment["XDG_DATA_HOME"] = str(tmp_path)
    assert "flowforge up" in without("runs", code=exits.EXIT_CONFIG).stderr


def test_login_without_the_privilege(db: Database) -> None:
    shell = Shell(db.create_login("flowforge_client"))
    result = shell("runs", code=exits.EXIT_PRIVILEGE)
    assert "flowforge_reader" in result.stderr
    with Client(db.dsn) as client:
        client.define(flow)
    assert shell("trigger", "orders").stdout == "1\n"
    assert shell("retry", 1, code=exits.EXIT_PRIVILEGE).stderr.count("grant flowforge_operator to") == 1
    reader = Shell(db.create_login("flowforge_reader"))
    for command in (("trigger", "orders"), ("cancel", 1), ("show", 1, "--output", "fetch")):
        refused = reader(*command, code=exits.EXIT_PRIVILEGE).stderr
        assert refused.count("grant") == refused.count("grant flowforge_client to") == 1, refused


def test_flag_wins_over_the_environment(db: Database) -> None:
    shell = Shell("postgresql://127.0.0.1:1/x")
    shell("runs", "--database-url", db.dsn, code=exits.EXIT_FAILED)


def test_connection_string_that_is_none_is_blamed_on_whoever_gave_it() -> None:
    """And not shown: a part of it may be a password."""
    says = "is not a PostgreSQL connection string (URI or key=value), such as postgresql://user@host/database"
    for command in (["runs"], ["trigger", "x"], ["migrate"], ["scheduler"], ["up"]):
        told = Shell("host=nowhere")(*command, "--database-url", "secret", code=exits.EXIT_CONFIG).stderr
        assert told == f"error: --database-url {says}\n"
        told = Shell("secret")(*command, code=exits.EXIT_CONFIG).stderr
        assert told == f"error: FLOWFORGE_DATABASE_URL {says}\n"


def test_an_empty_option_is_no_wish_for_the_embedded_database() -> None:
    """But a variable of the shell that was not set."""
    for command in (["runs"], ["trigger", "x"], ["migrate"], ["scheduler"], ["up"], ["doctor"]):
        told = Shell("host=nowhere")(*command, "--database-url", " ", code=exits.EXIT_USAGE).stderr
        assert "Invalid value for '--database-url': it is empty" in told


def test_blanks_around_a_connection_string_mean_nothing(db: Database) -> None:
    """As at the end of a file that holds one."""
    for url in (f"{db.dsn}\n", f" {make_conninfo(db.dsn)}\r\n"):
        Shell(url)("runs", code=exits.EXIT_FAILED)
        Shell("host=nowhere")("runs", "--database-url", url, code=exits.EXIT_FAILED)
        with Client(url) as client:
            assert client.define(flow).workflow == "orders"


def test_refused_connection_says_what_to_check(db: Database) -> None:
    wrong = Shell(make_conninfo(db.dsn, dbname="nosuch"))
    for command in (("runs",), ("trigger", "orders")):
        told = wrong(*command, code=exits.EXIT_DATABASE).stderr
        assert "the database does not exist; check the connection string" in told


def test_a_database_that_takes_no_writes_is_called_that(db: Database) -> None:
    """And not one that is down, whether the session or its first statement tells."""
    with Client(db.dsn) as client:
        client.define(flow)
    for attributes in ("any", "read-write"):
        url = make_conninfo(
            db.dsn, options="-c default_transaction_read_only=on", target_session_attrs=attributes
        )
        told = Shell(url)("trigger", "orders", code=exits.EXIT_DATABASE).stderr
        assert "the database takes no writes: " in told
        assert "read-only" in told
        assert "`flowforge doctor` tells which" in told
        assert "running" not in told
