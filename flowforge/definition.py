"""Workflows as Python says them: decorated functions, turned into the definition that PostgreSQL stores.

The database is the authority on what a valid definition is. What is refused here is only what would
otherwise be found late or blamed on the wrong line: a name used twice, a dependency that does not exist,
something that cannot be called.
"""

from __future__ import annotations

import difflib
import functools
import graphlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    get_args,
    overload,
)

from flowforge.errors import InvalidDefinition

if TYPE_CHECKING:
    from flowforge.worker.context import Context

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")

Duration: TypeAlias = float | timedelta
"""A length of time: a number of seconds, or a timedelta."""

When: TypeAlias = Literal["all_succeeded", "all_done", "any_failed", "any_succeeded", "none_failed"]
"""The trigger rule: what the upstream tasks must have come to for a task to run rather than be skipped."""

Isolation: TypeAlias = Literal["threads", "processes"]
"""Where a worker runs a handler: in a thread of its own process, or in a process that it can kill."""


def seconds(value: Duration, what: str) -> int | float:
    """`value` as a finite number of seconds; whole ones as int, so that equal durations are equal JSON.

    Raises InvalidDefinition, naming `what`, for anything else than a number or a timedelta.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    number: object = value
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise InvalidDefinition(f"{what} must be a number of seconds or a timedelta, not {value!r}")
    return int(number) if number == int(number) else number


@dataclass(frozen=True)
class Retry:
    """How often a task is attempted, and how long it waits in between.

    The wait before attempt n + 1 is `delay * backoff ** (n - 1)`, at most `max_delay`, plus a random part of
    up to `jitter` times itself. The database computes it.
    """

    max_attempts: int
    delay: Duration = 1
    backoff: float = 2
    max_delay: Duration = 3600
    jitter: float = 0.25

    def spec(self) -> dict[str, Any]:
        """The `retry` object of the definition. Raises InvalidDefinition for a duration that is none."""
        return {
            "max_attempts": self.max_attempts,
            "delay": seconds(self.delay, "retry.delay"),
            "backoff": seconds(self.backoff, "retry.backoff"),
            "max_delay": seconds(self.max_delay, "retry.max_delay"),
            "jitter": seconds(self.jitter, "retry.jitter"),
        }


class Task(Generic[P, R_co]):
    """A task of a workflow: the handler, still directly callable, and what the definition says of it."""

    def __init__(
        self,
        workflow: str,
        name: str,
        function: Callable[Concatenate[Context, P], R_co],
        options: dict[str, Any],
        isolation: Isolation | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.workflow = workflow
        self.name = name
        self.function = function
        self.handler: str = options.get("handler", f"{workflow}.{name}")
        self.queue: str = options.get("queue", "default")
        self.isolation = isolation  # the worker's matter, and no part of the definition
        self._options = options

    def __call__(self, ctx: Context, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Calls the handler itself, as a unit test does. Nothing is recorded anywhere."""
        return self.function(ctx, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<Task {self.workflow}.{self.name}>"

    @property
    def upstream(self) -> tuple[str, ...]:
        """The names of the tasks this one waits for: those of `after`, then the one of `map`."""
        after: list[str] = list(self._options.get("after", ()))
        mapped: str | None = self._options.get("map")
        if mapped is not None and mapped not in after:
            after.append(mapped)
        return tuple(after)

    def spec(self) -> dict[str, Any]:
        """The task's object of the definition: its name and what was set; the database knows the defaults."""
        return {"name": self.name, **self._options}


AnyTask: TypeAlias = Task[Any, Any]
Upstream: TypeAlias = AnyTask | str


class Workflow:
    """A directed acyclic graph of tasks under a name.

    Tasks are added by the decorator `task`, and name what they depend on by passing the earlier Task objects,
    or names. `Client.define` registers the result; a worker that imports it runs its handlers.
    """

    def __init__(self, name: str, *, description: str | None = None) -> None:
        """Raises InvalidDefinition when the name is not a non-empty string."""
        self.name = _name(name, "a workflow's name")
        self.description = description
        self._tasks: dict[str, AnyTask] = {}
        self._handlers: dict[str, AnyTask] = {}

    def __repr__(self) -> str:
        return f"<Workflow {self.name}: {len(self._tasks)} tasks>"

    @property
    def tasks(self) -> Mapping[str, AnyTask]:
        """The tasks by name, in the order in which they were added."""
        return MappingProxyType(self._tasks)

    @property
    def handlers(self) -> Mapping[str, AnyTask]:
        """The tasks by the handler name that a worker is asked for."""
        return MappingProxyType(self._handlers)

    @overload
    def task(self, function: Callable[Concatenate[Context, P], R], /) -> Task[P, R]: ...

    @overload
    def task(
        self,
        *,
        name: str | None = None,
        after: Upstream | Iterable[Upstream] = (),
        map: Upstream | None = None,
        when: When | None = None,
        queue: str | None = None,
        priority: int | None = None,
        retry: Retry | None = None,
        lease: Duration | None = None,
        time_limit: Duration | None = None,
        start_within: Duration | None = None,
        max_reaps: int | None = None,
        handler: str | None = None,
        isolation: Isolation | None = None,
    ) -> Callable[[Callable[Concatenate[Context, P], R]], Task[P, R]]: ...

    def task(
        self,
        function: Callable[..., Any] | None = None,
        *,
        name: str | None = None,
        after: Upstream | Iterable[Upstream] = (),
        map: Upstream | None = None,  # noqa: A002 - the definition's own word
        when: When | None = None,
        queue: str | None = None,
        priority: int | None = None,
        retry: Retry | None = None,
        lease: Duration | None = None,
        time_limit: Duration | None = None,
        start_within: Duration | None = None,
        max_reaps: int | None = None,
        handler: str | None = None,
        isolation: Isolation | None = None,
        **unknown: object,
    ) -> AnyTask | Callable[[Callable[..., Any]], AnyTask]:
        """Adds the decorated function as a task; with or without arguments.

        name: the task's name; the function's own when left out.
        after: the tasks this one waits for, as Task objects or names (a name may be defined later).
        map: an upstream task whose output is an array: this task runs once per element, given as `ctx.item`.
        when: the trigger rule; all_succeeded when left out.
        queue: the queue whose workers run it. priority: the larger goes first within its queue.
        retry: attempts and back-off; one attempt when left out.
        lease: how long a worker owns an attempt without renewing it; the worker's own when left out.
        time_limit: how long an attempt may run. start_within: how long it may wait for a worker.
        max_reaps: how often an attempt whose worker vanished is offered again before the task fails.
        handler: the name a worker knows the function by; "<workflow>.<task>" when left out.

        isolation: where a worker runs it, "threads" or "processes"; as its setting says when left out.

        Raises InvalidDefinition for a name used twice, a Task of another workflow, a duration that is none,
        an isolation that is none, or something that cannot be called with one context.
        """
        for each in unknown:
            raise InvalidDefinition(_no_option(each))
        if isinstance(after, str | Task):
            after = [after]
        elif not isinstance(after, Iterable):
            raise InvalidDefinition(f"after must be tasks or names of tasks, not {after!r}")
        if retry is not None and not isinstance(retry, Retry):
            raise InvalidDefinition(f"retry must be a Retry(…), such as Retry(max_attempts=3), not {retry!r}")
        given: dict[str, Any] = {
            "after": [self._upstream(task) for task in after] or None,
            "handler": None if handler is None else _name(handler, "a handler's name"),
            "queue": None if queue is None else _name(queue, "a queue's name"),
            "map": None if map is None else self._upstream(map),
            "when": when,
            "priority": priority,
            "retry": None if retry is None else retry.spec(),
            "lease": None if lease is None else seconds(lease, "lease"),
            "time_limit": None if time_limit is None else seconds(time_limit, "time_limit"),
            "start_within": None if start_within is None else seconds(start_within, "start_within"),
            "max_reaps": max_reaps,
        }
        if isolation not in (None, *get_args(Isolation)):
            raise InvalidDefinition(f"isolation is {isolation!r}; allowed is 'threads' or 'processes'")
        options = {key: value for key, value in given.items() if value is not None}

        def add(function: Callable[..., Any]) -> AnyTask:
            return self._add(function, name, options, isolation)

        return add if function is None else add(function)

    @property
    def queues(self) -> frozenset[str]:
        """The queues that its tasks are dispatched to."""
        return frozenset(task.queue for task in self._tasks.values())

    def spec(self) -> dict[str, Any]:
        """The definition to store.

        Raises InvalidDefinition when there is no task, one depends on an unknown one, or they form a cycle.
        """
        if not self._tasks:
            raise InvalidDefinition(f"workflow {self.name!r} has no task: add one with @task")
        for task in self._tasks.values():
            for upstream in task.upstream:
                if upstream not in self._tasks:
                    known = ", ".join(self._tasks)
                    raise InvalidDefinition(
                        f"task {task.name!r} of workflow {self.name!r} depends on {upstream!r}, "
                        f"which is not one of its tasks: {known}"
                    )
        try:
            graphlib.TopologicalSorter({task.name: task.upstream for task in self._tasks.values()}).prepare()
        except graphlib.CycleError as error:
            cycle = " → ".join(error.args[1])
            raise InvalidDefinition(f"the tasks of workflow {self.name!r} form a cycle: {cycle}") from None
        spec: dict[str, Any] = {"name": self.name, "tasks": [task.spec() for task in self._tasks.values()]}
        if self.description is not None:
            spec["description"] = self.description
        return spec

    def _add(
        self,
        function: Callable[..., Any],
        name: str | None,
        options: dict[str, Any],
        isolation: Isolation | None,
    ) -> AnyTask:
        if not callable(function):
            raise InvalidDefinition(
                f"@task of workflow {self.name!r} decorates a function; {function!r} cannot be called "
                "(a task's name is given as name=…)"
            )
        name = _name(getattr(function, "__name__", None) if name is None else name, "a task's name")
        try:
            inspect.signature(function).bind(None)
        except TypeError:
            raise InvalidDefinition(
                f"the handler of task {name!r} must be callable with one argument, the context; "
                f"its signature is {inspect.signature(function)}"
            ) from None
        if name in self._tasks:
            raise InvalidDefinition(
                f"workflow {self.name!r} already has a task {name!r}: give this one a name=…"
            )
        task: AnyTask = Task(self.name, name, function, options, isolation)
        other = self._handlers.get(task.handler)
        if other is not None and other.function is not function:
            raise InvalidDefinition(
                f"task {name!r} and task {other.name!r} of workflow {self.name!r} are different functions "
                f"under one handler name, {task.handler!r}"
            )
        if other is not None and other.isolation != isolation:
            raise InvalidDefinition(
                f"task {name!r} and task {other.name!r} of workflow {self.name!r} have one handler name, "
                f"{task.handler!r}, and so need one isolation"
            )
        self._tasks[name] = task
        self._handlers[task.handler] = task
        return task

    def _upstream(self, upstream: object) -> str:
        if isinstance(upstream, str):
            return upstream
        if not isinstance(upstream, Task):
            raise InvalidDefinition(
                f"a dependency is a task of workflow {self.name!r} or the name of one, not {upstream!r}"
            )
        if self._tasks.get(upstream.name) is not upstream:
            raise InvalidDefinition(f"{upstream!r} is not a task of workflow {self.name!r}")
        return upstream.name


def _no_option(name: str) -> str:
    parameters = inspect.signature(Workflow.task).parameters.values()
    known = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
    return f"@task has no option {name!r}{hint}"


def _name(value: object, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidDefinition(f"{what} must be a non-empty string, not {value!r}")
    return value
