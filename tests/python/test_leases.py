"""Leases that are kept, lost and outlived; cancel and time limits."""

import asyncio
import io
import logging
import sys
import threading
import time

import pytest

from flowforge.definition import Retry, Workflow
from flowforge.errors import TimeLimitExceeded
from flowforge.worker import daemon
from flowforge.worker.context import Context
from tests.python.workbench import Bench, Gate, Witness
from tests.services.process import wait_until


def wait_renewals(bench: Bench, run: int, task: str) -> None:
    """Until the lease was renewed four times, which takes longer than it lasts."""
    seen: set[str | None] = set()

    def moved() -> bool:
        seen.add(bench.task(run, task)["lease_expires_at"])
        return len(seen - {None}) > 4

    wait_until(moved, "renewals")


def test_a_task_longer_than_its_lease_runs_once(bench: Bench) -> None:
    """The lease is renewed, at a third of its own length and not of the worker's, while the reaper looks
    on."""
    witness = Witness(lease=3).closed()
    bench.define(witness.workflow)
    run = bench.trigger(witness.workflow)
    with bench.worker(witness.workflow, lease=600):
        witness.gate.await_arrivals(1)
        wait_renewals(bench, run, "task")
        witness.gate.open()
        assert bench.wait_run(run) == ["succeeded"]
    assert witness.executions == [(bench.task(run, "task")["task_run_id"], 1)]
    assert bench.all("select * from flowforge.attempt") == []


def test_handlers_are_asked_for_the_interpreter_early_while_a_worker_runs(bench: Bench) -> None:
    """Beside one that computes and makes a call of the system every few milliseconds, Python's own 5 ms would
    leave leases without renewal for seconds."""
    before = sys.getswitchinterval()
    workflow = Workflow("asked")
    workflow.task(name="interval")(lambda _: sys.getswitchinterval())
    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow):
        assert bench.wait_run(run) == ["succeeded"]
    assert bench.task(run, "interval")["output"] == pytest.approx(daemon.SWITCH_INTERVAL)
    assert sys.getswitchinterval() == before


def test_a_short_lease_is_renewed_in_time_among_long_ones(bench: Bench) -> None:
    long, short = Witness("long", lease=600).closed(), Witness("short", lease=3).closed()
    for each in (long, short):
        bench.define(each.workflow)
    runs = [bench.trigger(each.workflow) for each in (long, short)]
    with bench.worker(long.workflow, short.workflow):
        long.gate.await_arrivals(1)
        short.gate.await_arrivals(1)
        wait_renewals(bench, runs[1], "task")
        for each in (long, short):
            each.gate.open()
        assert bench.wait_run(*runs) == ["succeeded", "succeeded"]
    assert len(short.executions) == 1


def test_a_lost_lease_stops_the_handler_and_its_result_is_not_sent(bench: Bench) -> None:
    workflow = Workflow("w")
    gate, stopped = Gate(), []

    @workflow.task(lease=3)
    def cooperative(ctx: Context) -> str:
        if ctx.fencing_token == 1:
            try:
                gate.wait(until=ctx.check_cancelled)
            except BaseException as exc:
                stopped.append(str(exc))
                raise
        return f"token {ctx.fencing_token}"

    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow) as worker:
        gate.await_arrivals()
        task = bench.task(run, "cooperative")
        bench.execute("select flowforge.release_task_run(%s, 1, 'crashed')", task["task_run_id"])
        assert bench.wait_run(run) == ["succeeded"]
        wait_until(lambda: worker.counts["not_sent"] == 1, "the end of the first execution")
    assert bench.task(run, "cooperative")["output"] == "token 2"
    assert len(stopped) == 1
    assert worker.counts["lost"] == 1
    assert worker.counts["fenced"] == 0


def test_a_result_that_comes_too_late_changes_nothing(bench: Bench) -> None:
    """The handler does not listen, and no renewal has told yet: the finish is fenced."""
    witness = Witness().closed()
    witness.result = lambda ctx: f"token {ctx.fencing_token}"
    bench.define(witness.workflow)
    run = bench.trigger(witness.workflow)
    with bench.worker(witness.workflow, lease=600) as worker:
        witness.gate.await_arrivals(1)
        task = bench.task(run, "task")["task_run_id"]
        bench.execute("select flowforge.release_task_run(%s, 1, 'shutdown')", task)
        witness.gate.await_arrivals(2)
        witness.gate.open()
        assert bench.wait_run(run) == ["succeeded"]
        wait_until(lambda: worker.counts["fenced"] == 1, "the refusal")
    assert bench.task(run, "task")["output"] == "token 2"


def test_cancel_reaches_running_handlers_by_renewal(any_bench: Bench) -> None:
    """Within a third of the lease: a sync handler that looks, and an async one that does not. A success that
    still comes is accepted."""
    workflow = Workflow("w")
    gate = Gate()

    @workflow.task(lease=3)
    def looking(ctx: Context) -> None:
        gate.wait(until=ctx.check_cancelled)

    @workflow.task(lease=3)
    async def waiting(ctx: Context) -> None:
        gate.arrive()
        await asyncio.Event().wait()

    @workflow.task(lease=3)
    def finishing(ctx: Context) -> str:
        gate.arrive()
        while not ctx.cancelled:
            threading.Event().wait(0.01)
        return "done all the same"

    any_bench.define(workflow)
    run = any_bench.trigger(workflow)
    with any_bench.worker(workflow):
        gate.await_arrivals(3)
        any_bench.execute("select flowforge.cancel_run(%s, 'enough')", run)
        assert any_bench.wait_run(run) == ["cancelled"]
    assert any_bench.task(run, "looking")["state"] == "cancelled"
    assert any_bench.task(run, "waiting")["state"] == "cancelled"
    assert any_bench.task(run, "finishing")["state"] == "succeeded"


def test_time_limit_is_an_attempt_like_any_other(any_bench: Bench) -> None:
    workflow = Workflow("w")

    # More than two attempts, since a later one may come to its end too late as well.
    @workflow.task(time_limit=0.5, retry=Retry(max_attempts=20, delay=0))
    def busy(ctx: Context) -> int:
        while ctx.attempt == 1:
            ctx.check_cancelled()
        return ctx.attempt

    any_bench.define(workflow)
    run = any_bench.trigger(workflow)
    with any_bench.worker(workflow):
        assert any_bench.wait_run(run) == ["succeeded"]
    assert any_bench.task(run, "busy")["output"] >= 2
    # The reaper may have come first, and says more.
    errors = [error for (error,) in any_bench.all("select error from flowforge.attempt")]
    assert errors
    assert all(error.startswith("time limit of 0.5 s exceeded") for error in errors), errors


@pytest.mark.parametrize("table", ["worker", "progress"])
def test_nothing_that_may_wait_makes_a_lease_wait(bench: Bench, table: str) -> None:
    """The announcement, in a call that begins before there is a lease, or a report of progress waits for a
    lock: the short lease is renewed in time all the same, and the task run belongs to one execution only."""
    workflow = Workflow("w")
    gate, tokens = Gate(), []

    @workflow.task(lease=3)
    def short(ctx: Context) -> None:
        tokens.append(ctx.fencing_token)
        ctx.progress(0.5)
        gate.wait()

    def waits() -> bool:
        return bool(
            bench.all(
                "select 1 from pg_locks where not granted and relation = %s::regclass", f"flowforge.{table}"
            )
        )

    bench.define(workflow)
    run = bench.trigger(workflow)
    bench.wait_state(run, "short", "ready")
    with bench.db.connect() as blocker:
        blocker.execute("begin")
        blocker.execute(f"lock table flowforge.{table} in access exclusive mode".encode())
        with bench.worker(workflow, lock_timeout=60, lease=600):
            wait_until(waits, "the call, waiting")
            gate.await_arrivals()
            wait_renewals(bench, run, "short")
            blocker.execute("rollback")
            gate.open()
            assert bench.wait_run(run) == ["succeeded"]
    assert tokens == [1]


def test_renewal_tells_that_the_time_limit_is_not_over(bench: Bench) -> None:
    """After a claim of unknown outcome the worker knows the limit only from below; no lease extends past it,
    so each renewal tells more."""
    workflow = Workflow("w")

    @workflow.task(lease=3, time_limit=1000)
    def doubting(ctx: Context) -> None:
        ctx._execution.deadline = time.monotonic() - 1
        wait_until(lambda: (ctx.time_left() or 0) > 0, "time left")

    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow):
        assert bench.wait_run(run) == ["succeeded"]


def test_busy_handlers_past_their_time_limit_hold_up_nobody(bench: Bench) -> None:
    """Each is logging or reporting progress when its time is over, at any instruction, with the locks of
    logging and of the worker about to be taken: afterwards they can still be taken, and the worker works."""
    busy, quick = Workflow("busy"), Workflow("quick")
    stream = logging.StreamHandler(io.StringIO())
    logger = logging.getLogger("tests.busy")
    logger.propagate = False
    logger.addHandler(stream)

    @busy.task(time_limit=0.1)
    def report(ctx: Context) -> None:
        while True:
            for _ in range(100):
                ctx.progress(0.5, "on and on")
            logger.info("on and on")
            stream.setStream(io.StringIO())

    quick.task(name="task")(lambda _: "done")
    for each in (busy, quick):
        bench.define(each)
    runs = bench.trigger_many(busy, 200)
    with bench.worker(busy, quick, lease=30, concurrency=8) as worker:
        assert set(bench.wait_run(*runs)) == {"failed"}
        run = bench.trigger(quick)
        assert bench.wait_run(run) == ["succeeded"]
        wait_until(lambda: not worker.worker.left_behind, "the end of every handler")
    assert stream.lock is not None
    assert stream.lock.acquire(timeout=60)
    errors = [error for (error,) in bench.all("select error from flowforge.attempt")]
    assert all(error.startswith("time limit of 0.1 s exceeded") for error in errors), errors


def test_progress_raises_once_the_time_is_over(bench: Bench) -> None:
    """A handler that reports needs no other look. Where the run is being cancelled it is only asked to stop,
    and may go on."""
    workflow = Workflow("w")
    caught: list[BaseException] = []
    gate = Gate()

    @workflow.task(time_limit=1)
    def late(ctx: Context) -> None:
        try:
            while True:
                ctx.progress(0.5)
        except BaseException as exc:
            caught.append(exc)
            raise

    @workflow.task(lease=3)
    def cancelled(ctx: Context) -> str:
        gate.wait(until=lambda: gate.open() if ctx.cancelled else None)
        ctx.progress(1.0)
        return "finished"

    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow):
        gate.await_arrivals()
        wait_until(lambda: bool(caught), "the end of the first")
        bench.execute("select flowforge.cancel_run(%s, 'enough')", run)
        bench.wait_run(run)
    assert [type(exc) for exc in caught] == [TimeLimitExceeded]
    assert bench.task(run, "cancelled")["output"] == "finished"
