"""How results travel: as they are, and a large one by itself."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg._queries import PostgresQuery
from psycopg.adapt import Transformer

from flowforge.config import Config
from flowforge.stopping import Stop
from flowforge.worker.daemon import Worker
from flowforge.worker.execution import Finish, Release, Report, StopReason
from flowforge.worker.finishing import Finisher, _Ended
from flowforge.worker.leases import LeaseKeeper
from flowforge.worker.session import Session, Unanswered
from tests.python.slots import an_execution
from tests.services.process import wait_until


class Wire(Session):
    """Answers every result and keeps how many bytes of parameters each statement had."""

    def __init__(self, answer: str = "accepted") -> None:
        super().__init__(Config(), "finish")
        self.answer = answer
        self.rows: list[int] = []
        self.bytes: list[int] = []

    def call(self, query: str, params: Any, **_: Any) -> list[tuple[Any, ...]]:
        sent = PostgresQuery(Transformer())
        sent.convert(query, params)
        self.rows.append(len(params[0]))
        self.bytes.append(sum(len(each) for each in sent.params or () if each is not None))
        return [(self.answer,)] * len(params[0])


class Sending:
    """A finisher and what becomes of reports, each of a task run of its own, numbered from 0."""

    def __init__(self, wire: Session) -> None:
        self.counts, self._broken, self._put = Counter[str](), list[str](), 0
        session = Session(Config(), "renew")
        self.keeper = LeaseKeeper(session, "me", ["default"], 1, 60, self.counts, self._broken.append)
        self.finisher = Finisher(wire, self.keeper, self.counts, self._broken.append)

    def put(self, *reports: Report, stop: StopReason | None = None) -> None:
        for report in reports:
            execution = an_execution()
            execution.claim = execution.claim._replace(task_run_id=self._put)
            self._put += 1
            self.keeper.hold([execution])
            if stop is not None:
                execution.stop(stop)
            self.finisher.put(execution, report)

    def end(self) -> Counter[str]:
        self.finisher.close()
        assert self.finisher.wait_ended(60)
        assert not self._broken
        return self.counts


def sent_through(wire: Session, *reports: Report, stop: StopReason | None = None) -> Counter[str]:
    """What became of these reports, all there before the first was sent, of handlers told to `stop`."""
    sending = Sending(wire)
    sending.put(*reports, stop=stop)
    sending.finisher.start()
    return sending.end()


def sent(*outputs: str) -> Wire:
    """What went out of these results."""
    wire = Wire()
    reports = (Finish("succeeded", output=output) for output in outputs)
    assert sent_through(wire, *reports) == {"finished_succeeded": len(outputs)}
    return wire


def test_a_result_is_sent_as_it_is() -> None:
    """Escaped, it would take Python seconds in which no lease is renewed: it is full of what would be."""
    output = '"' + '\\u0001\\"' * 500_000 + '"'
    wire = sent(output)
    assert wire.bytes[0] < len(output) + 1000


def test_other_results_do_not_share_the_statement_of_a_large_one() -> None:
    large = '"' + "x" * 9_000_000 + '"'
    wire = sent("1", "2", large, "3", "4")
    assert wire.rows == [2, 1, 2]


class Watching(Wire):
    """Keeps how many leases were held while each statement was under way."""

    keeper: LeaseKeeper

    def __init__(self) -> None:
        super().__init__()
        self.held = list[int]()

    def call(self, query: str, params: Any, **options: Any) -> list[tuple[Any, ...]]:
        self.held.append(self.keeper.held)
        return super().call(query, params, **options)


def test_the_lease_is_kept_until_the_finish_is_answered() -> None:
    """Given up earlier, it runs out while the database is away, and the handler runs again."""
    wire = Watching()
    sending = Sending(wire)
    wire.keeper = sending.keeper
    sending.put(Finish("succeeded"), Finish("failed"))
    sending.finisher.start()
    sending.end()
    assert (wire.held, sending.keeper.held) == ([2], 0)


class Refusing(Wire):
    """Refuses so many statements, whatever is in them."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.outcomes = times, list[str]()

    def call(self, query: str, params: Any, **_: Any) -> list[tuple[Any, ...]]:
        self.outcomes.append(params[2][0])
        if len(self.outcomes) <= self.times:
            raise psycopg.errors.ProgramLimitExceeded("too much of something")
        return super().call(query, params)

    def pause(self) -> float:
        return 0.0


@pytest.mark.parametrize("times", [2, 4])
@pytest.mark.parametrize("report", [Finish("succeeded", output="1"), Finish("failed", error="x")])
def test_what_is_refused_whatever_is_in_it_is_not_the_value_s_fault(report: Finish, times: int) -> None:
    """A success must not become a failure because the database is out of something."""
    wire = Refusing(times)
    accepted = sent_through(wire, report)
    assert accepted == {f"finished_{report.outcome}": 1}
    assert wire.outcomes[-1] == report.outcome


def test_a_time_out_that_the_reaper_told_first_is_no_lost_lease(caplog: pytest.LogCaptureFixture) -> None:
    late = Finish("failed", error="time limit of 1 s exceeded")
    counts = sent_through(Wire("fenced"), late, stop=StopReason.TIME_LIMIT)
    assert (counts, caplog.text) == ({"timed_out_before": 1}, "")
    counts = sent_through(Wire("fenced"), late, stop=StopReason.CANCEL)
    assert counts == {"fenced": 1}
    assert "result refused: the lease was lost before" in caplog.text


class Locked(Wire):
    """The rows of these task runs are locked by somebody; `tries` are the statements that met one."""

    def __init__(self, locked: set[int]) -> None:
        super().__init__()
        self.locked, self.tries = locked, list[tuple[list[int], Any]]()
        self.sent: list[int] = []
        self.on_try: Callable[[], None] = lambda: None

    def call(self, query: str, params: Any, **options: Any) -> list[tuple[Any, ...]]:
        if self.locked & set(params[0]):
            self.tries.append((params[0], options["lock_timeout"]))
            self.on_try()
            raise psycopg.errors.LockNotAvailable("a lock")
        self.sent += params[0]
        return super().call(query, params)

    def pause(self) -> float:
        return 0.0


def test_locked_task_runs_hold_up_no_results_of_others() -> None:
    """Each is tried for a moment only, and few of them between two looks for what has come since."""
    wire = Locked(set(range(20)))
    sending = Sending(wire)
    tries: list[int] = []

    def put_another() -> None:
        if len(wire.tries) == 4:  # together, and some for themselves
            sending.put(Finish("succeeded"))
        if 20 in wire.sent:
            tries.append(len(wire.tries))
            wire.locked = set()

    wire.on_try = put_another
    sending.put(*[Finish("succeeded")] * 20)
    sending.finisher.start()
    wait_until(lambda: bool(tries), "the other's result")
    assert sending.end() == {"finished_succeeded": 21}
    assert wire.tries[0] == ([*range(20)], None)
    assert {timeout for _, timeout in wire.tries[1:]} == {0.2}
    assert tries[0] <= 4 + 6


class Slow(Wire):
    """A result of over a hundred characters takes 200 seconds."""

    def call(self, query: str, params: Any, *, limit: float = 60.0, **options: Any) -> list[tuple[Any, ...]]:
        if any(len(output) > 100 for output in params[3]) and limit < 200:
            raise Unanswered("no answer", sent=True, too_much=True)
        return super().call(query, params, **options)

    def pause(self) -> float:
        return 0.0


def test_a_result_that_takes_long_on_the_wire_is_given_the_time_and_others_go_first() -> None:
    """Else it would be sent in vain for ever, and nothing else."""
    wire = Slow()
    reports = [Finish("succeeded", output=output) for output in ("1", '"' + "x" * 200 + '"', "3")]
    assert sent_through(wire, *reports) == {"finished_succeeded": 3}
    assert wire.rows == [1, 1, 1]
    assert wire.bytes[-1] == max(wire.bytes)


@pytest.mark.parametrize("closing", [False, True])
def test_of_results_that_take_long_one_goes_at_a_time(closing: bool) -> None:
    """Each may take minutes in which no other result arrives. At the stop, all that do not go first."""
    finisher = Sending(Wire()).finisher
    first, second, small = ended(120.0), ended(120.0), ended(60.0)
    finisher._put_off([first, second, small])
    finisher._closing = closing
    turns = [finisher._next() for _ in range(2 + closing)]
    assert turns == ([[small], [first], [second]] if closing else [[small, first], [second]])


def test_at_the_stop_a_result_that_takes_long_waits_for_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for those that are to be sent a moment later, and for what does not fit into the next statement.
    Sent before them it would use up the grace time, and handlers that have succeeded would run again."""
    finisher, looks = Sending(Wire()).finisher, list[int]()
    take_due = finisher._take_due

    def counted(**options: Any) -> Any:
        looks.append(1)
        return take_due(**options)

    monkeypatch.setattr(finisher, "_take_due", counted)
    long, small = ended(120.0), ended(60.0)
    finisher._put_off([long])
    finisher.close()
    for _ in range(3):
        finisher.put(an_execution(), Finish("succeeded", output='"' + "x" * 5_000_000 + '"'))
    for _ in range(3):
        [large] = finisher._next()
        assert large is not long
    finisher._put_off([small], 0.2)
    looks.clear()
    assert finisher._next() == [small]
    assert len(looks) < 20, "it is waited for, and not looked for all the time"
    assert finisher._next() == [long]
    finisher._put_off([long], 0.2)
    looks.clear()
    assert finisher._next() == [long]
    assert len(looks) < 20


def test_until_the_stop_a_result_that_takes_long_waits_for_no_other() -> None:
    """One whose moment comes in an hour would keep it, and its handler's lease, waiting for nothing."""
    finisher = Sending(Wire()).finisher
    long, small = ended(120.0), ended(60.0)
    finisher._put_off([long])
    finisher._put_off([small], 3600)
    assert finisher._patience([]) == 0
    assert finisher._next() == [long]


def ended(limit: float) -> _Ended:
    """A result whose statement may take so many seconds."""
    return _Ended(an_execution(), Finish("succeeded"), True, limit)


class Full(Session):
    """Refuses all, so many times, as by a full disk or for want of a privilege; keeps whether health was told
    before each call."""

    def __init__(self, refusal: type[psycopg.Error], times: int = 4) -> None:
        super().__init__(Config(), "full")
        self.refusal, self.times, self.told = refusal, times, list[bool]()

    def call(self, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
        self.told.append(self.refused)
        if len(self.told) <= self.times:
            raise self.refusal("no")
        return [("accepted",)]

    def pause(self) -> float:
        return 0.0


@pytest.mark.parametrize("report", [Finish("succeeded"), Release("shutdown")])
def test_health_is_told_of_reports_that_are_refused_again_and_again(report: Report) -> None:
    """Nothing else would tell that no result arrives."""
    wire = Full(psycopg.errors.DiskFull)
    assert sent_through(wire, report).total() == 1
    assert wire.told == [False, False, False, True, True]


def test_health_is_told_no_more_of_a_report_that_is_forgotten() -> None:
    """Its lease ran out meanwhile: with the next report, hours later perhaps, nothing would be wrong."""
    wire = Full(psycopg.errors.InsufficientPrivilege)
    sending = Sending(wire)
    sending.finisher.start()
    sending.put(Release("unstarted"))
    wait_until(lambda: sending.keeper.held == 0 and wire.healthy, "health")
    assert wire._refused
    sending.end()


@pytest.mark.parametrize(
    ("refusal", "turns"), [(psycopg.errors.DiskFull, 3), (psycopg.errors.InsufficientPrivilege, 1)]
)
def test_health_is_told_of_refused_renewals(refusal: type[psycopg.Error], turns: int) -> None:
    """Of one among others too, and whatever is answered between two of them."""
    bad, good = an_execution(), an_execution()
    bad.claim = bad.claim._replace(task_run_id=7)

    class Refusing(Session):
        refuses = True

        def call(self, *args: Any, **_: Any) -> list[tuple[Any, ...]]:
            [ids, *_rest] = args[1]
            if self.refuses and 7 in ids:
                raise refusal("no")
            return [("held", 60.0)] * len(ids)

    def told() -> bool:
        return keeper.refused

    wire = Refusing(Config(), "renew")
    keeper = LeaseKeeper(wire, "me", ["default"], 1, 60, Counter(), list[str]().append)
    keeper.hold([bad, good])
    for turn in range(1, turns + 2):
        keeper._renew(turn * 1e9)
        assert told() is (turn >= turns)
    bad.renewed_at = 9e9
    keeper._renew(9e9)
    assert told(), "though only others were renewed"
    keeper.forget([bad])
    assert not told(), "nobody holds it any more"
    keeper.hold([bad])
    wire.refuses = False
    keeper._renew(10e9)
    assert not told()


def test_health_says_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renewals of some leases too, while others are answered."""

    class Once(Stop):
        def wait(self, seconds: float | None = None) -> bool:
            looks.append(seconds)
            return len(looks) > 1

    looks = list[float | None]()
    worker = Worker({}, Config(), Once())
    monkeypatch.setattr(LeaseKeeper, "refused", True)
    worker._watch()
    assert worker.health.state == "error"
    assert worker.health._state["detail"] == "the database refuses to renew; see the log"
    worker._finisher._session.stuck(psycopg.errors.InsufficientPrivilege("no"))
    looks.clear()
    worker._watch()
    assert worker.health._state["detail"] == "the database refuses to finish, renew; see the log"
