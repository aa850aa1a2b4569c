"""Standard error as daemons write it: nobody who reads it too slowly holds them up."""

import io
import os
import pty
import re
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from flowforge import log
from flowforge.cli import messages
from flowforge.cli.messages import Messages

TIMEOUT = 60.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PATIENCE", 0.01)


@pytest.fixture(params=["pipe", "terminal", "socket"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Of what is read, and written with waiting."""
    if request.param == "socket":
        ours, theirs = socket.socketpair()
        reader, writer = ours.detach(), theirs.detach()
    else:
        reader, writer = os.pipe() if request.param == "pipe" else pty.openpty()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def refuse(_: int) -> NoReturn:
    raise PermissionError


def daemon(writer: int) -> Any:
    raw = Messages(writer, "w", closefd=False)
    raw.serve_daemon()
    raw._left = 0.01
    return raw


def drained(reader: int) -> bytes:
    os.set_blocking(reader, False)
    found = b""
    while True:
        try:
            found += os.read(reader, 1 << 16)
        except BlockingIOError:
            return found.replace(b"\r\n", b"\n")


def test_lines_are_let_go_and_counted_once_there_is_room(ends: tuple[int, int]) -> None:
    """Whole: no line is glued to the beginning of another."""
    reader, writer = ends
    raw = daemon(writer)

    def fill() -> None:
        while raw.lost < 20:
            log.of("test").info("x" * (30 if raw.lost else 3000))

    with io.TextIOWrapper(raw, write_through=True) as stream:
        log.configure(stream=stream)
        try:
            thread = threading.Thread(target=fill, daemon=True)
            thread.start()
            thread.join(TIMEOUT)
            assert not thread.is_alive()
            before = drained(reader)
            log.of("test").info("there is room")
            print("half", file=stream)
            told = drained(reader).decode()
        finally:
            log.reset()
    notice = r"\S+ error +log: read too slowly; lines were lost count=\d\d+"
    assert re.search(
        rf"^\S+ info +test: there is room\n{notice}\nhalf\n$",
        told.removeprefix("" if before.endswith(b"\n") else "\n"),
    )


def test_the_notice_does_not_part_a_line(ends: tuple[int, int]) -> None:
    """Such as that of a handler's print, which is written in two."""
    reader, writer = ends
    raw = daemon(writer)
    while not raw.lost:
        raw.write(b"x" * 999 + b"\n")
    drained(reader)
    with io.TextIOWrapper(raw, write_through=True) as stream:
        log.configure(stream=stream, level="error")
        try:
            print("of a handler", file=stream)
        finally:
            log.reset()
    lines = drained(reader).decode().strip("\n").split("\n")
    assert lines[0] == "of a handler"
    assert "lines were lost" in lines[1]


def test_where_no_description_of_its_own_can_be_had_there_is_no_waiting_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as of a pipe that another user has made."""
    monkeypatch.setattr(messages, "_without_waiting", refuse)
    reader, writer = os.pipe()
    raw = daemon(writer)
    assert raw._own is None

    def fill() -> None:
        while raw.lost < 3:
            raw.write(b"x" * 9999 + b"\n")

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    drained(reader)
    raw.write(b"there is room\n")
    assert drained(reader).startswith(b"\nthere is room\n")
    os.close(reader)
    os.close(writer)


def test_a_time_out_that_sockets_have_by_default_is_none_of_the_log_s() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.setdefaulttimeout(3600)
        try:
            raw = daemon(theirs.fileno())
        finally:
            socket.setdefaulttimeout(None)
        assert theirs.getblocking()
        assert os.get_blocking(theirs.fileno())
        while not raw.lost:
            raw.write(b"x" * 4096)
        raw.close()


def test_patience_is_not_begun_anew_by_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a slow reader would set the pace of all threads."""
    monkeypatch.setattr(messages, "PATIENCE_FOR", 3600.0)
    reader, writer = os.pipe()
    raw = daemon(writer)
    while raw._left > 0:
        raw.write(b"x" * 4095 + b"\n")
    waits = []

    class Poll:
        def register(self, *_: int) -> None: ...

        def poll(self, timeout: float) -> list[int]:
            waits.append(timeout)
            return []

    monkeypatch.setattr(select, "poll", Poll)
    for _ in range(100):
        os.read(reader, 4096)
        raw.write(b"x" * 4095 + b"\n")
        raw.write(b"x" * 4095 + b"\n")
    assert len(waits) >= 100
    assert set(waits) == {0.0}
    os.close(reader)
    os.close(writer)


def test_a_file_gets_each_message_in_one_write(tmp_path: Any) -> None:
    """So that two daemons may share it."""
    writes = []
    with (tmp_path / "log").open("ab", buffering=0) as file:
        raw = daemon(file.fileno())
        raw.write(b"x" * 10_000)
        writes.append((tmp_path / "log").stat().st_size)
    assert writes == [10_000]
    assert raw._own is None
