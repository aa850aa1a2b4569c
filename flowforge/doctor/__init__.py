"""What `flowforge doctor` looks at: a set-up from its settings to its broker. Nothing is changed.

Each check answers one finding; one that cannot be made says why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flowforge.config import Config, key, unknown_variables, without_password
from flowforge.doctor import database, delivery, work
from flowforge.doctor.database import GROUPS
from flowforge.doctor.setup import Setup, Status, some

__all__ = ["CHECKS", "GROUPS", "Finding", "Status", "examine", "settings"]

CHECKS = (*database.CHECKS, *work.CHECKS, *delivery.CHECKS)


@dataclass(frozen=True)
class Finding:
    """The outcome of one check: what was seen, or why nothing was, and what to do about it unless it is
    ok."""

    check: str
    status: Status
    detail: str
    remedy: str = ""


def settings(config: Config, given: dict[str, tuple[Any, str]], source: str) -> Finding:
    """What is set, and where. `source` says where the database was given."""
    shown = [f"database_url={without_password(config.database_url)} ({source})"]
    fields = {each.name: each for each in dataclasses.fields(Config)}
    for name, (value, where) in given.items():
        if name != "database_url":
            items = map(_shown, value if isinstance(value, tuple) else (value,))
            text = ",".join(map(without_password, items) if fields[name].metadata.get("secret") else items)
            shown.append(f"{key(fields[name])}={text} ({where})")
    detail = "; ".join([*shown, "all else by default"])
    if strange := unknown_variables():
        remedy = "correct the name, or unset it; `flowforge config` lists what there is"
        return Finding(
            "settings", "warning", f"{some(list(strange))}: there is no such setting; {detail}", remedy
        )
    return Finding("settings", "ok", detail)


def _shown(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def examine(
    config: Config,
    source: str,
    role: str | None = None,
    command: Callable[[str], str] = "flowforge {}".format,
) -> Iterator[Finding]:
    """Make all checks but that of the settings, one after the other.

    `source` says where the database was given, `role` (one of GROUPS) what the login is to be, and `command`
    makes of a command one that works where the user is."""
    setup = Setup(config, source, role, command)
    try:
        for name, needs, check in CHECKS:
            verdict = setup.made(needs, check)
            yield Finding(name, verdict.status, verdict.detail, verdict.remedy)
    finally:
        setup.close()
