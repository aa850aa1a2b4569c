"""Many things at once in the main thread, to which servers must belong: generators that yield what they wait
for."""

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

Task = Generator[Callable[[], bool], None, None]
"""Goes on when what it has yielded last says True."""


def after(seconds: float) -> Callable[[], bool]:
    """So many seconds from now."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until


def either(*conditions: Callable[[], bool]) -> Callable[[], bool]:
    """The first of these."""
    return lambda: any(condition() for condition in conditions)


class Loop:
    """Runs tasks, and what blocks in threads beside them. What a task raises goes to its `failed`."""

    def __init__(self) -> None:
        self._tasks: list[tuple[Task, Callable[[], bool], Callable[[Exception], None]]] = []
        self._pool = ThreadPoolExecutor(8)

    def start(self, task: Task, failed: Callable[[Exception], None]) -> None:
        self._advance(task, failed)

    def tick(self) -> None:
        """Look once at everything that is waited for."""
        tasks, self._tasks = self._tasks, []
        for task, condition, failed in tasks:
            if condition():
                self._advance(task, failed)
            else:
                self._tasks.append((task, condition, failed))

    @property
    def idle(self) -> bool:
        return not self._tasks

    def background(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Run in a thread; a task yields `.done` of it, and then takes its `.result()`."""
        return self._pool.submit(function, *arguments)

    def repeat(self, seconds: float, function: Callable[[], bool]) -> Callable[[], bool]:
        """Ask `function` in the background every so often until it says True; an exception says False."""
        state: dict[str, Any] = {"asked": None, "next": 0.0}

        def condition() -> bool:
            asked: Future[bool] | None = state["asked"]
            if asked is not None and asked.done():
                state["asked"] = None
                if asked.exception() is None and asked.result():
                    return True
            if state["asked"] is None and time.monotonic() >= state["next"]:
                state["asked"], state["next"] = self._pool.submit(function), time.monotonic() + seconds
            return False

        return condition

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _advance(self, task: Task, failed: Callable[[Exception], None]) -> None:
        try:
            self._tasks.append((task, next(task), failed))
        except StopIteration:
            pass
        except Exception as error:  # noqa: BLE001 -- one fault that cannot be made must not end the others
            failed(error)
