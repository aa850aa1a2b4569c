"""What a worker does with RabbitMQ's messages: when it acknowledges, gives back, puts aside."""

import functools
import json
import struct
import threading
import uuid
from typing import Any

import pika
import pika.data
import pytest

from flowforge.broker import ConsumeChannel, Delivery, Message, PublishChannel
from flowforge.worker import messages
from flowforge.worker.session import Session
from tests.python.workbench import Bench, LossyProxy, Witness
from tests.services.database import Database
from tests.services.process import wait_until
from tests.services.rabbitmq import Broker, RabbitServer


def publish(bench: Bench, *bodies: bytes, message_id: str = "") -> None:
    channel = PublishChannel(bench.config, "test")
    channel.start()
    try:
        assert channel.wait_ready(30)
        channel.ensure(["default"])
        sent = [Message(message_id or str(uuid.uuid4()), "default", "h", body) for body in bodies]
        for message in sent:
            [outcome] = channel.publish_batch([message], 10)
            assert outcome.kind == "confirmed"
    finally:
        channel.close()


def body_of(bench: Bench, run: int) -> bytes:
    task = bench.task(run, "task")
    return json.dumps(
        {"task_run_id": task["task_run_id"], "dispatch_id": task["dispatch_id"], "handler": "h", "attempt": 1}
    ).encode()


def queued(bench: Bench, rabbit: Broker, queue: str = "default") -> int:
    prefix = f"{bench.config.namespace}.flowforge"
    counts = rabbit.counts(f"{prefix}.{queue}")
    return -1 if counts is None else counts[0]


def assert_acknowledged(bench: Bench, rabbit: RabbitServer) -> None:
    """Once no worker is left: what was not acknowledged would be given out still, or back in the queue."""
    queue = f"{bench.config.namespace}.flowforge.default"
    wait_until(lambda: rabbit.queues()[queue] == (0, 0, 0), "an empty queue")


def refuse(bench: Bench, run: int, sqlstate: str) -> None:
    """Make every claim of the task of `run` raise."""
    poison = bench.task(run, "task")["task_run_id"]
    bench.execute(
        f"""
        create function public.refuse() returns trigger language plpgsql as
            $$ begin raise exception 'poison' using errcode = '{sqlstate}'; end $$;
        create trigger refuse before update on flowforge.task_run for each row
            when (new.task_run_id = {poison} and new.state = 'running') execute function public.refuse();
        """
    )


def test_doubled_messages_make_one_execution_and_are_dropped(
    rabbit_bench: Bench, rabbit_server: RabbitServer
) -> None:
    """Several deliveries of one dispatch, waiting at the same time: never two in one undecided call, and all
    are acknowledged."""
    bench, witness = rabbit_bench, Witness()
    bench.define(witness.workflow)
    bench.never_redispatch()
    runs = bench.trigger_many(witness.workflow, 3)
    wait_until(lambda: queued(bench, rabbit_server) == 3, "three messages")
    publish(bench, *[body_of(bench, run) for run in runs for _ in range(3)])
    wait_until(lambda: queued(bench, rabbit_server) == 12, "twelve messages")
    calls: list[list[uuid.UUID]] = []
    real = Session.call

    def call(self: Session, query: str, params: Any, **options: Any) -> list[tuple[Any, ...]]:
        if "claim_task_runs" in query:
            calls.append(params[1])
        return real(self, query, params, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "call", call)
        with bench.worker(witness.workflow, concurrency=12) as worker:
            assert set(bench.wait_run(*runs)) == {"succeeded"}
            wait_until(lambda: sum(len(each) for each in calls) == 12, "all deliveries decided")
    assert_acknowledged(bench, rabbit_server)
    assert all(len(each) == len(set(each)) for each in calls)
    assert len(witness.executions) == 3
    assert worker.counts["dropped_running"] + worker.counts["dropped_finished"] == 9


def test_unreadable_messages_go_to_the_dead_letters(rabbit_bench: Bench, rabbit_server: RabbitServer) -> None:
    bench, witness = rabbit_bench, Witness()
    bench.define(witness.workflow)
    good = str(uuid.uuid4())
    unreadable = [
        b"", b"not json", b"[]", b"null", b'"text"', b"\xff\xfe", b"{}", b"[" * 100_000,
        json.dumps({"task_run_id": "1", "dispatch_id": good}).encode(),
        json.dumps({"task_run_id": True, "dispatch_id": good}).encode(),
        json.dumps({"task_run_id": 2**63, "dispatch_id": good}).encode(),
        json.dumps({"task_run_id": 1, "dispatch_id": "x"}).encode(),
        json.dumps({"task_run_id": 1, "dispatch_id": None}).encode(),
    ]  # fmt: skip
    with bench.worker(witness.workflow) as worker:
        publish(bench, *unreadable)
        run = bench.trigger(witness.workflow)
        assert bench.wait_run(run) == ["succeeded"]
        wait_until(lambda: queued(bench, rabbit_server, "dead") == len(unreadable), "the dead letters")
    assert_acknowledged(bench, rabbit_server)
    assert worker.counts["unreadable"] == len(unreadable)


class Raw(bytes):
    """The value of a header as it is sent, its type first."""


# What RabbitMQ passes on, and pika or Python have no value for, or one that is not a text.
STRANGE_HEADERS: dict[str, Any] = {
    "far ahead": Raw(b"T" + struct.pack(">Q", 2**63)),
    "past all years": Raw(b"T" + struct.pack(">Q", 2**40)),
    "tiny": Raw(b"D" + struct.pack(">Bi", 255, -1)),
    "no text": Raw(b"S" + struct.pack(">I", 2) + b"\xff\xfe"),
    "bytes": Raw(b"x" + struct.pack(">I", 2) + b"\x00\xff"),
    "nothing": Raw(b"V"),
    "deep": functools.reduce(lambda inner, _: [inner], range(400), list[Any]()),
    "traceparent": Raw(b"l" + struct.pack(">q", -1)),
}


def test_strange_headers_and_properties_are_not_looked_at(
    rabbit_bench: Bench, rabbit_server: RabbitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header that cannot be read costs neither its message nor the connection, which would bring the
    message again and again."""
    encode_value: Any = pika.data.encode_value

    def encode(pieces: list[bytes], value: Any) -> Any:
        if not isinstance(value, Raw):
            return encode_value(pieces, value)
        pieces.append(value)
        return len(value)

    monkeypatch.setattr(pika.data, "encode_value", encode)
    bench, witness = rabbit_bench, Witness()
    bench.define(witness.workflow)
    bench.never_redispatch()
    exchange = f"{bench.config.namespace}.flowforge"
    runs = bench.trigger_many(witness.workflow, 2)
    wait_until(lambda: queued(bench, rabbit_server) == 2, "two messages")
    with pika.BlockingConnection(pika.URLParameters(bench.config.amqp_urls[0])) as connection:
        channel = connection.channel()
        channel.queue_purge(f"{exchange}.default")
        for name, value in STRANGE_HEADERS.items():
            headers = {name: value, "traceparent": name}
            for body in (body_of(bench, runs[0]), b"\xff"):
                channel.basic_publish(exchange, "default", body, pika.BasicProperties(headers=headers))
        strange: Any = b"\xff\xfe"
        properties = pika.BasicProperties(
            *(strange, strange), priority=255, correlation_id=strange, reply_to=strange, expiration="600000"
        )
        properties.message_id = properties.type = properties.app_id = strange
        properties.timestamp = 2**64 - 1
        channel.basic_publish(exchange, "default", body_of(bench, runs[1]), properties)
        channel.basic_publish(exchange, "default", b"{}", properties)
    with bench.worker(witness.workflow) as worker:
        claimer: Any = worker.worker._claimer
        generation = claimer.channel.generation
        assert bench.wait_run(*runs) == ["succeeded", "succeeded"]
        unreadable = len(STRANGE_HEADERS) + 1
        wait_until(lambda: queued(bench, rabbit_server, "dead") == unreadable, "the dead letters")
        assert claimer.channel.generation == generation
    assert_acknowledged(bench, rabbit_server)
    assert worker.counts["unreadable"] == unreadable
    assert len(witness.executions) == 2


def test_a_message_of_another_database_is_dropped(rabbit_bench: Bench, rabbit_server: RabbitServer) -> None:
    bench, witness = rabbit_bench, Witness()
    bench.define(witness.workflow)
    with bench.worker(witness.workflow) as worker:
        publish(bench, json.dumps({"task_run_id": 999, "dispatch_id": str(uuid.uuid4())}).encode())
        wait_until(lambda: worker.counts["dropped_unknown"] == 1, "the answer unknown")
    assert_acknowledged(bench, rabbit_server)


def test_prefetched_messages_go_back_when_no_slot_comes_free(
    rabbit_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is busy for long does not keep from others what it has not begun."""
    monkeypatch.setattr(messages, "PAUSE_AFTER", 0.3)
    bench, witness = rabbit_bench, Witness().closed()
    bench.define(witness.workflow)
    bench.never_redispatch()
    runs = bench.trigger_many(witness.workflow, 3)
    with bench.worker(witness.workflow, concurrency=1):
        witness.gate.await_arrivals(1)
        with bench.worker(witness.workflow, concurrency=2):
            witness.gate.await_arrivals(3)
            witness.gate.open()
            assert set(bench.wait_run(*runs)) == {"succeeded"}
        # And it takes messages again.
        assert bench.wait_run(bench.trigger(witness.workflow)) == ["succeeded"]
    assert len(witness.executions) == 4


def test_what_arrives_while_the_worker_steps_aside_is_given_back_too(
    rabbit_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The channel learns of the pause in its own thread, and delivers until then: such a message is not kept
    from others for as long as no slot comes free."""
    monkeypatch.setattr(messages, "PAUSE_AFTER", 0.3)
    bench, witness = rabbit_bench, Witness().closed()
    bench.define(witness.workflow)
    bench.never_redispatch()
    asked, late = threading.Event(), threading.Event()
    pause = ConsumeChannel.pause

    with bench.worker(witness.workflow, concurrency=1) as worker:
        claimer: Any = worker.worker._claimer

        def pause_later(channel: ConsumeChannel) -> None:
            if channel is claimer.channel and claimer._aside and not late.is_set():
                asked.set()
            else:
                pause(channel)

        def received(delivery: Delivery) -> None:
            claimer._arrived.put(delivery)
            if asked.is_set() and not late.is_set():
                late.set()
                pause(claimer.channel)

        runs = [bench.trigger(witness.workflow)]
        witness.gate.await_arrivals(1)
        monkeypatch.setattr(ConsumeChannel, "pause", pause_later)
        claimer.channel._on_message = received
        runs.append(bench.trigger(witness.workflow))
        assert late.wait(60)
        with bench.worker(witness.workflow, concurrency=2):
            witness.gate.await_arrivals(2)
            witness.gate.open()
            assert bench.wait_run(*runs) == ["succeeded"] * 2


def test_nothing_is_acknowledged_while_the_database_is_away(
    rabbit_bench: Bench, rabbit: Broker, proxy: LossyProxy
) -> None:
    bench, witness = rabbit_bench, Witness()
    bench.define(witness.workflow)
    with bench.worker(witness.workflow, database_url=proxy.dsn) as worker:
        assert bench.wait_run(bench.trigger(witness.workflow)) == ["succeeded"]
        bench.never_redispatch()
        with proxy.down():
            runs = bench.trigger_many(witness.workflow, 6)
            session = worker.worker._claimer.session
            wait_until(lambda: session.lost_since_answer > 2, "failed tries")
            # What it tries to claim is neither acknowledged nor offered to anyone; the rest is back in the
            # queue.
            wait_until(lambda: queued(bench, rabbit) >= 2, "messages, back in the queue")
            assert len(witness.executions) == 1
        assert set(bench.wait_run(*runs)) == {"succeeded"}
    assert len(witness.executions) == 7


def test_a_claim_that_is_refused_is_told_apart_from_its_batch(rabbit_bench: Bench, rabbit: Broker) -> None:
    """One message that makes the claim raise, among others: it is put aside, they run."""
    bench, witness = rabbit_bench, Witness()
    bench.define(witness.workflow)
    runs = bench.trigger_many(witness.workflow, 6)
    wait_until(lambda: queued(bench, rabbit) == 6, "six messages")
    refuse(bench, runs[3], "22000")
    with bench.worker(witness.workflow, concurrency=6):
        assert set(bench.wait_run(*runs[:3], *runs[4:])) == {"succeeded"}
        wait_until(lambda: queued(bench, rabbit, "dead") == 1, "the dead letter")
    assert len(witness.executions) == 5
    assert bench.task(runs[3], "task")["state"] == "ready"


def test_a_message_whose_claim_fails_again_and_again_holds_up_no_other(
    rabbit_bench: Bench, rabbit: Broker
) -> None:
    """An error that says nothing of the message itself: it is kept aside, and runs once that has passed."""
    bench, witness = rabbit_bench, Witness()
    bench.define(witness.workflow)
    runs = bench.trigger_many(witness.workflow, 6)
    wait_until(lambda: queued(bench, rabbit) == 6, "six messages")
    refuse(bench, runs[1], "XX000")
    with bench.worker(witness.workflow, concurrency=6) as worker:
        assert set(bench.wait_run(runs[0], *runs[2:])) == {"succeeded"}
        claimer: Any = worker.worker._claimer
        wait_until(lambda: any(each._tries > 1 for each in list(claimer._refusals.values())), "another try")
        assert bench.wait_run(*bench.trigger_many(witness.workflow, 6)) == ["succeeded"] * 6
        bench.execute("drop trigger refuse on flowforge.task_run")
        assert bench.wait_run(runs[1]) == ["succeeded"]
        wait_until(lambda: not claimer._refusals, "nothing kept of it")
    assert queued(bench, rabbit, "dead") == 0


def test_without_a_broker_a_refused_claim_is_tried_singly_and_shown(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """One dispatch that makes the claim raise costs the others their company, and not their turn."""
    witness = Witness()
    bench.define(witness.workflow)
    runs = bench.trigger_many(witness.workflow, 6)
    for run in runs:
        bench.wait_state(run, "task", "ready")
    refuse(bench, runs[5], "XX000")
    with bench.worker(witness.workflow, concurrency=6) as worker:
        assert set(bench.wait_run(*runs[:5])) == {"succeeded"}
        wait_until(lambda: worker.worker.health.state not in ("starting", "ok"), "health")
        assert "poison" in next(
            str(each.__dict__["keys"]) for each in caplog.records if each.levelname == "ERROR"
        )
        bench.execute("drop trigger refuse on flowforge.task_run")
        assert bench.wait_run(runs[5]) == ["succeeded"]
        wait_until(lambda: worker.worker.health.state == "ok", "health")


def test_health_says_when_claims_are_refused_for_long_though_that_may_pass(any_bench: Bench) -> None:
    """As by a full disk. A few refusals, such as for a lock, are not worth a word."""
    witness = Witness()
    any_bench.define(witness.workflow)
    run = any_bench.trigger(witness.workflow)
    any_bench.wait_state(run, "task", "ready")
    refuse(any_bench, run, "53100")
    with any_bench.worker(witness.workflow) as worker:
        health = worker.worker.health
        wait_until(lambda: health.state == "error", "health that says so")
        assert health._state["detail"] == "the database refuses to claim; see the log"
        any_bench.execute("drop trigger refuse on flowforge.task_run")
        assert any_bench.wait_run(run) == ["succeeded"]
        wait_until(lambda: health.state == "ok", "health")


def test_what_was_refused_here_and_went_elsewhere_is_no_trouble_of_this_worker(
    rabbit_bench: Bench, rabbit: Broker
) -> None:
    """In a quiet night no message may come that shows it; whoever restarts what is not well would do so again
    and again."""
    bench, witness = rabbit_bench, Witness()
    bench.define(witness.workflow)
    bench.never_redispatch()
    run = bench.trigger(witness.workflow)
    wait_until(lambda: queued(bench, rabbit) == 1, "the message")
    refuse(bench, run, "53100")
    with bench.worker(witness.workflow) as worker:
        health = worker.worker.health
        wait_until(lambda: health.state == "error", "health that says so")
        # Between two tries it is in the queue, for others to take.
        wait_until(lambda: rabbit.purge(f"{bench.config.namespace}.flowforge.default") == 1, "its removal")
        wait_until(lambda: health.state == "ok", "health")


def test_a_broken_claiming_function_costs_no_message(rabbit_bench: Bench, rabbit: Broker) -> None:
    """A privilege taken away by mistake: nothing goes to the dead letters, and all runs once it is back."""
    bench, witness = rabbit_bench, Witness()
    bench.define(witness.workflow)
    login = bench.db.create_login("flowforge_worker")
    function = "flowforge.claim_task_runs(bigint[], uuid[], text, uuid, interval)"
    with bench.worker(witness.workflow, database_url=login) as worker:
        assert bench.wait_run(bench.trigger(witness.workflow)) == ["succeeded"]
        bench.execute(f"revoke execute on function {function} from flowforge_worker")
        runs = bench.trigger_many(witness.workflow, 8)
        wait_until(lambda: worker.worker._claimer.session._backoff._tries > 0, "a refusal of all")
        wait_until(lambda: worker.worker.health.state not in ("starting", "ok"), "health")
        bench.execute(f"grant execute on function {function} to flowforge_worker")
        assert set(bench.wait_run(*runs)) == {"succeeded"}
        wait_until(lambda: worker.worker._executor._slots._free == 4, "all slots free")
        assert queued(bench, rabbit, "dead") == 0


def test_a_broker_restart_while_a_task_runs_repeats_nothing(
    db: Database, rabbit_server: RabbitServer
) -> None:
    """The delivery comes again after the restart, is answered `running`, and dropped."""
    namespace = f"t{uuid.uuid4().hex[:12]}"
    bench, witness = Bench(db, rabbit_server.url, namespace), Witness().closed()
    bench.start()
    bench.define(witness.workflow)
    try:
        run = bench.trigger(witness.workflow)
        with bench.worker(witness.workflow):
            witness.gate.await_arrivals(1)
            rabbit_server.stop_app()
            rabbit_server.start_app()
            publish(bench, body_of(bench, run))
            witness.gate.open()
            again = bench.trigger(witness.workflow)
            assert bench.wait_run(run, again) == ["succeeded", "succeeded"]
        assert len(witness.executions) == 2
        assert bench.task(run, "task")["attempt"] == 1
    finally:
        bench.close()
        rabbit_server.delete_namespace(namespace)
