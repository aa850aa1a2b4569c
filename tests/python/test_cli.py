"""The command line as a whole: help, exit codes, what is printed, daemons as processes."""

import contextlib
import errno
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from flowforge import Client, Workflow, errors, exits, log
from flowforge.cli import cli, find_command
from flowforge.cli.registration import warn_of_unregistered
from flowforge.config import Config
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


def test_what_is_closed_is_no_file_s_number(tmp_path: Path) -> None:
    """Nor in what is started: a library would print into it."""
    program = """
import os, subprocess, sys
from flowforge.cli import _open_what_is_closed
_open_what_is_closed()
code = "import os, sys; assert sys.stdout is not None; assert os.open('/dev/null', os.O_RDONLY) > 2"
subprocess.run([sys.executable, "-c", code], check=True)
assert os.open(os.devnull, os.O_RDONLY) > 2
"""
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    ["--help", "--version", "runs --help", "config", "config --json", "show 1", "watch 1", "runs", "doctor"],
)
def test_output_that_nobody_reads_or_that_is_closed_has_its_exit_code(db: Database, arguments: str) -> None:
    """As of any other program; 1 would tell of a run that failed, or of trouble that doctor found."""
    shell = Shell(db.dsn)
    with db.connect() as connection:
        spec = '{"name": "w", "tasks": [{"name": "a"}]}'
        connection.execute("select flowforge.define_workflow(%s)", [spec])
        connection.execute("select flowforge.cancel_run(flowforge.trigger('w'))")
        connection.execute("select flowforge.cancel_leftovers()")
        connection.execute("select flowforge.settle_finished()")
    command = [sys.executable, "-m", "flowforge", *arguments.split()]
    environment = os.environ | shell.environment
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (exits.EXIT_PIPE, "")
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    said = "error: cannot write to standard output: Bad file descriptor\n"
    assert (done.returncode, done.stderr) == (exits.EXIT_FAILED, said)


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


@pytest.mark.parametrize("where", ["parse_args", "main"])
def test_an_interruption_while_the_command_line_is_read_has_its_exit_code(where: str) -> None:
    """Also before click has anything in hand, or when it has nothing more."""
    code = f"""
import click, sys
from flowforge.cli import main
def interrupted(*arguments, **options):
    raise KeyboardInterrupt
click.Group.{where} = interrupted
sys.argv = ["flowforge", "watch", "1"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (exits.EXIT_INTERRUPTED, b"", b"")


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
