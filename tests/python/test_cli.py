"""The command line as a whole: help, exit codes, the database, the user's modules, daemons as processes."""

import contextlib
import dataclasses
import errno
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from psycopg.conninfo import make_conninfo

from flowforge import Client, Workflow, errors, exits, log
from flowforge.cli import cli, find_command
from flowforge.cli.common import database
from flowforge.cli.registration import warn_of_unregistered
from flowforge.config import Config
from flowforge.loading import load_workflows
from tests.python.shell import Shell
from tests.services.database import Database

COMMANDS = cli.list_commands(None)  # type: ignore[arg-type]

flow = Workflow("orders")
flow.task(name="fetch")(lambda ctx: None)


# -- help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    """Also without any setting, which is when help is needed."""
    result = CliRunner().invoke(cli, [command, "--help"])
    assert result.exit_code == 0
    assert "Example" in result.stdout
    assert f"flowforge {command}" in result.stdout.partition("Example")[2]


def test_overview_names_every_command_and_exit_code() -> None:
    result = CliRunner().invoke(cli, ["--help"])
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\S.*[^.]\.$", result.stdout, re.MULTILINE), command
    for code, meaning in exits.EXITS.items():
        assert re.search(rf"^ *{code} +{re.escape(meaning)}$", result.stdout, re.MULTILINE)


def test_a_command_that_is_mistyped_is_guessed() -> None:
    says = "No such command 'triger'. Did you mean 'trigger'?"
    assert says in Shell("")("triger", "etl", code=exits.EXIT_USAGE).stderr
    assert "Did you mean" not in Shell("")("zzz", code=exits.EXIT_USAGE).stderr
    assert "No such option" in Shell("")("--triger", code=exits.EXIT_USAGE).stderr


def test_every_error_has_an_exit_code_of_its_kind() -> None:
    assert exits.exit_code(errors.NotFound("")) == exits.EXIT_USAGE
    assert exits.exit_code(errors.InvalidArgument("")) == exits.EXIT_USAGE
    assert exits.exit_code(errors.StateConflict("")) == exits.EXIT_REFUSED
    assert exits.exit_code(errors.DatabaseUnavailable("")) == exits.EXIT_DATABASE
    assert exits.exit_code(errors.BrokerMisconfigured("")) == exits.EXIT_BROKER
    assert exits.exit_code(errors.FlowForgeError("")) == exits.EXIT_FAILED
    assert exits.exit_code(RuntimeError("")) == exits.EXIT_FAILED
    codes = [value for name, value in vars(exits).items() if name.startswith("EXIT_")]
    assert len(set(codes)) == len(codes)


def test_output_that_cannot_be_written_is_told_in_a_line() -> None:
    """And that nobody reads, by its exit code alone, as of any other program."""
    command = [sys.executable, "-m", "flowforge", "config", "--json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "error: cannot write to standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (exits.EXIT_FAILED, said)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (exits.EXIT_PIPE, "")


def test_messages_that_cannot_be_written_change_no_exit_code() -> None:
    command = [sys.executable, "-m", "flowforge"]
    environment = os.environ | {"FLOWFORGE_DATABASE_URL": "postgresql://127.0.0.1:1/x"}
    for arguments, code in (("runs",), exits.EXIT_DATABASE), (("nosuch",), exits.EXIT_USAGE):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run([*command, *arguments], env=environment, stderr=full, check=False)
        assert done.returncode == code


def test_messages_for_a_full_pipe_of_somebody_who_does_not_block_are_let_go() -> None:
    """Whoever shares it may have set that it does not block."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    command = [sys.executable, "-m", "flowforge", "nosuch"]
    done = subprocess.run(command, stderr=writer, check=False, timeout=60)
    assert done.returncode == exits.EXIT_USAGE
    os.close(reader)
    os.close(writer)


def test_a_broken_pipe_that_is_not_the_outputs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise BrokenPipeError(errno.EPIPE, "of a broker")

    monkeypatch.setattr(Config, "from_environment", fail)
    assert "of a broker" in Shell("")("config", code=exits.EXIT_FAILED).stderr


def test_text_that_is_not_utf_8_is_told(db: Database) -> None:
    strange = b"\xff\xfe".decode(errors="surrogateescape")
    shell = Shell(db.dsn)
    for command in (
        ("runs", "--workflow", strange),
        ("show", 1, "--output", strange),
        ("graph", strange),
        ("pause", strange),
    ):
        said = shell(*command, code=exits.EXIT_USAGE).stderr
        assert said == "error: not text in UTF-8: '\\udcff\\udcfe'\n", command
    for arguments in (["runs"], ["define", "nosuch"], ["up"]):
        said = shell(*arguments, "--database-url", strange, code=exits.EXIT_CONFIG).stderr
        assert said == "error: --database-url is not text in UTF-8\n", arguments


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


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["up", "m"], "up"),
        (["--config", "f", "worker"], "worker"),
        (["--config=f", "worker"], "worker"),
        (["trigger", "up"], "trigger"),
        (["--config", "up"], None),
        (["--help"], "--help"),
        ([], None),
    ],
)
def test_the_command_is_found_among_the_arguments(arguments: list[str], command: str | None) -> None:
    assert find_command(arguments) == command


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


# -- registering workflows


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The present directory, where modules can be written; what was imported from it is forgotten again."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    sys.path.remove(str(tmp_path))


JOBS = """
from flowforge import Workflow
{0} = Workflow({0!r})
{0}.task(name="hello")(print)
{0}.task(name="bye", after="hello")(print)
"""


def test_define_registers_modules_and_files(db: Database, modules: Path) -> None:
    """With no more than the client's role; the same again is known, other content a new version."""
    (modules / "jobs_a.py").write_text(JOBS.format("first") + JOBS.format("second"))
    (modules / "third.json").write_text('{"name": "third", "tasks": [{"name": "only"}]}')
    client, admin = Shell(db.create_login("flowforge_client")), Shell(db.dsn)
    assert "flowforge define MODULE" in admin("workflows", code=exits.EXIT_FAILED).stderr
    told = client("define", "jobs_a", "third.json").stdout
    assert told == "first v1: new\nsecond v1: new\nthird v1: new\n"
    assert client("define", "jobs_a:second").stdout == "second v1: known already\n"
    changed = '{"name": "third", "tasks": [{"name": "only"}, {"name": "more"}]}'
    assert json.loads(client("define", "-", "--json", stdin=changed).stdout) == {
        "workflow": "third",
        "version": 2,
        "created": True,
    }
    listed = admin.documents("workflows")
    kept = [(each["workflow"], each["version"], each["tasks"], each["versions"]) for each in listed]
    assert kept == [("first", 1, 2, 1), ("second", 1, 2, 1), ("third", 2, 2, 2)]
    heading, *rows = admin("workflows").stdout.splitlines()
    assert heading.split() == ["workflow", "version", "tasks", "registered", "versions"]
    assert re.fullmatch(r"third +2 +2 +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +2", rows[-1])


@pytest.mark.parametrize(
    ("source", "code", "says"),
    [
        ("jobs_missing", exits.EXIT_USAGE, "no module 'jobs_missing'"),
        ("missing.json", exits.EXIT_USAGE, "cannot read missing.json: No such file"),
        ("bad.json", exits.EXIT_USAGE, "bad.json is not JSON: "),
        ("nan.json", exits.EXIT_USAGE, "nan.json is not JSON: NaN"),
        ("list.json", exits.EXIT_USAGE, "list.json: .*must be an object"),
        ("empty.json", exits.EXIT_USAGE, "empty.json: .*tasks"),
        ("jobs_circle", exits.EXIT_USAGE, "the tasks of workflow 'circle' form a cycle: a → b → a"),
        ("jobs_empty", exits.EXIT_USAGE, "workflow 'empty' has no task"),
    ],
)
def test_define_refuses_what_will_not_do(
    db: Database, modules: Path, source: str, code: int, says: str
) -> None:
    """In one line that names the file or workflow, and before anything is registered."""
    (modules / "jobs_good.py").write_text(JOBS.format("good"))
    (modules / "jobs_circle.py").write_text(
        JOBS.format("circle") + "circle.task(name='a', after='b')(id)\ncircle.task(name='b', after='a')(id)"
    )
    (modules / "jobs_empty.py").write_text("from flowforge import Workflow\nempty = Workflow('empty')")
    for name, text in {"bad": "{", "nan": '{"name": NaN}', "list": "[]", "empty": '{"name": "x"}'}.items():
        (modules / f"{name}.json").write_text(text)
    shell = Shell(db.dsn)
    told = shell("define", *([] if source.endswith(".json") else ["jobs_good"]), source, code=code)
    assert told.stdout == ""
    assert re.fullmatch(rf"error: {says}.*\n", told.stderr), told.stderr
    assert shell.documents("workflows", code=exits.EXIT_FAILED) == []


def test_define_registers_all_or_nothing(db: Database, modules: Path) -> None:
    """What the database refuses, it names by its file, wherever it stands among the others."""
    (modules / "jobs_good.py").write_text(JOBS.format("good"))
    for name, spec in {
        "a": {"name": "a", "tasks": [{"name": "t"}]},
        "b": {"name": "b", "tasks": [{"name": "t", "after": ["gone"]}]},
        "c": {"name": "c", "tasks": [{"name": "t"}]},
        "z": {"name": "z", "tasks": [{"name": "t"}, {"name": "u"}, {"name": "v"}]},
    }.items():
        (modules / f"{name}.json").write_text(json.dumps(spec))
    shell = Shell(db.dsn)
    for files in (["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]):
        told = shell("define", "jobs_good", *(f"{each}.json" for each in files), code=exits.EXIT_USAGE)
        assert told.stdout == ""
        assert re.match(r"error: b\.json: .*gone", told.stderr), told.stderr
    with db.connect() as conn:
        conn.execute("select flowforge.set_limit('max_tasks', 2)")
    told = shell("define", "jobs_good", "a.json", "z.json", "c.json", code=exits.EXIT_USAGE)
    assert re.match(r"error: z\.json: .*at most 2", told.stderr), told.stderr
    assert shell.documents("workflows", code=exits.EXIT_FAILED) == []
    assert shell("define", "c.json", "a.json").stdout == "c v1: new\na v1: new\n"


def test_a_refusal_of_the_database_names_the_workflow_once(db: Database, modules: Path) -> None:
    (modules / "jobs_long.py").write_text(JOBS.format("long") + "long.task(name='b', lease=9e9)(id)")
    told = Shell(db.dsn)("define", "jobs_long", code=exits.EXIT_USAGE).stderr
    assert told.startswith("error: task 'b' of workflow 'long': lease")
    assert told.count("workflow 'long'") == 1


# -- loading workflows


def test_workflows_are_found_in_modules(modules: Path) -> None:
    two = JOBS.format("one") + JOBS.format("two") + "alias = one\n"
    (modules / "jobs_two.py").write_text(two)
    (modules / "jobs_again.py").write_text("from jobs_two import one\n")
    (modules / "jobs_two").touch()  # a file of that name is no module
    assert [each.name for each in load_workflows(["jobs_two"])] == ["one", "two"]
    assert [each.name for each in load_workflows(["jobs_two:two"])] == ["two"]
    assert [each.name for each in load_workflows(["jobs_two", "jobs_again"])] == ["one", "two"]


@pytest.mark.parametrize(
    ("source", "place", "says"),
    [
        ("", "jobs_bad", "holds no Workflow"),
        ("", "jobs_missing", "no module 'jobs_missing'"),
        ("", "jobs_bad.py", "without .py: jobs_bad$"),
        ("", "./jobs_bad.py", "without .py: jobs_bad$"),
        ("", "/nowhere/jobs.py", "without .py$"),
        ("", "", "without .py$"),
        ("x = 1", "jobs_bad:x", "has no Workflow 'x'; it has: none"),
        ("import nonexistent_module", "jobs_bad", r"jobs_bad\.py:1: ModuleNotFoundError"),
        ("\n1/0", "jobs_bad", r"jobs_bad\.py:2: ZeroDivisionError"),
        ("import os\nos.environ['NONE']", "jobs_bad", r"jobs_bad\.py:2: KeyError: 'NONE'"),
        ("import json\njson.loads('{')", "jobs_bad", r"jobs_bad\.py:2: JSONDecodeError"),
        ("import click\nclick.Option([])", "jobs_bad", r"jobs_bad\.py:2: TypeError"),
        ("import os\n\ndef f(:", "jobs_bad", r"imported: \S*/jobs_bad\.py:3: SyntaxError: invalid syntax$"),
        ("raise SystemExit(3)", "jobs_bad", "SystemExit: 3"),
        (
            "from flowforge import Workflow\na = Workflow('same')\nb = Workflow('same')",
            "jobs_bad",
            "two different workflows are called 'same'",
        ),
        ("from flowforge import Workflow\na = Workflow('')", "jobs_bad", r"jobs_bad\.py:2: .*name"),
    ],
)
def test_modules_that_will_not_do(modules: Path, source: str, place: str, says: str) -> None:
    (modules / "jobs_bad.py").write_text(source)
    result = Shell("postgresql://127.0.0.1:1/x")("worker", place, code=exits.EXIT_USAGE)
    assert re.search(says, result.stderr.rstrip()), result.stderr
    assert result.stderr.count("\n") == 1


# -- daemons


def test_daemons_run_until_they_are_told_to_stop(db: Database, tmp_path: Path) -> None:
    """Scheduler and worker as their own processes bring a run to its end, and stop in order on SIGTERM."""
    (tmp_path / "jobs.py").write_text(
        "from flowforge import Workflow\nhello = Workflow('hello')\n"
        "@hello.task\ndef greet(ctx):\n    return 'hello'\n"
    )
    environment = os.environ | {"FLOWFORGE_DATABASE_URL": db.dsn, "FLOWFORGE_AMQP_URL": ""}
    defined = subprocess.run(
        [sys.executable, "-m", "flowforge", "define", "jobs"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert defined.stdout == "hello v1: new\n"
    daemons = [
        subprocess.Popen(
            [sys.executable, "-m", "flowforge", *command],
            cwd=tmp_path,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in (["scheduler", "--log-format", "json"], ["worker", "jobs", "-c", "2", "-q", "default"])
    ]
    try:
        with Client(db.dsn) as client:
            result = client.wait(client.trigger("hello"), timeout=60)
            assert result.outputs == {"greet": "hello"}
    finally:
        for daemon in daemons:
            daemon.terminate()
        logs = [daemon.communicate()[1] for daemon in daemons]
    assert [daemon.returncode for daemon in daemons] == [0, 0]
    assert {json.loads(line)["daemon"] for line in logs[0].splitlines()} == {"scheduler"}
    assert "worker: stopped" in logs[1]


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--lease", "0", "it is '0.0'; allowed is a number of seconds from 1 to 86400"),
        ("--queue", "dead", "it is 'dead'; allowed is queue names"),
        ("--amqp-url", "http://x", "it cannot be read; allowed is amqp://"),
        ("--concurrency", "many", "'many' is not a valid integer"),
    ],
)
def test_option_that_will_not_do_is_blamed_by_its_name(option: str, value: str, says: str) -> None:
    """And not the variable that it stands for, which nobody has set."""
    for command in ("up", "worker"):
        told = Shell("host=nowhere")(command, "jobs", option, value, code=exits.EXIT_USAGE).stderr
        assert option in told.partition("Invalid value for ")[2].partition(": ")[0]
        assert says in told


def test_a_worker_warns_of_what_is_not_registered(db: Database, capsys: pytest.CaptureFixture[str]) -> None:
    """Where its login may see that, and never in the way of its work."""
    config = Config(database_url=db.dsn, queues=("default",))
    two = Workflow("two")
    two.task(name="here")(lambda ctx: None)
    log.configure()

    def told(url: str) -> str:
        warn_of_unregistered(config.replace(database_url=url), [flow, two])
        return capsys.readouterr().err

    with Client(db.dsn) as client:
        client.define({"name": "two", "tasks": [{"name": each} for each in ("here", "gone", "lost")]})
        says = told(db.dsn)
        assert "workflow 'orders' is not registered; run flowforge define MODULE" in says
        assert re.search("registered version of workflow 'two' has tasks whose .* tasks=gone,lost", says)
        assert told(db.create_login("flowforge_worker")) == ""
        assert told("postgresql://127.0.0.1:1/x") == ""
        client.define(flow)
        elsewhere = [{"name": "here"}, {"name": "gone", "queue": "elsewhere"}]
        client.define({"name": "two", "tasks": elsewhere})
        assert told(db.dsn) == ""


@pytest.mark.parametrize(
    "trouble",
    [
        "begin; lock table flowforge.workflow_version in access exclusive mode",
        """
        alter view flowforge.workflow_version_status rename to real;
        create view flowforge.workflow_version_status as
            select r.* from (select pg_sleep(300)) s cross join flowforge.real r
        """,
    ],
    ids=["locked", "silent"],
)
def test_a_start_does_not_wait_for_a_warning(db: Database, trouble: str) -> None:
    config = Config(database_url=db.dsn, queues=("default",))
    start = threading.Thread(target=warn_of_unregistered, args=(config, [flow]), daemon=True)
    with db.connect() as other:
        other.execute(trouble)
        start.start()
        start.join(30)
        assert not start.is_alive()


def test_publisher_without_a_broker_says_what_to_set(db: Database) -> None:
    assert "FLOWFORGE_AMQP_URL" in Shell(db.dsn)("publisher", code=exits.EXIT_CONFIG).stderr


def test_up_refuses_options_of_a_server_it_will_not_start() -> None:
    told = Shell("host=nowhere")("up", "--data-dir", "x", code=exits.EXIT_USAGE).stderr
    assert "--data-dir and --port are for" in told
    assert "FLOWFORGE_DATABASE_URL names a database; unset it" in " ".join(told.split())
    option = Shell("")("up", "--port", "5", "--database-url", "host=x", code=exits.EXIT_USAGE).stderr
    assert "--database-url names a database; leave it out" in " ".join(option.split())


def test_up_is_not_to_be_given_the_database_that_it_would_start(tmp_path: Path) -> None:
    """The connection string that `up` printed, exported, and used once `up` has ended."""
    (tmp_path / "lock").touch()
    dsn = f"postgresql://flowforge@/flowforge?host={tmp_path}/run&passfile={tmp_path}/pgpass"
    told = Shell(dsn)("up", code=exits.EXIT_CONFIG).stderr
    assert f"FLOWFORGE_DATABASE_URL names the embedded PostgreSQL in {tmp_path}, which does not run" in told
    assert "unset it" in told
