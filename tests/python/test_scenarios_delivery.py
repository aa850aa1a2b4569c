"""Scenarios of messages: what the broker loses, refuses or doubles. Ids as in docs/scenarios.md."""

import json
import signal
from typing import Any

import pytest

from tests.python.cluster import Cluster
from tests.services.process import wait_until
from tests.services.rabbitmq import RabbitServer


@pytest.fixture
def cluster(rabbit_cluster: Cluster) -> Cluster:
    return rabbit_cluster


class Tap:
    """A queue beside the work queue that gets a copy of every message the exchange routes."""

    def __init__(self, cluster: Cluster) -> None:
        self._broker, self._name = cluster.broker, f"{cluster.namespace}.tap"
        assert self._broker is not None
        self._broker.declare(self._name)
        with self._broker.channel() as channel:
            channel.queue_bind(self._name, f"{cluster.namespace}.flowforge", "default")

    def messages(self) -> list[tuple[str, dict[str, Any]]]:
        """message_id and body of each message so far; they are taken away."""
        found: list[tuple[str, dict[str, Any]]] = []
        assert self._broker is not None
        with self._broker.channel() as channel:
            while True:
                method, properties, body = channel.basic_get(self._name, auto_ack=True)
                if method is None or properties is None or body is None:
                    return found
                found.append((str(properties.message_id), json.loads(body)))


@pytest.mark.parametrize("fault", ["deleted", "unbound"])
def test_hd_04_missing_queue(cluster: Cluster, fault: str) -> None:
    """A message to a queue that does not exist stays in the outbox, and goes out without a restart when the
    queue is back."""
    cluster.execute("select flowforge.configure_queue('default', null, '1 hour')")
    scheduler, publisher = cluster.start("scheduler", "publisher")
    cluster.wait_declared()
    assert isinstance(cluster.broker, RabbitServer)
    if fault == "deleted":
        cluster.broker.delete_queue(cluster.queue())
    else:
        with cluster.broker.channel() as channel:
            channel.queue_unbind(cluster.queue(), f"{cluster.namespace}.flowforge", "default")
    run = cluster.trigger("one")
    wait_until(lambda: cluster.published() == 1, "the message's way out")
    assert cluster.value("select max(tries) from flowforge.outbox") >= 1
    refusals = [entry for entry in publisher.entries() if "refused" in entry["event"]]
    assert refusals, "the fault did not occur"
    assert "returned" in refusals[0]["error"] or "NO_ROUTE" in refusals[0]["error"], refusals
    waiting = cluster.broker.counts(cluster.queue())
    assert waiting == (1, 0)
    assert scheduler.running()
    assert publisher.running()
    cluster.start("worker")
    assert cluster.wait_ended(run) == ["succeeded"]
    assert len(cluster.executions()) == 1
    cluster.check()


def test_hd_05_nack(cluster: Cluster) -> None:
    """The broker refuses all but some: exactly the confirmed rows are marked; the rest arrives later."""
    cluster.execute("select flowforge.configure_queue('default', null, '1 hour')")
    assert isinstance(cluster.broker, RabbitServer)
    # Before there is a queue: on one that is there it takes effect some time later.
    cluster.broker.set_policy(
        "hd05", f"^{cluster.queue()}$", '{"max-length": 1, "overflow": "reject-publish"}'
    )
    # A quorum queue's limit is soft: it takes what is under way before it refuses. A classic one counts.
    cluster.start("scheduler", "publisher", FLOWFORGE_QUEUE_TYPE="classic")
    cluster.wait_declared()
    runs = cluster.trigger_many("one", [{}] * 20)
    undecided = "select count(*) from flowforge.outbox where published_at is null and tries = 0"
    orders = "select count(*) from flowforge.outbox"
    wait_until(
        lambda: cluster.value(orders) == 20 and not cluster.value(undecided), "a decision on each message"
    )
    # Nothing consumes, so what is marked is what the broker has.
    waiting = cluster.broker.counts(cluster.queue())
    assert waiting is not None
    marked = cluster.published()
    assert 0 < marked < 20
    assert marked == waiting[0]
    wait_until(
        lambda: cluster.value("select max(tries) from flowforge.outbox where published_at is null") >= 3,
        "a third try",
    )
    growing = """
        select bool_and(next_attempt_at - created_at > interval '3 s') from flowforge.outbox
        where published_at is null and tries >= 2
    """
    assert cluster.value(growing)
    cluster.broker.clear_policy("hd05")
    cluster.start("worker", FLOWFORGE_QUEUE_TYPE="classic")
    assert set(cluster.wait_ended(*runs)) == {"succeeded"}
    assert len(cluster.executions()) == 20
    cluster.check()


def test_hd_06_queue_with_other_arguments(cluster: Cluster) -> None:
    """The only work queue is there with other arguments: the publisher names the queue and both values, is
    never well, and publishes nothing. Without that queue all goes on."""
    assert cluster.broker is not None
    cluster.broker.declare(
        cluster.queue(),
        arguments={
            "x-queue-type": "quorum",
            "x-max-length": 5,
            "x-dead-letter-exchange": f"{cluster.namespace}.flowforge.dead",
        },
    )
    cluster.start("scheduler", "worker")
    run = cluster.trigger("one")
    wait_until(lambda: cluster.value("select count(*) from flowforge.outbox") == 1, "the order")
    (publisher,) = cluster.start("publisher")
    states = set()

    def refused() -> bool:
        states.add(publisher.health())
        return publisher.health() == "error" and bool(
            cluster.value("select sum(tries) from flowforge.outbox")
        )

    wait_until(refused, "the refusal")
    assert "ok" not in states
    (line,) = [entry for entry in publisher.entries() if entry["level"] == "error"]
    [(published, parked, error)] = cluster.rows(
        "select published_at, parked_at, last_error from flowforge.outbox"
    )
    assert published is parked is None
    for part in (f"queue '{cluster.queue()}'", "x-max-length should be none and is '5'"):
        assert part in line["error"]
        assert part in error
    cluster.broker.delete_queue(cluster.queue())
    assert cluster.wait_ended(run) == ["succeeded"]
    cluster.check()


def test_hd_12_published_and_not_marked(cluster: Cluster) -> None:
    """The publisher dies between the confirm and the mark: two messages, one dispatch id, one claim; the
    other delivery is recognised."""
    cluster.execute("select flowforge.configure_queue('default', null, '1 hour')")
    scheduler = cluster.start("scheduler")
    (doomed,) = cluster.start("publisher", FLOWFORGE_CRASH_AT="publisher:after-confirm")
    cluster.wait_declared()
    tap = Tap(cluster)
    run = cluster.trigger("one", {"work": {"sleep": 0.5}})
    assert doomed.wait() == -9
    assert cluster.task(run, "work")["state"] == "ready"
    assert cluster.published() == 0
    cluster.start("publisher")
    wait_until(lambda: cluster.published() == 1, "the second message")
    workers = cluster.start("worker", "worker")
    assert cluster.wait_ended(run) == ["succeeded"]
    messages = tap.messages()
    assert len(messages) == 2
    (dispatch,) = {message_id for message_id, _ in messages} | {body["dispatch_id"] for _, body in messages}
    task = cluster.task(run, "work")
    assert (task["fencing_token"], task["attempt"], task["dispatch_id"]) == (1, 1, dispatch)
    assert len(cluster.executions()) == 1
    broker, queue = cluster.broker, cluster.queue()
    assert isinstance(broker, RabbitServer)
    # Neither waiting nor given out to one of the two.
    wait_until(lambda: broker.queues()[queue] == (0, 0, 2), "both messages acknowledged")
    for worker in workers:
        assert worker.stop() == 0
    counted = [entry for worker in workers for entry in worker.entries() if entry["event"] == "stopped"]
    dropped = sum(count for entry in counted for key, count in entry.items() if key.startswith("dropped_"))
    assert dropped == 1, counted
    assert scheduler[0].running()
    cluster.check()


def test_hd_13_one_unsendable_row(cluster: Cluster) -> None:
    """A row that can never be sent parks, and its task run fails visibly; fifty good ones pass it."""
    # Nobody makes a second, good order of the bad one while it is being spoilt.
    cluster.execute("select flowforge.configure_queue('default', null, '1 hour')")
    cluster.start("scheduler", "worker")
    bad = cluster.trigger("one", {})
    wait_until(lambda: cluster.value("select count(*) from flowforge.outbox") == 1, "the order")
    # No AMQP short string holds 300 bytes; no definition can bring this about, so it is done by hand.
    cluster.execute("update flowforge.outbox set handler = repeat('x', 300)")
    good = cluster.trigger_many("one", [{}] * 50)
    cluster.start("publisher")
    assert set(cluster.wait_ended(*good)) == {"succeeded"}
    assert cluster.wait_ended(bad) == ["failed"]
    task = cluster.task(bad, "work")
    assert "cannot be published" in task["error"]
    assert task["fencing_token"] == 0
    assert cluster.value("select count(*) from flowforge.dead_letters where run_id = %s", bad) == 1
    assert len(cluster.executions()) == 50
    cluster.check()


def test_hd_14_lower_id_commits_later(cluster: Cluster) -> None:
    """A transaction with the smaller ids that commits last loses nothing."""
    cluster.daemons(workers=1)
    with cluster.db.connect(autocommit=False) as late:
        row = late.execute("select flowforge.trigger('one')").fetchone()
        assert row is not None
        early = cluster.trigger("one")
        assert early > row[0]
        assert cluster.wait_ended(early) == ["succeeded"]
        assert cluster.value("select count(*) from flowforge.run where run_id = %s", row[0]) == 0
        late.commit()
    assert cluster.wait_ended(row[0]) == ["succeeded"]
    assert len(cluster.executions()) == 2
    cluster.check()


@pytest.mark.parametrize("fault", ["purged", "recreated"])
def test_hd_15_broker_lost_the_messages(cluster: Cluster, fault: str) -> None:
    """What was confirmed and marked is gone: it is published again under the same dispatch id, by itself."""
    _, publisher = cluster.start("scheduler", "publisher")
    runs = cluster.trigger_many("one", [{}] * 30)
    wait_until(lambda: cluster.published() >= 30, "the publication")
    before = dict(cluster.rows("select task_run_id, dispatch_id from flowforge.task_run"))
    assert isinstance(cluster.broker, RabbitServer)
    if fault == "purged":
        assert cluster.broker.purge(cluster.queue()) >= 30
    else:
        cluster.broker.ctl("stop_app")
        cluster.broker.ctl("force_reset")
        cluster.broker.ctl("start_app")
        # The reset took the user away too.
        user, password = cluster.broker.url.split("//")[1].split("@")[0].split(":")
        if user not in cluster.broker.ctl("list_users"):
            cluster.broker.ctl("add_user", user, password)
            cluster.broker.ctl("set_permissions", user, ".*", ".*", ".*")
        cluster.wait_declared()
    cluster.start("worker")
    assert set(cluster.wait_ended(*runs)) == {"succeeded"}
    assert dict(cluster.rows("select task_run_id, dispatch_id from flowforge.task_run")) == before
    assert cluster.value("select max(attempt) from flowforge.task_run") == 1
    assert len(cluster.executions()) == 30
    assert publisher.running()
    cluster.check()


def test_purge_in_the_middle_of_a_thousand_runs(cluster: Cluster) -> None:
    """The broker's queues are purged while a thousand runs are under way: all finish by themselves."""
    cluster.execute("select flowforge.configure_queue('default', 1000, '1 s')")
    cluster.start("scheduler", "publisher")
    runs = cluster.trigger_many("one", [{"work": {"sleep": 0.1}}] * 1000)
    # All are at the broker, so that it has what can be lost, however slow the scheduler is.
    wait_until(lambda: cluster.published() >= 1000, "the publication")
    workers = cluster.start("worker", "worker", FLOWFORGE_CONCURRENCY="16", FLOWFORGE_LEASE="60")
    done = "select count(*) from flowforge.run where finished_at is not null"
    assert cluster.broker is not None
    broker = cluster.broker

    def lost() -> bool:
        """What was purged before may be all that there is, and still to come again."""
        for worker in workers:
            worker.signal(signal.SIGSTOP)
        purged = broker.purge(cluster.queue())
        for worker in workers:
            worker.signal(signal.SIGCONT)
        return purged > 0

    for share in (100, 400, 700):
        wait_until(lambda share=share: cluster.value(done) >= share, f"{share} runs")  # type: ignore[misc]
        wait_until(lost, "messages that nobody was given")
    assert set(cluster.wait_ended(*runs)) == {"succeeded"}
    assert len(cluster.executions()) == 1000
    assert cluster.value("select max(attempt) from flowforge.task_run") == 1
    cluster.check()
