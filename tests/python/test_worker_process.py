"""A worker's process: killed at every step, asked to end, out of slots."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowforge import exits
from flowforge.definition import Workflow
from tests.python import worker_process
from tests.python.workbench import Bench
from tests.services.process import wait_until

WAITING = "waiting for handlers that still run; a second Ctrl-C or SIGTERM stops at once"
ROOT = Path(__file__).parents[2]


class Process:
    """worker_process, started with settings of the environment."""

    def __init__(self, bench: Bench, **settings: Any) -> None:
        config: dict[str, str] = {
            "FLOWFORGE_DATABASE_URL": bench.db.dsn,
            "FLOWFORGE_AMQP_URL": ",".join(bench.config.amqp_urls),
            "FLOWFORGE_NAMESPACE": bench.config.namespace,
            "FLOWFORGE_POLL_INTERVAL": "0.2",
            "FLOWFORGE_TEST_CRASHES": "1",
            **{f"FLOWFORGE_{name.upper()}": str(value) for name, value in settings.items()},
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.python.worker_process"],
            cwd=ROOT,
            env={**os.environ, **config},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log.append(json.loads(line) if line.startswith("{") else {"event": line})

    def events(self) -> list[str]:
        return [line["event"] for line in self.log]

    def wait_event(self, event: str) -> None:
        wait_until(lambda: event in self.events(), f"{event!r} in the log of the worker")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        code = self._process.wait(60)
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()
        return code

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.wait()


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(bench: Bench, **settings: Any) -> Process:
        started.append(Process(bench, **settings))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def trace_table(bench: Bench) -> None:
    bench.execute("create table public.trace (task_run_id bigint, token bigint, what text, pid int)")


def define_only(bench: Bench, *names: str) -> Workflow:
    """The workflow of worker_process with only the named tasks."""
    workflow = Workflow(worker_process.workflow.name)
    for name in names:
        task = worker_process.workflow.tasks[name]
        workflow.task(name=name, time_limit=task.spec().get("time_limit"))(task.function)
    bench.define(workflow)
    return workflow


def traced(bench: Bench, what: str) -> int:
    count: int = bench.one("select count(*) from public.trace where what = %s", what)
    return count


def go(bench: Bench) -> None:
    bench.execute("insert into public.trace values (0, 0, 'go', 0)")


@pytest.mark.parametrize(
    "point", ["after-delivery", "before-claim-commit", "after-claim-commit", "after-ack",
              "before-finish-commit", "after-finish-commit"],
)  # fmt: skip
def test_killed_at_any_step_the_run_still_ends_with_one_result(
    rabbit_bench: Bench, start: Callable[..., Process], point: str
) -> None:
    bench = rabbit_bench
    trace_table(bench)
    workflow = define_only(bench, "quick")
    bench.never_redispatch()
    run = bench.trigger(workflow)
    bench.wait_state(run, "quick", "ready")
    victim = start(bench, lease=2, crash_at=f"worker:{point}")
    assert victim.wait() == -signal.SIGKILL
    start(bench, lease=60)
    assert bench.wait_run(run) == ["succeeded"]
    task = bench.task(run, "quick")
    # One accepted result, of the last token; a second execution only where the first was interrupted.
    assert task["output"] == task["fencing_token"]
    executions = {"before-finish-commit": 2}.get(point, 1)
    assert traced(bench, "ran") == executions
    assert task["attempt"] == 1
    assert bench.violations() == []


def test_an_idle_worker_ends_at_once(any_bench: Bench, start: Callable[..., Process]) -> None:
    trace_table(any_bench)
    process = start(any_bench, grace=3600)
    process.wait_event("started")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_sigterm_lets_a_handler_finish_and_takes_nothing_new(
    any_bench: Bench, start: Callable[..., Process]
) -> None:
    bench = any_bench
    trace_table(bench)
    workflow = define_only(bench, "patient")
    first = bench.trigger(workflow)
    process = start(bench, grace=3600, concurrency=2)
    wait_until(lambda: traced(bench, "begun") == 1, "the handler")
    process.signal(signal.SIGTERM)
    process.wait_event(WAITING)
    [line] = [line for line in process.log if line["event"] == WAITING]
    assert (line["count"], line["at_most"]) == (1, "3600 s")
    second = bench.trigger(workflow)
    bench.wait_state(second, "patient", "ready")
    go(bench)
    assert process.wait() == 0
    assert bench.wait_run(first) == ["succeeded"]
    assert bench.task(second, "patient")["state"] == "ready"
    assert traced(bench, "begun") == 1


@pytest.mark.parametrize("task", ["patient", "gentle"])
@pytest.mark.parametrize("how", ["grace time over", "second signal"])
def test_what_does_not_finish_in_time_is_given_back_uncounted(
    any_bench: Bench, start: Callable[..., Process], task: str, how: str
) -> None:
    """Ready at once, and the same attempt under the same dispatch id, whether or not the handler listens. The
    exit code tells a stop from a forced one."""
    bench = any_bench
    trace_table(bench)
    workflow = define_only(bench, task)
    run = bench.trigger(workflow)
    process = start(bench, grace=1 if how == "grace time over" else 3600, lease=3600)
    wait_until(lambda: traced(bench, "begun") == 1, "the handler")
    before = bench.task(run, task)
    process.signal(signal.SIGTERM)
    if how == "second signal":
        # Not before the first is handled, and not the same one so soon, or the two are one request.
        process.wait_event(WAITING)
        process.signal(signal.SIGINT)
    assert process.wait() == (exits.EXIT_INTERRUPTED if how == "second signal" else 0)
    after = bench.task(run, task)
    assert after["state"] == "ready"
    assert (after["attempt"], after["reaps"]) == (1, 0)
    assert after["dispatch_id"] == before["dispatch_id"]
    assert traced(bench, "ended") == 0


def test_a_worker_that_stood_still_finds_out_and_changes_nothing(
    bench: Bench, start: Callable[..., Process]
) -> None:
    """Stopped as a whole for longer than its lease: another one runs the task, and the first one's result is
    not taken when it wakes up."""
    trace_table(bench)
    workflow = define_only(bench, "patient")
    run = bench.trigger(workflow)
    first = start(bench, lease=3, concurrency=1)
    wait_until(lambda: traced(bench, "begun") == 1, "the handler")
    first.signal(signal.SIGSTOP)
    second = start(bench, lease=60, concurrency=1)
    wait_until(lambda: traced(bench, "begun") == 2, "the second execution")
    go(bench)
    assert bench.wait_run(run) == ["succeeded"]
    before = bench.task(run, "patient")
    first.signal(signal.SIGCONT)
    wait_until(lambda: traced(bench, "ended") == 2, "the end of the first execution")
    for process in (first, second):
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    assert bench.task(run, "patient") == before
    assert (before["fencing_token"], before["reaps"], before["attempt"]) == (2, 0, 1)
    totals = first.log[-1]
    assert totals["claimed"] == 1
    assert totals.get("fenced", 0) + totals.get("not_sent", 0) == 1


def test_a_worker_without_slots_left_gives_up(bench: Bench, start: Callable[..., Process]) -> None:
    trace_table(bench)
    workflow = define_only(bench, "stuck")
    runs = bench.trigger_many(workflow, 2)
    process = start(bench, concurrency=2, grace=3600)
    assert process.wait() == exits.EXIT_NO_SLOTS
    assert bench.wait_run(*runs) == ["failed", "failed"]
    assert bench.task(runs[0], "stuck")["error"].startswith("time limit of 0.5 s exceeded")


@pytest.mark.parametrize("signals", [1, 2])
def test_threads_that_a_handler_has_left_do_not_keep_the_process(
    bench: Bench, start: Callable[..., Process], signals: int
) -> None:
    """Neither those of asyncio.to_thread nor its own, which the interpreter would wait for."""
    trace_table(bench)
    workflow = define_only(bench, "leaves_a_thread")
    run = bench.trigger(workflow)
    process = start(bench, grace=1)
    wait_until(lambda: traced(bench, "begun") == 1, "the handler")
    process.signal(signal.SIGTERM)
    if signals == 2:
        process.wait_event(WAITING)
        process.signal(signal.SIGINT)
    assert process.wait() == (exits.EXIT_OK if signals == 1 else exits.EXIT_INTERRUPTED)
    assert bench.task(run, "leaves_a_thread")["state"] == "ready"


def test_work_that_a_handler_has_left_in_pools_does_not_keep_the_process(
    bench: Bench, start: Callable[..., Process]
) -> None:
    """Its slot is not lost, and its threads are daemons, which the interpreter joins all the same."""
    trace_table(bench)
    workflow = define_only(bench, "leaves_work")
    run = bench.trigger(workflow)
    process = start(bench)
    assert bench.wait_run(run) == ["succeeded"]
    process.signal(signal.SIGTERM)
    assert process.wait() == exits.EXIT_OK


def test_a_worker_whose_descriptors_are_gone_says_so_and_fails(
    bench: Bench, start: Callable[..., Process]
) -> None:
    """Nobody has asked it to stop, so it must be started again."""
    trace_table(bench)
    workflow = define_only(bench, "closes_everything")
    bench.trigger(workflow)
    process = start(bench, grace=1)
    assert process.wait() == exits.EXIT_FAILED
    assert any(line.get("level") == "error" for line in process.log)
