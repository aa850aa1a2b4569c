"""Sessions that are stepped through FlowForge's functions, statement by statement.

A `Laboratory` is a database whose functions pause before each inner statement (instrument.py). Its sessions
run programs: a session goes from one pause to the next when it is told to, and the laboratory knows of each
whether it has stopped, is blocked by another one's lock, or is done. Who goes on when, explore.py decides.
"""

import json
import select
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import psycopg
from psycopg import pq
from psycopg.rows import namedtuple_row
from psycopg.types.json import Jsonb

from tests.services.database import Clock, Database
from tests.services.postgres import PostgresServer
from tests.sql.instrument import FUNCTIONS, functions, instrument

_PATIENCE = 30.0


@dataclass(frozen=True)
class Call:
    """A call of a function of FlowForge; answers its rows, as objects or, of a scalar function, as values."""

    function: str
    arguments: tuple[Any, ...]

    @property
    def sql(self) -> str:
        holes = ", ".join(["%s"] * len(self.arguments))
        return f"select coalesce(jsonb_agg(to_jsonb(r)), '[]') from flowforge.{self.function}({holes}) r"


COMMIT, ROLLBACK = "commit", "rollback"

# What a session does: calls, a statement of its own after a call, COMMIT or ROLLBACK to end a transaction
# early. The transaction that is open at the end is committed.
Program = Generator[Call | str, Any, Any]


def table(function: str, *arguments: Any) -> Program:
    """A call that answers rows."""
    return (yield Call(function, arguments))


def call(function: str, *arguments: Any) -> Program:
    """A call that answers one row or value."""
    (value,) = yield Call(function, arguments)
    return value


class SqlError(Exception):
    """A call raised; its transaction has been rolled back. Thrown into the program that made the call."""

    def __init__(self, sqlstate: str, message: str) -> None:
        super().__init__(f"{sqlstate} {message}")
        self.sqlstate = sqlstate


class Session:
    """One connection. At any time it is stopped (at a pause, or between statements), blocked, or done."""

    def __init__(self, laboratory: "Laboratory", number: int) -> None:
        self.number = number
        self.done = True
        self.blocked = False
        self.place = ""
        self.steps = 0
        self.result: Any = None
        self.called: set[str] = set()
        self._laboratory = laboratory
        self._connection = laboratory.database.connect()
        self._connection.execute(f"set flowforge_test.session = {number}; set deadlock_timeout = '10ms'")
        self._connection.add_notice_handler(self._noticed)
        self._pq = self._connection.pgconn
        self._poll = select.poll()
        self._poll.register(self._pq.socket, select.POLLIN)
        self.pid = self._connection.info.backend_pid
        self._turn: int = laboratory.value(
            f"select (last_value + is_called::int) % 2 from flowforge_test.pauses_{number}"
        )
        laboratory.value("select pg_advisory_lock(%s, %s)", number, self._turn)
        self._program: Program = _returning(None)
        self._next: Call | str = COMMIT
        self._in_transaction = self._in_flight = False
        self._answer: pq.abc.PGresult
        self._claims: list[tuple[int, int, str]] = []
        self._accepted: list[tuple[int, int]] = []
        self._fetched: dict[int, tuple[int, str]] = {}

    def _noticed(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        turn, _, place = (diagnostic.message_primary or "").partition(" ")
        if turn == str(self._turn):
            self.place = place

    @property
    def stopped(self) -> bool:
        return not self.done and not self.blocked

    @property
    def position(self) -> str:
        """Where it stopped: before which statement of which function, or before what end."""
        return self.place or str(self._next)

    def start(self, program: Program) -> None:
        """Go to the first stop of a program."""
        self._program = program
        self.done = False
        self.steps = 0
        self.result = None
        self.called = set()
        self._advance(lambda: next(program))
        self.wait()

    def step(self) -> None:
        """Go from a stop to the next, or as far as the locks of other sessions let it."""
        self.steps += 1
        if self.place:
            self.place = ""
            self._laboratory.hand_over(self.number, self._turn)
            self._turn = 1 - self._turn
        else:
            self._send(str(self._next))
        self.wait()

    def wait(self) -> None:
        """Wait until it has stopped, is done, or is blocked by another session."""
        deadline = time.monotonic() + _PATIENCE
        self.blocked = False
        patience = 1
        while self._in_flight and not self.place:
            if self._poll.poll(patience):
                self._pq.consume_input()
                # The notice of a pause sends the result of "begin" ahead of that of the call.
                while self._in_flight and not self._pq.is_busy():  # type: ignore[redundant-expr]  # _answered clears it
                    if result := self._pq.get_result():
                        self._answer = result
                    else:
                        self._answered(self._answer)
            elif self._laboratory.is_blocked(self):
                self.blocked = True
                self._laboratory.blocked.add(self.number)
                return
            else:
                patience *= 2
            assert time.monotonic() < deadline, f"session {self.number} neither stops nor is blocked"

    def _answered(self, answer: pq.abc.PGresult) -> None:
        self._in_flight = False
        if answer.status == pq.ExecStatus.FATAL_ERROR:
            sqlstate = (answer.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
            error = SqlError(sqlstate, answer.error_message.decode().strip())
            self._pq.exec_(b"rollback")
            self._end_transaction(committed=False)
            self._advance(lambda: self._program.throw(error))
        elif isinstance(self._next, Call):
            value = answer.get_value(0, 0) or b"[]"
            rows = json.loads(value, object_hook=lambda fields: SimpleNamespace(**fields))
            self._witness(self._next, rows)
            self._advance(lambda: self._program.send(rows))
        else:
            if self._next in (COMMIT, ROLLBACK):
                self._end_transaction(committed=self._next == COMMIT)
            self._advance(lambda: next(self._program))

    def _advance(self, resume: Callable[[], Call | str]) -> None:
        """Take the program's next statement. A call is sent at once, since it stops at its first pause."""
        try:
            self._next = resume()
        except StopIteration as end:
            self.result = end.value
            self._program = _returning(end.value)
            self._next = COMMIT
            self.done = not self._in_transaction
            return
        if isinstance(self._next, Call):
            self.called.add(self._next.function)
            text = psycopg.ClientCursor(self._connection).mogrify(self._next.sql, self._next.arguments)
            self._send(text if self._in_transaction else f"begin; {text}")
            self._in_transaction = True

    def _send(self, text: str) -> None:
        self._pq.send_query(text.encode())
        self._in_flight = True

    def _end_transaction(self, *, committed: bool) -> None:
        self._in_transaction = False
        if committed:
            self._laboratory.claims += self._claims
            self._laboratory.accepted += self._accepted
        self._claims, self._accepted = [], []
        self._laboratory.released = True

    def _witness(self, statement: Call, rows: list[Any]) -> None:
        if statement.function == "fetch_outbox":
            self._fetched = {each.outbox_id: (each.task_run_id, each.dispatch_id) for each in rows}
        elif statement.function == "mark_published":
            self._laboratory.messages += [self._fetched[each] for each in statement.arguments[0]]
        elif statement.function.startswith("claim_"):
            claim_id = next(str(each) for each in statement.arguments if isinstance(each, uuid.UUID))
            won = [(r.task_run_id, r.fencing_token, claim_id) for r in rows if r.outcome == "claimed"]
            assert len({each[0] for each in won}) == len(won), f"one call won a task run twice: {won}"
            self._claims += won
        elif statement.function == "finish_task_run" and rows == ["accepted"]:
            self._accepted.append((statement.arguments[0], statement.arguments[1]))
        elif statement.function == "finish_task_runs":
            tokens = statement.arguments[1]
            self._accepted += [
                (r.task_run_id, tokens[r.position - 1]) for r in rows if r.answer == "accepted"
            ]

    def close(self) -> None:
        """End the session wherever it is; its locks are free when this returns."""
        self._laboratory.value("select pg_terminate_backend(%s, 10000)", self.pid)
        self._connection.close()
        self._laboratory.value("select pg_advisory_unlock(%s, %s)", self.number, self._turn)


def _returning(value: Any) -> Program:
    """A program that does nothing more."""
    yield from ()
    return value


class Run:
    """One run, as the controller sees it at the moment."""

    def __init__(self, laboratory: "Laboratory", run_id: int) -> None:
        self.id = run_id
        self._laboratory = laboratory

    @property
    def state(self) -> str:
        return str(self._laboratory.value("select state from flowforge.run where run_id = %s", self.id))

    def rows(self, task: str | None = None) -> list[Any]:
        """Its task runs, ascending; all of them, or the own row and all elements of one task."""
        return self._laboratory.rows(
            "select tr.*, t.name from flowforge.task_run tr join flowforge.task t using (task_id)"
            " where tr.run_id = %s and t.name = coalesce(%s, t.name) order by tr.task_run_id",
            *(self.id, task),
        )

    def __getitem__(self, task: str) -> Any:
        return next(row for row in self.rows(task) if row.map_index is None)

    def states(self) -> dict[str, str]:
        return {row.name: row.state for row in self.rows() if row.map_index is None}


class Laboratory:
    """A database with the instrumented functions, and who steps sessions through them."""

    def __init__(self, server: PostgresServer, template: str) -> None:
        self.database = Database(server, template)
        self.control = self.database.connect()
        # Its tables are small and never analysed.
        self.control.execute("set enable_seqscan = off; set jit = off")
        self.control.pgconn.prepare(
            b"hand_over", b"select pg_advisory_lock($1::int, $2::int), pg_advisory_unlock($1::int, $3::int)"
        )
        self.clock = Clock(self.database)
        self.control.execute(Path(__file__).with_suffix(".sql").read_bytes())
        for path in sorted(FUNCTIONS.glob("*.sql")):
            self.install(path.read_text())
        self.sessions: dict[int, Session] = {}
        self._resets = self._last_run_id = 0
        self.claims: list[tuple[int, int, str]] = []
        self.accepted: list[tuple[int, int]] = []
        # What the broker has confirmed to publishers, whatever became of the mark.
        self.messages: list[tuple[int, str]] = []
        self.released = False
        # Of the present schedule: the steps in their order, who was ever blocked, and whether two sessions
        # met: at some moment both had done something and were not done.
        self.trace: list[str] = []
        self.blocked: set[int] = set()
        self.met = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()
        self.clock.close()
        self.control.close()
        forbidden = self.database.forbidden_transitions()
        self.database.drop()
        assert error or not forbidden

    def install(self, text: str) -> None:
        """Put the instrumented form of the functions of a file (but the clock) into the database."""
        for function in functions(text):
            if function.name != "_clock":
                self.control.execute(instrument(function).encode())

    def hand_over(self, number: int, turn: int) -> None:
        """Let a session pass its pause, and hold the lock of its next. This is sent more often than any other
        statement, and so without what psycopg does around one."""
        arguments = [b"%d" % each for each in (number, 1 - turn, turn)]
        answer = self.control.pgconn.exec_prepared(b"hand_over", arguments)
        assert answer.status == pq.ExecStatus.TUPLES_OK, answer.error_message

    def value(self, query: str, *arguments: Any) -> Any:
        row = self.control.execute(query.encode(), arguments or None).fetchone()
        return row[0] if row else None

    def rows(self, query: str, *arguments: Any) -> list[Any]:
        with self.control.cursor(row_factory=namedtuple_row) as cursor:
            return cursor.execute(query.encode(), arguments or None).fetchall()

    def define(self, name: str, *tasks: dict[str, Any]) -> str:
        """Register a workflow; answer its name."""
        self.value("select flowforge.define_workflow(%s)", Jsonb({"name": name, "tasks": list(tasks)}))
        return name

    def trigger(self, workflow: str) -> Run:
        return Run(self, self.value("select flowforge.trigger(%s)", workflow))

    def tick(self) -> None:
        """What a scheduler does in one round when nothing has gone wrong."""
        self.value(
            "select flowforge.settle_finished(), flowforge.expand_map(), flowforge.dispatch_ready(),"
            " flowforge.cancel_leftovers()"
        )

    def start(self, workflow: str) -> Run:
        """Trigger a run and dispatch what can go first."""
        run = self.trigger(workflow)
        self.tick()
        return run

    def expire(self, after: str = "1 hour") -> None:
        """Let every lease and delay run out, with a scheduler that was there all the time."""
        self.clock.advance(after)
        self.value("update flowforge.scheduler set reaper_ticked_at = flowforge._clock() returning true")

    def claim(self, row: Any, lease: str = "30 s") -> Any:
        """Claim a ready task run by its message; answer the winner's row."""
        claim_id = uuid.uuid4()
        (claimed,) = self.rows(
            "select * from flowforge.claim_task_run(%s, %s, 'w0', %s, %s)",
            *(row.task_run_id, row.dispatch_id, claim_id, lease),
        )
        assert claimed.outcome == "claimed"
        self.claims.append((claimed.task_run_id, claimed.fencing_token, str(claim_id)))
        return claimed

    def finish(self, claimed: Any, outcome: str = "succeeded", output: Any = None) -> None:
        """Report how an execution ended; a failure is not tried again."""
        answer = self.value(
            "select flowforge.finish_task_run(%s, %s, %s, %s, null, false)",
            *(claimed.task_run_id, claimed.fencing_token, outcome, Jsonb(output)),
        )
        assert answer == "accepted"
        self.accepted.append((claimed.task_run_id, claimed.fencing_token))

    def is_blocked(self, session: Session) -> bool:
        """Whether a lock that another session holds or is in line for stops this one."""
        others = [each.pid for each in self.sessions.values() if each is not session]
        return bool(self.value("select pg_blocking_pids(%s) && %s::int[]", session.pid, others))

    def before(self, first: str, second: str) -> bool:
        """Whether the present schedule made the one step before the other, or the other never."""
        for step in self.trace:
            if step in (first, second):
                return step == first
        return False

    def interleave(self, programs: Sequence[Program], choose: Callable[[list[int]], int]) -> list[Any]:
        """Step the programs to their ends; answer their results."""
        self.trace, self.blocked, self.met = [], set(), False
        for number in range(1, len(programs) + 1):
            if number not in self.sessions:
                self.sessions[number] = Session(self, number)
        sessions = [self.sessions[number] for number in range(1, len(programs) + 1)]
        for session, program in zip(sessions, programs, strict=True):
            session.start(program)
        while not all(session.done for session in sessions):
            enabled = [session.number for session in sessions if session.stopped]
            if enabled:
                session = self.sessions[choose(enabled)]
                self.trace.append(f"{session.number}: {session.position}")
                session.step()
            else:
                # A cycle: one of them is about to be told.
                for each in sessions:
                    each.wait()
            self.met |= sum(each.steps > 0 and not each.done for each in sessions) > 1
            self._unblock(sessions)
        return [session.result for session in sessions]

    def _unblock(self, sessions: list[Session]) -> None:
        """After the end of a transaction, see who can go on, until nobody's state changes."""
        while self.released:
            self.released = False
            for session in sessions:
                if session.blocked:
                    session.wait()

    def abandon(self) -> None:
        """End all sessions, wherever they are."""
        for session in self.sessions.values():
            session.close()
        self.sessions = {}

    def reset(self) -> None:
        """Forget every run since the last reset."""
        [(_, self._last_run_id)] = self.rows(
            "select flowforge_test.forget(%s),"
            " coalesce(pg_sequence_last_value('flowforge.run_run_id_seq'), 0) as run_id",
            self._last_run_id,
        )
        self.claims, self.accepted, self.messages = [], [], []
        self._resets += 1
        if self._resets % 300 == 0:
            self.control.execute(
                "vacuum flowforge.run, flowforge.task_run, flowforge.outbox, flowforge.attempt,"
                " flowforge.queue, flowforge.scheduler, flowforge_test.claimed, flowforge_test.accepted,"
                " flowforge_test.clock"
            )

    def drive(self) -> int | None:
        """Have every message delivered and every run end; how often only the clock could go on, or None."""
        messages, self.messages = self.messages, []
        waits: int | None = self.value(
            "select flowforge_test.drive(%s::bigint[], %s::uuid[])",
            *([each[0] for each in messages], [each[1] for each in messages]),
        )
        return waits

    def check(self, *, ended: bool) -> None:
        """Raise what broke of all that holds at any time or, if all has `ended`, then."""
        holders: dict[tuple[int, int], str] = {}
        for task_run_id, token, claim_id in self.claims:
            assert holders.setdefault((task_run_id, token), claim_id) == claim_id, "two claims hold one token"
        broken = self.rows(
            "select * from flowforge_test.broken(%s::bigint[], %s::bigint[], %s)",
            *([each[0] for each in self.accepted], [each[1] for each in self.accepted], ended),
        )
        self.claims, self.accepted = [], []
        assert not broken, "\n".join(each[0] for each in broken)
