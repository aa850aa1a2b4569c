"""Commands of the command line, run against one database."""

import json
from typing import Any

from click.testing import CliRunner, Result

from flowforge.cli import cli


class Shell:
    """Commands against one database."""

    def __init__(self, dsn: str) -> None:
        self.environment = {"FLOWFORGE_DATABASE_URL": dsn, "FLOWFORGE_AMQP_URL": "", "COLUMNS": "200"}

    def __call__(self, *arguments: object, code: int = 0, stdin: str | None = None) -> Result:
        result = CliRunner().invoke(cli, [*map(str, arguments)], env=self.environment, input=stdin)
        assert result.exit_code == code, result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result

    def documents(self, *arguments: object, code: int = 0) -> list[dict[str, Any]]:
        """The JSON documents that the command prints, one on each line."""
        out = self(*arguments, "--json", code=code).stdout
        return [json.loads(line) for line in out.splitlines()]

    def document(self, *arguments: object, code: int = 0) -> dict[str, Any]:
        [found] = self.documents(*arguments, code=code)
        return found
