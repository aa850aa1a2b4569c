"""The publisher: no message is lost, none is marked that the broker has not, and none holds up the rest."""

import json
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from flowforge import exits
from flowforge.broker import ConsumeChannel, PublishChannel
from flowforge.config import Config
from flowforge.db import Connection
from flowforge.errors import ConfigError
from flowforge.health import read_health
from flowforge.publisher import Publisher
from tests.python.amqp_proxy import AmqpProxy
from tests.python.channels import User
from tests.python.daemons import TIMEOUT, Flow, Running, process
from tests.services.database import Database
from tests.services.process import wait_until
from tests.services.rabbitmq import Broker, RabbitServer


@pytest.fixture
def config(db: Database, rabbit: Broker, amqp_namespace: str) -> Config:
    return Config(
        database_url=db.create_login("flowforge_publisher"),
        amqp_urls=(rabbit.url,),
        namespace=amqp_namespace,
        poll_interval=0.2,
        blocked_timeout=1,
    )


class Outbox(Flow):
    """A workflow, its outbox, and its queues on the broker."""

    def __init__(self, db: Database, broker: Broker, namespace: str, *tasks: dict[str, Any]) -> None:
        super().__init__(db, *tasks)
        self._broker, self._prefix = broker, f"{namespace}.flowforge."

    def name_of(self, queue: str = "default") -> str:
        return f"{self._prefix}{queue}"

    def dispatch(self, count: int = 1) -> list[int]:
        """Trigger runs and dispatch them, as the scheduler does."""
        runs = [self.trigger() for _ in range(count)]
        while self.value("select flowforge.dispatch_ready()"):
            pass
        return runs

    def unpublished(self) -> int:
        return int(self.value("select count(*) from flowforge.outbox where published_at is null"))

    def errors(self) -> set[str | None]:
        return {row[0] for row in self.conn.execute("select last_error from flowforge.outbox")}

    def dispatches(self) -> list[str]:
        query = "select dispatch_id::text from flowforge.task_run where dispatch_id is not null"
        return sorted(row[0] for row in self.conn.execute(query))

    def messages(self, queue: str = "default") -> list[tuple[Any, dict[str, Any]]]:
        """Take every message out of a queue: properties and body."""
        found = []
        with self._broker.channel() as channel:
            while (got := channel.basic_get(self.name_of(queue), auto_ack=True))[0] is not None:
                found.append((got[1], json.loads(got[2])))
        return found

    def waiting(self, queue: str = "default") -> int:
        counts = self._broker.counts(self.name_of(queue))
        return 0 if counts is None else counts[0]

    def listening(self) -> bool:
        query = """
            select query ilike 'listen%' from pg_stat_activity
            where application_name = 'flowforge publisher listen' and datname = current_database()
        """
        return bool(self.value(query))

    def idle_in_transaction(self) -> int:
        query = """
            select count(*) from pg_stat_activity
            where application_name = 'flowforge publisher' and state like 'idle in transaction%'
                and datname = current_database()
        """
        return int(self.value(query))


def detail(running: Running) -> str:
    """What health says beside the state."""
    return str(running.health._state["detail"])


@pytest.fixture
def outbox(db: Database, rabbit: Broker, amqp_namespace: str) -> Iterator[Callable[..., Outbox]]:
    with ExitStack() as stack:

        def make(*tasks: dict[str, Any]) -> Outbox:
            made = Outbox(db, rabbit, amqp_namespace, *tasks)
            stack.callback(made.close)
            return made

        yield make


def test_every_order_becomes_a_message_that_any_language_can_read(
    config: Config, outbox: Callable[..., Outbox]
) -> None:
    box = outbox({"name": "one", "handler": "häendler"}, {"name": "two", "queue": "other"})
    run = box.trigger(labels='{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}')
    box.value("select flowforge.dispatch_ready()")
    lazy = config.replace(poll_interval=3600)
    publisher = Publisher(lazy)
    tick, moved = publisher.tick, [1]

    def counted(conn: Connection) -> int:
        moved.append(tick(conn))
        return moved[-1]

    publisher.tick = counted  # type: ignore[method-assign]
    with Running(publisher, lazy) as running:
        wait_until(lambda: box.unpublished() == 0, "the marks")
        ((properties, body),) = box.messages()
        query = "select task_run_id, dispatch_id::text from flowforge.task_run where run_id = %s order by 1"
        first, second = box.conn.execute(query, [run]).fetchall()
        assert body == {"task_run_id": first[0], "dispatch_id": first[1], "handler": "häendler", "attempt": 1}
        assert properties.message_id == first[1]
        assert properties.type == "häendler"
        assert properties.headers["traceparent"].startswith("00-0af7")
        assert [each.message_id for each, _ in box.messages("other")] == [second[1]]
        running.until("ok")
        wait_until(box.listening, "LISTEN")
        # From here on only a notification wakes it, but for one look when it had begun to listen.
        for _ in range(2):
            wait_until(lambda: moved[-1] == 0, "a look that finds nothing")
            box.dispatch()
            wait_until(lambda: box.unpublished() == 0, "the notified order")
    assert running.code == exits.EXIT_OK


def test_more_orders_than_a_batch_all_go_out_once(config: Config, outbox: Callable[..., Outbox]) -> None:
    box = outbox()
    box.conn.execute("select flowforge.configure_queue('default', window_size => 1000)")
    few = config.replace(publish_batch=10)
    with Running(Publisher(few), few) as running:
        running.until("ok")  # whoever finds a queue missing offers again what is dispatched
        box.dispatch(105)
        wait_until(lambda: box.unpublished() == 0, "the marks")
        sent = [properties.message_id for properties, _ in box.messages()]
    assert sorted(sent) == box.dispatches()


def test_two_publishers_send_no_order_twice(config: Config, outbox: Callable[..., Outbox]) -> None:
    box = outbox()
    few = config.replace(publish_batch=3)
    with Running(Publisher(few), few) as one, Running(Publisher(few), few) as other:
        # Not before the queue is there: whoever finds it missing offers again what is dispatched.
        one.until("ok")
        other.until("ok")
        box.dispatch(90)
        wait_until(lambda: box.unpublished() == 0, "the marks")
        sent = [properties.message_id for properties, _ in box.messages()]
    assert sorted(sent) == box.dispatches()


def test_an_order_that_commits_late_is_published_too(
    config: Config, db: Database, outbox: Callable[..., Outbox]
) -> None:
    first, second = outbox({"name": "one", "queue": "other"}), outbox()
    with Running(Publisher(config), config) as running:
        running.until("ok")  # whoever finds a queue missing offers again what is dispatched
        with db.connect() as late, late.transaction():
            late.execute("select flowforge.trigger(%s)", [first.name])
            late.execute("select flowforge.dispatch_ready()")
            second.dispatch()
            wait_until(lambda: second.waiting() == 1, "the order with the higher id")
            wait_until(lambda: second.unpublished() == 0, "its mark")  # which follows the message
        wait_until(lambda: first.waiting("other") == 1, "the order with the lower id")


def test_an_order_for_a_queue_that_is_gone_is_kept_and_goes_out_when_it_is_back(
    config: Config, rabbit: Broker, outbox: Callable[..., Outbox], caplog: pytest.LogCaptureFixture
) -> None:
    box = outbox()
    with Running(Publisher(config), config) as running:
        running.until("ok")
        rabbit.delete_queue(box.name_of())
        box.dispatch(3)
        wait_until(lambda: box.unpublished() == 0, "the marks")
        # The row itself tells the error only until its message has gone out.
        kept = [each.__dict__["keys"] for each in caplog.records if "kept for a later" in each.getMessage()]
        assert [(each["count"], "NO_ROUTE" in each["error"]) for each in kept] == [(3, True)]
        assert box.value("select max(tries) from flowforge.outbox") == 1
        assert {properties.message_id for properties, _ in box.messages()} == set(box.dispatches())


def test_what_was_in_a_queue_that_is_gone_is_published_again_at_once(
    config: Config, rabbit: Broker, outbox: Callable[..., Outbox]
) -> None:
    box = outbox()
    box.conn.execute("select flowforge.configure_queue('default', redispatch_delay => interval '1 hour')")
    with Running(Publisher(config), config):
        box.dispatch(3)
        wait_until(lambda: box.unpublished() == 0, "the marks")
    rabbit.delete_queue(box.name_of())
    before = box.dispatches()
    with Running(Publisher(config), config):
        wait_until(lambda: box.waiting() == 3, "the messages")
        assert sorted(properties.message_id for properties, _ in box.messages()) == before
    assert box.value("select max(attempt) from flowforge.task_run") == 1


def test_a_queue_that_is_deleted_while_nothing_is_published_is_noticed(
    config: Config, rabbit: Broker, outbox: Callable[..., Outbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PublishChannel, "look_interval", 0.1)
    box = outbox()
    box.conn.execute("select flowforge.configure_queue('default', redispatch_delay => interval '1 hour')")
    with Running(Publisher(config), config) as running:
        box.dispatch(3)
        wait_until(lambda: box.waiting() == 3 and box.unpublished() == 0, "the messages and their marks")
        rabbit.delete_queue(box.name_of())
        wait_until(lambda: box.waiting() == 3, "the messages again")
        running.until("ok")
    assert sorted(properties.message_id for properties, _ in box.messages()) == box.dispatches()


def test_a_consumer_that_comes_back_first_hides_no_loss(
    config: Config, rabbit_server: RabbitServer, outbox: Callable[..., Outbox]
) -> None:
    box = outbox()
    box.conn.execute("select flowforge.configure_queue('default', redispatch_delay => interval '1 hour')")
    seen: set[str | None] = set()
    consumer = ConsumeChannel(
        config, ["default"], lambda got: seen.add(got.message_id), prefetch=10, name="worker"
    )
    with Running(Publisher(config), config):
        consumer.start()
        try:
            box.dispatch(3)
            wait_until(lambda: len(seen) == 3 and box.unpublished() == 0, "the first delivery")
            before, generation = set(seen), consumer.generation
            seen.clear()
            rabbit_server.delete_queue(box.name_of())
            wait_until(
                lambda: consumer.generation > generation and consumer.state == "connected", "the consumer"
            )
            rabbit_server.close_connections("test")
            wait_until(lambda: seen == before, "the same dispatches, again at once")
        finally:
            consumer.close()


def test_nacked_orders_are_kept_and_confirmed_ones_marked(
    config: Config, rabbit_server: RabbitServer, outbox: Callable[..., Outbox]
) -> None:
    box = outbox({"name": "one"}, {"name": "two", "queue": "other"})
    classic = config.replace(queue_type="classic")
    full = '{"max-length": 1, "overflow": "reject-publish"}'
    rabbit_server.set_policy("full", f"^{box.name_of()}$", full)
    with Running(Publisher(classic), classic) as running:
        try:
            box.dispatch(10)
            nacked = "select count(*) from flowforge.outbox where last_error like '%nack%' and tries > 0"
            wait_until(lambda: bool(box.value(nacked) == 9), "nine of ten to be nacked")
            wait_until(lambda: box.unpublished() == 9, "the marks of all others")
            assert box.waiting("other") == 10
            running.until("ok")
        finally:
            rabbit_server.clear_policy("full")
        wait_until(lambda: box.unpublished() == 0, "the marks")
        assert len({properties.message_id for properties, _ in box.messages()}) == 10


def test_an_order_that_can_never_be_published_is_parked_and_holds_up_nobody(
    config: Config, outbox: Callable[..., Outbox]
) -> None:
    box = outbox()
    runs = box.dispatch(3)
    box.conn.execute(
        "update flowforge.outbox set handler = repeat('h', 256), next_attempt_at = '-infinity'"
        " where task_run_id = (select task_run_id from flowforge.task_run where run_id = %s)",
        [runs[1]],
    )
    with Running(Publisher(config), config):
        wait_until(lambda: box.waiting() == 2, "the good ones")
        wait_until(lambda: box.unpublished() == 1, "the marks")
        parked = "select last_error, tries from flowforge.outbox where parked_at is not null"
        ((error, tries),) = box.conn.execute(parked).fetchall()
        assert "not a valid message" in error
        assert tries == 1
    box.value("select flowforge.fail_undeliverable()")
    box.value("select flowforge.settle_finished()")
    assert [box.run_state(run) for run in runs] == ["running", "failed", "running"]


def test_the_longest_queue_name_is_none_too_long_for_the_broker(
    config: Config, outbox: Callable[..., Outbox]
) -> None:
    box = outbox({"name": "one", "queue": "ÿ" * 100})
    box.dispatch()
    with Running(Publisher(config), config):
        wait_until(lambda: box.waiting("ÿ" * 100) == 1, "the message")


@pytest.mark.parametrize("which", ["default", "dead"])
def test_queues_that_all_have_other_arguments_are_waited_for_from_the_start(
    config: Config, rabbit: Broker, outbox: Callable[..., Outbox], which: str
) -> None:
    """As after a change of FLOWFORGE_QUEUE_TYPE; the dead-letter queue is in the way of all others."""
    box = outbox()
    rabbit.declare(box.name_of(which), arguments={"x-queue-type": "quorum", "x-max-length": 5})
    box.dispatch()
    with Running(Publisher(config), config) as running:
        running.until("error" if which == "default" else "no broker")
        assert f"queue '{box.name_of(which)}' exists with other arguments" in detail(running)
        assert box.unpublished() == 1
        rabbit.delete_queue(box.name_of(which))
        running.until("ok")
        wait_until(lambda: box.waiting() > 0, "the message")
        wait_until(lambda: box.unpublished() == 0, "the marks")
    assert running.code == exits.EXIT_OK
    # Twice, where the refused order's time came when the queue's loss had been noted.
    assert len({properties.message_id for properties, _ in box.messages()}) == 1


def test_no_order_is_sent_between_the_return_of_its_queue_and_the_note_of_its_loss(
    config: Config, db: Database, rabbit: Broker, outbox: Callable[..., Outbox]
) -> None:
    """It would be sent a second time for the loss. The connection's thread hesitates before it notes that;
    the order is due throughout."""

    class Hesitating(set[str]):
        def add(self, queue: str) -> None:
            for _ in range(50):
                with db.connect() as conn:
                    conn.execute("update flowforge.outbox set next_attempt_at = '-infinity'")
                time.sleep(0.01)
            super().add(queue)

    box = outbox()
    rabbit.declare(box.name_of("default"), arguments={"x-queue-type": "quorum", "x-max-length": 5})
    box.dispatch()
    publisher = Publisher(config.replace(poll_interval=0.01))
    publisher._channel.gone = Hesitating()
    with Running(publisher, config) as running:
        running.until("error")
        rabbit.delete_queue(box.name_of("default"))
        running.until("ok")
        wait_until(lambda: box.unpublished() == 0 and not publisher._channel.gone, "the mark")
        wait_until(lambda: box.waiting() >= 1, "the message")
    assert box.waiting() == 1


def test_a_queue_with_other_arguments_among_others_is_refused_alone(
    config: Config, rabbit: Broker, outbox: Callable[..., Outbox], tmp_path: Any
) -> None:
    """A client may have chosen its name: all other queues go on, at the start and afterwards."""
    box = outbox({"name": "one", "queue": "evil"}, {"name": "two"})
    rabbit.declare(box.name_of("evil"), arguments={"x-queue-type": "classic"})
    kept = "select count(*) from flowforge.outbox where published_at is null and last_error like %s"
    said = f"queue '{box.name_of('evil')}' exists with other arguments%"
    for turn in (1, 2):
        box.dispatch(2)
        daemon = process("Publisher", config.replace(health_file=str(tmp_path / "health")))
        try:
            wait_until(lambda turn=turn: box.waiting() == 2 * turn, "the other queue's messages")  # type: ignore[misc]
            wait_until(lambda turn=turn: box.value(kept, said) == 2 * turn, "the refusals")  # type: ignore[misc]
            wait_until(lambda: "publisher: error (queue" in read_health(tmp_path / "health")[1], "health")
        finally:
            daemon.terminate()
            _, errors = daemon.communicate(timeout=TIMEOUT)
        assert daemon.returncode == exits.EXIT_OK
        (line,) = [line for line in map(json.loads, errors.splitlines()) if line["level"] == "error"]
        assert (line["queue"], line["error"].startswith(said.rstrip("%"))) == ("evil", True)
    assert box.value("select min(tries) from flowforge.outbox where published_at is null") >= 1
    with Running(Publisher(config), config) as running:
        running.until("error")
        # A client chooses one while the publisher runs.
        late = outbox({"name": "one", "queue": "late"}, {"name": "two", "queue": "other"})
        rabbit.declare(box.name_of("late"), arguments={"x-queue-type": "classic"})
        late.dispatch()
        wait_until(lambda: late.waiting("other") == 1, "the other queue's message")
        wait_until(lambda: "late" in detail(running) and "evil" in detail(running), "both in health")
        rabbit.delete_queue(box.name_of("evil"))
        rabbit.delete_queue(box.name_of("late"))
        wait_until(lambda: box.unpublished() == 0, "the marks")
        running.until("ok")
    # One that goes right while its orders are offered again gets them twice.
    for queue, count in (("evil", 4), ("late", 1)):
        assert len({properties.message_id for properties, _ in box.messages(queue)}) == count


def test_a_user_who_may_not_publish_costs_no_task_run_and_is_waited_for(
    config: Config, rabbit_server: RabbitServer, outbox: Callable[..., Outbox]
) -> None:
    """Its right to write covers the queues, so all can be declared, and not the exchange."""
    box, user = outbox(), User(rabbit_server)
    user.may_write(f"^{config.namespace}[.]flowforge[.]")
    box.dispatch(20)
    refused = config.replace(amqp_urls=(user.url,))
    try:
        with Running(Publisher(refused), refused) as running:
            running.until("no broker")
            wait_until(lambda: "403" in detail(running), "the cause to be named")
            assert f"write on exchange '{config.namespace}.flowforge'" in detail(running)
            assert box.unpublished() == 20
            assert box.errors() == {None}
            assert not box.value("select count(*) from flowforge.outbox where parked_at is not null")
            user.may_write(".*")
            wait_until(lambda: box.unpublished() == 0, "the marks")
            running.until("ok")
        assert running.code == exits.EXIT_OK
    finally:
        user.delete()
    assert sorted(properties.message_id for properties, _ in box.messages()) == box.dispatches()


def test_a_blocked_broker_leaves_no_transaction_open_and_is_reported(
    config: Config, rabbit_server: RabbitServer, outbox: Callable[..., Outbox]
) -> None:
    box = outbox()
    with Running(Publisher(config), config) as running:
        running.until("ok")
        rabbit_server.set_memory_watermark(0)
        try:
            box.dispatch(3)
            running.until("blocked")
            assert box.idle_in_transaction() == 0
            query = "select count(*) from (select from flowforge.outbox for update skip locked) o"
            assert box.value(query) == 3
            # Another one is stopped while blocked.
            with Running(Publisher(config), config) as other:
                other.until("blocked")
            assert other.code == exits.EXIT_OK
            assert sum(each.name == "flowforge-broker-publisher" for each in threading.enumerate()) == 1
            assert running.health.state == "blocked"
            assert box.unpublished() == 3
        finally:
            rabbit_server.set_memory_watermark(0.4)
        wait_until(lambda: box.unpublished() == 0, "the marks")
        running.until("ok")
        assert {properties.message_id for properties, _ in box.messages()} == set(box.dispatches())


def test_a_broker_that_is_away_is_waited_for_without_a_transaction(
    config: Config, rabbit_server: RabbitServer, outbox: Callable[..., Outbox]
) -> None:
    box = outbox()
    rabbit_server.stop()
    with Running(Publisher(config), config) as running:
        box.dispatch(2)
        running.until("no broker")
        assert box.idle_in_transaction() == 0
        rabbit_server.start()
        wait_until(lambda: box.unpublished() == 0, "the marks")
        running.until("ok")


def test_a_queue_that_confirms_nothing_holds_up_no_other(
    config: Config, rabbit: Broker, outbox: Callable[..., Outbox], caplog: Any
) -> None:
    """Whether its messages arrived is not known, and nothing says that the broker refused them."""
    box = outbox({"name": "one"}, {"name": "two", "queue": "other"})
    with AmqpProxy(rabbit.url) as wire:
        wire.silent.add("default")
        hasty = config.replace(confirm_timeout=2, amqp_urls=(wire.url,))
        with Running(Publisher(hasty), hasty) as running:
            box.dispatch(2)
            left = "select count(*) from flowforge.outbox where queue = %s and published_at is null"
            wait_until(lambda: bool(box.value(left, "other") == 0), "the other queue's messages")
            late = f"{left} and last_error like 'no confirm within%%' and tries > 0"
            wait_until(lambda: bool(box.value(late, "default") == 2), "the error")
            running.until("ok")
            assert box.value(left, "default") == 2
    assert len({properties.message_id for properties, _ in box.messages("other")}) == 2
    told = {each.getMessage() for each in caplog.records if each.levelname == "WARNING"}
    assert any("not confirmed in time" in each for each in told)
    assert not any("refused" in each for each in told)


@pytest.mark.parametrize("moment", ["after-fetch", "after-confirm", "after-mark", "after-commit"])
def test_a_publisher_killed_at_any_step_loses_nothing_and_repeats_only_the_same_dispatch(
    config: Config, outbox: Callable[..., Outbox], moment: str
) -> None:
    box = outbox()
    box.dispatch(3)
    victim = process("Publisher", config, FLOWFORGE_CRASH_AT=f"publisher:{moment}")
    victim.communicate(timeout=TIMEOUT)
    assert victim.returncode == -signal.SIGKILL
    with Running(Publisher(config), config) as running:
        running.until("ok")
        wait_until(lambda: box.unpublished() == 0, "the marks")
    sent = [properties.message_id for properties, _ in box.messages()]
    assert set(sent) == set(box.dispatches())
    # The mark was lost with the transaction: the same dispatches once more, which a claim recognises.
    assert len(sent) == (6 if moment in ("after-confirm", "after-mark") else 3)
    claims = [
        box.value(
            "select outcome from flowforge.claim_task_run(%s, %s, 'w', %s, '1 minute')",
            box.value("select task_run_id from flowforge.task_run where dispatch_id = %s", dispatch),
            dispatch,
            uuid.uuid4(),
        )
        for dispatch in sent
    ]
    assert sorted(claims) == ["claimed"] * 3 + ["running"] * (len(sent) - 3)
    box.healthy()


def test_a_connection_lost_between_confirm_and_mark_means_published_again(
    config: Config, db: Database, outbox: Callable[..., Outbox]
) -> None:
    box = outbox()
    with Running(Publisher(config), config) as running:
        running.until("ok")  # the queue is there
    box.dispatch(3)
    patient = config.replace(lock_timeout=600)
    with db.connect() as stranger, ExitStack() as daemons:
        with stranger.transaction():
            # Fetching is possible under this lock, marking waits for it.
            stranger.execute("lock table flowforge.outbox in share mode")
            daemons.enter_context(Running(Publisher(patient), patient))
            waits = "application_name = 'flowforge publisher' and wait_event_type = 'Lock'"
            waits += " and datname = current_database()"
            count = f"select count(*) from pg_stat_activity where {waits}"
            wait_until(lambda: bool(box.value(count) == 1), "the mark to wait")
            assert box.waiting() == 3
            box.value(f"select pg_terminate_backend(pid) from pg_stat_activity where {waits}")
        wait_until(lambda: box.unpublished() == 0, "the marks")
    sent = sorted(properties.message_id for properties, _ in box.messages())
    assert sent == sorted(box.dispatches() * 2)


def test_without_a_broker_there_is_nothing_to_publish_to(db: Database) -> None:
    with pytest.raises(ConfigError, match="FLOWFORGE_AMQP_URL is not set"):
        Publisher(Config(database_url=db.dsn))
