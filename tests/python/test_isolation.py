"""Handlers in processes of their own: everything works as in threads, and whatever a handler does hurts only
its own task run."""

import contextlib
import errno
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowforge import exits
from flowforge.config import Config
from flowforge.definition import Workflow
from flowforge.errors import ConfigError, InvalidDefinition
from flowforge.stopping import Stop
from flowforge.worker import child, children, executor
from flowforge.worker.daemon import Worker, handlers_of
from flowforge.worker.execution import Execution, Finish, Release
from tests.python import isolated_flows as flows
from tests.python.cluster import PROGRAM, Process
from tests.python.slots import an_execution
from tests.python.workbench import Bench, RunningWorker
from tests.services.process import has_ended, wait_for_end, wait_until

FLOWS = "tests.python.isolated_flows"
LEASE = 3600
"""So long that nothing which the tests wait for comes of its end."""


class Scene:
    """A bench, workers whose handlers are isolated, and the files by which handlers and test tell each
    other."""

    def __init__(self, bench: Bench, directory: Path) -> None:
        self.bench, self.directory, self.before = bench, directory, set[psutil.Process]()
        self._witness, self._go = directory / "witness", directory / "go"
        bench.execute("create table public.booked (value bigint)")

    def trigger(self, workflow: Workflow, **value: Any) -> int:
        self.bench.define(workflow)
        return self.bench.trigger(workflow, {"witness": str(self._witness), "go": str(self._go), **value})

    def pids(self) -> list[int]:
        """The processes of the executions so far."""
        return list(map(int, self._witness.read_text().split())) if self._witness.exists() else []

    def await_executions(self, count: int = 1) -> list[int]:
        wait_until(lambda: len(self.pids()) >= count, f"{count} executions")
        return self.pids()

    def go(self) -> None:
        self._go.touch()

    @contextlib.contextmanager
    def worker(self, *workflows: Workflow, **settings: Any) -> Iterator[RunningWorker]:
        """A worker for the time of the block, after which no process is left and nothing is broken."""
        given = {"isolation": "processes", "lease": LEASE, "sources": [FLOWS], **settings}
        self.before = set(psutil.Process().children())
        with self.bench.worker(*workflows, **given) as running:
            yield running
        assert not set(psutil.Process().children()) - self.before
        assert self.bench.violations() == []

    def run(self, workflow: Workflow, **value: Any) -> dict[str, Any]:
        """One run to its end; its task."""
        return self.ended(self.trigger(workflow, **value))

    def ended(self, run: int) -> dict[str, Any]:
        self.bench.wait_run(run)
        return self.bench.task(run, "task")


@pytest.fixture
def scene(bench: Bench, tmp_path: Path) -> Scene:
    return Scene(bench, tmp_path)


@pytest.fixture
def any_scene(any_bench: Bench, tmp_path: Path) -> Scene:
    """With either delivery."""
    return Scene(any_bench, tmp_path)


def gone(pid: int) -> bool:
    try:
        return has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


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
                "where application_name = 'flowforge worker transaction'"
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


# -- what dies


def test_a_crash_hurts_only_its_own_task_run(any_scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """It is given back at once, long before its lease ends, and executed again in the same attempt. The log
    says how it died."""
    caplog.set_level(logging.WARNING)
    told = {
        "exit": "exit code 3",
        "kill": "SIGKILL",
        "segmentation fault": "SIGSEGV",
        "abort": "SIGABRT",
    }
    with any_scene.worker(flows.dies_once, flows.waits, concurrency=3):
        other = any_scene.trigger(flows.waits)
        [other_pid] = any_scene.await_executions()
        runs = [
            any_scene.trigger(flows.dies_once, how=how, witness=str(any_scene.directory / how))
            for how in told
        ]
        for task in map(any_scene.ended, runs):
            assert (task["output"], task["attempt"], task["fencing_token"]) == (2, 1, 2)
        any_scene.go()
        assert any_scene.ended(other)["output"] == other_pid
    records = [vars(each)["keys"] for each in caplog.records if "broken off" in each.getMessage()]
    assert {each["run"]: each["error"] for each in records} == {
        run: f"the handler's process died: {how}" for run, how in zip(runs, told.values(), strict=True)
    }
    assert len(records) == len(told)


def test_a_task_that_always_crashes_fails_with_a_reason(scene: Scene) -> None:
    with scene.worker(flows.dies):
        task = scene.run(flows.dies)
    assert (task["state"], len(scene.pids())) == ("failed", 2)
    assert task["error"].endswith("given up after 2 executions without an answer")


# -- what is no business of a handler


def test_what_a_handler_does_to_its_process_ends_in_its_state(scene: Scene) -> None:
    outputs = {"forks": {"exit code": 0}, "prints bytes": 5, "ends another": -signal.SIGTERM}
    errors = {
        "leaves": "SystemExit: 5",
        "closes everything": "given up after 1 executions",
        "closes everything and hangs": "given up after 1 executions",
        "leaves a daemon": "given up after 1 executions",
    }
    with scene.worker(flows.odd, concurrency=1):
        for do, output in outputs.items():
            assert scene.run(flows.odd, do=do)["output"] == output, do
        large = "x" * 16_000_000
        assert scene.run(flows.odd, do="large", value=large)["output"] == large
        for do, error in errors.items():
            assert error in scene.run(flows.odd, do=do)["error"], do
            assert scene.run(flows.odd, do="large", value="next")["output"] == "next", do
    [daemon] = scene.pids()
    os.kill(daemon, signal.SIGKILL)


def test_a_process_has_its_socket_and_nothing_else_of_the_worker(scene: Scene) -> None:
    with scene.worker(flows.odd):
        has = scene.run(flows.odd, do="tells what it has")["output"]
    assert (has["sockets"], has["others"]) == (1, [])
    assert not any(scene.bench.db.dsn in argument for argument in has["arguments"])
    assert has["settings"] == [name for name in sorted(os.environ) if name.startswith("FLOWFORGE")]


# -- starting


def handlers_in(scene: Scene, monkeypatch: pytest.MonkeyPatch, code: str) -> str:
    """A module that is different in the worker's children."""
    (scene.directory / "module_of_test.py").write_text(code)
    monkeypatch.syspath_prepend(scene.directory)
    return "module_of_test"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("1 / 0", "module module_of_test cannot be imported: "),
        ("import os; os._exit(4)", "a process for handlers ended before it was ready: exit code 4"),
        ("from flowforge import Workflow\nother = Workflow('o')\nother.task(name='o')(print)",
         "module_of_test held handler 'pid.task' only in the worker"),
        ("from tests.python.isolated_flows import pid; kept = bytearray(60_000_000)",
         "a memory limit of 64 MiB leaves less than 8 MiB to handlers"),
    ],
)  # fmt: skip
def test_a_process_that_is_of_no_use_ends_the_worker(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: str, told: str
) -> None:
    """With the reason, and what it had claimed given back uncounted."""
    run = scene.trigger(flows.pid)
    source = handlers_in(scene, monkeypatch, code)
    with scene.worker(flows.pid, sources=[source], memory_limit=64) as worker:
        assert worker.wait_ended() == exits.EXIT_FAILED
        assert worker.worker.health.state == "failed"
    assert told in caplog.text
    task = scene.bench.task(run, "task")
    assert (task["state"], task["attempt"], task["reaps"]) == ("ready", 1, 0)


def test_processes_that_are_slow_to_start_end_no_worker(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when many start at once on a busy machine. What waits for one is given back uncounted, health says
    so, and it goes on starting."""
    monkeypatch.setattr(children, "START_LIMIT", 0.3)
    code = f"""
from pathlib import Path
from tests.python.isolated_flows import pid
while not Path({str(scene.directory / "go")!r}).exists(): pass
"""
    run = scene.trigger(flows.pid)
    with scene.worker(flows.pid, sources=[handlers_in(scene, monkeypatch, code)], concurrency=1) as worker:
        wait_until(lambda: worker.counts["released_unstarted"] >= 2, "tries")
        wait_until(lambda: worker.worker.health.state == "error", "health that says so")
        assert worker.worker.health._state["detail"] == "a process for handlers is not ready after 0.3 s"
        [starting] = set(psutil.Process().children()) - scene.before
        scene.go()
        task = scene.ended(run)
        wait_until(lambda: worker.worker.health.state == "ok", "health")
    assert (task["output"], task["attempt"], task["reaps"]) == (starting.pid, 1, 0)


def test_a_time_limit_shorter_than_the_start_of_a_process_gets_its_turn(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given back while the process goes on starting, for the next."""
    code = f"""
from pathlib import Path
from tests.python.isolated_flows import quick
while not Path({str(scene.directory / "go")!r}).exists(): pass
"""
    run = scene.trigger(flows.quick)
    source = handlers_in(scene, monkeypatch, code)
    with scene.worker(flows.quick, sources=[source], concurrency=1) as worker:
        wait_until(lambda: worker.counts["claimed"] >= 2, "a second claim")
        [process] = set(psutil.Process().children()) - scene.before
        scene.go()
        task = scene.ended(run)
        assert (task["state"], task["output"]) == ("succeeded", process.pid)


def test_without_the_names_of_modules_there_are_no_processes(scene: Scene) -> None:
    config = scene.bench.config.replace(isolation="processes")
    with pytest.raises(ConfigError, match=r"'pid\.task' is to run in a process of its own"):
        Worker(handlers_of([flows.pid]), config, Stop())


def test_while_there_can_be_no_more_processes_they_are_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Health says so, and nothing is lost or counted."""
    real, full = subprocess.Popen, True

    def popen(*arguments: Any, **options: Any) -> Any:
        if full:
            raise OSError(errno.EAGAIN, "no more processes")
        return real(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(children, "START_AGAIN", 0.05)
    run = scene.trigger(flows.pid)
    with scene.worker(flows.pid) as worker:
        wait_until(lambda: worker.worker.health.state == "error", "health that says so")
        wait_until(lambda: worker.counts["released_unstarted"] >= 2, "tries")
        full = False
        assert scene.ended(run)["state"] == "succeeded"
        wait_until(lambda: worker.worker.health.state == "ok", "health")
    task = scene.bench.task(run, "task")
    assert (task["attempt"], task["reaps"]) == (1, 0)
    assert "no process for handlers can be started; trying again" in caplog.text


@pytest.mark.parametrize("error", ["MemoryError()", "ConnectionRefusedError(111, 'refused')"])
def test_what_is_refused_to_a_module_for_now_is_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """While the worker has others at work, perhaps."""
    code = f"""
from pathlib import Path
from tests.python.isolated_flows import pid
if not Path({str(scene.directory / "go")!r}).exists(): raise {error}
"""
    monkeypatch.setattr(children, "START_AGAIN", 0.05)
    run = scene.trigger(flows.pid)
    source = handlers_in(scene, monkeypatch, code)
    with scene.worker(flows.pid, sources=[source]) as worker:
        wait_until(lambda: worker.worker.health.state == "error", "health that says so")
        scene.go()
        assert scene.ended(run)["state"] == "succeeded"
    assert scene.bench.task(run, "task")["reaps"] == 0


def test_a_process_that_was_given_back_is_not_killed_for_its_last_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose time limit may pass before its end is noted: the process may be at work for another one."""
    killed: list[object] = []

    class Healthy:
        tasks = 0

        def __init__(self, _: child.Setup) -> None: ...

        def run(self, execution: Execution, *_: object) -> child.Ended:
            execution.runs_in(self)
            return child.Ended(Finish("succeeded"), False, "", False)

        def wake(self) -> None: ...

        def kill(self) -> None:
            killed.append(self)

    monkeypatch.setattr(children, "Process", Healthy)
    processes = children.Children(Config(), [], frozenset(), lambda _: None)
    execution = an_execution()
    assert processes.run(execution) == Finish("succeeded")
    assert not execution.kill()
    assert killed == []


def test_a_process_that_runs_handlers_is_no_problem_whatever_becomes_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Health would tell of a want of processes while there is one, and for as long as a handler runs."""

    class Dies:
        def __init__(self, _: child.Setup) -> None: ...

        def run(self, _: Execution, __: object, on_ready: Callable[[], None]) -> child.Ended:
            on_ready()
            raise children.Died("SIGSEGV")

    monkeypatch.setattr(children, "Process", Dies)
    processes = children.Children(Config(), [], frozenset(), lambda _: None)
    processes.problem = "no process for handlers can be started"
    assert processes.run(an_execution()) == Release("crashed")
    assert processes.problem == ""


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
