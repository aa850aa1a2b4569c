"""What a handler is given: values, and progress to tell."""

import threading
import time
from typing import Any

import pytest

from flowforge.definition import Retry, Workflow
from flowforge.worker.context import Context
from tests.python.workbench import Bench, Gate
from tests.services.process import wait_until


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
