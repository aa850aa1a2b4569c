"""The worker's side of handlers' processes: who gets a task, how long one is waited for, how one ends."""

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from flowforge.config import Config
from flowforge.worker import child, children
from flowforge.worker.execution import Execution, Finish, Release
from tests.python.slots import an_execution


def test_a_process_that_has_ended_is_not_killed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another's by then."""
    killed: list[int] = []
    process = children.Process(child.Setup(Config(), (), frozenset()))
    pid = process._process.pid
    assert os.getsid(pid) == pid, "a terminal's signals reach it"
    real = os.killpg

    def killpg(group: int, number: int) -> None:
        killed.append(group)
        real(group, number)

    monkeypatch.setattr(os, "killpg", killpg)
    assert process.close() == "SIGKILL"
    assert set(killed) == {pid}
    killed.clear()
    process.kill()
    assert killed == []


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


class Scripted:
    """A process of no machine: it has `age`, and is `ready` or not. A task gets its process as the report."""

    def __init__(self, _: object = None, *, age: float = 0, ready: bool = True, tasks: int = 0) -> None:
        self.age, self.ready, self.tasks, self.usable, self.closed = age, ready, tasks, True, False

    def run(self, _: Execution, __: object, on_ready: Callable[[], None]) -> child.Ended:
        if not self.ready:
            raise children.NotReady
        on_ready()
        self.tasks += 1
        return child.Ended(Finish("succeeded", output=str(id(self))), False, "", False)

    def close(self) -> str:
        self.closed = True
        return "closed"


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> children.Children:
    monkeypatch.setattr(children, "Process", Scripted)
    return children.Children(Config(), [], frozenset(), lambda _: None)


def test_what_is_ready_is_used_before_what_is_not(processes: Any) -> None:
    """Which may never be. As long as it is waited for, health does not say otherwise."""
    ready, hangs = Scripted(tasks=1), Scripted(ready=False)
    processes._idle = [hangs]
    assert processes.run(an_execution()) == Release("unstarted")
    problem = processes.problem
    assert "not ready" in problem
    processes._idle[:0] = [ready]
    for _ in range(2):
        assert processes.run(an_execution()) == Finish("succeeded", output=str(id(ready)))
        assert processes.problem == problem
    hangs.ready = True
    processes._idle = [hangs]
    assert processes.run(an_execution()) == Finish("succeeded", output=str(id(hangs)))
    assert processes.problem == ""


def test_what_was_waited_for_and_ended_is_waited_for_no_more(processes: Any) -> None:
    """As when its module raises at last: health would tell of it for ever."""
    ends = iter([children.NotReady(), children.NotStarted("its module raises")])

    class Ends(Scripted):
        def run(self, _: Execution, __: object, on_ready: Callable[[], None]) -> child.Ended:
            raise next(ends)

    processes._idle = [Ends(ready=False)]
    assert processes.run(an_execution()) == Release("unstarted")
    assert "not ready" in processes.problem
    with pytest.raises(children.NotStarted):
        processes.run(an_execution())
    assert processes.problem == ""


def test_each_process_that_is_replaced_gives_the_next_ones_more_time(processes: Any) -> None:
    """Else a long import would never come to its end. One that took no longer than usual ends that, and one
    that took longer does not."""

    def lasts(seconds: float) -> None:
        hangs = Scripted(ready=False, age=seconds - 1)
        processes._idle = [hangs]
        assert processes.run(an_execution()) == Release("unstarted")
        assert processes._take() is hangs
        processes._idle = [hangs]
        hangs.age += 2
        assert processes._take() is not hangs
        assert hangs.closed
        assert processes.problem == ""

    for times in (1, 2, 4):
        lasts(times * children.START_PATIENCE)
    processes._idle = [Scripted(age=children.START_PATIENCE + 1)]
    processes.run(an_execution())
    lasts(8 * children.START_PATIENCE)
    processes._idle = []
    processes.run(an_execution())
    lasts(children.START_PATIENCE)


def test_that_there_can_be_no_more_is_a_problem_until_there_is_one_more(
    processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever others do meanwhile, and whatever becomes of its handler."""
    monkeypatch.setattr(children, "START_AGAIN", 0)

    def refused(_: object) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    class Dies(Scripted):
        def run(self, _: Execution, __: object, on_ready: Callable[[], None]) -> child.Ended:
            on_ready()
            raise children.Died("SIGSEGV")

    with monkeypatch.context() as patch:
        patch.setattr(children, "Process", refused)
        assert processes.run(an_execution()) == Release("unstarted")
    processes._idle = [Scripted(tasks=1)]
    processes.run(an_execution())
    assert "no more processes" in processes.problem
    with monkeypatch.context() as patch:
        patch.setattr(children, "REFUSED_FOR", 0)  # for long nobody was in want of one
        processes.run(an_execution())
    assert processes.problem == ""
    processes._refused, processes._idle = "no more processes", []
    monkeypatch.setattr(children, "Process", Dies)
    assert processes.run(an_execution()) == Release("crashed")
    assert processes.problem == ""
