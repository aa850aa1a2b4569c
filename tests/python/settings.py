"""Writes docs/settings.md from the settings themselves: ./dev run python -m tests.python.settings"""

import dataclasses
from pathlib import Path

from flowforge.config import Config, variable

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"

_HEAD = """\
# Settings

Each setting is an environment variable; an option of a command, such as `--lease`, goes before it, and
[commands.md](commands.md) tells the options that there are. Lengths of time are seconds, or as
text also `1.5s`, `10m`, `2h` or `1d`, as in options. An empty variable counts
as not set.

Under the environment lies a TOML file, if there is one: `flowforge --config FILE …` or `FLOWFORGE_CONFIG`
names it. Its keys are the variables in small letters without `FLOWFORGE_`; lists are lists:

```toml
database_url = "service=production"  # of ~/.pg_service.conf
amqp_url = ["amqps://flowforge@rabbit-1", "amqps://flowforge@rabbit-2"]
amqp_password_file = "/run/secrets/rabbitmq"
concurrency = 16
queues = ["default", "reports"]
prepared_statements = false
```

`flowforge config` prints what holds and where it is from, without passwords.

No password needs to stand in an environment variable or in the arguments of a program, which other users of
the machine may see. For PostgreSQL take a `passfile=…` in the connection string, `~/.pgpass` or a service
file, as for any program that uses libpq; for RabbitMQ `FLOWFORGE_AMQP_PASSWORD_FILE`. With
`sslmode=verify-full sslrootcert=…` in PostgreSQL's connection string and `amqps://` for RabbitMQ, both
servers are verified.

This file is generated from `flowforge/config.py`; a test compares the two. After changing a setting, write it
anew: `./dev run python -m tests.python.settings`.

| variable | default | allowed | meaning |
|---|---|---|---|
"""

_TAIL = """
Besides, `FLOWFORGE_PG_BIN` names the directory of the programs of another PostgreSQL for `flowforge up` and
`demo`, `XDG_DATA_HOME` moves the default directory of the embedded data, and `NO_COLOR` turns colours off.
"""


def page() -> str:
    """The page as it should be."""
    rows = []
    for each in dataclasses.fields(Config):
        default = each.default
        if isinstance(default, bool):
            default = "on" if default else "off"
        elif isinstance(default, tuple):
            default = ",".join(default)
        elif isinstance(default, float):
            default = f"{default:g}"
        cells = [f"`{variable(each)}`", f"`{default}`" if default != "" else "none"]
        cells += [each.metadata["allowed"], each.metadata["help"]]
        rows.append(f"| {' | '.join(cells)} |\n")
    return _HEAD + "".join(rows) + _TAIL


if __name__ == "__main__":
    PAGE.write_text(page())
