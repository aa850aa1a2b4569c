"""Scenarios of the broker's own condition: alarms, restarts, its time-outs and limits. Ids as in
docs/scenarios.md."""

import contextlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator

import pika
import pytest
from pika.exceptions import AMQPError

from tests.python.cluster import PROGRAM, Cluster
from tests.services.process import wait_until
from tests.services.rabbitmq import RabbitServer


@pytest.fixture
def cluster(rabbit_cluster: Cluster) -> Cluster:
    return rabbit_cluster


@pytest.fixture
def setting(rabbit_server: RabbitServer) -> Iterator[Callable[[str, int], None]]:
    """Set the broker's settings for what connects from now on, until the end of the test."""
    changed: dict[str, str] = {}

    def change(name: str, value: int) -> None:
        changed[name] = rabbit_server.ctl("eval", f"application:get_env(rabbit, {name}).").strip()
        rabbit_server.ctl("eval", f"application:set_env(rabbit, {name}, {value}).")

    yield change
    for name, former in changed.items():
        undo = f"unset_env(rabbit, {name})" if former == "undefined" else f"set_env(rabbit, {name}, "
        undo += "" if former == "undefined" else former.removeprefix("{ok,").removesuffix("}") + ")"
        rabbit_server.ctl("eval", f"application:{undo}.")


def test_hd_07_memory_alarm(cluster: Cluster, rabbit_server: RabbitServer) -> None:
    """During an alarm the publisher holds no lock, says that it is blocked and stops when told to; workers go
    on with what is in their queues; afterwards all the rest is delivered."""
    _, publisher = cluster.start("scheduler", "publisher", FLOWFORGE_BLOCKED_TIMEOUT="1")
    cluster.wait_declared()
    cluster.execute("select flowforge.configure_queue('default', null, '1 hour')")
    early = cluster.trigger_many("one", [{}] * 20)
    wait_until(lambda: cluster.published() == 20, "the publication")
    rabbit_server.set_memory_watermark(0)
    try:
        late = cluster.trigger_many("one", [{}] * 5)
        wait_until(lambda: publisher.health() == "blocked", "the publisher's report")
        unlocked = """
            select count(*) from (
                select from flowforge.outbox where published_at is null for update skip locked) as o
        """
        wait_until(lambda: cluster.value(unlocked) == 5, "orders that nobody holds")
        cluster.start("worker")
        assert set(cluster.wait_ended(*early)) == {"succeeded"}
        assert publisher.stop() == 0
        (publisher,) = cluster.start("publisher", FLOWFORGE_BLOCKED_TIMEOUT="1")
        wait_until(lambda: publisher.health() == "blocked", "the next publisher's report")
        assert cluster.value("select count(*) from flowforge.outbox where published_at is null") == 5
    finally:
        rabbit_server.set_memory_watermark(0.4)
    assert set(cluster.wait_ended(*late)) == {"succeeded"}
    wait_until(lambda: publisher.health() == "ok", "the publisher's health")
    assert len(cluster.executions()) == 25
    cluster.check()


def test_hd_08_restart_while_a_task_runs(cluster: Cluster, rabbit_server: RabbitServer) -> None:
    """A broker restart in the middle of a task, and its message delivered a second time: one execution."""
    _, _, worker = cluster.daemons(workers=1)
    run = cluster.trigger("one", {"work": {"until": str(cluster.directory / "go")}})
    before = cluster.wait_task(run, "work", "running")
    rabbit_server.restart()
    lost = "the connection to the broker was lost"
    wait_until(
        lambda: any(lost in str(entry.get("error")) for entry in worker.entries()), "the worker's loss"
    )
    cluster.wait_declared()
    # What a broker does that was never told of the acknowledgement.
    body = {key: before[key] for key in ("task_run_id", "dispatch_id", "attempt")} | {"handler": "one.work"}
    with rabbit_server.channel() as channel:
        channel.basic_publish("", cluster.queue(), json.dumps(body).encode())
    wait_until(lambda: rabbit_server.queues()[cluster.queue()] == (0, 0, 1), "the second delivery's end")
    (cluster.directory / "go").touch()
    assert cluster.wait_ended(run) == ["succeeded"]
    after = cluster.task(run, "work")
    assert (after["attempt"], after["fencing_token"], after["reaps"]) == (1, 1, 0)
    assert len(cluster.executions()) == 1
    assert worker.stop() == 0
    (ended,) = [entry for entry in worker.entries() if entry["event"] == "stopped"]
    # The broker may have forgotten the acknowledgement itself, and delivered a second one, too.
    assert ended["dropped_running"] in (1, 2)
    cluster.check()


def test_hd_09_consumer_timeout(
    cluster: Cluster, rabbit_server: RabbitServer, setting: Callable[[str, int], None]
) -> None:
    """A task longer than the broker waits for an acknowledgement runs once, and costs no channel."""
    setting("consumer_timeout", 1000)
    setting("channel_tick_interval", 500)
    _, _, worker = cluster.daemons(workers=1)
    run = cluster.trigger("one", {"work": {"until": str(cluster.directory / "go")}})
    cluster.wait_task(run, "work", "running")
    for _ in range(2):
        _see_a_consumer_time_out(cluster, rabbit_server)
    (cluster.directory / "go").touch()
    assert cluster.wait_ended(run) == ["succeeded"]
    assert cluster.task(run, "work")["attempt"] == 1
    assert len(cluster.executions()) == 1
    told = worker.log.read_text()
    assert "PRECONDITION" not in told
    assert "was lost" not in told
    cluster.check()


def _see_a_consumer_time_out(cluster: Cluster, broker: RabbitServer) -> None:
    """A consumer that acknowledges nothing loses its channel: the fault, on a queue of its own."""
    queue = f"{cluster.namespace}.slow"
    broker.declare(queue)
    with broker.channel() as channel:
        channel.basic_publish("", queue, b"{}")
        channel.basic_consume(queue, lambda *_: None)

        def closed() -> bool:
            channel.connection.process_data_events(0.05)
            return bool(channel.is_closed)

        wait_until(closed, "the end of the broker's patience")
    broker.delete_queue(queue)


def test_hd_10_delivery_limit(cluster: Cluster, rabbit_server: RabbitServer) -> None:
    """The broker throws a message away that consumers returned too often: it is counted, and the task run
    is published again by itself."""
    rabbit_server.set_policy("hd10", f"^{cluster.queue()}$", '{"delivery-limit": 3}')
    cluster.start("scheduler", "publisher")
    cluster.wait_declared()
    run = cluster.trigger("one")
    wait_until(lambda: cluster.published() >= 1, "the publication")
    dispatch = cluster.task(run, "work")["dispatch_id"]
    dead = f"{cluster.namespace}.flowforge.dead"

    def given_up() -> bool:
        """Take it and die before the acknowledgement."""
        with rabbit_server.channel() as channel:
            channel.basic_get(cluster.queue())
        waiting = rabbit_server.counts(dead)
        return waiting is not None and waiting[0] > 0

    wait_until(given_up, "the end of the broker's patience")
    examined = subprocess.run(
        [PROGRAM, "doctor", "--json"],
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    findings = [json.loads(line) for line in examined.stdout.splitlines()]
    (counted,) = [each["detail"] for each in findings if each["check"] == "broker dead letters"]
    assert re.match("[1-9][0-9]* messages", counted)
    cluster.start("worker")
    assert cluster.wait_ended(run) == ["succeeded"]
    after = cluster.task(run, "work")
    assert (after["attempt"], after["dispatch_id"]) == (1, dispatch)
    assert len(cluster.executions()) == 1
    cluster.check()


def test_hd_11_heartbeats_during_a_long_task(cluster: Cluster, rabbit_server: RabbitServer) -> None:
    """A handler that computes for many heartbeats and yields to nobody costs no connection."""
    missed = "missed heartbeats from client"
    before = rabbit_server.log().count(missed)
    _, _, worker = cluster.daemons(workers=1, FLOWFORGE_AMQP_HEARTBEAT="1")
    run = cluster.trigger("one", {"work": {"spin": str(cluster.directory / "go")}})
    cluster.wait_task(run, "work", "running")
    # The fault: a connection that nobody serves for as long.
    parameters = pika.URLParameters(rabbit_server.url)
    parameters.heartbeat = 1
    neglected = pika.BlockingConnection(parameters)
    wait_until(lambda: rabbit_server.log().count(missed) > before, "the neglected connection's end")
    with contextlib.suppress(AMQPError):
        neglected.close()
    (cluster.directory / "go").touch()
    assert cluster.wait_ended(run) == ["succeeded"]
    assert rabbit_server.log().count(missed) == before + 1
    assert not [entry for entry in worker.entries() if "lost" in str(entry.get("error"))]
    assert len(cluster.executions()) == 1
    cluster.check()
