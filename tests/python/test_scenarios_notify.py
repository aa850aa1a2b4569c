"""Scenarios of the cost of notifications, which serialise commits and have a largest size. Ids as in
docs/scenarios.md; of listeners, in test_scenarios_listening.py, of a full queue in test_notify_full.py."""

import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

from tests.python.cluster import Cluster
from tests.python.held_notify import held_notify, wait_for_waiters
from tests.services.postgres import Connection
from tests.services.process import wait_until

CHANNELS = "listen flowforge_scheduler; listen flowforge_outbox"
FINISHERS = 16
EXPIRED = """
    select bool_and(lease_expires_at < clock_timestamp()) from flowforge.task_run where state = 'running'
"""


@pytest.fixture(params=["postgresql", "rabbitmq"])
def either(request: pytest.FixtureRequest) -> Cluster:
    found: Cluster = request.getfixturevalue("cluster" if request.param == "postgresql" else "rabbit_cluster")
    return found


@pytest.fixture
def listener(cluster: Cluster) -> Iterator[Connection]:
    with cluster.db.connect() as connection:
        connection.execute(CHANNELS)
        yield connection


def heard(listener: Connection, by: Connection) -> list[tuple[str, str]]:
    """What has been notified so far: channels and payloads."""
    by.execute("notify flowforge_scheduler, 'the end'")
    found: list[tuple[str, str]] = []
    for each in listener.notifies(timeout=30):
        if each.payload == "the end":
            return found
        found.append((each.channel, each.payload))
    raise AssertionError("the listener hears nothing")


def wait_for_no_standby(cluster: Cluster) -> None:
    cluster.execute(f"alter database {cluster.db.name} set synchronous_commit = local")
    cluster.reconnect()


def test_hd_25_what_is_called_often_waits_for_no_notify(cluster: Cluster) -> None:
    """Somebody's NOTIFY is at its commit, and holds the lock of all: who claims, renews, reports, finishes,
    settles and publishes does not need it. One commit of a dispatch does, for all that it dispatched."""
    wait_for_no_standby(cluster)
    names = ("flaky", "one")
    tasks = {name: [{"name": "work", "retry": {"max_attempts": 2, "delay": 60}}] for name in names}
    for name in names:
        spec = json.dumps({"name": f"{name} of many", "tasks": tasks[name]})
        cluster.value("select version from flowforge.define_workflow(%s)", spec)
        cluster.trigger_many(f"{name} of many", [{}] * FINISHERS)
    cluster.execute("select flowforge.dispatch_ready()")
    cluster.execute("select flowforge.declare_scheduler(false)")
    with ThreadPoolExecutor(FINISHERS) as pool, ExitStack() as stack:
        sessions = [stack.enter_context(cluster.db.connect()) for _ in range(FINISHERS)]
        with held_notify(cluster.db):
            claimed = "select task_run_id, fencing_token, workflow from flowforge."

            def by_message(session: Connection) -> list[str]:
                with session.transaction():
                    orders = session.execute("select * from flowforge.fetch_outbox(1)").fetchall()
                    session.execute("select flowforge.mark_published(%s)", [[order[0] for order in orders]])
                ((_, task_run, dispatch, *_),) = orders
                claim = claimed + "claim_task_run(%s, %s, 'w', %s, '1 min')"
                return work(session, session.execute(claim, [task_run, dispatch, uuid.uuid4()]).fetchall())

            def by_choice(session: Connection) -> list[str]:
                claim = claimed + "claim_next('{default}', 'w', %s, '1 min')"
                return work(session, session.execute(claim, [uuid.uuid4()]).fetchall())

            def work(session: Connection, claims: list[Any]) -> list[str]:
                ((task_run, token, workflow),) = claims
                session.execute("select flowforge.renew_leases(%s, %s, '1 min')", [[task_run], [token]])
                session.execute("select flowforge.report_progress(%s, %s, 0.5)", [task_run, token])
                session.execute("select flowforge.assert_lease(%s, %s)", [task_run, token])
                outcome = "failed" if workflow.startswith("flaky") else "succeeded"
                finish = "select flowforge.finish_task_run(%s, %s, %s)"
                return [row[0] for row in session.execute(finish, [task_run, token, outcome])]

            answers = [
                answer for way in (by_message, by_choice)
                for each in pool.map(way, sessions, timeout=60) for answer in each
            ]  # fmt: skip
            assert answers == ["accepted"] * (2 * FINISHERS)
            assert cluster.value("select flowforge.settle_finished()") == FINISHERS
            cluster.trigger("one")
            for call in ("reap_expired_leases", "expand_map", "next_due", "sweep_outbox", "redispatch_lost"):
                cluster.rows(f"select flowforge.{call}()")
            wait_for_waiters(cluster.db, 0)
            # What does notify waits at its commit, with all else done.
            with sessions[0].transaction(force_rollback=True):
                sessions[0].execute("set local synchronous_commit = local")
                assert sessions[0].execute("select flowforge.dispatch_ready()").fetchone() == (1,)
                wait_for_waiters(cluster.db, 0)
                late = pool.submit(sessions[1].execute, "notify flowforge_outbox")
                wait_for_waiters(cluster.db, 1)
                assert not late.done()
        late.result(timeout=60)
    assert not cluster.rows("select * from flowforge.violations()")


def test_hd_25_one_notification_at_most_for_a_transaction(cluster: Cluster, listener: Connection) -> None:
    """Of the channel of whoever has to do with it; and none to a scheduler that is awake."""
    spec = json.dumps({"name": "w", "tasks": [{"name": "a"}, {"name": "b", "after": ["a"]}]})
    cluster.value("select version from flowforge.define_workflow(%s)", spec)
    held: list[tuple[Any, ...]] = []

    def claim() -> None:
        cluster.execute("select flowforge.dispatch_ready()")
        heard(listener, listener_by)
        held[:] = cluster.rows(
            "select task_run_id, fencing_token"
            " from flowforge.claim_next('{default}', 'w', gen_random_uuid(), '0.1 s', 100)"
        )

    def sent(query: str, *parameters: Any) -> list[str]:
        cluster.rows(query, *parameters)
        found = heard(listener, listener_by)
        assert {payload for _, payload in found} <= {""}
        return [channel.removeprefix("flowforge_") for channel, _ in found]

    with cluster.db.connect() as listener_by:
        for asleep in (True, False):
            wakes = ["scheduler"] if asleep else []
            cluster.execute("select flowforge.declare_scheduler(%s)", asleep)
            # In one transaction a hundred are one.
            assert sent("select flowforge.trigger('w') from generate_series(1, 100)") == wakes
            assert sent("select flowforge.dispatch_ready()") == ["outbox"]
            assert sent("select flowforge.dispatch_ready()") == []
            claim()
            finish = "select flowforge.finish_task_run(%s, %s, 'succeeded')"
            assert sent(finish, *held.pop()) == wakes
            assert sent("select flowforge.settle_finished()") == []
            assert sent("select flowforge.release_task_run(%s, %s, 'shutdown')", *held.pop()) == ["outbox"]
            run = cluster.value("select run_id from flowforge.task_run where task_run_id = %s", held[0][0])
            assert sent("select flowforge.cancel_run(%s)", run) == []
            assert sent("select flowforge.release_task_run(%s, %s, 'shutdown')", *held.pop(0)) == wakes
            # Some are offered again, and one is too old for that.
            cluster.execute("update flowforge.task_run set reaps = 2 where task_run_id = %s", held[0][0])
            wait_until(lambda: bool(cluster.value(EXPIRED)), "the end of the leases")
            states = "select count(*) from flowforge.task_run where state = 'failed'"
            before = cluster.value(states)
            assert sent("select flowforge.reap_expired_leases()") == ["outbox"]
            assert cluster.value(states) == before + 1
            for run in [row[0] for row in cluster.rows("select run_id from flowforge.run")]:
                cluster.rows("select flowforge.cancel_run(%s)", run)
            heard(listener, listener_by)


def test_hd_25_without_notify_everything_passes(either: Cluster) -> None:
    """One setting turns it off: nothing is notified any more, though the lock for it is taken for good, and
    all goes on by looking."""
    cluster = either
    wait_for_no_standby(cluster)
    daemons = cluster.daemons(workers=1, FLOWFORGE_LEASE="3")
    if cluster.broker:
        cluster.wait_declared()
    assert cluster.wait_ended(cluster.trigger("one")) == ["succeeded"]
    cluster.execute("select flowforge.set_limit('notify', 0)")
    never, flag = str(cluster.directory / "never"), str(cluster.directory / "died")
    with cluster.db.connect() as listener, cluster.db.connect() as by:
        listener.execute(CHANNELS)
        heard(listener, by)
        (survivor,) = cluster.start("worker", FLOWFORGE_LEASE="3")
        workers = "select count(*) from flowforge.worker"
        wait_until(lambda: cluster.value(workers) == 2, "the second worker")
        with held_notify(cluster.db):
            mixed = cluster.trigger_many("mixed", [{"broken": {"fail": True}, "flaky": {"attempts": 2}}] * 5)
            others = [cluster.trigger("diamond"), cluster.trigger("mapped", {"items": {"output": [1, 2]}})]
            dying = cluster.trigger("one", {"work": {"die": flag}})
            cancelled = cluster.trigger("one", {"work": {"until": never}})
            cluster.wait_task(cancelled, "work", "running")
            cluster.rows("select flowforge.cancel_run(%s)", cancelled)
            assert set(cluster.wait_ended(*mixed)) == {"failed"}
            assert cluster.wait_ended(*others, dying) == ["succeeded"] * 3
            assert cluster.wait_ended(cancelled) == ["cancelled"]
            assert cluster.value("select flowforge.retry_run(%s)", mixed[0]) > 0
            assert cluster.wait_ended(mixed[0]) == ["failed"]
            wait_for_waiters(cluster.db, 0)
        assert heard(listener, by) == []
    assert [each.running() for each in [*daemons, survivor]].count(False) == 1
    cluster.check()


def test_hd_29_payload_does_not_grow(cluster: Cluster, listener: Connection) -> None:
    """The longest names, a large input and ten thousand tasks that become ready in one transaction: it
    commits, and says nothing but that there is something."""
    with cluster.db.connect() as other:
        other.execute("select pg_notify('other', repeat('x', 7999))")
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            other.execute("select pg_notify('other', repeat('x', 8000))")
        count, long = 10_000, "n" * 194
        more = {"queue": "q" * 200, "handler": "h" * 255}
        tasks = [{"name": f"{long}_{number:05}", **more} for number in range(count)]
        assert {len(each["name"]) for each in tasks} == {200}
        spec = json.dumps({"name": "w" * 200, "tasks": tasks})
        cluster.value("select version from flowforge.define_workflow(%s)", spec)
        cluster.execute("select flowforge.configure_queue(%s, %s)", "q" * 200, count)
        cluster.execute("select flowforge.declare_scheduler(true)")
        with cluster.db.connect(autocommit=False) as client:
            trigger = "select flowforge.trigger(%s, jsonb_build_object('x', repeat('x', 5000000)))"
            client.execute(trigger, ["w" * 200])
            assert client.execute("select flowforge.dispatch_ready(%s)", [count]).fetchone() == (count,)
            client.commit()
        assert heard(listener, other) == [("flowforge_scheduler", ""), ("flowforge_outbox", "")]
    assert cluster.value("select count(*) from flowforge.outbox") == count
    assert not cluster.rows("select * from flowforge.violations()")
