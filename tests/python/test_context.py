"""What a handler is given: values, progress, and a transaction that ends the task run together with its side
effects."""

import asyncio
import threading
import time
from typing import Any

import psycopg
import pytest

from flowforge.definition import Retry, Workflow
from flowforge.errors import Cancelled, DatabaseUnavailable, NotStorable
from flowforge.worker.context import Context
from tests.python.workbench import Bench, Gate, LossyProxy
from tests.services.process import wait_until


@pytest.fixture
def bench(bench: Bench) -> Bench:
    """With a table for side effects."""
    bench.execute("create table public.effect (task_run_id bigint, what text)")
    return bench


def effects(bench: Bench) -> list[str]:
    return [what for (what,) in bench.all("select what from public.effect order by what")]


def write(tx: Any, ctx: Context, what: str) -> None:
    tx.execute("insert into public.effect values (%s, %s)", [ctx.task_run_id, what])


def test_a_handler_sees_its_task_run_and_what_came_before(bench: Bench) -> None:
    workflow = Workflow("shop")
    seen: dict[str, Any] = {}

    @workflow.task
    def numbers(ctx: Context) -> list[int]:
        return [10, 20]

    @workflow.task(retry=Retry(max_attempts=1))
    def broken(ctx: Context) -> None:
        raise ValueError

    @workflow.task(after=[numbers, broken], when="all_done")
    def both(ctx: Context) -> None:
        seen["both"] = (ctx.input, dict(ctx.upstream), dict(ctx.upstream_states), ctx.item, ctx.map_index)
        seen["ids"] = (ctx.run_id, ctx.task_run_id, ctx.workflow, ctx.task, ctx.attempt, ctx.fencing_token)
        seen["dispatch"] = ctx.dispatch_id
        seen["time"] = (ctx.deadline, ctx.time_left(), ctx.cancelled)
        ctx.check_cancelled()

    @workflow.task(map=numbers)
    def each(ctx: Context) -> Any:
        return [ctx.map_index, ctx.item]

    @workflow.task(time_limit=1000)
    def limited(ctx: Context) -> float | None:
        assert ctx.deadline is not None
        return ctx.time_left()

    bench.define(workflow)
    run = bench.trigger(workflow, {"customer": 7})
    with bench.worker(workflow):
        assert bench.wait_run(run) == ["failed"]
    task = bench.task(run, "both")
    assert seen["both"] == (
        {"customer": 7}, {"numbers": [10, 20]}, {"numbers": "succeeded", "broken": "failed"}, None, None,
    )  # fmt: skip
    assert seen["ids"] == (run, task["task_run_id"], "shop", "both", 1, 1)
    assert str(seen["dispatch"]) == task["dispatch_id"]
    assert seen["time"] == (None, None, False)
    assert bench.task(run, "each")["output"] == [[0, 10], [1, 20]]
    assert 0 < bench.task(run, "limited")["output"] <= 1000


def test_input_that_python_cannot_hold_fails_its_own_task_only(bench: Bench) -> None:
    """PostgreSQL keeps a number of 5,000 digits, which Python refuses to read: it must not break the
    claim."""
    workflow = Workflow("w")

    @workflow.task
    def echo(ctx: Context) -> Any:
        return ctx.input

    bench.define(workflow)
    bad = bench.one("select flowforge.trigger('w', %s::jsonb)", "9" * 5000)
    good = bench.trigger(workflow, 1)
    with bench.worker(workflow):
        assert bench.wait_run(bad, good) == ["failed", "succeeded"]
    assert bench.task(bad, "echo")["error"].startswith("ValueError: ")


# -- the transaction


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


# -- its connection is lost before the commit


def lose(tx: Any) -> None:
    tx.execute("select pg_terminate_backend(pg_backend_pid())")


@pytest.mark.parametrize("how", ["as it is", "as the cause of another", "swallowed in the block"])
def test_loss_of_the_connection_before_the_commit_uses_up_no_attempt(bench: Bench, how: str) -> None:
    """A restart of PostgreSQL, a failover: nothing happened, and the same attempt is executed again."""
    workflow = Workflow("w")
    executions: list[tuple[int, int]] = []

    @workflow.task(retry=Retry(max_attempts=1))
    def pay(ctx: Context) -> None:
        executions.append((ctx.attempt, ctx.fencing_token))
        with ctx.transaction() as tx:
            write(tx, ctx, f"paid under token {ctx.fencing_token}")
            if ctx.fencing_token == 1:
                try:
                    lose(tx)
                except psycopg.Error as exc:
                    if how == "as it is":
                        raise
                    if how == "as the cause of another":
                        raise ValueError("no payment") from exc
            tx.finish()

    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow) as worker:
        assert bench.wait_run(run) == ["succeeded"]
    assert executions == [(1, 1), (1, 2)]
    assert effects(bench) == ["paid under token 2"]
    assert worker.counts["released_crashed"] == 1


@pytest.mark.parametrize("statement", ["flowforge.assert_lease", "insert into public.effect"])
def test_loss_of_the_connection_without_a_word_of_the_server_is_the_same(
    bench: Bench, proxy: LossyProxy, statement: str
) -> None:
    """As after a crash of the server's host, also in the transaction's first statements."""
    workflow = Workflow("w")
    tokens: list[int] = []

    @workflow.task(retry=Retry(max_attempts=1))
    async def pay(ctx: Context) -> None:
        def block() -> None:
            tokens.append(ctx.fencing_token)
            with ctx.transaction() as tx:
                write(tx, ctx, f"paid under token {ctx.fencing_token}")
                tx.finish()

        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(block))

    bench.define(workflow)
    run = bench.trigger(workflow)
    proxy.lose(statement, sent=False)
    with bench.worker(workflow, database_url=proxy.dsn):
        assert bench.wait_run(run) == ["succeeded"]
    assert tokens == [1, 2]
    assert effects(bench) == ["paid under token 2"]


def test_a_transaction_that_always_loses_its_connection_ends_at_max_reaps(bench: Bench) -> None:
    workflow = Workflow("w")
    executions: list[int] = []

    @workflow.task(max_reaps=1)
    def pay(ctx: Context) -> None:
        executions.append(ctx.fencing_token)
        with ctx.transaction() as tx:
            lose(tx)

    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow):
        assert bench.wait_run(run) == ["failed"]
    assert executions == [1, 2]


@pytest.mark.parametrize("then", ["returns", "fails by itself", "tries again"])
def test_a_handler_that_catches_the_loss_of_its_connection_goes_on(bench: Bench, then: str) -> None:
    workflow = Workflow("w")

    @workflow.task(retry=Retry(max_attempts=1))
    def pay(ctx: Context) -> str:
        try:
            with ctx.transaction() as tx:
                lose(tx)
        except psycopg.Error:
            pass
        if then == "fails by itself":
            raise ValueError("something else")
        if then == "tries again":
            with ctx.transaction() as tx:
                tx.finish("in a second block")
        return "without a payment"

    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow):
        bench.wait_run(run)
    task = bench.task(run, "pay")
    assert task["reaps"] == 0
    if then == "fails by itself":
        assert task["error"].startswith("ValueError: something else")
    else:
        assert task["output"] == ("without a payment" if then == "returns" else "in a second block")


def test_an_error_in_the_block_with_its_connection_intact_is_a_failure(bench: Bench) -> None:
    """Also one of another connection that is lost."""
    workflow = Workflow("w")

    @workflow.task(retry=Retry(max_attempts=1))
    def pay(ctx: Context) -> None:
        with ctx.transaction(), psycopg.connect(bench.db.dsn) as other:
            lose(other)

    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow):
        assert bench.wait_run(run) == ["failed"]
    task = bench.task(run, "pay")
    assert task["error"].startswith("AdminShutdown: ")
    assert task["reaps"] == 0


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


@pytest.mark.parametrize("committed", [True, False])
def test_unknown_outcome_of_the_commit_makes_neither_a_double_nor_a_hollow_success(
    bench: Bench, proxy: LossyProxy, committed: bool
) -> None:
    """The connection goes away during COMMIT, before or after the server did it. The handler swallows the
    error and returns: that must not become a finish of its own."""
    workflow = Workflow("w")
    caught: list[BaseException] = []
    attempts: list[int] = []

    @workflow.task
    def pay(ctx: Context) -> str:
        attempts.append(ctx.attempt)
        try:
            with ctx.transaction() as tx:
                write(tx, ctx, "paid")
                tx.finish("in the transaction")
                if len(attempts) == 1:
                    proxy.lose("COMMIT", sent=committed)
        except DatabaseUnavailable as exc:
            caught.append(exc)
        return "on its own"

    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow, database_url=proxy.dsn) as worker:
        assert bench.wait_run(run) == ["succeeded"]
    assert proxy.lost == 1
    assert len(caught) == 1
    assert effects(bench) == ["paid"]
    assert bench.task(run, "pay")["output"] == "in the transaction"
    # The same attempt: what the network did costs none of the budget.
    assert attempts == ([1] if committed else [1, 1])
    assert worker.counts["fenced_crashed" if committed else "released_crashed"] == 1


def test_time_limit_cuts_the_open_transaction(bench: Bench) -> None:
    """The row's lock must go with it, or the failure could not be recorded."""
    workflow = Workflow("w")
    ended: list[BaseException] = []

    @workflow.task(time_limit=1)
    def slow(ctx: Context) -> None:
        try:
            with ctx.transaction() as tx:
                write(tx, ctx, "paid")
                tx.execute("select pg_sleep(600)")
        except BaseException as exc:
            ended.append(exc)
            raise

    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow):
        assert bench.wait_run(run) == ["failed"]
    assert bench.task(run, "slow")["error"].startswith("time limit of 1 s exceeded")
    assert len(ended) == 1
    assert effects(bench) == []


def test_time_limit_of_a_handler_that_has_noticed_the_loss_of_its_connection(bench: Bench) -> None:
    """There is nothing left to cut; the limit holds all the same, and the worker goes on."""
    workflow = Workflow("w")
    noticed: list[BaseException] = []

    @workflow.task(time_limit=1)
    def slow(ctx: Context) -> None:
        with ctx.transaction() as tx:
            try:
                tx.execute("select pg_terminate_backend(pg_backend_pid())")
            except psycopg.Error as exc:
                noticed.append(exc)
            Gate().wait(until=ctx.check_cancelled)

    @workflow.task
    def other(ctx: Context) -> str:
        return "done"

    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow, concurrency=1) as worker:
        assert bench.wait_run(run) == ["failed"]
        again = bench.trigger(workflow)
        bench.wait_state(again, "other", "succeeded")
        assert worker.counts["lost"] == 0
        worker.asked.request()
        assert worker.wait_ended() == 0
    assert bench.task(run, "slow")["error"].startswith("time limit of 1 s exceeded")
    assert noticed


def test_what_is_given_back_at_shutdown_cannot_commit_any_more(bench: Bench) -> None:
    """The handler's thread outlives the grace time, and goes on to the end of its transaction."""
    workflow = Workflow("w")
    gate, ended = Gate(), []

    @workflow.task
    def pay(ctx: Context) -> None:
        try:
            with ctx.transaction() as tx:
                write(tx, ctx, "paid")
                gate.wait()
        except BaseException as exc:
            ended.append(exc)
            raise

    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow, grace=0, lease=600) as worker:
        gate.await_arrivals()
    assert worker.worker.left_behind
    assert bench.task(run, "pay")["state"] == "ready"
    gate.open()
    wait_until(lambda: bool(ended), "the end of the handler")
    assert effects(bench) == []
    assert bench.task(run, "pay")["state"] == "ready"


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


# -- progress


def test_progress_is_coalesced_and_the_last_one_counts(bench: Bench) -> None:
    workflow = Workflow("w")
    gate, took = Gate(), []

    @workflow.task
    def work(ctx: Context) -> None:
        began = time.monotonic()
        for step in range(100_000):
            ctx.progress(step / 100_000, f"step {step}")
        took.append(time.monotonic() - began)
        ctx.progress(1, "done\0" + "!" * 5000)
        with pytest.raises(ValueError, match="between 0 and 1"):
            ctx.progress(1.5)
        with pytest.raises(ValueError, match="between 0 and 1"):
            ctx.progress(float("nan"))
        with pytest.raises(ValueError, match="a number between 0 and 1, not 'half'"):
            ctx.progress("half")  # type: ignore[arg-type]
        gate.wait()

    bench.execute(
        """
        create sequence public.reports;
        create function public.count_report() returns trigger language plpgsql security definer as
            $$ begin perform nextval('public.reports'); return new; end $$;
        create trigger count_report before insert or update on flowforge.progress
            for each row execute function public.count_report();
        """
    )
    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow):
        gate.await_arrivals()
        wait_until(lambda: bench.all("select 1 from flowforge.progress where fraction = 1") != [], "progress")
        gate.open()
        bench.wait_run(run)
    message = bench.one("select message from flowforge.progress")
    assert message == "done\ufffd" + "!" * 995
    # About one a second, not one for each round trip.
    assert bench.one("select last_value from public.reports") <= 3 + took[0]


def test_an_upstream_that_there_is_not_is_told_with_those_there_are(bench: Bench) -> None:
    workflow = Workflow("w")

    @workflow.task
    def first(ctx: Context) -> int:
        return 1

    @workflow.task(after=first)
    def second(ctx: Context) -> list[Any]:
        for known in (ctx.upstream, ctx.upstream_states):
            assert known.get("frist") is None
            assert "frist" not in known
            with pytest.raises(KeyError, match="'frist' is not among these upstream tasks: first"):
                known["frist"]
        return [dict(ctx.upstream), dict(ctx.upstream_states)]

    bench.define(workflow)
    run = bench.trigger(workflow)
    with bench.worker(workflow):
        assert bench.wait_run(run) == ["succeeded"]
    assert bench.task(run, "second")["output"] == [{"first": 1}, {"first": "succeeded"}]


def test_contexts_work_in_threads_of_the_handler(bench: Bench) -> None:
    workflow = Workflow("w")

    @workflow.task
    def work(ctx: Context) -> Any:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(ctx.input))
        thread.start()
        thread.join()
        return found

    bench.define(workflow)
    run = bench.trigger(workflow, "x")
    with bench.worker(workflow):
        bench.wait_run(run)
    assert bench.task(run, "work")["output"] == ["x"]
