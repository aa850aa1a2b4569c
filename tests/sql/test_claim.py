"""claim_task_run, claim_task_runs and claim_next: one winner, and the right answer for everybody else."""

import random
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.services.database import Database
from tests.sql.helpers import Engine, failing, task

RETRIED = {"max_attempts": 3, "delay": 0}


def batch(engine: Engine, messages: list[Any], claim_id: uuid.UUID | None = None) -> list[Any]:
    ids, dispatch_ids = [each.task_run_id for each in messages], [each.dispatch_id for each in messages]
    return engine.table("claim_task_runs", ids, dispatch_ids, "worker", claim_id or uuid.uuid4(), "30 s")


def test_the_winner_gets_all_that_a_handler_needs(engine: Engine) -> None:
    engine.define(task("a"), task("f"), task("b", "a", "f", when="any_succeeded", handler="h", time_limit=60))
    run_id = engine.trigger(input=Jsonb({"n": 1}))
    engine.drive_until("b", failing("f"))
    message = engine.messages()[-1]
    claim = engine.claim(message, lease="20 s")
    assert (claim.position, claim.outcome, claim.fencing_token, claim.attempt) == (1, "claimed", 1, 1)
    assert (claim.task_run_id, claim.dispatch_id) == (message.task_run_id, message.dispatch_id)
    assert (claim.run_id, claim.workflow, claim.task, claim.handler) == (run_id, "w", "b", "h")
    assert (claim.input, claim.item, claim.map_index) == ({"n": 1}, None, None)
    assert claim.upstream_outputs == {"a": "a"}
    assert claim.upstream_states == {"a": "succeeded", "f": "failed"}
    assert (claim.lease.total_seconds(), claim.time_limit.total_seconds()) == (20, 60)
    row = engine.task_run(run_id, "b")
    assert (row.state, row.stage, row.lease_owner, row.last_owner) == (
        "running",
        "leased",
        "worker",
        "worker",
    )
    assert row.lease_expires_at == claim.lease_expires_at == row.started_at + claim.lease
    assert row.deadline == row.started_at + claim.time_limit


# Who does not win


def claimed(engine: Engine) -> Any:
    engine.claim_one()


def done(engine: Engine) -> Any:
    engine.work()


def failed(engine: Engine) -> Any:
    claim = engine.claim_one()
    engine.finish(claim, "failed", retryable=False)


def on_its_next_attempt(engine: Engine) -> Any:
    engine.work(failing("a"))


def next_attempt_running(engine: Engine) -> Any:
    engine.work(failing("a"))
    engine.schedule()
    engine.claim_one()


def cancelled(engine: Engine) -> Any:
    engine.rows("select flowforge.cancel_run(run_id) from flowforge.run")


def being_cancelled(engine: Engine) -> Any:
    engine.rows("update flowforge.run set cancel_requested_at = now()")


def retried(engine: Engine) -> Any:
    failed(engine)
    engine.schedule()
    engine.rows("select flowforge.retry_run(run_id) from flowforge.run")


@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        (claimed, "running"),
        (done, "finished"),
        (failed, "finished"),
        (on_its_next_attempt, "superseded"),
        (next_attempt_running, "superseded"),
        (retried, "superseded"),
        (cancelled, "cancelled"),
        (being_cancelled, "cancelled"),
    ],
)
def test_a_late_message_is_told_why_and_changes_nothing(engine: Engine, event: Any, outcome: str) -> None:
    engine.start(task("a", retry=RETRIED))
    (message,) = engine.messages()
    event(engine)
    with engine.changes_nothing():
        answer = engine.claim(message)
        (again,) = batch(engine, [message])
    assert (answer.outcome, again.outcome) == (outcome, outcome)
    assert (answer.task_run_id, answer.dispatch_id) == (message.task_run_id, message.dispatch_id)
    assert set(answer[4:]) == {None}


def test_a_foreign_message_is_unknown(engine: Engine) -> None:
    engine.start(task("a"))
    (message,) = engine.messages()
    foreign = [
        SimpleNamespace(task_run_id=message.task_run_id, dispatch_id=uuid.uuid4()),
        SimpleNamespace(task_run_id=2**63 - 1, dispatch_id=message.dispatch_id),
        SimpleNamespace(task_run_id=-1, dispatch_id=uuid.uuid4()),
    ]
    with engine.changes_nothing():
        assert [answer.outcome for answer in batch(engine, foreign)] == ["unknown"] * 3


# The same call again


def test_only_the_same_claim_id_gets_its_claim_back(engine: Engine) -> None:
    engine.start(task("a"))
    (message,) = engine.messages()
    claim_id = uuid.uuid4()
    first = engine.claim(message, claim_id)
    engine.advance("10 s")
    with engine.changes_nothing():
        # The same worker, even: every other call is another delivery.
        assert engine.claim(message).outcome == "running"
    again = engine.claim(message, claim_id)
    assert (again.outcome, again.fencing_token) == ("claimed", first.fencing_token)
    assert (again.lease_expires_at - first.lease_expires_at).total_seconds() == 10
    assert engine.finish(again) == "accepted"
    assert engine.claim(message, claim_id).outcome == "finished"


def test_a_claim_given_back_is_bounded_by_its_time_limit(engine: Engine) -> None:
    engine.start(task("a", time_limit=35))
    (message,) = engine.messages()
    claim_id = uuid.uuid4()
    first = engine.claim(message, claim_id)
    engine.advance("10 s")
    again = engine.claim(message, claim_id)
    assert (again.lease_expires_at - first.lease_expires_at).total_seconds() == 5


def test_a_call_repeated_after_a_reap_claims_anew(engine: Engine) -> None:
    engine.start(task("a"))
    (message,) = engine.messages()
    claim_id = uuid.uuid4()
    first = engine.claim(message, claim_id)
    engine.advance("31 s")
    assert engine.reap() == 1
    again = engine.claim(message, claim_id)
    assert (again.outcome, again.fencing_token) == ("claimed", first.fencing_token + 1)
    assert engine.finish(first) == "fenced"
    # Had another delivery been quicker, it would have been that one's.
    assert engine.claim(message).outcome == "running"


# Leases


def test_the_lease_of_the_definition_wins_and_the_time_limit_bounds_it(engine: Engine) -> None:
    run_id = engine.start(task("a", lease=40), task("b", time_limit=10), task("c"))
    for message in engine.messages():
        engine.claim(message, lease="20 s")
    leases = {}
    for name in "abc":
        row = engine.task_run(run_id, name)
        lasts = (row.lease_expires_at - row.started_at).total_seconds()
        leases[name] = (row.lease_length.total_seconds(), lasts)
    assert leases == {"a": (40, 40), "b": (20, 10), "c": (20, 20)}


@pytest.mark.parametrize("column", ["claim_id", "lease_owner", "lease_expires_at", "lease_length"])
def test_a_lease_stands_exactly_while_running(engine: Engine, column: str) -> None:
    engine.start(task("a"), task("b", "a"))
    engine.claim_one()
    with engine.refuses("23514"):
        engine.rows(f"update flowforge.task_run set {column} = null where state = 'running'")
    value = {
        "claim_id": str(uuid.uuid4()),
        "lease_owner": "w",
        "lease_expires_at": "now",
        "lease_length": "1 s",
    }
    with engine.refuses("23514"):
        engine.rows(f"update flowforge.task_run set {column} = %s where state = 'pending'", value[column])


def test_the_delay_of_a_second_offer_holds_up_claim_next_but_not_a_message(engine: Engine) -> None:
    engine.start(task("a"))
    (message,) = engine.messages()
    for _ in range(2):
        engine.claim_one()
        engine.advance("31 s")
        assert engine.reap() == 1
    assert engine.claim_next() == []
    assert engine.claim(message).outcome == "claimed"


# Batches


def test_one_answer_for_each_position_and_only_the_first_of_a_task_run_wins(engine: Engine) -> None:
    engine.start(*(task(f"t{i}") for i in range(6)))
    messages = engine.messages()
    engine.claim(messages[0])
    foreign = SimpleNamespace(task_run_id=messages[1].task_run_id, dispatch_id=uuid.uuid4())
    asked = [messages[3], foreign, messages[1], messages[0], messages[1], messages[5], messages[3]]
    answers = batch(engine, asked)
    assert [answer.position for answer in answers] == list(range(1, 8))
    assert [(each.task_run_id, each.dispatch_id) for each in answers] == [
        (each.task_run_id, each.dispatch_id) for each in asked
    ]
    assert [answer.outcome for answer in answers] == [
        *("claimed", "unknown", "claimed", "running", "running", "claimed", "running")
    ]
    states = engine.rows("select state, fencing_token from flowforge.task_run order by task_run_id")
    assert [row.fencing_token for row in states] == [1, 1, 0, 1, 0, 1]


def test_a_repeated_batch_answers_the_same(engine: Engine) -> None:
    engine.define(*(task(f"t{i}") for i in range(50)))
    engine.trigger()
    engine.schedule()
    messages = engine.messages()
    random.shuffle(messages)
    claim_id = uuid.uuid4()
    first = batch(engine, messages, claim_id)
    assert batch(engine, messages, claim_id) == first
    assert {answer.fencing_token for answer in first} == {1}


def test_an_empty_batch(engine: Engine) -> None:
    assert batch(engine, []) == []


# Delivery without a broker


def test_claim_next_takes_by_priority_from_the_named_queues(engine: Engine) -> None:
    engine.start(task("a", queue="q"), task("b", queue="q", priority=1), task("c", queue="other"))
    assert [claim.task for claim in engine.claim_next(1, ("q",))] == ["b"]
    assert [claim.task for claim in engine.claim_next(5, ("q", "nowhere"))] == ["a"]
    assert engine.claim_next(5, ("q", "nowhere")) == []
    assert engine.claim_next(5, ()) == []
    (claim,) = engine.claim_next(5, ("other",))
    assert (claim.outcome, claim.position, claim.fencing_token) == ("claimed", 1, 1)


def test_claim_next_consumes_the_orders_to_publish(engine: Engine) -> None:
    engine.start(task("a"), task("b"))
    claim = engine.claim_one()
    assert [order.task_run_id for order in engine.messages()] == [claim.task_run_id + 1]


def test_a_repeated_claim_next_answers_what_it_holds_and_chooses_nothing_new(engine: Engine) -> None:
    engine.start(*(task(f"t{i}") for i in range(5)))
    call = ("claim_next", ["default"], "worker", uuid.uuid4(), "30 s", 2)
    first = engine.table(*call)
    engine.finish(first[0])
    engine.advance("10 s")
    (again,) = engine.table(*call)
    assert (again.task_run_id, again.fencing_token) == (first[1].task_run_id, first[1].fencing_token)
    assert (again.lease_expires_at - first[1].lease_expires_at).total_seconds() == 10
    engine.finish(again)
    # What it held has ended: now it is a new call.
    assert len(engine.table(*call)) == 2


def test_claim_next_leaves_a_run_that_is_being_cancelled(engine: Engine) -> None:
    engine.start(task("a"))
    engine.rows("update flowforge.run set cancel_requested_at = now()")
    with engine.changes_nothing():
        assert engine.claim_next() == []


def test_claim_next_waits_for_nothing_that_a_publisher_holds(db: Database, committing: Engine) -> None:
    run_id = committing.start(task("a"))
    with db.connect(autocommit=False) as publisher:
        assert publisher.execute("select from flowforge.fetch_outbox(10)").rowcount == 1
        assert committing.claim_one().task == "a"
        publisher.execute("select flowforge.mark_published(array_agg(outbox_id)) from flowforge.outbox")
    # The order that the publisher held is recognised as stale and goes.
    (order,) = committing.messages()
    assert committing.claim(order).outcome == "running"
    assert committing.call("sweep_outbox") == 1
    assert committing.task_run(run_id, "a").state == "running"


# What is refused

GOOD: dict[str, dict[str, Any]] = {
    "claim_task_run": {"task_run_id": 1, "dispatch_id": uuid.uuid4()},
    "claim_task_runs": {"task_run_ids": [1, 2], "dispatch_ids": [uuid.uuid4(), uuid.uuid4()]},
    "claim_next": {"queues": ["default"]},
}
COMMON: dict[str, Any] = {"worker": "worker", "claim_id": uuid.uuid4(), "lease": "30 s"}


@pytest.mark.parametrize(
    ("function", "wrong", "code"),
    [
        *(
            (function, {name: None}, "WF001")
            for function, named in GOOD.items()
            for name in {**named, **COMMON}
        ),
        *((function, {"worker": ""}, "WF001") for function in GOOD),
        *((function, {"worker": "a\tb"}, "WF001") for function in GOOD),
        *((function, {"worker": "w" * 201}, "WF005") for function in GOOD),
        *((function, {"lease": "0.09 s"}, "WF001") for function in GOOD),
        *((function, {"lease": "-1 day"}, "WF001") for function in GOOD),
        *((function, {"lease": "7 days 1 s"}, "WF001") for function in GOOD),
        ("claim_task_runs", {"task_run_ids": [1, None]}, "WF001"),
        ("claim_task_runs", {"dispatch_ids": [uuid.uuid4(), None]}, "WF001"),
        ("claim_task_runs", {"dispatch_ids": [uuid.uuid4()]}, "WF001"),
        ("claim_next", {"queues": ["default", None]}, "WF001"),
        ("claim_next", {"max_rows": None}, "WF001"),
        ("claim_next", {"max_rows": 0}, "WF001"),
        ("claim_next", {"max_rows": 100_001}, "WF001"),
    ],
)
def test_wrong_arguments_are_refused(engine: Engine, function: str, wrong: dict[str, Any], code: str) -> None:
    engine.start(task("a"))
    with engine.refuses(code):
        engine.table(function, **{**GOOD[function], **COMMON, **wrong})


def test_a_batch_has_a_named_limit(engine: Engine) -> None:
    engine.call("set_limit", "max_batch", 1500)
    dispatch_id = uuid.uuid4()
    for size, refused in [(1500, False), (1501, True)]:
        messages = [SimpleNamespace(task_run_id=i, dispatch_id=dispatch_id) for i in range(size)]
        if refused:
            with engine.refuses("WF005", "1501 elements; at most 1500"):
                batch(engine, messages)
        else:
            assert len(batch(engine, messages)) == size
