"""A moment in which the system gives no thread loses nothing; at the start it is the program's end."""

import multiprocessing
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from flowforge import connecting, cutoff, exits, stopping, up
from flowforge.cli.telling import tell
from flowforge.config import Config
from flowforge.errors import DatabaseUnavailable
from flowforge.health import Health
from flowforge.publisher import Publisher
from flowforge.stopping import Stop
from flowforge.threads import NoThread
from flowforge.worker import child
from flowforge.worker.daemon import Worker
from flowforge.worker.execution import Finish, Release
from tests.python.slots import Slots
from tests.python.workbench import Gate
from tests.services.process import wait_until

LACK = "no thread can be started: can't start new thread"


def refuse(patch: pytest.MonkeyPatch, name: str = "flowforge") -> None:
    """There are no threads whose names begin so."""
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", refusing)


@pytest.mark.parametrize("name", ["flowforge-time-limits", "flowforge-handlers"])
def test_without_the_worker_s_own_threads_nothing_is_claimed(
    slots: Callable[..., Slots], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Health says so."""

    async def coroutine(_ctx: Any) -> str:
        return "done"

    bench = slots(coroutine=coroutine, thread=lambda _: "done")
    with monkeypatch.context() as patch:
        refuse(patch, name)
        assert bench.executor.reserve(1, timeout=0) == 0
        assert LACK in bench.executor.blocked
    for handler in ("thread", "coroutine"):
        assert bench.run(handler) == Finish("succeeded", output='"done"')
    assert (bench.executor.blocked, bench.broken) == ("", [])


def test_what_there_is_no_thread_for_is_given_back(
    slots: Callable[..., Slots], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more is claimed than there are threads for. Health says so."""
    gate = Gate()
    bench = slots(3, thread=lambda _: gate.wait())
    first = bench.start("thread")
    gate.await_arrivals()
    with monkeypatch.context() as patch:
        refuse(patch)
        assert bench.run("thread") == Release("unstarted")
        assert bench.executor.reserve(3, timeout=0) == 0
        gate.open()
        assert bench.report(first) == Finish("succeeded")
        wait_until(lambda: bench.free() == 1, "the thread that there is")
        assert bench.executor.blocked == LACK
        assert bench.run("thread") == Finish("succeeded")
        wait_until(lambda: bench.free() == 1, "the thread that there is")
    wait_until(lambda: bench.free() == 3, "all slots")
    assert (bench.executor.blocked, bench.executor.slots["lost"], bench.broken) == ("", 0, [])


def test_to_connect_without_a_thread_may_do_later(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch)
    with pytest.raises(DatabaseUnavailable, match=LACK):
        connecting.connect(Config(), "worker", Stop(), (), "flowforge_worker")


def test_a_guard_for_which_there_is_no_thread_is_as_one_without_a_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The daemons outlast that. The next one has its thread."""
    watchdog = cutoff._Watchdog()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with monkeypatch.context() as patch:
            refuse(patch)
            with pytest.raises(OSError, match=LACK):
                watchdog.add(1, ours.fileno(), 0)
        watchdog.add(1, ours.fileno(), 0)
        theirs.settimeout(60)
        assert theirs.recv(1) == b"", "the guard has run out"
        watchdog.remove(1)


def names() -> set[str]:
    return {each.name for each in threading.enumerate() if each.name.startswith("flowforge-")}


@pytest.mark.parametrize("name", ["finish", "renew", "claim"])
def test_a_worker_that_never_had_its_threads_ends_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """And leaves none of the others."""
    before = names()
    worker = Worker({"h": lambda _: None}, Config(), Stop())
    monkeypatch.setattr(worker, "_check", lambda: None)
    with monkeypatch.context() as patch:
        refuse(patch, f"flowforge-{name}")
        assert worker.run() == exits.EXIT_FAILED
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [LACK]
    wait_until(lambda: names() <= before, "the end of the others")


def test_a_publisher_that_never_had_its_thread_ends_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch)
    channel = threading.Thread(name="flowforge-broker")
    monkeypatch.setattr("flowforge.publisher.PublishChannel", lambda *_: channel)
    with pytest.raises(NoThread, match=LACK):
        Publisher(Config(amqp_urls=("amqp://localhost",)))


def test_up_ends_the_daemons_that_have_threads_when_one_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop()
    parts = [up._Part(name, lambda: int(not stop.wait()), Health(name), 1.0) for name in ("one", "two")]
    refuse(monkeypatch, "flowforge-two")
    with pytest.raises(NoThread, match=LACK):
        up._run_parts(parts, Config(), None, stop, lambda: None)
    assert (stop.requested, parts[0].thread.is_alive()) == (True, False)


def test_what_tells_goes_on_without_a_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(monkeypatch)
    told: list[str] = []
    tell(told.append, "ready")
    assert told == []
    assert vars(caplog.records[-1])["keys"]["error"] == LACK


def test_a_program_comes_to_its_end_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody waits at its end for one that was not started."""
    at_end: list[Any] = []
    monkeypatch.setattr(stopping, "_at_end", at_end)
    monkeypatch.setattr("atexit.register", at_end.append)
    monkeypatch.setattr(stopping, "_flush_and_end", at_end.append)
    monkeypatch.setattr("os._exit", at_end.append)
    refuse(monkeypatch, "")
    stopping.end_soon(7)
    [write] = at_end
    write()
    assert at_end == [write]
    stopping.end_now(7)
    assert at_end == [write, 7]


@pytest.mark.parametrize("lacking", [True, False])
def test_a_process_for_handlers_without_a_thread_may_be_started_later(
    monkeypatch: pytest.MonkeyPatch, lacking: bool
) -> None:
    """What else goes wrong in it is not taken for that."""

    def fails(_: int) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr("flowforge.log.configure", lambda *_: None)
    monkeypatch.setattr("flowforge.log.configure_others", lambda *_: None)
    monkeypatch.setattr(child, "limit_memory", fails)
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)
    if lacking:
        refuse(monkeypatch)
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        ours.send(child.Setup(Config(), ("tests.python.isolated_flows",), frozenset({"pid.task"})))
        with pytest.raises(SystemExit if lacking else RuntimeError) as ended:
            child.Child(theirs).run()
    assert str(ended.value) == (str(child.EXIT_FOR_NOW) if lacking else "a fault")
