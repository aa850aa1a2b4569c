"""Log lines: one for each event, in one form, also of what others log."""

import contextvars
import io
import logging
import logging.handlers
import sys
from collections.abc import Callable
from typing import TextIO

import pytest

from flowforge import log


def test_no_line_raises_once_the_stream_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the thread that has something to tell."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    log.configure("text", "info")
    try:
        stream.close()
        log.of("probe").info("to nobody")
        try:
            raise ValueError("why")
        except ValueError:
            log.of("probe").exception("to nobody")
    finally:
        log.reset()


def test_an_event_of_several_lines_is_one_line() -> None:
    stream = io.StringIO()
    log.configure("text", "info", stream)
    try:
        log.of("probe").error('no schema\nHINT: run `migrate` für "x"', error="a\nb")
    finally:
        log.reset()
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r'error   probe: "no schema\nHINT: run `migrate` für \"x\"" error="a\nb"')


def fresh_root(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """The root logger as a program finds it. No fixture: pytest adds its own once those are made."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    return root


def test_what_others_log_has_the_same_form(monkeypatch: pytest.MonkeyPatch) -> None:
    root, stream = fresh_root(monkeypatch), io.StringIO()
    log.configure_others("text", "debug", ["root_of_mine.flows:etl"], stream)
    context = contextvars.copy_context()
    context.run(log.about, run=7, task="a b")
    context.run(logging.getLogger("library").warning, "in %s", "it")
    logging.getLogger("root_of_mine.other").debug("outside")
    logging.getLogger("library").info("not shown")
    inside, outside = stream.getvalue().splitlines()
    assert inside.endswith('warning library: in it run=7 task="a b"')
    assert outside.endswith("debug   root_of_mine.other: outside")
    log.configure_others("json", "debug", [], stream)
    assert len(root.handlers) == 1


def test_what_a_logger_writes_by_itself_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_root(monkeypatch)
    stream, own = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", own)
    handler = logging.StreamHandler(sys.stdout)
    handler.setLevel(logging.WARNING)
    written = logging.getLogger("writes_by_itself")
    monkeypatch.setattr(written, "handlers", [handler])
    log.configure_others("text", "info", ["writes_by_itself"], stream)
    written.getChild("part").warning("once")
    written.info("not by it")
    assert own.getvalue() == "once\n"
    assert [line.rpartition(": ")[2] for line in stream.getvalue().splitlines()] == ["not by it"]


def filtered() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(lambda record: "audit" in record.getMessage())
    return handler


class Chosen(logging.StreamHandler[TextIO]):
    """Writes what it likes."""

    def emit(self, _record: logging.LogRecord) -> None:
        pass


@pytest.mark.parametrize(
    "handler",
    [
        logging.NullHandler,  # as libraries have
        filtered,
        lambda: logging.StreamHandler(io.StringIO()),
        lambda: logging.handlers.MemoryHandler(1000),
        Chosen,
    ],
    ids=["null", "filtered", "elsewhere", "memory", "chosen"],
)
def test_what_a_logger_keeps_elsewhere_is_written(
    monkeypatch: pytest.MonkeyPatch, handler: Callable[[], logging.Handler]
) -> None:
    """Or nowhere at all: the log of the worker is where people look."""
    fresh_root(monkeypatch)
    stream = io.StringIO()
    quiet = logging.getLogger("keeps_it_elsewhere")
    monkeypatch.setattr(quiet, "handlers", [handler()])
    log.configure_others("text", "info", ["keeps_it_elsewhere"], stream)
    quiet.error("payment failed")
    assert stream.getvalue().endswith("keeps_it_elsewhere: payment failed\n")


def test_of_others_no_more_is_heard_than_the_level_says(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_root(monkeypatch)
    stream = io.StringIO()
    log.configure_others("text", "error", [], stream)
    logging.getLogger("library").warning("not shown")
    logging.getLogger("library").error("shown")
    assert [line.rpartition(": ")[2] for line in stream.getvalue().splitlines()] == ["shown"]


def test_logging_that_a_module_has_set_up_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    root, handler = fresh_root(monkeypatch), logging.NullHandler()
    root.addHandler(handler)
    log.configure_others("text", "debug", ["another_of_mine"])
    assert (root.handlers, root.level) == ([handler], logging.WARNING)
    assert logging.getLogger("another_of_mine").level == logging.NOTSET


def test_text_lines_show_the_keys_and_quote_what_needs_it() -> None:
    stream = io.StringIO()
    log.configure("text", "info", stream)
    try:
        probe = log.of("probe")
        probe.info("did it", run=1, error='a "b" c', empty="")
        probe.info("nothing for terminals", error="\x1b[2J\x9b\u200e\u200f\u061c\u200b\ufeff")
        probe.debug("not shown")
        try:
            raise ValueError("why")
        except ValueError:
            probe.exception("failed", token=2)
    finally:
        log.reset()
    first, hostile, second, *trace = stream.getvalue().splitlines()
    assert hostile.endswith(r"error=\x1b[2J\x9b\u200e\u200f\u061c\u200b\ufeff")
    assert first.endswith('info    probe: did it run=1 error="a \\"b\\" c" empty=""')
    assert second.endswith("error   probe: failed token=2")
    assert trace[-1] == "ValueError: why"
