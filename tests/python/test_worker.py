"""The worker's guarantees on real servers, over both ways of delivery."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from flowforge import exits
from flowforge.definition import Retry, Workflow
from flowforge.errors import ConfigError, PermanentError
from flowforge.stopping import Stop
from flowforge.worker import claiming
from flowforge.worker.context import Context
from flowforge.worker.daemon import Worker, handlers_of
from flowforge.worker.session import Session
from tests.python.channels import User
from tests.python.proxy import Proxy
from tests.python.workbench import Bench, Gate, LossyProxy, RunningWorker, Witness
from tests.services.process import wait_until
from tests.services.rabbitmq import RabbitServer

# -- both deliveries


def test_every_task_of_a_graph_runs_once(any_bench: Bench) -> None:
    workflow = Workflow("graph")
    lock, executions = threading.Lock(), []

    def note(ctx: Context) -> None:
        with lock:
            executions.append(ctx.task_run_id)

    @workflow.task
    def split(ctx: Context) -> list[int]:
        note(ctx)
        return list(range(20))

    @workflow.task(map=split)
    async def square(ctx: Context) -> int:
        note(ctx)
        return int(ctx.item) ** 2

    @workflow.task(after=[square])
    def total(ctx: Context) -> int:
        note(ctx)
        return sum(ctx.upstream["square"])

    any_bench.define(workflow)
    runs = any_bench.trigger_many(workflow, 5)
    with any_bench.worker(workflow) as one, any_bench.worker(workflow) as two:
        assert set(any_bench.wait_run(*runs)) == {"succeeded"}
    assert {any_bench.task(run, "total")["output"] for run in runs} == {2470}
    assert len(executions) == len(set(executions)) == 5 * 22
    assert one.counts["claimed"] + two.counts["claimed"] == 5 * 22
    assert any_bench.violations() == []


def test_no_more_is_claimed_than_there_are_slots(any_bench: Bench) -> None:
    witness = Witness().closed()
    any_bench.define(witness.workflow)
    runs = any_bench.trigger_many(witness.workflow, 10)
    with any_bench.worker(witness.workflow, concurrency=3):
        witness.gate.await_arrivals(3)
        wait_until(
            lambda: any_bench.one("select count(*) from flowforge.task_run where state = 'pending'") == 0,
            "dispatch",
        )
        assert any_bench.one("select count(*) from flowforge.task_run where state = 'running'") == 3
        witness.gate.open()
        assert set(any_bench.wait_run(*runs)) == {"succeeded"}
    assert len(witness.executions) == 10


@pytest.mark.parametrize("sent", [True, False], ids=["reply lost", "request lost"])
def test_unknown_outcome_of_a_claim_is_asked_again_whole(
    any_bench: Bench, proxy: LossyProxy, sent: bool
) -> None:
    """The connection goes away during a claim of several. Every task runs exactly once, under its first
    token: the repetition got the claims of the lost answer back, and nothing waited for a lease to run
    out."""
    witness = Witness()
    any_bench.define(witness.workflow)
    runs = any_bench.trigger_many(witness.workflow, 8)
    wait_until(
        lambda: any_bench.one("select count(*) from flowforge.task_run where state = 'ready'") == 8,
        "dispatch",
    )
    proxy.lose("flowforge.claim_", sent=sent)
    with any_bench.worker(witness.workflow, database_url=proxy.dsn, concurrency=8, lease=600):
        assert set(any_bench.wait_run(*runs)) == {"succeeded"}
    assert proxy.lost == 1
    assert len(witness.executions) == 8
    assert {token for _, token in witness.executions} == {1}


def test_time_limit_counts_from_the_call_that_claimed(bench: Bench, proxy: LossyProxy) -> None:
    """And not from a repetition: the worker never lets a handler go on for longer than the database does."""
    workflow = Workflow("w")
    left: list[float] = []

    @workflow.task(time_limit=1000, lease=30)
    def look(ctx: Context) -> None:
        left.append(
            bench.one(
                "select extract(epoch from deadline - clock_timestamp())::float8 from flowforge.task_run "
                "where task_run_id = %s",
                ctx.task_run_id,
            )
        )
        left.append(ctx.time_left() or 0)

    bench.define(workflow)
    run = bench.trigger(workflow)
    bench.wait_state(run, "look", "ready")
    proxy.lose("flowforge.claim_", sent=True, times=3)
    with bench.worker(workflow, database_url=proxy.dsn):
        assert bench.wait_run(run) == ["succeeded"]
    assert proxy.lost == 3
    in_database, in_worker = left
    assert in_worker <= in_database


def test_time_limit_is_not_used_up_while_the_database_is_away(bench: Bench, proxy: LossyProxy) -> None:
    """Requests that may have claimed, but did not, for longer than the limit."""
    workflow = Workflow("w")
    workflow.task(name="task", time_limit=5)(lambda ctx: ctx.time_left())
    bench.define(workflow)
    run = bench.trigger(workflow)
    bench.wait_state(run, "task", "ready")
    proxy.lose("flowforge.claim_", sent=False, times=1_000_000)
    with bench.worker(workflow, database_url=proxy.dsn):
        wait_until(lambda: proxy.lost > 0, "the first request")
        since = time.monotonic()
        wait_until(lambda: time.monotonic() - since > 5, "the time limit to pass")
        proxy.lose("", times=0)
        assert bench.wait_run(run) == ["succeeded"]
    task = bench.task(run, "task")
    assert 0 < task["output"] <= 5
    assert task["fencing_token"] == 1, "it was not given back"


@pytest.mark.parametrize("sent", [True, False], ids=["reply lost", "request lost"])
def test_unknown_outcome_of_a_finish_is_asked_again(any_bench: Bench, proxy: LossyProxy, sent: bool) -> None:
    witness = Witness()
    any_bench.define(witness.workflow)
    runs = any_bench.trigger_many(witness.workflow, 5)
    proxy.lose("flowforge.finish_task_runs", sent=sent)
    with any_bench.worker(witness.workflow, database_url=proxy.dsn, lease=600) as worker:
        assert set(any_bench.wait_run(*runs)) == {"succeeded"}
    assert proxy.lost == 1
    assert len(witness.executions) == 5
    assert (worker.counts["repeated"] > 0) == sent
    assert worker.counts["repeated"] + worker.counts["finished_succeeded"] == 5


def test_a_database_that_goes_and_comes_back_loses_nothing(any_bench: Bench, proxy: LossyProxy) -> None:
    """What ends during the gap is recorded after it, if nobody took over."""
    witness = Witness().closed()
    any_bench.define(witness.workflow)
    runs = any_bench.trigger_many(witness.workflow, 6)
    with any_bench.worker(witness.workflow, database_url=proxy.dsn, concurrency=2, lease=60) as worker:
        witness.gate.await_arrivals(2)
        with proxy.down():
            witness.gate.open()
            wait_until(lambda: worker.worker._executor.wait_idle(0), "the end of all handlers")
            finish = worker.worker._finisher._session
            wait_until(lambda: finish.lost_since_answer > 0, "a finish in vain")
            assert any_bench.one("select count(*) from flowforge.task_run where state = 'succeeded'") == 0
        assert set(any_bench.wait_run(*runs)) == {"succeeded"}
    assert len(witness.executions) == 6
    assert {token for _, token in witness.executions} == {1}


def test_a_failover_to_read_only_and_back(bench: Bench) -> None:
    witness = Witness().closed()
    bench.define(witness.workflow)
    first = bench.trigger(witness.workflow)
    with bench.worker(witness.workflow) as worker:
        witness.gate.await_arrivals(1)
        name = bench.one("select current_database()")
        bench.execute(f'alter database "{name}" set default_transaction_read_only = on')
        bench.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()"
        )
        witness.gate.open()
        # Its old connection is lost, and each new one is refused for being read-only.
        finish = worker.worker._finisher._session
        wait_until(lambda: finish.lost_since_answer > 1, "a finish that meets read-only")
        assert bench.run_state(first) == "running"
        bench.execute(f'alter database "{name}" set default_transaction_read_only = off')
        second = bench.trigger(witness.workflow)
        assert bench.wait_run(first, second) == ["succeeded", "succeeded"]
    assert len(witness.executions) == 2


def test_failed_attempts_are_retried_and_permanent_ones_are_not(any_bench: Bench) -> None:
    workflow = Workflow("w")

    @workflow.task(retry=Retry(max_attempts=3, delay=0))
    def flaky(ctx: Context) -> int:
        if ctx.attempt < 3:
            raise ValueError("not yet")
        return ctx.attempt

    @workflow.task(retry=Retry(max_attempts=3, delay=0))
    async def hopeless(ctx: Context) -> None:
        raise PermanentError("never")

    any_bench.define(workflow)
    run = any_bench.trigger(workflow)
    with any_bench.worker(workflow):
        assert any_bench.wait_run(run) == ["failed"]
    assert any_bench.task(run, "flaky")["output"] == 3
    hopeless_run = any_bench.task(run, "hopeless")
    assert hopeless_run["attempt"] == 1
    assert hopeless_run["error"].startswith("PermanentError: never")


def test_an_unknown_handler_is_given_back_and_found_elsewhere(any_bench: Bench) -> None:
    """A rolling deploy: the worker without the handler neither fails nor keeps the task."""
    witness = Witness()
    any_bench.define(witness.workflow)
    run = any_bench.trigger(witness.workflow)
    with any_bench.worker(Witness("other").workflow) as other:
        wait_until(lambda: other.counts["released_unknown_handler"] > 0, "a release")
        task = any_bench.task(run, "task")
        assert task["state"] in ("ready", "running")
        assert (task["attempt"], task["reaps"]) == (1, 0)
    with any_bench.worker(witness.workflow):
        assert any_bench.wait_run(run) == ["succeeded"]
    assert other.counts["unknown_handler"] >= 1


def test_of_an_unknown_handler_it_is_told_now_and_then(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each element of a map would tell of it again and again."""
    handlers = {"one": "strange", "two": "strange", "three": "strange", "four": "stranger"}
    tasks = [{"name": name, "handler": handler} for name, handler in handlers.items()]
    bench.execute("select flowforge.define_workflow(%s)", json.dumps({"name": "w", "tasks": tasks}))
    bench.execute("select flowforge.trigger('w')")

    def told() -> list[Any]:
        return [vars(each) for each in caplog.records if "no such handler" in each.getMessage()]

    with bench.worker(Witness("other").workflow) as other:
        # Told before it is released, each.
        wait_until(lambda: other.counts["released_unknown_handler"] >= len(tasks), "the releases")
        assert len(told()) == 2
        monkeypatch.setattr(claiming, "_UNKNOWN_TOLD_EVERY", 0.0)
        bench.execute("select flowforge.trigger('w')")
        wait_until(lambda: len(told()) >= 4, "more")
    assert any(str(each).count("more_since_last_told") for each in told()[2:])


# -- finishing


def test_a_refused_result_does_not_harm_its_batch(bench: Bench) -> None:
    """Results of one batch, one of them larger than the database's limit: that one fails, for good, the
    others are stored, and no handler runs twice."""
    witness = Witness(retry=Retry(max_attempts=3, delay=0))
    gate = Gate()

    def result(ctx: Context) -> str:
        if ctx.input > 0:
            gate.wait()
        return "x" * 5000 if ctx.input == 2 else "fine"

    witness.result = result
    bench.define(witness.workflow)
    bench.execute("select flowforge.set_limit('max_payload_bytes', 1024)")
    with bench.worker(witness.workflow, concurrency=5) as worker:
        finisher, sizes = worker.worker._finisher, watched(worker)
        with held(finisher._session) as waiting:
            # The first result is being sent while the others come in, which therefore go together.
            runs = bench.trigger_many(witness.workflow, 5)
            gate.await_arrivals(4)
            wait_until(waiting.is_set, "the first statement")
            gate.open()
            wait_until(lambda: worker.worker._executor.wait_idle(0), "the end of all handlers")
        assert bench.wait_run(*runs) == ["succeeded", "succeeded", "failed", "succeeded", "succeeded"]
    assert sizes[:2] == [1, 4]
    task = bench.task(runs[2], "task")
    assert task["error"].startswith("result not storable: ")
    assert task["attempt"] == 1
    assert len(witness.executions) == 5


def watched(worker: RunningWorker) -> list[int]:
    """Will hold the sizes of the batches of finishes."""
    session, sizes = worker.worker._finisher._session, []
    real = session.call

    def call(query: str, params: Any, **options: Any) -> list[tuple[Any, ...]]:
        sizes.append(len(params[0]))
        return real(query, params, **options)

    session.call = call  # type: ignore[method-assign]
    return sizes


@contextlib.contextmanager
def held(session: Session) -> Iterator[threading.Event]:
    """Calls of `session` wait until the end of the block; the event tells that one does."""
    real, free, waiting = session.call, threading.Event(), threading.Event()

    def call(*arguments: Any, **options: Any) -> list[tuple[Any, ...]]:
        waiting.set()
        free.wait()
        return real(*arguments, **options)

    session.call = call  # type: ignore[method-assign]
    try:
        yield waiting
    finally:
        session.call = real  # type: ignore[method-assign]
        free.set()


@pytest.mark.parametrize("value", ["a\0b", "\ud800", float("nan"), b"bytes"], ids=repr)
def test_unstorable_results_end_their_task_at_once(bench: Bench, value: object) -> None:
    witness = Witness(retry=Retry(max_attempts=3, delay=0))
    witness.result = lambda _: value
    bench.define(witness.workflow)
    run = bench.trigger(witness.workflow)
    with bench.worker(witness.workflow):
        assert bench.wait_run(run) == ["failed"]
    assert bench.task(run, "task")["error"].startswith("result not storable: ")
    assert len(witness.executions) == 1


def test_what_ended_while_a_finish_was_under_way_goes_into_one_statement(bench: Bench) -> None:
    witness = Witness().closed()
    bench.define(witness.workflow)
    runs = bench.trigger_many(witness.workflow, 40)
    with bench.worker(witness.workflow, concurrency=40) as worker:
        sizes = watched(worker)
        witness.gate.await_arrivals(40)
        with held(worker.worker._finisher._session):
            witness.gate.open()
            wait_until(lambda: worker.worker._executor.wait_idle(0), "the end of all handlers")
        assert set(bench.wait_run(*runs)) == {"succeeded"}
    assert sum(sizes) == 40
    assert len(sizes) <= 2


# -- delivery by PostgreSQL alone


def test_idle_workers_are_woken_by_notify(bench: Bench) -> None:
    witness = Witness()
    bench.define(witness.workflow)
    with bench.worker(witness.workflow, poll_interval=3600):
        for _ in range(3):
            assert bench.wait_run(bench.trigger(witness.workflow)) == ["succeeded"]


def test_notifications_that_gathered_cost_one_look(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many came while every slot was taken."""
    witness = Witness().closed()
    bench.define(witness.workflow)
    first = bench.trigger(witness.workflow)
    claims: list[str] = []
    call = Session.call

    def counting(self: Session, query: str, *args: Any, **options: Any) -> list[tuple[Any, ...]]:
        claims.append(self.purpose)
        return call(self, query, *args, **options)

    with bench.worker(witness.workflow, poll_interval=300, concurrency=1):
        witness.gate.await_arrivals()
        for _ in range(1000):
            bench.execute("notify flowforge_outbox")
        monkeypatch.setattr(Session, "call", counting)
        witness.gate.open()
        assert bench.wait_run(first, bench.trigger(witness.workflow)) == ["succeeded", "succeeded"]
        for _ in range(5):
            assert bench.wait_run(bench.trigger(witness.workflow)) == ["succeeded"]
    assert claims.count("claim") < 50


def test_behind_a_pooler_that_forwards_no_notifications_the_worker_polls(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    # What a connection sends to itself comes back even through such a pooler; that must not count.
    witness = Witness()
    bench.define(witness.workflow)
    with Proxy(bench.db.server.port, pooled=True) as pooler:
        dsn = f"{bench.db.server.dsn(bench.db.name, tcp=True)} port={pooler.port} sslmode=disable"
        with bench.worker(witness.workflow, database_url=dsn, prepared_statements=False):
            assert bench.wait_run(bench.trigger(witness.workflow)) == ["succeeded"]
    told = [record for record in caplog.records if "hears nothing" in record.getMessage()]
    assert len(told) == 1


def test_without_notify_the_worker_polls(bench: Bench) -> None:
    witness = Witness()
    bench.define(witness.workflow)
    bench.execute("select flowforge.set_limit('notify', 0)")
    with bench.worker(witness.workflow):
        for _ in range(2):
            assert bench.wait_run(bench.trigger(witness.workflow)) == ["succeeded"]


def test_only_the_workers_own_queues_are_served(bench: Bench) -> None:
    here, there = Witness("here", queue="here"), Witness("there", queue="there")
    for each in (here, there):
        bench.define(each.workflow)
    runs = [bench.trigger(each.workflow) for each in (there, here)]
    with bench.worker(here.workflow, there.workflow, queues=("here",)):
        assert bench.wait_run(runs[1]) == ["succeeded"]
        assert bench.wait_state(runs[0], "task", "ready")
    assert there.executions == []


# -- the process


@pytest.mark.parametrize("call", ["finish_task_runs", "renew_leases"])
def test_health_tells_of_every_connection(bench: Bench, proxy: LossyProxy, call: str) -> None:
    """Claims are answered, and nothing else is: that is not ok. It is again once they come back."""
    witness = Witness(lease=60 if call == "finish_task_runs" else 6).closed()
    bench.define(witness.workflow)
    proxy.lose(f"flowforge.{call}", sent=False, times=1_000_000)
    run = bench.trigger(witness.workflow)
    with bench.worker(witness.workflow, database_url=proxy.dsn) as worker:
        health = worker.worker.health
        witness.gate.await_arrivals()
        if call == "finish_task_runs":
            witness.gate.open()
        wait_until(lambda: health.state == "no database", "the news")
        proxy.lose("", times=0)
        wait_until(lambda: health.state == "ok", "recovery")
        witness.gate.open()
        assert bench.wait_run(run) == ["succeeded"]


def test_an_async_handler_that_blocks_its_loop_wedges_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a time limit: the others run, and health says it until it ends."""
    monkeypatch.setattr("flowforge.worker.executor.BLOCKED_AFTER", 2)
    gate = Gate()
    workflow, other = Workflow("blocking"), Workflow("other")

    @workflow.task
    async def block(ctx: Context) -> None:
        gate.wait()

    @other.task
    async def coroutine(ctx: Context) -> str:
        return "async"

    @other.task(after=[coroutine])
    def thread(ctx: Context) -> str:
        return "sync"

    for each in (workflow, other):
        bench.define(each)
    blocked = bench.trigger(workflow)
    with bench.worker(workflow, other, concurrency=2) as worker:
        gate.await_arrivals()
        assert worker.worker.running == [("blocking.block", blocked)]
        assert set(bench.wait_run(*bench.trigger_many(other, 5))) == {"succeeded"}
        wait_until(lambda: worker.worker.health.state == "error", "the news")
        assert set(bench.wait_run(*bench.trigger_many(other, 5))) == {"succeeded"}
        gate.open()
        assert bench.wait_run(blocked) == ["succeeded"]
        wait_until(lambda: worker.worker.health.state == "ok", "recovery")
        assert worker.worker.running == []


def test_a_broker_that_forbids_consuming_is_waited_for(
    rabbit_bench: Bench, rabbit_server: RabbitServer
) -> None:
    """The permission may be granted at any time."""
    user = User(rabbit_server)
    witness = Witness()
    rabbit_bench.define(witness.workflow)
    first = rabbit_bench.trigger(witness.workflow)
    rabbit_bench.wait_state(first, "task", "ready")
    user.may_read("^$")
    try:
        with rabbit_bench.worker(witness.workflow, amqp_urls=(user.url,)) as worker:
            wait_until(lambda: "ACCESS_REFUSED" in str(worker.worker._messages.channel.error), "a refusal")  # type: ignore[union-attr]
            wait_until(lambda: worker.worker.health.state == "no broker", "the news")
            user.may_read(".*")
            assert rabbit_bench.wait_run(first) == ["succeeded"]
            wait_until(lambda: worker.worker.health.state == "ok", "recovery")
    finally:
        user.delete()


def test_connections_are_three_and_one_more_for_each_open_transaction(any_bench: Bench) -> None:
    workflow = Workflow("w")
    gate = Gate()

    @workflow.task
    def first(ctx: Context) -> None:
        pass

    @workflow.task(after=[first])
    def paying(ctx: Context) -> None:
        with ctx.transaction() as tx:
            gate.wait()
            tx.finish()

    def connections() -> list[str]:
        found = any_bench.all(
            "select application_name from pg_stat_activity "
            "where datname = current_database() and application_name like 'flowforge worker%%'"
        )
        return sorted(name for (name,) in found)

    any_bench.define(workflow)
    with any_bench.worker(workflow):
        runs = any_bench.trigger_many(workflow, 2)
        gate.await_arrivals(2)
        own = [f"flowforge worker {purpose}" for purpose in ("claim", "finish", "renew")]
        both = [*own, *["flowforge worker transaction"] * 2]
        wait_until(lambda: connections() == both, "a connection for each transaction")
        gate.open()
        assert any_bench.wait_run(*runs) == ["succeeded", "succeeded"]
        wait_until(lambda: connections() == own, "three connections")
    wait_until(lambda: connections() == [], "no connection left")


def test_presence_is_announced_and_taken_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    witness = Witness()
    with bench.worker(witness.workflow, concurrency=7, queues=("default", "other")) as worker:
        wait_until(lambda: bench.all("select 1 from flowforge.worker") != [], "presence")
        found = bench.all("select name, queues, capacity from flowforge.worker")
        assert found == [(worker.worker.name, ["default", "other"], 7)]
        # The last call of a worker that ends has a second.
        keeper = worker.worker._keeper
        monkeypatch.setattr(keeper, "close", lambda _, close=keeper.close: close(60))
    assert bench.all("select * from flowforge.worker") == []


def test_each_worker_has_a_name_of_its_own(bench: Bench) -> None:
    """A worker that comes back on the same host, even with the same pid, is another owner."""
    names = {Worker({}, bench.config, Stop()).name for _ in range(5)}
    assert len(names) == 5
    assert all(f":{os.getpid()}:" in name for name in names)


def test_a_handler_name_means_one_function() -> None:
    one, two = Workflow("one"), Workflow("two")
    one.task(name="a", handler="shared")(lambda ctx: 1)
    two.task(name="a", handler="shared")(lambda ctx: 2)
    with pytest.raises(ConfigError, match="shared"):
        handlers_of([one, two])


def test_start_up_refuses_a_login_without_privileges(bench: Bench) -> None:
    login = bench.db.create_login()
    with bench.worker(database_url=login) as worker:
        assert worker.wait_ended() == exits.EXIT_PRIVILEGE
