"""The start of every daemon: it ends with one line where nothing heals."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from flowforge import db as database
from flowforge import exits, runner
from flowforge.config import Config
from flowforge.errors import (
    BrokerMisconfigured,
)
from flowforge.migrate import SCHEMA_VERSION
from flowforge.stopping import Stop
from tests.python.daemons import CHECKOUT, Running
from tests.python.probe import Probe
from tests.services.database import Database
from tests.services.process import wait_until


def start_fails(config: Config, written: Callable[[], list[dict[str, object]]]) -> tuple[int, str]:
    """Exit code and the one line of a daemon that ends at its start."""
    running = Running(Probe(), config)
    with running:
        running.join()
    assert running.code is not None
    (line,) = written()
    assert line["level"] == "error"
    assert running.health.state == "failed"
    return running.code, str(line["event"])


def test_what_no_waiting_heals_ends_the_start_with_one_line(
    config: Config, db: Database, written: Callable[[], list[dict[str, object]]]
) -> None:
    wrong = config.replace(database_url=db.server.dsn(db.name, tcp=True) + " password=s3cret")
    code, line = start_fails(wrong, written)
    assert code == exits.EXIT_DATABASE
    assert "wrong login or password" in line
    assert "s3cret" not in line


def test_a_missing_setting_ends_the_start(written: Callable[[], list[dict[str, object]]]) -> None:
    code, line = start_fails(Config(), written)
    assert code == exits.EXIT_CONFIG
    assert "FLOWFORGE_DATABASE_URL is not set" in line


def test_a_password_that_is_not_escaped_shows_neither_in_log_nor_health_nor_on_the_command_line(
    tmp_path: Path, written: Callable[[], list[dict[str, object]]]
) -> None:
    url = "postgresql://u:p@S3CRET@127.0.0.1:1/db"
    config = Config(database_url=url, health_file=str(tmp_path / "health"))
    code, line = start_fails(config, written)
    assert code == exits.EXIT_CONFIG
    assert "%40 for @" in line
    health = Path(config.health_file).read_text()
    assert "%40 for @" in health
    command = subprocess.run(
        [sys.executable, "-m", "flowforge", "runs"],
        cwd=CHECKOUT,
        env={**os.environ, "FLOWFORGE_DATABASE_URL": url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert command.returncode == exits.EXIT_CONFIG
    assert "%40 for @" in command.stderr
    assert "S3CRET" not in str(written()) + health + command.stdout + command.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("drop schema flowforge cascade", "has no schema flowforge"),
        ("drop function flowforge.dispatch_ready", "it has no function dispatch_ready"),
        (
            "create or replace function flowforge.schema_version() returns bigint language sql return 0",
            f"has version 0, this program needs {SCHEMA_VERSION}",
        ),
    ],
)
def test_a_schema_that_is_too_old_ends_the_start(
    config: Config, db: Database, written: Callable[[], list[dict[str, object]]], change: str, said: str
) -> None:
    with db.connect() as conn:
        conn.execute(change.encode())
    code, line = start_fails(config, written)
    assert code == exits.EXIT_SCHEMA
    assert said in line
    assert "run `flowforge migrate`" in line


@pytest.mark.parametrize(
    ("groups", "lacks"),
    [
        ([], "USAGE on schema flowforge, EXECUTE on dispatch_ready"),
        (["flowforge_client"], "EXECUTE on dispatch_ready"),
    ],
)
def test_missing_privileges_are_named_with_the_remedy(
    config: Config,
    db: Database,
    written: Callable[[], list[dict[str, object]]],
    groups: list[str],
    lacks: str,
) -> None:
    dsn = db.create_login(*groups)
    name = psycopg.conninfo.conninfo_to_dict(dsn)["user"]
    code, line = start_fails(config.replace(database_url=dsn), written)
    assert code == exits.EXIT_PRIVILEGE
    assert line == f'login "{name}" lacks {lacks}; remedy: grant flowforge_scheduler to "{name}"'


def test_a_login_of_its_role_is_enough(config: Config, db: Database) -> None:
    probe = Probe()
    with Running(probe, config.replace(database_url=db.create_login("flowforge_scheduler"))) as running:
        wait_until(lambda: running.health.state == "ok", "the start")


def test_a_misconfigured_broker_ends_the_daemon(
    config: Config, written: Callable[[], list[dict[str, object]]]
) -> None:
    def fail(_: database.Connection) -> int:
        raise BrokerMisconfigured("queue 'q' exists with other arguments")

    running = Running(Probe(fail), config)
    with running:
        running.join()
    assert running.code == exits.EXIT_BROKER
    assert [line["event"] for line in written() if line["level"] == "error"] == [
        "queue 'q' exists with other arguments"
    ]


def test_a_health_file_that_cannot_be_written_ends_the_start(
    config: Config, tmp_path: Path, written: Callable[[], list[dict[str, object]]]
) -> None:
    probe = Probe()
    code = runner.run(probe, config.replace(health_file=str(tmp_path / "no/such/folder")), stop=Stop())
    assert code == exits.EXIT_CONFIG
    assert probe.closed
    ((event),) = [str(line["event"]) for line in written()]
    assert event.startswith(f"the health file {tmp_path}/no/such/folder cannot be written: No such file")


def test_importing_the_runner_loads_neither_pika_nor_yoyo() -> None:
    command = "import sys, flowforge.runner; sys.exit(bool({'pika', 'yoyo'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", command], cwd=CHECKOUT, check=True)
