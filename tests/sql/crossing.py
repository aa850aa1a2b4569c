"""A place where two functions can meet that have no scenario of their own.

It is a run that has task runs in every state, so that whatever a function looks for, it finds there, and so
does the other one. Nothing is said of any pair in particular. In whatever order their statements come: what
the two answer they answer too when one of them waits for the end of the other, and so does the run end.
"""

import itertools
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.sql.explore import Body
from tests.sql.programs import assert_and_finish, batch_claim, batch_finish, refusable, release, renew
from tests.sql.stepping import Laboratory, Program, Run, call, table


@dataclass
class Place:
    """Of the run's tasks is a ready, published long ago, and was to be started by now; b, p and q are ready
    and have yet to be published; c runs, and its lease is over; d has failed, unsettled, and e waits for it;
    u has ended, m is to be expanded and x to be dispatched. The claimed ones have left their orders."""

    lab: Laboratory
    run: Run
    rows: dict[str, Any]
    owner: Any

    @classmethod
    def make(cls, lab: Laboratory, *, cancelled: bool) -> "Place":
        run = lab.start("crossing")
        rows = {row.name: row for row in run.rows()}
        lab.finish(lab.claim(rows["u"]), "succeeded", [1, 2])
        lab.value("select flowforge.settle_finished()")
        owner = lab.claim(rows["c"])
        lab.finish(lab.claim(rows["d"]), "failed")
        lab.value(
            "select flowforge.mark_published(array(select outbox_id from flowforge.outbox"
            " where task_run_id = %s))",
            rows["a"].task_run_id,
        )
        lab.expire("35 s")
        if cancelled:
            lab.value(
                "update flowforge.run set cancel_requested_at = flowforge._clock()"
                " where run_id = %s returning true",
                run.id,
            )
        return cls(lab, run, rows, owner)

    def ends(self) -> Any:
        """What has become of the run. Whether a fails, or starts at the last moment, is nobody's promise, nor
        whether a map is expanded before it is cancelled."""
        rows = sorted(
            (row.name, row.state)
            for row in self.run.rows()
            if row.name != "a" and (row.map_index is None or row.state != "cancelled")
        )
        return self.run.state, tuple(rows)


def _publish(place: Place) -> Program:
    """A publisher's transaction: one order is confirmed, another refused, and one can never be published."""
    orders = yield from table("fetch_outbox", 100)
    ids = {each.task_run_id: each.outbox_id for each in orders}
    if order := ids.get(place.rows["b"].task_run_id):
        yield from call("mark_published", [order])
    if order := ids.get(place.rows["p"].task_run_id):
        yield from call("mark_refused", [order], ["no queue"])
    if order := ids.get(place.rows["q"].task_run_id):
        yield from call("mark_unpublishable", order, "too large")
    return len(orders)


def _claim_next(place: Place) -> Program:
    rows = yield from table("claim_next", ["default"], "w2", uuid.uuid4(), "30 s", 10)
    return sorted(each.task for each in rows)


# By name: what each calls, and its program.
ACTORS: dict[str, tuple[str, Callable[[Place], Program]]] = {
    "announce": ("announce_worker", lambda _: call("announce_worker", "w2", ["default"], 1)),
    "cancel": ("cancel_run", lambda at: call("cancel_run", at.run.id)),
    "claim": ("claim_task_runs", lambda at: batch_claim([at.rows[each] for each in "cba"], "w2")),
    "claim_next": ("claim_next", _claim_next),
    "configure": ("configure_queue", lambda _: call("configure_queue", "default", 4, "10 s")),
    "declare": ("declare_scheduler", lambda _: call("declare_scheduler", True)),
    "dispatch": ("dispatch_ready", lambda _: call("dispatch_ready")),
    "expand": ("expand_map", lambda _: call("expand_map")),
    "finish": ("finish_task_runs", lambda at: batch_finish([at.owner])),
    "handler": (
        "assert_lease finish_task_run",
        lambda at: refusable(assert_and_finish(at.owner), "WF006"),
    ),
    "leftovers": ("cancel_leftovers", lambda _: call("cancel_leftovers")),
    "lost": ("redispatch_lost", lambda _: call("redispatch_lost")),
    "pause": ("pause_queue", lambda _: call("pause_queue", "default")),
    "publish": ("fetch_outbox mark_published mark_refused mark_unpublishable", _publish),
    "reap": ("reap_expired_leases", lambda _: call("reap_expired_leases")),
    "redispatch": ("redispatch", lambda _: call("redispatch", "default")),
    "release": ("release_task_run", lambda at: release(at.owner, "shutdown")),
    "renew": ("renew_leases", lambda at: renew(at.owner)),
    "resume": ("resume_queue", lambda _: call("resume_queue", "default")),
    "retry": ("retry_run", lambda at: refusable(call("retry_run", at.run.id), "WF007")),
    "settle": ("settle_finished", lambda _: call("settle_finished")),
    "sweep": ("sweep_outbox", lambda _: call("sweep_outbox")),
    "undeliverable": ("fail_undeliverable", lambda _: call("fail_undeliverable")),
}


def _agree(answer: Any, serial: Any) -> bool:
    """Whether an answer is one that a session gives too which meets nobody; but what it has not taken, since
    somebody had it locked, it may take the next time."""
    if type(serial) is int or (isinstance(answer, list) and len(answer) != len(serial)):
        return True
    return answer == serial or (answer, serial) == ("busy", "held")


class Crossing:
    """The scenario of two actors."""

    def __init__(self, first: str, second: str) -> None:
        self.__name__ = f"{first}, {second}"
        self._actors = first, second
        self._serial: list[list[Any]] = []
        self._ends: set[Any] = set()

    @property
    def meeting(self) -> tuple[frozenset[str], ...]:
        # Of a cancelled run nothing is fetched, so that there is nothing to mark.
        nothing = {"mark_published", "mark_refused", "mark_unpublishable"} if self._cancelled else set()
        return tuple(frozenset(ACTORS[each][0].split()) - nothing for each in self._actors)

    @property
    def _cancelled(self) -> bool:
        return "leftovers" in self._actors

    def __call__(self, lab: Laboratory) -> Body:
        place = Place.make(lab, cancelled=self._cancelled)
        if "resume" in self._actors:
            lab.value("select flowforge.pause_queue('default')")
        answers = yield [ACTORS[each][1](place) for each in self._actors]
        # A queue that has been left paused would hold the run up.
        lab.value("select flowforge.resume_queue('default')")
        # The two orders in which one waits for the other's end are run first.
        if not lab.met:
            self._serial.append(answers)
        assert any(all(map(_agree, answers, each)) for each in self._serial), (
            f"{answers}: not of {self._serial}"
        )
        yield None
        ends = place.ends()
        if not lab.met:
            self._ends.add(ends)
        assert ends in self._ends, f"{ends}, and not one of {self._ends}"


def crossings() -> list[Crossing]:
    return [Crossing(*pair) for pair in itertools.combinations_with_replacement(sorted(ACTORS), 2)]
