"""The clauses of docs/worker-protocol.md, each tried on the worker under test."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

from flowforge.conformance.engine import Engine, Violated

_TEXT = 'tab\t quote\' "double" back\\slash\nnew line $HOME `id` $(id) %s ünï 🙂'


@dataclass(frozen=True)
class Clause:
    """What a worker must do. `check` raises Violated."""

    name: str
    sentence: str
    needs_broker: bool
    check: Callable[[Engine], None]


CLAUSES: list[Clause] = []


def _clause(sentence: str, *, needs_broker: bool = False) -> Callable[[Callable[[Engine], None]], None]:
    def add(check: Callable[[Engine], None]) -> None:
        CLAUSES.append(Clause(check.__name__, sentence, needs_broker, check))

    return add


@_clause("It finishes what it claims, under the token of the claim, with the output as JSON.")
def finishes(engine: Engine) -> None:
    value = {"text": _TEXT, "list": [1, 2.5, None, True], "empty": {}}
    run = engine.begin("echo", value)
    engine.ends_untroubled(run)
    _same(engine.task(run)["output"], {"input": value, "upstream": {}, "item": None})


@_clause("The handler gets the run's input, the upstream outputs and the item that the claim answers.")
def hands_over(engine: Engine) -> None:
    echo = {"handler": "conformance.echo"}
    run = engine.trigger(
        {"name": "items", "handler": "other", "queue": engine.other_queue},
        {"name": "fact", "handler": "other", "queue": engine.other_queue, "after": ["items"]},
        {"name": "each", "map": "items", "after": ["fact"], **echo},
        value="the input",
    )
    items = [_TEXT, {"a": [1]}]
    engine.supply(run, "items", items)
    engine.supply(run, "fact", _TEXT)
    engine.ends(run, "succeeded")
    wanted = [{"input": "the input", "upstream": {"fact": _TEXT}, "item": item} for item in items]
    _same(engine.task(run, "each")["output"], wanted)


@_clause("It reports a failure with its text, of each attempt under that attempt's own token.")
def failure(engine: Engine) -> None:
    text = "asked to fail: 'ünï' $HOME `id` %s"
    run = engine.begin("fail", {"error": text}, retry={"max_attempts": 2, "delay": 0})
    engine.ends(run, "failed")
    found = engine.attempts(run)
    if [(outcome, reported, text in error) for outcome, reported, error in found] != [
        ("failed", True, True)
    ] * 2:
        raise Violated(f"of two failures the database was told {found}")


@_clause("An output that the database refuses is reported as a failure that no retry mends.")
def unstorable_output(engine: Engine) -> None:
    for handler in ("unstorable", "nested"):
        run = engine.begin(handler, retry={"max_attempts": 2, "delay": 0})
        engine.ends(run, "failed")
        if len(found := engine.attempts(run)) != 1 or not found[0][1]:
            raise Violated(f"of {handler} the database was told {found}, not one failure that no retry mends")


@_clause("It renews the lease, of the length that the claim tells, while the handler runs.")
def renews(engine: Engine) -> None:
    run, _ = engine.ticking(100, lease=8)

    def over() -> bool:
        row = engine.task(run)
        if row["reaps"]:
            raise Violated("the lease ran out while the handler ran")
        return bool(row["state"] != "running" and row["fencing_token"])

    engine.wait(over, "a task of ten seconds did not end", engine.patience + 10)
    engine.ends_untroubled(run)


@_clause("It stops the handler of a run that is being cancelled, and says so.")
def cancel(engine: Engine) -> None:
    run, file = engine.ticking(600, lease=8)
    engine.ticks(file)
    engine.rows("select flowforge.cancel_run(%s, 'conformance')", run)
    engine.ends(run, "cancelled")
    if engine.task(run)["reaps"]:
        raise Violated("it held the task run until its lease ran out")
    engine.stops(file)


@_clause("It stops the handler at the time limit that the claim tells.")
def time_limit(engine: Engine) -> None:
    run, file = engine.ticking(600, time_limit=1.5)
    engine.ticks(file)
    engine.stops(file)
    engine.ends(run, "failed")


@_clause("It stops the handler of a task run that somebody else owns by now, and reports nothing of it.")
def lost(engine: Engine) -> None:
    run, file = engine.ticking(600, lease=8)
    engine.ticks(file)
    token = engine.take_over(run)
    engine.stops(file, lambda: engine.renew(run, token))
    if (answer := engine.finish(run, "task", token, "ours")) != "accepted":
        raise Violated(f"the new owner's result was answered {answer}: somebody reported under its token")
    engine.ends(run, "succeeded")
    _same(engine.task(run)["output"], "ours")


@_clause("It gives back what it has no handler for, and goes on.")
def unknown_handler(engine: Engine) -> None:
    run = engine.begin("nobody_knows_this")

    def given_back() -> bool:
        row = engine.task(run)
        if row["state"] in ("failed", "succeeded"):
            raise Violated(f"the task run {row['state']}, {row['error']}")
        return row["unknown_handler_since"] is not None

    engine.wait(given_back, "it was not released as unknown_handler")
    engine.rows("select flowforge.cancel_run(%s, 'conformance')", run)
    engine.is_well()


@_clause("It goes on when its connections to the database are lost.")
def database_lost(engine: Engine) -> None:
    engine.is_well()
    engine.database.cut()
    engine.is_well()


@_clause("A claim whose answer is lost is asked for again under the same claim_id.")
def claim_repeated(engine: Engine) -> None:
    engine.database.loses = engine.has_claimed
    run = engine.begin("echo")
    engine.wait(lambda: engine.database.loses is None, "nothing was claimed")
    engine.ends_untroubled(run)


@_clause("A result that cannot be told, as the database is away, is told until it is answered.")
def finish_repeated(engine: Engine) -> None:
    run, file = engine.ticking(10)
    engine.ticks(file)
    engine.database.down()
    engine.wait(lambda: file.read_bytes().endswith(b"e"), "the handler did not get to its end")
    time.sleep(1)
    engine.database.up()
    engine.ends_untroubled(run)


@_clause("It acknowledges a message when the claim has been answered, and not before.", needs_broker=True)
def acknowledges_after_claim(engine: Engine) -> None:
    kept: list[bool] = []

    def claimed() -> bool:
        if not engine.has_claimed():
            return False
        # The answer waits here, and with it the worker, who is to hold the message.
        time.sleep(0.3)
        with engine.without_broker():
            deadline = time.monotonic() + 3
            while engine.counts()[0] == 0 and time.monotonic() < deadline:
                time.sleep(0.05)
            kept.append(engine.counts()[0] > 0)
        return True

    engine.database.loses = claimed
    run = engine.begin("echo")
    engine.wait(lambda: engine.database.loses is None, "nothing was claimed", engine.patience + 15)
    if not kept[0]:
        raise Violated("the message was gone before the claim had been answered")
    engine.ends(run, "succeeded")
    engine.settles_all()


@_clause("A message that comes twice at the same time is executed once.", needs_broker=True)
def doubled_message(engine: Engine) -> None:
    with engine.without_broker():
        run, file = engine.ticking(10)
        engine.wait(lambda: engine.counts()[0] == 1, "the publisher published nothing")
        row = engine.task(run)
        engine.message(row["task_run_id"], row["dispatch_id"])
    engine.ends_untroubled(run)
    engine.settles_all()
    if (begun := file.read_bytes().count(b"b")) != 1:
        raise Violated(f"the handler was started {begun} times")


@_clause("Messages that are of no use any more are acknowledged, and change nothing.", needs_broker=True)
def stale_message(engine: Engine) -> None:
    retried = engine.begin("fail", {"error": "x"}, retry={"max_attempts": 2, "delay": 0})
    done = engine.begin("echo")
    engine.ends(retried, "failed")
    engine.ends(done, "succeeded")
    ids = engine.rows(
        "select a.task_run_id, a.dispatch_id::text from flowforge.attempt a where a.task_run_id = %s",
        engine.task(retried)["task_run_id"],
    )
    row = engine.task(done)
    ids += [
        (row["task_run_id"], row["dispatch_id"]),
        (row["task_run_id"], str(uuid4())),
        (2**53, str(uuid4())),
    ]
    for task_run, dispatch in ids:
        engine.message(task_run, dispatch)
    engine.settles_all()
    engine.once(done)
    if engine.task(retried)["fencing_token"] != 2:
        raise Violated("an old message was executed")
    engine.is_well()


@_clause("A message that cannot be read neither ends it nor comes back without end.", needs_broker=True)
def unreadable_message(engine: Engine) -> None:
    engine.is_well()  # its queue is there
    for body in (
        b"",
        b"not json",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b'{"task_run_id": "x", "dispatch_id": 1}',
        b"[" * 100_000 + b"]" * 100_000,
    ):
        engine.raw_message(body)
    engine.is_well()
    engine.settles_all()
    engine.is_well()


@_clause("It goes on when its connection to the broker is lost, and so do its handlers.", needs_broker=True)
def broker_lost(engine: Engine) -> None:
    run, file = engine.ticking(20)
    engine.ticks(file)
    with engine.without_broker():
        pass
    engine.ends_untroubled(run)
    engine.is_well()


@_clause("It goes on when its queue is deleted, and declared anew.", needs_broker=True)
def queue_deleted(engine: Engine) -> None:
    engine.is_well()
    engine.settles_all()  # and none of its consumers is of before
    engine.wait(lambda: engine.counts()[1] > 0, "it does not come back to its queue")
    engine.delete_queue()
    engine.is_well()


@_clause("On SIGTERM it gives back what runs, as neither failed nor crashed, and ends.")
def sigterm(engine: Engine) -> None:
    run, file = engine.ticking(600)
    engine.ticks(file)
    worker = engine.worker
    assert worker is not None  # noqa: S101 -- it was started for this clause
    engine.worker = None  # whose end is no violation from now on
    try:
        worker.terminate()
        engine.wait(lambda: worker.poll() is not None, "it did not end")
        engine.stops(file)
    finally:
        engine.worker = worker
        engine.kill_worker()  # what it may have left behind
    row = engine.task(run)
    outcomes = [outcome for outcome, _, _ in engine.attempts(run)]
    if (row["state"], row["attempt"], row["reaps"], outcomes) != ("ready", 1, 0, ["released"]):
        raise Violated(
            f"the task run was left {row['state']}, with attempt {row['attempt']}, reaped {row['reaps']}"
        )


def _same(found: object, wanted: object) -> None:
    if found != wanted:
        raise Violated(f"the output is {found!r}, not {wanted!r}")
