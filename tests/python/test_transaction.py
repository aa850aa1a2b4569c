"""A transaction that ends the task run together with its side effects."""

import asyncio

import psycopg
import pytest

from flowforge.definition import Retry, Workflow
from flowforge.errors import Cancelled, NotStorable
from flowforge.worker.context import Context
from tests.python.effects import effects, write
from tests.python.workbench import Bench, Gate
from tests.services.process import wait_until

pytestmark = pytest.mark.usefixtures("table_of_effects")


def test_side_effects_and_the_finish_are_one_commit(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    workflow = Workflow("w")
    gate = Gate()

    @workflow.task
    def pay(ctx: Context) -> str:
        with ctx.transaction() as tx:
            write(tx, ctx, "paid")
            tx.finish({"paid": True})
            write(tx, ctx, "noted")
            gate.wait()
        return "does not count"

    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow) as worker:
        gate.await_arrivals()
        assert effects(bench) == []
        assert bench.task(run, "pay")["state"] == "running"
        gate.open()
        assert bench.wait_run(run) == ["succeeded"]
        assert bench.task(run, "pay")["output"] == {"paid": True}
        assert effects(bench) == ["noted", "paid"]
    # No second finish was sent.
    assert dict(worker.counts) == {"claimed": 1, "finished_in_transaction": 1}
    [told] = [each for each in caplog.records if "give it to tx.finish(output)" in each.getMessage()]
    keys = {"daemon": "worker", "run": run, "handler": "w.pay"}
    assert told.keys == keys | {"task_run": bench.task(run, "pay")["task_run_id"]}  # type: ignore[attr-defined]


@pytest.mark.parametrize("end", ["end of the block", "return"])
def test_a_transaction_without_finish_is_a_mistake_that_takes_everything_back(bench: Bench, end: str) -> None:
    """Side effects without the finish could be made again by the next attempt, and a finish without an output
    would lose what the handler returns."""
    workflow = Workflow("w")

    @workflow.task(retry=Retry(max_attempts=3, delay=0))
    def pay(ctx: Context) -> str:
        with ctx.transaction() as tx:
            write(tx, ctx, "paid")
            if end == "return":
                return "paid"
        return "paid"

    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow):
        assert bench.wait_run(run) == ["failed"]
    task = bench.task(run, "pay")
    assert task["attempt"] == 1
    assert "without tx.finish(output)" in task["error"]
    assert effects(bench) == []


def test_an_exception_after_the_block_changes_nothing_and_is_told(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    workflow = Workflow("w")

    @workflow.task
    def pay(ctx: Context) -> None:
        with ctx.transaction() as tx:
            write(tx, ctx, "paid")
            tx.finish("paid")
        raise ValueError("too late to matter")

    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow):
        assert bench.wait_run(run) == ["succeeded"]
    assert bench.task(run, "pay")["output"] == "paid"
    assert effects(bench) == ["paid"]
    assert "raised after its transaction" in caplog.text


def test_an_exception_in_the_block_takes_everything_back(bench: Bench) -> None:
    workflow = Workflow("w")

    @workflow.task(retry=Retry(max_attempts=2, delay=0))
    def pay(ctx: Context) -> None:
        with ctx.transaction() as tx:
            write(tx, ctx, f"paid {ctx.attempt}")
            tx.finish()
            if ctx.attempt == 1:
                raise ValueError("no")

    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow):
        assert bench.wait_run(run) == ["succeeded"]
    assert effects(bench) == ["paid 2"]


def test_a_failed_block_may_be_tried_again_and_a_committed_one_not(bench: Bench) -> None:
    workflow = Workflow("w")
    caught: list[BaseException] = []

    @workflow.task
    def pay(ctx: Context) -> None:
        try:
            with ctx.transaction() as tx:
                tx.execute("select 1/0")
        except psycopg.errors.DivisionByZero as exc:
            caught.append(exc)
        with ctx.transaction() as tx:
            write(tx, ctx, "paid")
            tx.finish()
            try:
                with ctx.transaction():
                    pass
            except RuntimeError as exc:
                caught.append(exc)
        try:
            with ctx.transaction() as tx:
                write(tx, ctx, "paid again")
        except RuntimeError as exc:
            caught.append(exc)

    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow):
        assert bench.wait_run(run) == ["succeeded"]
    assert effects(bench) == ["paid"]
    assert len(caught) == 3


@pytest.mark.parametrize("end", ["rollback", "commit", "rollback; begin", "method"])
def test_the_handler_cannot_end_the_transaction_itself(bench: Bench, end: str) -> None:
    """A finish in another transaction would make a success of side effects that are not there."""
    workflow = Workflow("w")

    @workflow.task
    def pay(ctx: Context) -> None:
        with ctx.transaction() as tx:
            if end == "method":
                tx.connection.commit()
            for statement in end.split("; "):
                tx.execute(statement)
            tx.finish("paid")

    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow):
        assert bench.wait_run(run) == ["failed"]


def test_an_output_that_cannot_be_stored_takes_the_side_effects_back_for_good(bench: Bench) -> None:
    workflow = Workflow("w")
    caught: list[str] = []

    @workflow.task(retry=Retry(max_attempts=3, delay=0))
    def pay(ctx: Context) -> None:
        with ctx.transaction() as tx:
            write(tx, ctx, "paid")
            try:
                tx.finish({1, 2})
            except NotStorable as exc:
                caught.append(str(exc))
            tx.finish("x" * 10_000)

    bench.define(workflow)
    bench.execute("select flowforge.set_limit('max_payload_bytes', 1024)")
    run = bench.trigger(workflow)
    with bench.worker(workflow):
        assert bench.wait_run(run) == ["failed"]
    task = bench.task(run, "pay")
    assert task["error"].startswith("result not storable: ")
    assert task["attempt"] == 1
    assert len(caught) == 1
    assert effects(bench) == []


def test_a_lost_lease_stops_the_transaction_before_its_first_statement(bench: Bench) -> None:
    workflow = Workflow("w")
    gate = Gate()
    caught: list[BaseException] = []

    @workflow.task
    def pay(ctx: Context) -> None:
        if ctx.fencing_token == 1:
            gate.wait()
            try:
                with ctx.transaction() as tx:
                    write(tx, ctx, "paid under token 1")
            except Cancelled as exc:
                caught.append(exc)
                raise
        with ctx.transaction() as tx:
            write(tx, ctx, f"paid under token {ctx.fencing_token}")
            tx.finish()

    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow) as worker:
        gate.await_arrivals()
        task = bench.task(run, "pay")
        # As after a reap: another execution has the task run now.
        bench.execute("select flowforge.release_task_run(%s, 1, 'crashed')", task["task_run_id"])
        assert bench.wait_run(run) == ["succeeded"]
        gate.open()
        wait_until(lambda: worker.counts["not_sent"] == 1, "the end of the first execution")
    assert effects(bench) == ["paid under token 2"]
    assert len(caught) == 1
    assert bench.task(run, "pay")["fencing_token"] == 2


def test_the_server_ends_a_transaction_whose_worker_is_gone(bench: Bench) -> None:
    """Time-outs that the server itself keeps, bounded by the time limit."""
    workflow = Workflow("w")
    names = ("idle_in_transaction_session_timeout", "statement_timeout")

    def settings(ctx: Context) -> dict[str, int]:
        with ctx.transaction() as tx:
            rows = tx.execute(
                "select name, setting::int from pg_settings where name = any (%s)", [list(names)]
            ).fetchall()
            level = tx.execute("show transaction_isolation").fetchone()
            tx.finish([*rows, *(level or ())])
        return {}

    workflow.task(name="free")(settings)
    workflow.task(name="bound", time_limit=100)(settings)
    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow):
        assert bench.wait_run(run) == ["succeeded"]
    free, bound = (dict(bench.task(run, name)["output"][:2]) for name in ("free", "bound"))
    assert free == {"idle_in_transaction_session_timeout": 300_000, "statement_timeout": 0}
    assert all(0 < bound[name] <= 100_000 for name in names)
    assert bench.task(run, "free")["output"][2] == "read committed"


def test_the_event_loop_is_not_to_be_blocked(bench: Bench) -> None:
    workflow = Workflow("w")
    caught: list[str] = []

    @workflow.task
    async def pay(ctx: Context) -> None:
        try:
            with ctx.transaction():
                pass
        except RuntimeError as exc:
            caught.append(str(exc))

        def block() -> None:
            with ctx.transaction() as tx:
                write(tx, ctx, "paid")
                tx.finish("yes")

        await asyncio.to_thread(block)

    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow):
        assert bench.wait_run(run) == ["succeeded"]
    assert "asyncio.to_thread" in caught[0]
    assert bench.task(run, "pay")["output"] == "yes"
    assert effects(bench) == ["paid"]
