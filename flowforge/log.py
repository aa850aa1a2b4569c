"""Structured logs: one line an event, JSON or text, with stable keys.

Use `log = log.of("scheduler")`, then `log.info("event in words", run=1, task_run=2)`. Keys in use: daemon,
run, task_run, dispatch, attempt, token, queue, count, error, seconds. Never a payload, never a password.
Lines of others, which handlers and libraries log, have `logger` instead of `daemon`, and what they are
about."""

from __future__ import annotations

import datetime
import json
import logging
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, TextIO

_ROOT = "flowforge"

_about: ContextVar[dict[str, Any] | None] = ContextVar("flowforge log", default=None)

# Control characters but newline and tab, and what breaks lines, turns the direction of text unseen, or has
# no width.
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


def visible(text: str) -> str:
    """`text` for people: what a terminal would obey instead of showing it stands there as an escape such as
    \\x1b."""
    return UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


class Log:
    """A logger of one daemon. Every method takes the event in words and its keys, and none raises."""

    def __init__(self, daemon: str) -> None:
        self._daemon = daemon
        self._logger = logging.getLogger(f"{_ROOT}.{daemon}")

    def debug(self, event: str, **keys: Any) -> None:
        self._write(logging.DEBUG, event, keys)

    def info(self, event: str, **keys: Any) -> None:
        self._write(logging.INFO, event, keys)

    def warning(self, event: str, **keys: Any) -> None:
        self._write(logging.WARNING, event, keys)

    def error(self, event: str, **keys: Any) -> None:
        self._write(logging.ERROR, event, keys)

    def exception(self, event: str, **keys: Any) -> None:
        """As `error`, with the traceback of the exception being handled."""
        self._write(logging.ERROR, event, keys, exc_info=True)

    def _write(self, level: int, event: str, keys: dict[str, Any], exc_info: bool = False) -> None:
        # A program's own logging.config may have turned off what it did not know.
        self._logger.disabled = False
        # A closed standard error, or a program's own handler that raises, must not end a thread of a daemon.
        with suppress(Exception):
            if self._logger.isEnabledFor(level):
                self._logger.log(
                    level, "%s", event, extra={"keys": {"daemon": self._daemon, **keys}}, exc_info=exc_info
                )


def of(daemon: str) -> Log:
    """The logger of `daemon`."""
    return Log(daemon)


def configure(form: str = "text", level: str = "info", stream: TextIO | None = None) -> None:
    """Write FlowForge's lines to `stream` (standard error) as `form`, json or text. Calling again replaces
    the first."""
    root = logging.getLogger(_ROOT)
    root.handlers[:] = [_handler(form, stream)]
    root.setLevel(level.upper())
    root.propagate = False


def configure_others(
    form: str = "text", level: str = "info", modules: Iterable[str] = (), stream: TextIO | None = None
) -> None:
    """Write what handlers and libraries log by the standard library's logging in the same form, with the task
    run that it is `about`. Nothing is changed where somebody has set up the root logger, and what a logger
    writes to standard output or error by itself is not written again.

    `level` is for the packages of `modules` (MODULE[:NAME]); of all others, warnings are the least. Libraries
    have much to say, and not all of it is for a log: the URLs that they ask may hold secrets."""
    root = logging.getLogger()
    if root.handlers:
        return
    handler = _handler(form, stream)
    handler.addFilter(_unwritten)
    root.addHandler(handler)
    least = logging.getLevelNamesMapping()[level.upper()]
    if root.level == logging.WARNING:  # which it is by itself
        root.setLevel(max(logging.WARNING, least))
    for module in modules:
        package = logging.getLogger(module.partition(":")[0].partition(".")[0])
        if package.level == logging.NOTSET:
            package.setLevel(least)


def _unwritten(record: logging.LogRecord) -> bool:
    """Whether nothing on the record's way to the root has written it where people see it."""
    logger = logging.getLogger(record.name)
    while logger.parent is not None:
        if any(record.levelno >= handler.level and _is_plain(handler) for handler in logger.handlers):
            return False
        logger = logger.parent
    return True


def _is_plain(handler: logging.Handler) -> bool:
    """Whether it writes to the process's output whatever it is given. Others choose what they keep, or put it
    where nobody looks before it is too late, as by mail: a line too many is better than none."""
    return (
        type(handler) is logging.StreamHandler
        and handler.stream in (sys.stdout, sys.stderr)
        and not handler.filters
    )


def about(**keys: Any) -> None:
    """In the present context, and in those copied from it, what others than FlowForge log has these keys."""
    _about.set(keys)


def _handler(form: str, stream: TextIO | None) -> logging.Handler:
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    return handler


def stream() -> TextIO | None:
    """What lines are written to; nothing before `configure`."""
    for handler in logging.getLogger(_ROOT).handlers:
        if isinstance(handler, logging.StreamHandler):
            found: TextIO | None = handler.stream
            return found
    return None


def find_stream() -> None:
    """Write to what is standard error now where the one so far was closed or detached."""
    for handler in logging.getLogger(_ROOT).handlers:
        if isinstance(handler, logging.StreamHandler) and is_lost(handler.stream):
            handler.stream = getattr(sys, "stderr", None)


def is_lost(stream: TextIO | None) -> bool:
    """Whether it was closed or detached."""
    try:
        return getattr(stream, "closed", False) is True  # and no method of that name
    except ValueError:  # detached
        return True
    except Exception:  # noqa: BLE001 -- a module's own, of whose mistakes others tell
        return False


def reset() -> None:
    """Undo `configure`: the lines go to whatever the program has set up for the standard library's
    logging."""
    root = logging.getLogger(_ROOT)
    root.handlers[:] = []
    root.setLevel(logging.NOTSET)
    root.propagate = True


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
    fields = {"time": moment, "level": record.levelname.lower(), "event": record.getMessage()}
    keys: dict[str, Any] | None = getattr(record, "keys", None)
    if keys is not None and record.name.startswith(f"{_ROOT}."):
        return fields | keys
    return fields | {"logger": record.name} | (_about.get() or {})


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        moment, level, event = fields.pop("time"), fields.pop("level"), fields.pop("event")
        daemon = fields.pop("daemon", None) or fields.pop("logger", record.name)
        if "\n" in event:  # as the text of an exception may have
            event = json.dumps(event, ensure_ascii=False)
        rest = "".join(f" {key}={_shown(value)}" for key, value in fields.items())
        line = f"{moment} {level:<7} {daemon}: {event}{rest}"
        return visible(f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line)


def _shown(value: Any) -> str:
    text = str(value)
    return json.dumps(text) if not text or any(char.isspace() or char in '"=' for char in text) else text
