"""A set-up that flowforge doctor examines and a test mends."""

import contextlib
import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

from click.testing import CliRunner
from psycopg.conninfo import conninfo_to_dict

from flowforge import exits
from flowforge.cli import cli
from flowforge.config import Config
from flowforge.doctor import CHECKS
from flowforge.publisher import Publisher
from flowforge.scheduler import Scheduler
from tests.python.daemons import Running
from tests.python.shell import Shell
from tests.services.database import Database
from tests.services.process import wait_until

Found = dict[str, str]


class Patient:
    """One database, examined with `dsn` and mended by an administrator."""

    def __init__(self, db: Database, dsn: str) -> None:
        self.db, self.shell = db, Shell(dsn)

    @property
    def config(self) -> Config:
        """What its daemons run with; they are trusted with everything."""
        environment = self.shell.environment | {"FLOWFORGE_DATABASE_URL": self.db.dsn}
        return Config.from_environment(environment).replace(poll_interval=0.05)

    @property
    def login(self) -> str:
        return str(conninfo_to_dict(self.shell.environment["FLOWFORGE_DATABASE_URL"])["user"])

    def set(self, **environment: str) -> None:
        self.shell.environment |= environment

    def examine(self, *arguments: object, code: int = 0) -> dict[str, Found]:
        """Every finding by the check's name, and all checks are there."""
        found = {each.pop("check"): each for each in self.shell.documents("doctor", *arguments, code=code)}
        assert list(found) == ["settings", *(name for name, _, _ in CHECKS)]
        for each in found.values():
            assert bool(each["remedy"]) == (each["status"] in ("warning", "problem")), each
        assert (code == 0) == all(each["status"] != "problem" for each in found.values())
        return found

    def problem(self, check: str, *arguments: object) -> Found:
        found = self.examine(*arguments, code=exits.EXIT_FAILED)[check]
        assert found["status"] == "problem", found
        return found

    def seen(self, check: str, *arguments: object) -> Found:
        """What is said of it at present."""
        return next(each for each in self.all(*arguments) if each["check"] == check)

    def warning(self, check: str) -> Found:
        found = self.seen(check)
        assert found["status"] == "warning", found
        return found

    def well(self, check: str, *arguments: object) -> None:
        """Once what was done has taken effect, the check is content."""

        wait_until(lambda: self.seen(check, *arguments)["status"] == "ok", f"doctor's consent to {check}", 30)

    def all(self, *arguments: object) -> list[Found]:
        """All findings, whatever the exit code."""
        result = CliRunner().invoke(
            cli, ["doctor", "--json", *map(str, arguments)], env=self.shell.environment
        )
        assert result.exit_code in (exits.EXIT_OK, exits.EXIT_FAILED), result.output
        return [json.loads(line) for line in result.stdout.splitlines()]

    def follow(self, remedy: str) -> None:
        """Do what the remedy says, if it is commands of the program or SQL: as an administrator."""
        for each in re.sub(r", with [a-z' ]+ login[a-z ]*", "", remedy).split("; "):
            if each.startswith("flowforge "):
                Shell(self.db.dsn)(*shlex.split(each)[1:])
            else:
                self.sql(each)

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with self.db.connect() as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def work(self, queue: str = "default", count: int = 1) -> None:
        """Something to do."""
        tasks = [{"name": f"t{number}", "queue": queue} for number in range(count)]
        self.sql(f"select flowforge.define_workflow('{json.dumps({'name': 'w', 'tasks': tasks})}')")
        self.sql("select flowforge.trigger('w')")

    @contextlib.contextmanager
    def scheduler(self) -> Iterator[None]:
        with Running(Scheduler(self.config), self.config):
            yield

    @contextlib.contextmanager
    def publisher(self) -> Iterator[None]:
        with Running(Publisher(self.config), self.config):
            yield
