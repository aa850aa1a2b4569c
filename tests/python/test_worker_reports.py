"""What is reported of a handler's end, and that it arrives."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from flowforge.definition import Workflow
from flowforge.errors import Cancelled, NotStorable, PermanentError, TimeLimitExceeded
from flowforge.worker.claim import CLAIM_NEXT, answers
from flowforge.worker.execution import (
    Execution,
    Finish,
    Release,
    StopReason,
    describe,
    is_of_memory,
    judge,
    report_of,
)
from flowforge.worker.executor import _judged
from flowforge.worker.finishing import Finisher
from flowforge.worker.leases import LeaseKeeper
from flowforge.worker.session import Session
from tests.python.slots import an_execution
from tests.python.workbench import Bench
from tests.services.process import wait_until


def with_stop(reason: StopReason | None, **facts: bool) -> Execution:
    execution = an_execution(time_limit=5)
    if reason is not None:
        execution.stop(reason)
    for name, value in facts.items():
        setattr(execution, name, value)
    return execution


@pytest.mark.parametrize(
    ("stop", "raised", "outcome"),
    [
        (None, None, "succeeded"),
        (None, ValueError("x"), "failed"),
        # Nobody asked it to: a cancelled outcome outside a cancelled run would be refused.
        (None, Cancelled("x"), "failed"),
        (StopReason.CANCEL, None, "succeeded"),
        (StopReason.CANCEL, Cancelled("x"), "cancelled"),
        (StopReason.CANCEL, asyncio.CancelledError(), "cancelled"),
        (StopReason.CANCEL, ValueError("x"), "failed"),
        # Whatever it returns: it came too late.
        (StopReason.TIME_LIMIT, None, "failed"),
        (StopReason.TIME_LIMIT, TimeLimitExceeded(), "failed"),
        (StopReason.SHUTDOWN, None, "succeeded"),
    ],
)
def test_outcome_follows_from_the_end_and_what_was_asked(
    stop: StopReason | None, raised: BaseException | None, outcome: str
) -> None:
    report = judge(with_stop(stop), 1, raised)
    assert isinstance(report, Finish)
    assert report.outcome == outcome
    assert report.retryable


def test_nothing_is_sent_for_a_lost_lease_or_a_finish_in_the_handlers_transaction() -> None:
    assert judge(with_stop(StopReason.LOST), 1, None) is None
    assert judge(with_stop(None, finished=True), 1, None) is None
    assert judge(with_stop(None, finished=True), None, ValueError()) is None


def test_an_unknown_commit_is_never_reported_as_a_success() -> None:
    assert judge(with_stop(None, commit_unknown=True), 1, None) == Release("crashed")
    assert judge(with_stop(None, commit_unknown=True), None, ValueError()) == Release("crashed")


def test_what_stops_at_shutdown_is_given_back() -> None:
    assert judge(with_stop(StopReason.SHUTDOWN), None, Cancelled()) == Release("shutdown")


def test_time_limit_is_named() -> None:
    report = judge(with_stop(StopReason.TIME_LIMIT), None, TimeLimitExceeded())
    assert report == Finish("failed", error="time limit of 5 s exceeded")


class Hostile(dict[str, Any]):
    def items(self) -> Any:
        raise OSError("no items")


@pytest.mark.parametrize(
    "value",
    ["a\0b", "\ud800", {"k\0": 1}, float("nan"), float("inf"), b"bytes", {1, 2}, object(), Hostile(a=1)],
    ids=repr,
)
def test_unstorable_result_is_a_permanent_failure(value: object) -> None:
    report = judge(with_stop(None), value, None)
    assert isinstance(report, Finish)
    assert (report.outcome, report.retryable) == ("failed", False)
    assert report.error is not None
    assert report.error.startswith("result not storable: ")


def test_deep_nesting_is_not_storable() -> None:
    value: list[Any] = []
    for _ in range(20_000):
        value = [value]
    report = judge(with_stop(None), value, None)
    assert report == Finish("failed", error="result not storable: nested too deeply", retryable=False)


def test_what_json_holds_is_stored_as_it_is() -> None:
    report = judge(with_stop(None), {"big": 2**70, "text": "\\u0000 ü", "list": [1.5, None, True]}, None)
    assert report == Finish(
        "succeeded", output='{"big":1180591620717411303424,"text":"\\\\u0000 ü","list":[1.5,null,true]}'
    )


def test_permanent_errors_are_not_retryable() -> None:
    for raised in (PermanentError("no use"), NotStorable("not storable: x")):
        report = judge(with_stop(None), None, raised)
        assert isinstance(report, Finish)
        assert not report.retryable


def test_error_text_is_storable_bounded_and_shows_where() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise OSError

    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)
        raise ValueError("a\0b\ud800" + "x" * 100_000)

    with pytest.raises(ValueError) as caught:
        deep(200)
    text = describe(caught.value)
    text.encode()
    assert "\0" not in text
    assert len(text) < 7000
    assert text.startswith("ValueError: a\ufffdb?xxx")
    assert "in deep" in text
    assert describe(Mute()).startswith("Mute: ")


def refuse(*_: Any) -> Any:
    raise RuntimeError("not to be had")


class Odd(type):
    __name__ = property(refuse)


class OfOddKind(Exception, metaclass=Odd):
    """As of a mock."""


class Unprintable(str):
    __slots__ = ()
    __format__ = refuse


class Stubborn(Exception):
    def __str__(self) -> str:
        return Unprintable("x")


class Bare(NotStorable):
    def __init__(self) -> None:
        """Without that of its base."""


STRANGE: dict[str, Callable[[], Exception]] = {
    "OfOddKind": OfOddKind,
    "Stubborn": Stubborn,
    "Bare": Bare,
    "Classless": type("Classless", (Exception,), {"__class__": property(refuse)}),
    "Causeless": type("Causeless", (Exception,), {"__cause__": property(refuse)}),
    "Traceless": type("Traceless", (Exception,), {"__traceback__": property(refuse)}),
    "Partless": lambda: type("Partless", (ExceptionGroup,), {"exceptions": property(refuse)})(
        "x", [OSError()]
    ),
}


@pytest.mark.parametrize("name", STRANGE)
def test_an_exception_that_cannot_be_described_fails_its_attempt_and_no_worker(name: str) -> None:
    """Whatever its class makes of what it is asked."""
    raised = STRANGE[name]()
    report = report_of(with_stop(None), None, raised)
    assert isinstance(report, Finish)
    assert (report.outcome, report.retryable) == ("failed", True)
    assert (report.error or "").startswith(name)
    assert not is_of_memory(raised)


def test_memory_that_does_not_suffice_for_the_error_fails_the_attempt_and_no_worker() -> None:
    def no_memory(_: Exception) -> Any:
        raise MemoryError

    huge = type("Huge", (Exception,), {"__class__": property(no_memory)})
    report = _judged(with_stop(None), True, None, huge())
    assert report == Finish("failed", error="Huge: the error could not be described")


def test_an_error_is_told_also_when_its_source_cannot_be_read() -> None:
    class Loader:
        get_source = refuse

    code = compile("def fail():\n    raise KeyError('x')", "/nowhere/app.zip/gone.py", "exec")
    module: dict[str, Any] = {"__name__": "gone", "__loader__": Loader()}
    exec(code, module)  # noqa: S102 -- what is imported from an archive
    with pytest.raises(KeyError) as caught:
        module["fail"]()
    assert describe(caught.value) == "KeyError: 'x'"


def test_a_release_that_finds_the_row_locked_is_repeated(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """What a shutdown gives back is not counted; left to the reaper it would be."""
    workflow = Workflow("w")
    workflow.task(name="task")(lambda _: None)
    bench.define(workflow)
    run = bench.trigger(workflow)
    bench.wait_state(run, "task", "ready")
    config, counts, broken = bench.config.replace(lock_timeout=0.1), Counter[str](), list[str]()
    claims = Session(config, "claim")
    (answer,) = answers(claims.call(CLAIM_NEXT, [["default"], "me", uuid4(), 60, 1]))
    claims.close()
    assert answer.claim is not None
    execution = Execution(answer.claim, time.monotonic(), time.monotonic())
    keeper = LeaseKeeper(Session(config, "renew"), "me", ["default"], 1, 60, counts, broken.append)
    keeper.hold([execution])
    finisher = Finisher(Session(config, "finish"), keeper, counts, broken.append)
    with bench.db.connect() as other, other.transaction():
        other.execute("select from flowforge.task_run for update")
        finisher.start()
        finisher.put(execution, Release("shutdown"))
        finisher.close()
        wait_until(lambda: caplog.text.count("refused") >= 2, "refusals")
        assert keeper.held == 1
    assert finisher.wait_ended(60)
    assert (counts, broken, keeper.held) == ({"released_shutdown": 1}, [], 0)
    task = bench.task(run, "task")
    assert (task["state"], task["reaps"]) == ("ready", 0)
