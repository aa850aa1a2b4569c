"""Drives the engine through its SQL functions, as scheduler, worker and client in one."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

# What a claim answered; the attributes are the columns of flowforge.claim_row.
Claim = Any
# Plays the handlers: answers the output, or raises Failure.
Behaviour = Callable[[Claim], Any]

TABLES = (
    *("workflow", "workflow_version", "task", "task_dependency", "queue", "run", "task_run", "attempt"),
    *("outbox", "progress", "worker", "run_retry", "setting", "scheduler", "frontier"),
)


class Failure(Exception):
    """The handler fails with this error."""


def nothing(claim: Claim) -> None:
    """A handler that succeeds with null."""


def failing(*tasks: str) -> Behaviour:
    """Handlers of which those of the named tasks fail; the others answer their task's name."""

    def behave(claim: Claim) -> str:
        if claim.task in tasks:
            raise Failure(f"{claim.task} failed")
        return str(claim.task)

    return behave


def task(name: str, *after: str, **settings: Any) -> dict[str, Any]:
    """A task of a definition."""
    return {"name": name, "after": list(after), **settings}


class Engine:
    """FlowForge over one connection, whose transaction the test keeps open."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        self.sound = True

    # -- statements

    def rows(self, query: str, *parameters: Any) -> list[Any]:
        adapted = [Jsonb(each) if isinstance(each, dict) else each for each in parameters]
        cursor = self.connection.execute(query.encode(), adapted)
        return cursor.fetchall() if cursor.description else []

    def row(self, query: str, *parameters: Any) -> Any:
        (row,) = self.rows(query, *parameters)
        return row

    def value(self, query: str, *parameters: Any) -> Any:
        (value,) = self.row(query, *parameters)
        return value

    def call(self, function: str, *arguments: Any, **named: Any) -> Any:
        """The one value that a function answers."""
        return self.value(*_statement(function, arguments, named))

    def table(self, function: str, *arguments: Any, **named: Any) -> list[Any]:
        """The rows that a function answers."""
        return self.rows(*_statement(function, arguments, named))

    @contextmanager
    def refuses(self, code: str, *words: str) -> Iterator[pytest.ExceptionInfo[psycopg.Error]]:
        """What the block calls must raise this SQLSTATE, name these words and leave nothing behind."""
        before = self.content()
        with pytest.raises(psycopg.Error) as caught, self.connection.transaction():
            yield caught
        assert caught.value.sqlstate == code, caught.value
        for word in words:
            assert word in str(caught.value)
        assert self.content() == before

    @contextmanager
    def changes_nothing(self) -> Iterator[None]:
        before = self.content()
        yield
        assert self.content() == before

    def content(self) -> dict[str, list[str]]:
        """Every row of every table, as text."""
        return {
            name: [
                row.line for row in self.rows(f"select t::text as line from flowforge.{name} t order by 1")
            ]
            for name in TABLES
        }

    # -- time

    def advance(self, interval: str) -> None:
        self.rows("update flowforge_test.clock set reading = reading + %s::interval", interval)

    # -- client

    def define(self, *tasks: dict[str, Any], name: str = "w") -> None:
        self.rows("select flowforge.define_workflow(%s)", {"name": name, "tasks": list(tasks)})

    def trigger(self, workflow: str = "w", **named: Any) -> int:
        run_id: int = self.call("trigger", workflow, **named)
        return run_id

    def start(self, *tasks: dict[str, Any]) -> int:
        """Define a workflow of these tasks, trigger it and dispatch what can be."""
        self.define(*tasks)
        run_id = self.trigger()
        self.schedule()
        return run_id

    # -- scheduler

    def schedule(self) -> None:
        """Everything that the scheduler can do at this moment, but reaping."""
        steps = "settle_finished() + flowforge.expand_map() + flowforge.dispatch_ready()"
        while self.value(f"select flowforge.{steps} + flowforge.cancel_leftovers()"):
            pass

    def reap(self) -> int:
        """One tick of a reaper that has been ticking all along."""
        self.rows("update flowforge.scheduler set reaper_ticked_at = flowforge._clock()")
        taken: int = self.call("reap_expired_leases")
        return taken

    # -- worker

    def claim_next(self, max_rows: int = 1000, queues: tuple[str, ...] = ("default",)) -> list[Claim]:
        """Claim what is dispatched, without its messages."""
        return self.table("claim_next", list(queues), "worker", uuid.uuid4(), "30 s", max_rows)

    def claim_one(self) -> Claim:
        """Claim the next one, after a scheduler has moved in what is due to be offered again."""
        self.rows("select flowforge._promote_due(flowforge._clock(), 1000)")
        (claim,) = self.claim_next(1)
        return claim

    def messages(self) -> list[Any]:
        """The orders to publish, oldest first."""
        return self.rows("select * from flowforge.outbox order by outbox_id")

    def claim(self, message: Any, claim_id: uuid.UUID | None = None, lease: str = "30 s") -> Claim:
        """Claim by a message: anything with task_run_id and dispatch_id."""
        (claim,) = self.table(
            "claim_task_run",
            message.task_run_id,
            message.dispatch_id,
            "worker",
            claim_id or uuid.uuid4(),
            lease,
        )
        return claim

    def finish(self, claim: Claim, outcome: str = "succeeded", **named: Any) -> str:
        answer: str = self.call("finish_task_run", claim.task_run_id, claim.fencing_token, outcome, **named)
        return answer

    def finish_all(self, claims: list[Claim], outcome: str = "succeeded") -> list[str]:
        """Finish in one batch; answers in the order of the claims."""
        ids, tokens = [each.task_run_id for each in claims], [each.fencing_token for each in claims]
        outcomes, nulls, retryables = [outcome] * len(claims), [None] * len(claims), [True] * len(claims)
        answers = self.table("finish_task_runs", ids, tokens, outcomes, nulls, nulls, retryables)
        return [each.answer for each in answers]

    def work(self, behaviour: Behaviour = nothing, max_rows: int = 1000) -> int:
        """Claim, run and finish what is dispatched; answers how many."""
        claims = self.claim_next(max_rows)
        for claim in claims:
            try:
                output = behaviour(claim)
            except Failure as failure:
                answer = self.finish(claim, "failed", error=str(failure))
            else:
                answer = self.finish(claim, output=Jsonb(output))
            assert answer == "accepted"
        return len(claims)

    def drive(self, behaviour: Behaviour = nothing) -> None:
        """Schedule and work, until there is nothing to do but wait."""
        self.schedule()
        while self.work(behaviour):
            self.schedule()

    def drive_until(self, name: str, behaviour: Behaviour = nothing) -> None:
        """Drive until a task of this name waits for a worker."""
        self.schedule()
        waiting = "select count(*) from flowforge.task_run_status where state = 'ready' and task = %s"
        while not self.value(waiting, name):
            assert self.work(behaviour)
            self.schedule()

    # -- looking

    def states(self, run_id: int) -> dict[str, str]:
        """State of each task; elements of maps left out."""
        query = "select task, state from flowforge.task_run_status where run_id = %s and map_index is null"
        return {row.task: row.state for row in self.rows(query, run_id)}

    def run_state(self, run_id: int) -> str:
        state: str = self.value("select state::text from flowforge.run where run_id = %s", run_id)
        return state

    def task_run(self, run_id: int, name: str, map_index: int | None = None) -> Any:
        """The row of a task run."""
        return self.row(
            """select tr.* from flowforge.task_run tr join flowforge.task t using (task_id)
            where tr.run_id = %s and t.name = %s and tr.map_index is not distinct from %s
            order by tr.generation desc limit 1""",
            *(run_id, name, map_index),
        )


def _statement(function: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    places = ["%s"] * len(arguments) + [f"{name} => %s" for name in named]
    return f"select * from flowforge.{function}({', '.join(places)})", *arguments, *named.values()
