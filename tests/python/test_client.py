"""The client: each call, its errors, and what it does when its connection dies."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from flowforge import Client, Context, PermanentError, RunResult, Workflow
from flowforge import client as client_module
from flowforge.config import Config
from flowforge.errors import (
    ConfigError,
    DatabaseUnavailable,
    IdempotencyConflict,
    InvalidArgument,
    NotFound,
    NotReadable,
    NotStorable,
    StateConflict,
    WaitTimeout,
)
from tests.python.running import running
from tests.python.workbench import LossyProxy
from tests.services.database import Database
from tests.services.process import wait_until

flow = Workflow("sums")


@flow.task
def numbers(ctx: Context) -> list[int]:
    if ctx.input.get("broken"):
        raise PermanentError("no numbers today")
    return list(ctx.input.get("numbers", [1, 2]))


@flow.task(map=numbers)
def square(ctx: Context) -> int:
    return int(ctx.item) ** 2


@flow.task(after=square)
def total(ctx: Context) -> int:
    return sum(ctx.upstream["square"])


@pytest.fixture
def client(db: Database) -> Iterator[Client]:
    """A client of a database that knows the workflow, where nothing runs it."""
    with Client(db.dsn) as client:
        client.define(flow)
        yield client


def kill_connections(db: Database) -> None:
    with db.connect() as connection:
        connection.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity "
            "where datname = current_database() and application_name = 'flowforge client'"
        )


def run_count(db: Database) -> int:
    with db.connect() as connection:
        row = connection.execute("select count(*) from flowforge.run").fetchone()
    assert row is not None
    return int(row[0])


def test_run_from_trigger_to_result(db: Database) -> None:
    """A login with the client's role alone can define, trigger, wait and read results."""
    with running(Config(database_url=db.dsn), flow), Client(db.create_login("flowforge_client")) as client:
        assert not client.define(flow).created
        run_id = client.trigger(flow, {"numbers": [1, 2, 3]}, labels={"team": "data"})
        result = client.wait(run_id, timeout=60)
        assert result.succeeded
        assert result.ended
        assert result.outputs == {"total": 14}
        assert result.errors == {}
        assert (result.run_id, result.workflow, result.version) == (run_id, "sums", 1)
        assert result.finished_at is not None
        assert result.created_at <= result.finished_at
        assert client.result(run_id) == result
        assert client.result(run_id, "square") == [1, 4, 9]


def test_failed_run_tells_why(db: Database) -> None:
    with running(Config(database_url=db.dsn), flow), Client(db.dsn) as client:
        result = client.wait(client.trigger("sums", {"broken": True}), timeout=timedelta(minutes=1))
        assert result.state == "failed"
        assert not result.succeeded
        assert "no numbers today" in result.errors["numbers"]
        assert client.result(result.run_id, "total") is None


def test_outputs_beyond_python_are_refused_by_name(db: Database) -> None:
    """PostgreSQL keeps them, and gives them as text. The other outputs can be had."""
    tasks = [{"name": name} for name in ("deep", "fine", "long")]
    outputs = {"deep": "[" * 5000 + "]" * 5000, "fine": "1", "long": "1" + "0" * 5000}
    with db.connect() as connection, Client(db.dsn) as client:
        client.define({"name": "odd", "tasks": tasks})
        run_id = client.trigger("odd")
        connection.execute("select flowforge.dispatch_ready()")
        for handler, task_run, token in connection.execute(
            "select handler, task_run_id, fencing_token "
            "from flowforge.claim_next('{default}', 'w', gen_random_uuid(), '1 min', 3)"
        ).fetchall():
            connection.execute(
                "select flowforge.finish_task_run(%s, %s, 'succeeded', %s::jsonb)",
                [task_run, token, outputs[handler.removeprefix("odd.")]],
            )
        connection.execute("select flowforge.settle_finished()")
        assert client.result(run_id, "fine") == 1
        for task, why in (("deep", "nested too deeply"), ("long", "digits")):
            with pytest.raises(NotReadable, match=rf"'{task}' of run {run_id} .*{why}.*flowforge show"):
                client.result(run_id, task)
        for ask in (client.result, client.wait):
            with pytest.raises(NotReadable, match=f"'(deep|long)' of run {run_id} "):
                ask(run_id)


def test_a_whole_number_out_of_range_is_not_called_another_thing(client: Client) -> None:
    for number, says in ((10**20, "priority is far too large"), (-(10**20), "priority is far too small")):
        with pytest.raises(InvalidArgument, match=says):
            client.trigger(flow, priority=number)


def test_definitions_are_made_in_the_order_of_their_names(db: Database, client: Client) -> None:
    """Two at once, each in an order of its own, would wait for each other."""
    client.define_all([{"name": name, "tasks": [{"name": "t"}]} for name in ("c", "a", "b")])
    with db.connect() as connection:
        query = "select workflow from flowforge.workflow_status order by workflow_id"
        assert connection.execute(query).fetchall() == [("sums",), ("a",), ("b",), ("c",)]


def test_same_key_is_the_same_run(client: Client) -> None:
    first = client.trigger(flow, {"numbers": [1]}, idempotency_key="monday")
    assert client.trigger(flow, {"numbers": [1]}, idempotency_key="monday") == first
    assert client.trigger(flow, {"numbers": [1]}, idempotency_key="tuesday") != first
    with pytest.raises(IdempotencyConflict, match="monday"):
        client.trigger(flow, {"numbers": [2]}, idempotency_key="monday")


def test_every_argument_of_trigger_arrives(db: Database, client: Client) -> None:
    before = datetime.now(UTC)
    run_id = client.trigger(flow, [1, None, "ä"], version=1, priority=7, delay=3600, labels={"a": "b"})
    with db.connect() as connection:
        row = connection.execute(
            "select r.input, r.priority, r.labels, min(t.available_at) from flowforge.run r "
            "join flowforge.task_run t using (run_id) where r.run_id = %s group by r.run_id",
            [run_id],
        ).fetchone()
    assert row is not None
    assert row[:3] == ([1, None, "ä"], 7, {"a": "b"})
    assert row[3] >= before + timedelta(minutes=59)


def test_input_left_out_is_an_empty_object(db: Database, client: Client) -> None:
    left_out, null = client.trigger(flow), client.trigger(flow, None)
    with db.connect() as connection:
        rows = connection.execute("select run_id, input::text from flowforge.run").fetchall()
    assert dict(rows) == {left_out: "{}", null: "null"}


def test_trigger_many_keeps_the_order(db: Database, client: Client) -> None:
    inputs = [{"numbers": [each]} for each in range(20)]
    keys = [f"key {each}" for each in range(20)]
    run_ids = client.trigger_many(flow, inputs, idempotency_keys=keys)
    with db.connect() as connection:
        rows = connection.execute("select run_id, input from flowforge.run").fetchall()
    stored: dict[int, object] = dict(rows)
    assert [stored[run_id] for run_id in run_ids] == inputs
    assert client.trigger_many("sums", inputs, idempotency_keys=keys) == run_ids
    assert len(client.trigger_many("sums", inputs)) == 20
    assert run_count(db) == 40


endless: list[object] = []
endless.append(endless)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (float("nan"), " is not storable: Out of range float"),
        ({"deep": [1, float("inf")]}, r"\['deep'\]\[1\] is not storable: Out of range float"),
        (["nul \0"], r"\[0\] is not storable: .*U\+0000"),
        ({"\0": 1}, r" is not storable: .*U\+0000"),
        ({"\ud800": 1, "x": 1}, " is not storable: .*surrogate"),
        (b"bytes", " is not storable: .*bytes"),
        ({"x": {1, 2}}, r"\['x'\] is not storable: .*set"),
        (endless, r" is not storable: .*[Cc]ircular"),
    ],
)
def test_what_is_not_json_is_refused_before_anything_is_sent(value: object, says: str) -> None:
    """No database is there: an error about the value shows that none was asked."""
    with Client("host=127.0.0.1 port=1 connect_timeout=2") as client:
        with pytest.raises(NotStorable, match=f"^input{says}"):
            client.trigger("sums", value)
        with pytest.raises(NotStorable, match=rf"^inputs\[1\]{says}"):
            client.trigger_many("sums", [1, value])
        with pytest.raises(NotStorable, match="labels"):
            client.trigger("sums", labels={"x": value})
        with pytest.raises(DatabaseUnavailable):
            client.trigger("sums", 1)


@pytest.mark.parametrize("name", ["nul \0", "\ud800"])
def test_text_that_cannot_travel_is_refused(name: str) -> None:
    with Client("host=127.0.0.1 port=1") as client:
        with pytest.raises(NotStorable):
            client.trigger(name)
        with pytest.raises(NotStorable):
            client.trigger_many("sums", [1], idempotency_keys=[name])


def test_errors_name_what_is_wrong(client: Client) -> None:
    with pytest.raises(NotFound, match="nosuch"):
        client.trigger("nosuch")
    with pytest.raises(NotFound, match="no version 9"):
        client.trigger(flow, version=9)
    for call in (client.result, client.cancel, client.wait, client.retry):
        with pytest.raises(NotFound, match="4711"):
            call(4711)
    with pytest.raises(InvalidArgument, match="delay"):
        client.trigger(flow, delay=float("nan"))
    with pytest.raises(InvalidArgument, match="delay"):
        client.trigger(flow, delay=1e300)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda client: client.trigger(7), "workflow must be a Workflow or the name of one, not 7"),
        (lambda client: client.trigger(flow, priority="high"), "priority must be a whole number, not 'high'"),
        (lambda client: client.trigger(flow, priority=True), "priority must be a whole number, not True"),
        (lambda client: client.trigger(flow, version=1.5), "version must be a whole number, not 1.5"),
        (lambda client: client.trigger(flow, idempotency_key=7), "idempotency_key must be text, not 7"),
        (lambda client: client.trigger(flow, labels=["x"]), r"labels must be a dictionary, not \['x'\]"),
        (lambda client: client.trigger(flow, delay="10x"), "delay must be a number of seconds .*, not '10x'"),
        (lambda client: client.trigger(flow, delay=-1), "delay must be a number of seconds from 0"),
        (
            lambda client: client.trigger_many(flow, {"n": 1}),
            "inputs must be a list of inputs, .* not {'n': 1}",
        ),
        (lambda client: client.trigger_many(flow, "text"), "inputs must be a list of inputs, .* not 'text'"),
        (lambda client: client.trigger_many(flow, 3), "inputs must be a list of inputs, .* not 3"),
        (
            lambda client: client.trigger_many(flow, [1], idempotency_keys="k"),
            "idempotency_keys must be a list of texts, .* not 'k'",
        ),
        (
            lambda client: client.trigger_many(flow, [1], idempotency_keys=[7]),
            "each of idempotency_keys must be text",
        ),
        (lambda client: client.wait("abc"), "run_id must be a whole number, not 'abc'"),
        (lambda client: client.wait(1, timeout="10x"), "timeout must be a number of seconds .*, not '10x'"),
        (lambda client: client.wait(1, timeout=-1), "timeout must be a number of seconds from 0, .* not -1"),
        (lambda client: client.result(2**63), "run_id is far too large"),
        (lambda client: client.result(1, 7), "task must be text, not 7"),
        (lambda client: client.cancel(None), "run_id must be a whole number, not None"),
        (lambda client: client.cancel(1, reason=7), "reason must be text, not 7"),
        (lambda client: client.retry(1, from_task=flow), "from_task must be text"),
        (lambda client: client.retry(1, request_id=7), "request_id must be text, not 7"),
    ],
)
def test_argument_that_will_not_do_is_named(call: Callable[[Client], object], says: str) -> None:
    """With what is allowed, and before the database is asked: there is none."""
    with Client("host=127.0.0.1 port=1") as client, pytest.raises(InvalidArgument, match=f"^{says}"):
        call(client)


def test_wait_ends_when_its_time_is_over(client: Client) -> None:
    run_id = client.trigger(flow)
    with pytest.raises(WaitTimeout, match=f"run {run_id} of workflow 'sums'") as timeout:
        client.wait(run_id, timeout=0.05)
    assert isinstance(timeout.value, TimeoutError)
    assert client.result(run_id).state == "running"


def test_cancel_and_retry(db: Database) -> None:
    with running(Config(database_url=db.dsn), flow), Client(db.dsn) as client:
        run_id = client.trigger(flow, {"numbers": [3]}, delay=3600)
        assert client.cancel(run_id, reason="mistake")
        assert client.wait(run_id, timeout=60).state == "cancelled"
        assert not client.cancel(run_id)
        assert client.retry(run_id, request_id="again") == 3
        assert client.wait(run_id, timeout=60).outputs == {"total": 9}
        assert client.retry(run_id, request_id="again") == 3  # the answer of the first time
        assert client.result(run_id).succeeded


def test_retry_is_refused_while_the_task_is_under_way(db: Database, client: Client) -> None:
    run_id = client.trigger(flow)
    with db.connect() as connection:
        connection.execute("select flowforge.dispatch_ready()")
    with pytest.raises(StateConflict, match="numbers"):
        client.retry(run_id, from_task="numbers")


def test_repeatable_calls_survive_a_dead_connection(db: Database, client: Client) -> None:
    run_id = client.trigger(flow, idempotency_key="k")
    for call in (
        lambda: client.define(flow),
        lambda: client.trigger(flow, idempotency_key="k"),
        lambda: client.trigger_many(flow, [{}], idempotency_keys=["k"]),
        lambda: client.result(run_id),
        lambda: client.result(run_id, "total"),
        lambda: client.cancel(run_id),
    ):
        kill_connections(db)
        call()
    assert run_count(db) == 1


def test_a_cancel_whose_answer_was_lost_was_one_all_the_same(db: Database, proxy: LossyProxy) -> None:
    """Repeated, it finds that the run is being cancelled; whoever asked for that has what they asked for."""
    with running(Config(database_url=db.dsn), flow), Client(proxy.dsn) as client:
        cancelled, ended = client.trigger(flow, delay=3600), client.trigger(flow)
        assert client.wait(ended, timeout=60).succeeded
        proxy.lose("flowforge.cancel_run")
        assert client.cancel(cancelled)
        assert proxy.lost == 1
        assert not client.cancel(cancelled)
        proxy.lose("flowforge.cancel_run")
        assert not client.cancel(ended)
        assert proxy.lost == 2


def test_wait_outlasts_an_outage(client: Client, proxy: LossyProxy) -> None:
    """More than the one connection that every call makes anew; a run that is not found is told at once."""
    run_id = client.trigger(flow)
    refused: list[DatabaseUnavailable] = []

    class Counting(Client):
        def _look(self, *arguments: Any) -> Any:
            try:
                return super()._look(*arguments)
            except DatabaseUnavailable as error:
                refused.append(error)
                raise

    ended: list[RunResult] = []
    with Counting(proxy.dsn) as remote:
        waiting = threading.Thread(target=lambda: ended.append(remote.wait(run_id, timeout=600)))
        waiting.start()
        wait_until(lambda: remote._used_at > 0, "the first look")
        with proxy.down():
            wait_until(lambda: len(refused) >= 3 or not waiting.is_alive(), "refused looks")
        client.cancel(run_id)
        waiting.join()
        with pytest.raises(NotFound):
            remote.wait(run_id + 1)
    assert [result.state for result in ended] == ["cancelled"]


def test_wait_ends_in_time_during_an_outage(
    client: Client, proxy: LossyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = client.trigger(flow)
    with ExitStack() as stack, Client(proxy.dsn) as remote:
        sleep = time.sleep

        def go_down(seconds: float) -> None:
            monkeypatch.setattr(time, "sleep", sleep)
            stack.enter_context(proxy.down())
            sleep(seconds)

        monkeypatch.setattr("flowforge.client.time.sleep", go_down)
        with pytest.raises(WaitTimeout, match=f"run {run_id} of .* as far as is known: ") as timeout:
            remote.wait(run_id, timeout=0.5)
    assert isinstance(timeout.value.__cause__, DatabaseUnavailable)


def test_wait_outlasts_an_outage_right_after_the_trigger(client: Client, proxy: LossyProxy) -> None:
    """But waits for nothing that never answered."""
    assert client.trigger(flow)
    with Client(proxy.dsn) as remote:
        run_id = remote.trigger(flow)
        with proxy.down():
            with pytest.raises(WaitTimeout, match=f"run {run_id} has not ended .* as far as is known: "):
                remote.wait(run_id, timeout=0.1)
            with Client(proxy.dsn) as other, pytest.raises(DatabaseUnavailable):
                other.wait(run_id, timeout=600)


def test_no_call_waits_for_ever_for_an_answer(
    db: Database, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it keep the others from their ends."""
    run_id = client.trigger(flow)
    monkeypatch.setattr(client_module, "_LAST_LOOK", 0.1)
    with db.connect() as other, other.transaction(), Client(db.dsn, call_timeout=0.2) as impatient:
        other.execute("lock table flowforge.run in access exclusive mode")
        with pytest.raises(DatabaseUnavailable, match=r"no answer within 0\.\d s"):
            impatient.cancel(run_id)
        with pytest.raises(WaitTimeout, match="as far as is known: no answer within 0"):
            client.wait(run_id, timeout=0.1)
        with client._lock, pytest.raises(WaitTimeout, match="in use by another thread"):
            client.wait(run_id, timeout=0.1)
    assert client.result(run_id).run_id == run_id


def test_other_calls_are_never_sent_twice(
    db: Database, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could tell whether the first one took effect; the caller is told, and the next call works."""
    monkeypatch.setattr(client_module, "_IDLE_BEFORE_CHECK", 3600.0)
    kill_connections(db)
    with pytest.raises(DatabaseUnavailable):
        client.trigger(flow)
    assert run_count(db) == 0
    client.trigger(flow)
    assert run_count(db) == 1


def test_idle_connection_is_tried_before_such_a_call(
    db: Database, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_IDLE_BEFORE_CHECK", 0.0)
    kill_connections(db)
    client.trigger(flow)
    assert run_count(db) == 1


def test_threads_share_a_client(db: Database, client: Client) -> None:
    found: list[RunResult] = []

    def work() -> None:
        found.extend(client.result(client.trigger(flow)) for _ in range(10))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({result.run_id for result in found}) == 60
    with db.connect() as connection:
        row = connection.execute(
            "select count(*) from pg_stat_activity "
            "where datname = current_database() and application_name = 'flowforge client'"
        ).fetchone()
    assert row == (1,)


def test_wait_in_one_thread_leaves_the_client_to_others(client: Client) -> None:
    run_id = client.trigger(flow)
    ended: list[RunResult] = []
    waiting = threading.Thread(target=lambda: ended.append(client.wait(run_id)))
    waiting.start()
    wait_until(lambda: client.result(run_id).state == "running", "an answer while another thread waits")
    assert waiting.is_alive()
    client.cancel(run_id)
    waiting.join()
    assert [result.state for result in ended] == ["cancelled"]


def test_closed_client_refuses(client: Client) -> None:
    client.close()
    client.close()
    with pytest.raises(InvalidArgument, match="closed"):
        client.trigger(flow)


def test_database_comes_from_the_environment(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWFORGE_DATABASE_URL", db.dsn)
    with Client() as client:
        assert client.define(flow).created
    for garbage in ("garbage", 7):
        with pytest.raises(ConfigError, match=r"^dsn is not a PostgreSQL connection string"):
            Client(garbage)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dsn is empty"):
        Client("")
    monkeypatch.delenv("FLOWFORGE_DATABASE_URL")
    with pytest.raises(ConfigError, match="FLOWFORGE_DATABASE_URL"):
        Client()
