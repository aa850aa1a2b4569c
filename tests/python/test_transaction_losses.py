"""A transaction that loses its connection, its time or its worker before its end is known."""

import asyncio

import psycopg
import pytest

from flowforge.definition import Retry, Workflow
from flowforge.errors import DatabaseUnavailable
from flowforge.worker.context import Context
from tests.python.effects import effects, lose, write
from tests.python.workbench import Bench, Gate, LossyProxy
from tests.services.process import wait_until

pytestmark = pytest.mark.usefixtures("table_of_effects")


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
