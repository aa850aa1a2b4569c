"""Requests to stop: none is lost, and what only connects is given up at once."""

import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FrameType
from typing import Any, ClassVar

import pytest

from flowforge import connecting, exits, stopping
from flowforge.config import Config
from flowforge.db import Connection
from flowforge.listen import Listener
from flowforge.runner import Daemon
from flowforge.stopping import Remembered, Stop
from tests.python.daemons import TIMEOUT, Running
from tests.python.workbench import RunningWorker, Witness
from tests.services.database import Database
from tests.services.process import wait_until


def interrupted(
    first: Callable[[], object], code: CodeType, instruction: int, second: Callable[[], object]
) -> bool:
    """Call `first`, and `second` before that instruction of `code`, as a signal or another thread may;
    whether `code` has so many."""
    passed = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal passed
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        passed += event == "opcode"
        if event == "opcode" and passed == instruction:
            sys.settrace(None)
            second()
            return None
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        first()
    finally:
        sys.settrace(before)
    return passed >= instruction


def test_no_request_is_lost_whenever_it_comes() -> None:
    """At any instruction of another one."""
    code = Stop.request.__code__
    instruction, stop, called = 0, Stop(), list[int]()
    stop.on_request(lambda: called.append(1))
    while interrupted(stop.request, code, instruction := instruction + 1, stop.request):
        assert stop.immediate, f"before instruction {instruction}"
        assert len(called) == 2
        stop = Stop()
        called.clear()
        stop.on_request(lambda: called.append(1))
    assert instruction > 5


@pytest.mark.parametrize("signals", [(signal.SIGHUP, signal.SIGTERM), (signal.SIGTERM, signal.SIGHUP)])
def test_the_end_of_a_terminal_and_another_signal_are_one_whenever_it_comes(signals: tuple[int, int]) -> None:
    """At any instruction of the judgement of the first."""
    code = stopping._Requests.counts.__code__
    first, second = signals
    instruction, came = 0, True
    while came:
        which, counted, instruction = stopping._Requests(), list[bool](), instruction + 1
        came = interrupted(
            lambda: counted.append(which.counts(first, False)),  # noqa: B023 -- called at once
            code,
            instruction,
            lambda: counted.append(which.counts(second, False)),  # noqa: B023
        )
        if came:
            assert sorted(counted) == [False, True], f"before instruction {instruction}"
    assert instruction > 20


def test_no_early_signal_is_lost_whenever_it_comes() -> None:
    code = Remembered.__call__.__code__
    instruction, remembered, taken = 0, Remembered(), list[int]()

    def take(number: int) -> None:
        with suppress(KeyboardInterrupt):
            remembered(number, None)

    first, second = partial(take, signal.SIGTERM), partial(take, signal.SIGINT)
    while interrupted(first, code, instruction := instruction + 1, second):
        remembered.take(lambda: taken.append(1))
        assert len(taken) == 2, f"before instruction {instruction}"
        remembered = Remembered()
        taken.clear()
    assert instruction > 5


class Silent:
    """A server that takes connections and says nothing."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._taken: list[socket.socket] = []
        self.dsn = f"host=127.0.0.1 port={self._socket.getsockname()[1]} dbname=d user=u connect_timeout=600"

    def await_connection(self) -> None:
        self._socket.settimeout(60)
        self._taken.append(self._socket.accept()[0])

    def close(self) -> None:
        for each in [self._socket, *self._taken]:
            each.close()


@pytest.fixture
def silent() -> Iterator[Silent]:
    server = Silent()
    yield server
    server.close()


class Probe(Daemon):
    name = "probe"
    role = "flowforge_scheduler"
    functions: ClassVar[tuple[str, ...]] = ("dispatch_ready",)

    def tick(self, conn: Connection) -> int:
        raise AssertionError("there is no connection")


def test_a_daemon_that_connects_stops_at_once(silent: Silent) -> None:
    with Running(Probe(), Config(database_url=silent.dsn)) as running:
        silent.await_connection()
        running.stop.request()
        running.join()
    assert running.code == exits.EXIT_OK
    assert running.health.state == "stopping"


def test_a_worker_that_connects_stops_at_once_and_tells_of_no_outage(silent: Silent) -> None:
    worker = RunningWorker((Witness().workflow,), Config(database_url=silent.dsn))
    silent.await_connection()
    states: list[str] = []
    report = worker.worker.health.report

    def spy(state: str, detail: str = "") -> bool:
        states.append(state)
        return report(state, detail)

    worker.worker.health.report = spy  # type: ignore[method-assign]
    worker.asked.request()
    worker.wait_ended(TIMEOUT)
    assert (worker.code, states) == (exits.EXIT_OK, ["stopping"])


def test_a_start_whose_check_is_not_answered_stops_at_once(db: Database) -> None:
    config = Config(database_url=db.dsn)
    with db.connect() as connection:
        connection.execute(
            """
            create or replace function flowforge.schema_version() returns bigint language sql
                as 'select 9::bigint from pg_sleep(300)'
            """
        )

        def await_check() -> None:
            query = (
                "select from pg_stat_activity where datname = current_database() and wait_event = 'PgSleep'"
            )
            wait_until(lambda: connection.execute(query).rowcount > 0, "the check")

        with Running(Probe(), config) as running:
            await_check()
            running.stop.request()
            running.join()
        worker = RunningWorker((Witness().workflow,), config)
        await_check()
        worker.asked.request()
        worker.wait_ended(TIMEOUT)
    assert (running.code, worker.code) == (exits.EXIT_OK, exits.EXIT_OK)


def test_a_start_whose_check_is_not_answered_tries_again(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "CHECK_LIMIT", 0.5)
    with db.connect() as connection:
        connection.execute(
            """
            create sequence public.checks;
            create or replace function flowforge.schema_version() returns bigint language sql as
                $$ select 9::bigint from pg_sleep(case nextval('public.checks') when 1 then 300 else 0 end) $$
            """
        )
    worker = RunningWorker((Witness().workflow,), Config(database_url=db.dsn))
    wait_until(lambda: worker.worker.health.state == "ok", "the start", TIMEOUT)
    assert worker.stop() == exits.EXIT_OK


def test_closing_a_listener_that_connects_waits_for_nothing(silent: Silent) -> None:
    listener = Listener(silent.dsn, ["probe"], lambda: None, name="probe")
    listener.start()
    silent.await_connection()
    listener.close()
    assert listener.is_alive()  # still connecting, and nobody waited for that
    silent.close()
    wait_until(lambda: not listener.is_alive(), "the end of the attempt")
