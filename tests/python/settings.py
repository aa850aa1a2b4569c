"""Writes docs/settings.md from the settings themselves: ./dev run python -m tests.python.settings"""

import dataclasses
from pathlib import Path

from flowforge.config import Config, variable

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"

_HEAD = """\
# Settings

Each setting is an environment variable; an option of a command, such as `--lease`, goes before it, and
`flowforge COMMAND --help` tells the options that there are. Durations are seconds. An empty variable counts
as not set.

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
