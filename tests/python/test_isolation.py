"""Handlers in processes of their own: everything works as in threads, and limits are hard."""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psutil
import pytest

from flowforge.config import Config
from flowforge.definition import Workflow
from flowforge.errors import InvalidDefinition
from flowforge.worker import child, executor
from flowforge.worker.execution import Finish
from tests.python import isolated_flows as flows
from tests.python.cluster import PROGRAM, Process
from tests.python.isolation import FLOWS, Scene, gone
from tests.python.slots import an_execution
from tests.services.process import wait_for_end, wait_until

# -- as in threads


def test_a_handler_in_a_process_has_all_that_one_in_a_thread_has(any_scene: Scene) -> None:
    """Input, upstream, item, time left, progress while it runs, its transaction; and is in the main thread.
    A task may choose for itself."""
    bench = any_scene.bench
    run = any_scene.trigger(flows.graph, value={"ä": [1.5, None, "𝄞"]})
    with any_scene.worker(flows.graph) as worker:
        wait_until(
            lambda: bench.all("select fraction, message from flowforge.progress") == [(0.5, "half")],
            "progress",
        )
        assert worker.worker.running == [("graph.first", run)]
        wait_until(lambda: worker.worker.health.state == "ok", "health")
        any_scene.go()
        assert bench.wait_run(run) == ["succeeded"]
    tasks = {name: task["output"] for name, task in bench.tasks(run).items()}
    pid, value, left, in_main_thread = tasks["first"]
    assert (value, left, in_main_thread) == ({"ä": [1.5, None, "𝄞"]}, None, True)
    assert tasks["book"] == [[index, item, True] for index, item in enumerate(tasks["first"])]
    [(booked,)] = bench.all("select value from public.booked")
    assert tasks["near"] == os.getpid()
    assert os.getpid() not in (pid, booked)
    assert worker.counts["finished_succeeded"] == 6
    assert worker.counts["finished_in_transaction"] == 1


def test_a_process_is_used_again_and_replaced_after_so_many_tasks(scene: Scene) -> None:
    scene.bench.define(flows.pid)
    runs = scene.bench.trigger_many(flows.pid, 9)
    with scene.worker(flows.pid, concurrency=1, recycle_after=3):
        assert set(scene.bench.wait_run(*runs)) == {"succeeded"}
    pids = [scene.bench.task(run, "task")["output"] for run in runs]
    assert sorted(pids.count(pid) for pid in set(pids)) == [3, 3, 3]


@pytest.mark.parametrize("workflow", [flows.listens, flows.awaits], ids=lambda each: each.name)
def test_a_cancel_is_told_at_once_to_who_listens(scene: Scene, workflow: Workflow) -> None:
    run = scene.trigger(workflow)
    with scene.worker(workflow, lease=1) as worker:
        [pid] = scene.await_executions()
        scene.bench.execute("select flowforge.cancel_run(%s)", run)
        assert scene.ended(run)["state"] == "cancelled"
        assert not gone(pid), "it was told, and not killed"
    assert worker.counts["finished_cancelled"] == 1


def test_a_time_limit_cuts_the_transaction(scene: Scene) -> None:
    with scene.worker(flows.locked):
        assert scene.run(flows.locked)["error"].startswith("time limit of 1 s exceeded")
        wait_until(
            lambda: scene.bench.one(
                "select count(*) from pg_stat_activity "
                "where application_name = 'flowforge worker transaction' and datname = current_database()"
            ) == 0,
            "the end of its connection",
        )  # fmt: skip
    assert scene.bench.all("select * from public.booked") == []


@pytest.mark.parametrize("end", ["returns", "exit"])
def test_what_comes_after_the_commit_changes_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Renewals that find the task run finished do not stop a handler that still runs."""
    run = scene.trigger(flows.goes_on, **({} if end == "returns" else {"crash": end}))
    with scene.worker(flows.goes_on, lease=1) as worker:
        scene.await_executions()
        keeper, renewed = worker.worker._keeper, threading.Semaphore(0)
        apply = keeper._apply

        def counting(*arguments: Any) -> None:
            apply(*arguments)
            renewed.release()

        monkeypatch.setattr(keeper, "_apply", counting)
        for _ in range(3):
            assert renewed.acquire(timeout=60)
        scene.go()
        assert scene.ended(run)["output"] == "kept"
        wait_until(lambda: worker.worker._executor.wait_idle(0), "its end")
    assert worker.counts["lost"] == 0
    assert scene.bench.all("select value from public.booked") == [(1,)]


# -- what does not stop is killed


def test_a_handler_that_hangs_is_killed_at_its_time_limit(any_scene: Scene) -> None:
    """In a loop, or in C without giving the interpreter back. The slots are free again, with fresh
    processes."""
    runs = [any_scene.trigger(flows.hangs, how=how) for how in ("in C", "in Python")]
    with any_scene.worker(flows.hangs, flows.pid, concurrency=2) as worker:
        for run in runs:
            task = any_scene.ended(run)
            assert task["state"] == "failed"
            assert task["error"].startswith("time limit of 1 s exceeded")
        wait_until(lambda: all(map(gone, any_scene.pids())), "the end of both processes")
        assert any_scene.run(flows.pid)["output"] not in any_scene.pids()
        assert len(any_scene.pids()) == 2
        wait_until(lambda: worker.worker._executor.wait_idle(0), "idle slots")
        assert worker.worker._executor.lost == 0


def test_a_handler_that_has_lost_its_lease_is_killed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "LOST_MOMENT", 0.2)
    run = scene.trigger(flows.hangs_once)
    with scene.worker(flows.hangs_once, lease=1) as worker:
        [pid] = scene.await_executions()
        task = scene.bench.task(run, "task")
        scene.bench.execute("select flowforge.release_task_run(%s, 1, 'crashed')", task["task_run_id"])
        assert scene.ended(run)["output"] == 2
        wait_until(lambda: gone(pid), "the end of the first")
        wait_until(lambda: worker.counts["not_sent"] == 1, "the end of the first execution")
    assert (worker.counts["lost"], worker.counts["released_crashed"]) == (1, 0)


def test_a_shutdown_gives_back_uncounted_what_hangs(any_scene: Scene) -> None:
    run = any_scene.trigger(flows.hangs_once)
    with any_scene.worker(flows.hangs_once, grace=1) as worker:
        [pid] = any_scene.await_executions()
        assert worker.stop() == 0
        assert gone(pid)
    task = any_scene.bench.task(run, "task")
    assert (task["state"], task["attempt"], task["reaps"]) == ("ready", 1, 0)
    assert worker.counts["released_shutdown"] == 1
    assert not worker.worker.left_behind


# -- memory


def test_a_task_killed_by_its_memory_limit_among_a_thousand_others(any_scene: Scene) -> None:
    bench = any_scene.bench
    bench.define(flows.eats)
    inputs = [{"eats": "a block"} if number == 500 else {} for number in range(1001)]
    runs = [bench.trigger(flows.eats, each) for each in inputs]
    with any_scene.worker(flows.eats, memory_limit=128):
        states = bench.wait_run(*runs)
    assert [number for number, state in enumerate(states) if state != "succeeded"] == [500]
    error = bench.task(runs[500], "task")["error"]
    assert error.startswith("memory limit of 128 MiB exceeded: MemoryError\n")
    assert "isolated_flows.py" in error


def test_what_runs_out_of_memory_says_so_and_its_process_is_replaced(scene: Scene) -> None:
    with scene.worker(flows.eats, concurrency=1, memory_limit=128):
        before = scene.run(flows.eats)["output"]
        for what in ("a block", "small objects", "its result", "in a group"):
            error = scene.run(flows.eats, eats=what)["error"]
            assert error.startswith("memory limit of 128 MiB exceeded: "), what
            after = scene.run(flows.eats)["output"]
            assert after != before, what
            assert gone(before), what
            before = after


def test_the_end_of_an_async_handler_takes_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may have all memory that there is. It has succeeded, and its side effects are not to be
    repeated."""
    closed: list[str] = []

    async def left_open() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            closed.append("generator")

    async def coroutine(_ctx: Any) -> Any:
        assert await asyncio.to_thread(int) == 0
        generator = left_open()
        await anext(generator)
        monkeypatch.setattr(threading.Thread, "start", no_more_threads)
        return True

    def no_more_threads(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        one = child.Child(theirs)
        execution = child._Execution(child.Task(an_execution().claim, None), one._tell)
        one._execute(execution, coroutine, Config())
        assert ours.recv().report == Finish("succeeded", output="true")
    assert closed == ["generator"]


# -- the program


@pytest.fixture
def program(scene: Scene) -> Iterator[Callable[..., Process]]:
    """`flowforge worker` with options."""
    started: list[Process] = []

    def start(*options: str) -> Process:
        environment = {
            **os.environ,
            "FLOWFORGE_DATABASE_URL": scene.bench.db.dsn,
            "FLOWFORGE_HEALTH_FILE": str(scene.directory / "health"),
            "FLOWFORGE_POLL_INTERVAL": "0.2",
        }
        command = [PROGRAM, "worker", FLOWS, "--isolation", "processes", "--log-format", "json", *options]
        started.append(Process("worker", command, environment, scene.directory / "log"))
        return started[-1]

    yield start
    for process in started:
        process.stop()


def test_what_handlers_log_is_told_with_their_task_run(scene: Scene, program: Callable[..., Process]) -> None:
    """By the standard library's logging, in threads, on the event loop, in what that hands to threads, and in
    processes; and libraries' debugging is not."""
    process = program("--log-level", "debug")
    run = scene.trigger(flows.logs)
    assert scene.bench.wait_run(run) == ["succeeded"]
    process.stop()
    assert all(line.startswith("{") for line in process.log.read_text().splitlines())
    told = {each["event"]: each for each in process.entries() if "logger" in each}
    tasks = {name: task["task_run_id"] for name, task in scene.bench.tasks(run).items()}

    def about(event: str) -> tuple[object, ...]:
        each = told.pop(event)
        return (*(each[key] for key in ("level", "logger", "run")), {each["task"]: each["task_run"]})

    def mine(task: str) -> tuple[object, ...]:
        return run, {task: tasks[task]}

    assert "ValueError: no luck" in told["threaded\nat work"]["traceback"]
    assert about("isolated at work") == ("info", FLOWS, *mine("isolated"))
    assert about("isolated in detail") == ("debug", FLOWS, *mine("isolated"))
    assert about("threaded\nat work") == ("error", "shop", *mine("threaded"))
    assert about("awaiting at work") == ("warning", "shop", *mine("awaiting"))
    assert told == {}


def test_a_process_does_not_outlive_a_worker_that_was_killed(
    scene: Scene, program: Callable[..., Process]
) -> None:
    """Neither one that hangs in C nor one that has nothing to do."""
    process = program("-c", "2", "--memory-limit", "256", "--recycle-after", "5")
    idle = scene.run(flows.pid)["output"]
    other = scene.trigger(flows.waits)
    scene.await_executions(1)
    scene.trigger(flows.hangs_once)
    scene.await_executions(2)
    scene.go()
    assert scene.ended(other)["state"] == "succeeded"
    below = psutil.Process(process.pid).children(recursive=True)
    assert {each.pid for each in below} == {idle, *scene.pids()}
    assert len(below) == 2
    process.kill()
    wait_for_end(below)


def test_what_a_terminal_sends_to_all_is_for_the_worker_to_heed(
    scene: Scene, program: Callable[..., Process]
) -> None:
    """Ctrl-C reaches the worker and its processes. The handler finishes, and its lines are in the log."""
    process = program()
    run = scene.trigger(flows.goes_on)
    [pid] = scene.await_executions()
    for each in (pid, process.pid):
        os.kill(each, signal.SIGINT)
    wait_until(lambda: process.health() == "stopping", "the worker heeding it")
    scene.go()
    assert process.wait() == 0
    assert scene.ended(run)["output"] == "kept"
    events = [entry["event"] for entry in process.entries()]
    assert any(event.startswith("what the handler returned is not kept") for event in events)


# -- what a task says


def test_isolation_is_the_workers_matter_and_no_part_of_the_definition() -> None:
    assert flows.graph.tasks["near"].isolation == "threads"
    assert flows.graph.tasks["first"].isolation is None
    assert "isolation" not in str(flows.graph.spec())
    workflow = Workflow("w")
    with pytest.raises(InvalidDefinition, match="isolation is 'fork'"):
        workflow.task(name="t", isolation="fork")(print)  # type: ignore[call-overload]
    workflow.task(name="t", handler="h", isolation="threads")(print)
    with pytest.raises(InvalidDefinition, match="need one isolation"):
        workflow.task(name="u", handler="h", isolation="processes")(print)
