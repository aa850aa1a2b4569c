"""The processes in which handlers run: whatever becomes of one, by its handler or at its start, hurts nothing
else."""

import errno
import logging
import os
import signal
import subprocess
from typing import Any

import psutil
import pytest

from flowforge import exits
from flowforge.errors import ConfigError
from flowforge.stopping import Stop
from flowforge.worker import children
from flowforge.worker.daemon import Worker, handlers_of
from tests.python import isolated_flows as flows
from tests.python.isolation import Scene, gone
from tests.services.process import wait_until

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
    how = "the execution broke off without an answer: the handler's process died: exit code 3"
    assert task["error"] == f"{how}; given up after 2 executions without an answer"


# -- what a handler has started


@pytest.mark.parametrize("how", ["hangs", "crashes"])
def test_what_a_handler_has_started_ends_with_its_process(scene: Scene, how: str) -> None:
    """Which a time limit kills, or the handler itself: the next attempt is not to run beside it."""
    with scene.worker(flows.starts_another):
        assert scene.run(flows.starts_another, how=how)["state"] == "failed"
        [other] = scene.pids()
        wait_until(lambda: gone(other), "the end of what it has started")


def test_what_a_handler_has_started_may_go_on_until_its_process_ends(scene: Scene) -> None:
    with scene.worker(flows.starts_another, flows.pid, concurrency=1):
        assert scene.run(flows.starts_another, how="returns")["state"] == "succeeded"
        scene.run(flows.pid)
        [other] = scene.pids()
        assert not gone(other)
    wait_until(lambda: gone(other), "the end of what it has started")


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


def test_a_process_that_never_gets_ready_is_replaced(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a name server does not answer while a module is imported. Also where no time limit lets a task
    wait as long as it takes."""
    monkeypatch.setattr(children, "START_PATIENCE", 0.5)
    code = f"""
import time
from pathlib import Path
from tests.python.isolated_flows import quick
try: Path({str(scene.directory / "first")!r}).touch(exist_ok=False)
except FileExistsError: pass
else: time.sleep(3600)
"""
    run = scene.trigger(flows.quick)
    source = handlers_in(scene, monkeypatch, code)
    with scene.worker(flows.quick, sources=[source], concurrency=1):
        assert scene.ended(run)["state"] == "succeeded"
    assert "a process for handlers does not get ready; it is replaced" in caplog.text


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
