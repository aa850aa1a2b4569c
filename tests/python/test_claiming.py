"""A claim whose outcome is not known is asked for again until the database has said what became of it."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from flowforge import db as database
from flowforge import listen
from flowforge.worker import claiming, dispatches
from flowforge.worker.claim import (
    BARE_CLAIM_NEXT,
    BARE_CLAIM_TASK_RUNS,
    CLAIM_NEXT,
    CLAIM_TASK_RUNS,
    TRACEPARENTS,
)
from flowforge.worker.context import Context
from flowforge.worker.session import Session, Unanswered
from tests.python.workbench import Bench, LossyProxy, RunningWorker, Witness
from tests.services.process import wait_until


def hold_the_first_claim(bench: Bench) -> None:
    """Let the first claim wait in the database, for longer than any lock time-out, until `let_it_commit`."""
    bench.execute(
        """
        create sequence public.claims;
        create table public.held as select 1;
        grant usage on sequence public.claims to public;
        grant select on public.held to public;
        create function public.hold() returns trigger language plpgsql as $$
            begin
                if nextval('public.claims') = 1 then
                    while exists (select from public.held) loop perform pg_sleep(0.01); end loop;
                end if;
                return new;
            end $$;
        create trigger hold before update on flowforge.task_run for each row
            when (old.state = 'ready' and new.state = 'running') execute function public.hold();
        """
    )


def let_it_commit(bench: Bench) -> None:
    bench.execute("delete from public.held")


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The SQLSTATEs that claims were refused with."""
    refused: list[str | None] = []
    real = Session.call

    def call(self: Session, query: str, params: Any, **options: Any) -> list[tuple[Any, ...]]:
        try:
            return real(self, query, params, **options)
        except psycopg.Error as exc:
            if "claim_" in query:
                refused.append(exc.sqlstate)
            raise

    monkeypatch.setattr(Session, "call", call)
    return refused


@pytest.mark.parametrize("sqlstate", ["55P03", "42501"])
def test_a_refused_repeat_gives_no_claim_up(
    any_bench: Bench, proxy: LossyProxy, refusals: list[str | None], sqlstate: str
) -> None:
    """The connection breaks while the claim is under way in the database, and its repeat is refused, for the
    very locks that the first one holds or for a privilege that is away. The first one commits afterwards:
    what it claimed is executed by this worker, not left running until the lease ends."""
    bench, witness = any_bench, Witness(lease=3600)
    way = conninfo_to_dict(proxy.dsn)
    login = make_conninfo(bench.db.create_login("flowforge_worker"), host=way["host"], port=way["port"])
    bench.define(witness.workflow)
    bench.never_redispatch()
    runs = bench.trigger_many(witness.workflow, 4)
    for run in runs:
        bench.wait_state(run, "task", "ready")
    hold_the_first_claim(bench)
    revoked = "flowforge.claim_next, flowforge.claim_task_runs"
    with bench.worker(witness.workflow, database_url=login, lock_timeout=0.2):
        wait_until(
            lambda: (
                bench.one(
                    "select count(*) from pg_stat_activity"
                    " where wait_event = 'PgSleep' and datname = current_database()"
                )
                == 1
            ),
            "the claim to be under way",
        )
        if sqlstate == "42501":
            bench.execute(f"revoke execute on function {revoked} from flowforge_worker")
        with proxy.down():
            pass
        wait_until(lambda: sqlstate in refusals, "the repeat to be refused")
        let_it_commit(bench)
        if sqlstate == "42501":
            wait_until(
                lambda: bench.one("select count(*) from flowforge.task_run where state = 'running'") > 0,
                "the first claim to commit",
            )
            bench.execute(f"grant execute on function {revoked} to flowforge_worker")
        assert bench.wait_run(*runs) == ["succeeded"] * 4
    assert sorted(task_run for task_run, _ in witness.executions) == sorted(
        bench.task(run, "task")["task_run_id"] for run in runs
    )


def test_a_worker_that_cannot_try_to_listen_polls_and_tries_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the server's queue of notifications is full: work goes on, and the worker is woken later."""
    monkeypatch.setattr(dispatches, "TRY_AGAIN_AFTER", 0.0)
    full = True

    def refused_while_full(conn: database.Connection, connect: Callable[[], database.Connection]) -> bool:
        if full:
            conn.execute("select 1 / 0")
        return listen.hears(conn, connect)

    monkeypatch.setattr(dispatches, "hears", refused_while_full)
    witness = Witness()
    bench.define(witness.workflow)
    with bench.worker(witness.workflow) as worker:
        assert bench.wait_run(bench.trigger(witness.workflow)) == ["succeeded"]
        full = False
        claimer: Any = worker.worker._claimer
        wait_until(lambda: claimer._hears is True, "another try")
        assert bench.wait_run(bench.trigger(witness.workflow)) == ["succeeded"]


def too_much_at_first(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    """The answers to claims do not arrive, until they are asked for in parts; `then` is called before each
    part."""
    real = Session.call
    bare = False

    def call(self: Session, query: str, params: Any, **options: Any) -> list[tuple[Any, ...]]:
        nonlocal bare
        if query == CLAIM_TASK_RUNS and bare:
            then()
        rows = real(self, query, params, **options)
        bare = bare or query in (BARE_CLAIM_NEXT, BARE_CLAIM_TASK_RUNS)
        if rows and query in (CLAIM_NEXT, CLAIM_TASK_RUNS) and not bare:
            raise Unanswered("out of memory for query result", sent=True, too_much=True)
        return rows

    monkeypatch.setattr(Session, "call", call)


def claimed_in_parts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, witness: Witness, then: Callable[[], None] = lambda: None
) -> list[int]:
    """Three runs whose task runs are ready, and whose claim's answer will be too much."""
    too_much_at_first(monkeypatch, then)
    bench.define(witness.workflow)
    bench.never_redispatch()
    runs = bench.trigger_many(witness.workflow, 3)
    for run in runs:
        bench.wait_state(run, "task", "ready")
    return runs


def test_what_waits_its_turn_in_parts_is_held(any_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts before may take longer than the leases of the rest, which may be shorter than the worker's
    own."""
    bench, witness, turns = any_bench, Witness(lease=2), 0

    def await_renewal() -> None:
        nonlocal turns
        turns += 1
        ends = "select {}(lease_expires_at) from flowforge.task_run where state = 'running'"
        latest = bench.one(ends.format("max"))
        wait_until(
            lambda: (bench.one(ends.format("min")) or latest) > latest, "the leases of all to be extended"
        )

    runs = claimed_in_parts(bench, monkeypatch, witness, await_renewal)
    with bench.worker(witness.workflow, concurrency=3, lease=3600) as worker:
        assert bench.wait_run(*runs) == ["succeeded"] * 3
        wait_until(lambda: worker.worker._executor._slots._free == 3, "free slots")
        wait_until(lambda: worker.worker._keeper.held == 0, "nothing to be held")
    assert turns >= 1
    assert len(witness.executions) == 3
    assert bench.one("select array_agg(distinct fencing_token) from flowforge.task_run") == [1]


def test_what_a_stopping_worker_has_claimed_in_parts_is_given_back(
    any_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, witness = any_bench, Witness(lease=3600)
    workers: list[RunningWorker] = []

    def stop() -> None:
        wait_until(lambda: bool(workers), "the worker to be known")
        workers[0].asked.request()
        wait_until(lambda: workers[0].worker._claimer.stopping, "the stop")

    claimed_in_parts(bench, monkeypatch, witness, stop)
    with bench.worker(witness.workflow, concurrency=3) as worker:
        workers.append(worker)
        assert worker.wait_ended() == 0
    assert len(witness.executions) <= 1, "what was asked for when it was told to stop"
    assert bench.one("select count(*) from flowforge.task_run where state = 'running'") == 0


def test_a_part_that_is_not_won_any_more_costs_no_slot(
    any_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, witness, finished = any_bench, Witness(lease=3600), list[int]()

    def finish_one() -> None:
        if not finished:
            finish = "flowforge.finish_task_run(task_run_id, fencing_token, 'succeeded', '1')"
            query = f"select run_id, {finish} from flowforge.task_run where state = 'running' limit 1"
            [(run, _)] = bench.all(query)
            finished.append(run)

    runs = claimed_in_parts(bench, monkeypatch, witness, finish_one)
    with bench.worker(witness.workflow, concurrency=4) as worker:
        assert bench.wait_run(*runs) == ["succeeded"] * 3
        wait_until(lambda: worker.worker._executor._slots._free == 4, "free slots")
        assert worker.worker._keeper.held == 0
    assert len(witness.executions) == 2


def test_what_never_arrives_fails_and_holds_nothing_up(
    any_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given back as crashed after some tries, which counts; the others have been run by then."""
    monkeypatch.setattr(claiming, "_LONGEST_PART", 0.0)
    bench, witness = any_bench, Witness(lease=3600, max_reaps=0)
    runs = claimed_in_parts(bench, monkeypatch, witness)
    much, patched = bench.task(runs[0], "task")["task_run_id"], Session.call

    def call(self: Session, query: str, params: Any, **options: Any) -> list[tuple[Any, ...]]:
        rows = patched(self, query, params, **options)
        if query == CLAIM_TASK_RUNS and rows[0][2] == much:
            raise Unanswered("out of memory for query result", sent=True, too_much=True)
        return rows

    monkeypatch.setattr(Session, "call", call)
    with bench.worker(witness.workflow, concurrency=3) as worker:
        assert bench.wait_run(*runs) == ["failed", "succeeded", "succeeded"]
        wait_until(lambda: worker.worker._executor._slots._free == 3, "free slots")
    assert "what its handler gets does not arrive: out of memory" in bench.task(runs[0], "task")["error"]


@pytest.mark.parametrize("sqlstate", ["XX001", "55P03"])
def test_what_cannot_be_read_fails_and_what_is_only_locked_does_not(
    any_bench: Bench, monkeypatch: pytest.MonkeyPatch, sqlstate: str
) -> None:
    bench, witness, refused = any_bench, Witness(lease=3600, max_reaps=0), list[int]()
    runs = claimed_in_parts(bench, monkeypatch, witness)
    broken, patched = bench.task(runs[0], "task")["task_run_id"], Session.call

    def call(self: Session, query: str, params: Any, **options: Any) -> list[tuple[Any, ...]]:
        if query == CLAIM_TASK_RUNS and params[0] == [broken] and (sqlstate == "XX001" or not refused):
            refused.append(broken)
            query = f"do $$ begin raise exception 'no' using errcode = '{sqlstate}'; end $$"
            params = []
        return patched(self, query, params, **options)

    monkeypatch.setattr(Session, "call", call)
    with bench.worker(witness.workflow, concurrency=3) as worker:
        first = "failed" if sqlstate == "XX001" else "succeeded"
        assert bench.wait_run(*runs) == [first, "succeeded", "succeeded"]
        wait_until(lambda: worker.worker._executor._slots._free == 3, "free slots")
    assert refused


def test_a_connection_lost_while_a_claim_is_asked_for_in_parts_breaks_nothing(
    any_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the database hangs, until it is restarted: that looks like too much for a while."""
    bench, witness = any_bench, Witness(lease=3600)
    runs = claimed_in_parts(bench, monkeypatch, witness)
    patched, failures = Session.call, [True, True, False]

    def call(self: Session, query: str, params: Any, **options: Any) -> list[tuple[Any, ...]]:
        if query in (BARE_CLAIM_NEXT, BARE_CLAIM_TASK_RUNS) and failures:
            raise Unanswered("no answer", sent=True, too_much=failures.pop(0))
        return patched(self, query, params, **options)

    monkeypatch.setattr(Session, "call", call)
    with bench.worker(witness.workflow, concurrency=3):
        assert bench.wait_run(*runs) == ["succeeded"] * 3
    assert not failures


def test_an_answer_that_does_not_arrive_is_asked_for_in_parts(
    any_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What several tasks are given together may take longer than a call may, or more memory than there is.
    One that takes longer by itself gets the time. The database has claimed them, though: they are executed,
    each by the time limit that runs since then."""
    bench, real = any_bench, Session.call
    claimed_at: list[float] = []

    def call(self: Session, query: str, params: Any, **options: Any) -> list[tuple[Any, ...]]:
        rows = real(self, query, params, **options)
        if rows and "claim_" in query and ((len(rows) > 1 and "input" in query) or options["limit"] < 200):
            claimed_at.append(time.monotonic())
            raise Unanswered("out of memory for query result", sent=True, too_much=True)
        return rows

    deadlines: list[float] = []

    def execute(ctx: Context) -> None:
        deadlines.append(time.monotonic() + (ctx.time_left() or 0))

    monkeypatch.setattr(Session, "call", call)
    witness = Witness(lease=3600, time_limit=7200)
    witness.result = execute
    bench.define(witness.workflow)
    bench.never_redispatch()
    runs = bench.trigger_many(witness.workflow, 4)
    for run in runs:
        bench.wait_state(run, "task", "ready")
    with bench.worker(witness.workflow, concurrency=4) as worker:
        assert bench.wait_run(*runs) == ["succeeded"] * 4
        wait_until(lambda: worker.worker._executor._slots._free == 4, "free slots")
    assert len(witness.executions) == 4
    assert min(deadlines) - 7200 <= claimed_at[0]


@pytest.mark.parametrize("error", [MemoryError(), psycopg.OperationalError("out of memory for query result")])
def test_memory_that_runs_out_breaks_no_thread(bench: Bench, error: Exception) -> None:
    """The connection is given up, and the caller told that the answer may have been too much."""
    session = Session(bench.config, "test")
    assert session.call("select 1", []) == [(1,)]
    connection: Any = session.connection

    def fail(*_: Any, **__: Any) -> None:
        raise error

    connection.execute = fail
    connection.cursor = fail
    with pytest.raises(Unanswered) as caught:
        session.call("select 1", [])
    assert (caught.value.sent, caught.value.too_much) == (True, True)
    assert session.call("select 2", []) == [(2,)]
    session.close()


def test_a_connection_lost_after_the_last_claim_is_no_trouble_while_handlers_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is asked on it before a slot is free again: health would say for hours that there is no
    database."""
    real = Session.call

    def call(self: Session, query: str, params: Any, **options: Any) -> list[tuple[Any, ...]]:
        if query == TRACEPARENTS:
            query = "select pg_terminate_backend(pg_backend_pid())"
            params = []
        return real(self, query, params, **options)

    monkeypatch.setattr(Session, "call", call)
    witness = Witness().closed()
    bench.define(witness.workflow)
    run = bench.trigger(witness.workflow)
    with bench.worker(witness.workflow, concurrency=1, tracing=True) as worker:
        session = worker.worker._claimer.session
        witness.gate.await_arrivals()
        wait_until(lambda: session.healthy, "health", 20)
        assert session.lost_since_answer == 1
        witness.gate.open()
        assert bench.wait_run(run) == ["succeeded"]
        wait_until(lambda: session.lost_since_answer == 0, "the next claim")


def test_how_often_a_handler_was_unknown_is_counted_for_each(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For so many names at a time."""
    now = 0.0
    monkeypatch.setattr(claiming, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(claiming, "_UNKNOWN_KEPT", 2)
    claimer: Any = SimpleNamespace(_unknown={})

    def comes(*handlers: str) -> list[tuple[str, int]]:
        """What is told: of which handler, and how many more."""
        caplog.clear()
        for handler in handlers:
            claim: Any = SimpleNamespace(handler=handler, run_id=1, task_run_id=1)
            claiming.Claimer._tell_unknown(claimer, claim)
        told = [vars(each)["keys"] for each in caplog.records]
        return [(each["handler"], each.get("more_since_last_told", 0)) for each in told]

    assert comes("a", "a", "b", "a") == [("a", 0), ("b", 0)]
    now = claiming._UNKNOWN_TOLD_EVERY
    assert comes("a", "a") == [("a", 2)]
    assert comes("c", "d") == [("c", 0), ("d", 0)]
    assert claimer._unknown.keys() == {"d"}
