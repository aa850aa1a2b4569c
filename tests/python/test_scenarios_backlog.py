"""Scenarios of what waits: numbers at their ends, and old work that newer work overtakes. Ids as in
docs/scenarios.md; of numbers, more in tests/sql/test_counters.py."""

import json

import pytest

from tests.python.cluster import Cluster
from tests.services.process import wait_until

INT4 = 2**31 - 2
LAST = 2**63 - 1


@pytest.fixture(params=["postgresql", "rabbitmq"])
def either(request: pytest.FixtureRequest) -> Cluster:
    found: Cluster = request.getfixturevalue("cluster" if request.param == "postgresql" else "rabbit_cluster")
    return found


def set_by_hand(cluster: Cluster, assignments: str, run: int) -> None:
    """Change what only time could bring about."""
    cluster.execute("set session_replication_role = replica")
    cluster.execute(f"update flowforge.task_run set {assignments} where run_id = %s", run)
    cluster.execute("set session_replication_role = origin")


def test_hd_27_numbers_at_their_ends(either: Cluster) -> None:
    """Ids beyond 31 bits and counters at their last value but one pass through all daemons; a task run whose
    token is at its end fails alone, by an error that says so, and the rest goes on."""
    cluster = either
    for (sequence,) in cluster.rows(
        "select c.oid::regclass::text from pg_class c"
        " where c.relkind = 'S' and c.relnamespace = 'flowforge'::regnamespace"
    ):
        cluster.rows("select setval(%s, %s)", sequence, INT4)
    spent = cluster.trigger("one")
    almost = cluster.trigger("one")
    mixed = cluster.trigger_many("mixed", [{"broken": {"fail": True}, "flaky": {"attempts": 2}}] * 3)
    assert spent > INT4
    cluster.execute("select flowforge.dispatch_ready()")
    set_by_hand(cluster, f"fencing_token = {LAST}", spent)
    almost_last = ", ".join(
        f"{counter} = {LAST - 1}" for counter in ("fencing_token", "attempt", "redispatches")
    )
    set_by_hand(cluster, almost_last, almost)
    cluster.daemons(workers=1)
    assert cluster.wait_ended(spent, almost) == ["failed", "succeeded"]
    assert "its fencing token has reached its last value" in cluster.task(spent, "work")["error"]
    (execution,) = [each for each in cluster.executions() if each["run"] == almost]
    assert (execution["token"], execution["attempt"]) == (LAST, LAST - 1)
    assert set(cluster.wait_ended(*mixed)) == {"failed"}
    assert {cluster.task(run, "flaky")["attempt"] for run in mixed} == {2}
    assert not [each for each in cluster.executions() if each["run"] == spent]
    cluster.check()


def test_hd_46_priority_is_strict_and_what_waits_is_seen(either: Cluster) -> None:
    """As documented: as long as there is more of higher priority than workers, a low one waits. How long it
    has been waiting is told, of the queue and of all, and it runs once there is room."""
    cluster = either
    cluster.execute("select flowforge.configure_queue('default', 2)")
    cluster.start("scheduler", *(["publisher"] if cluster.broker else []))
    if cluster.broker:
        cluster.wait_declared()
    stream = cluster.trigger_many("one", [{"work": {"sleep": 0.05}}] * 2)
    dispatched = "select count(*) from flowforge.task_run where state = 'ready'"
    wait_until(lambda: cluster.value(dispatched) == 2, "a full window")
    low = cluster.trigger("one", priority=-1)
    cluster.start("worker", FLOWFORGE_CONCURRENCY="1")
    waiting = "select count(*) from flowforge.task_run where stage = 'eligible'"
    ages: list[float] = []

    def overtaken() -> bool:
        if cluster.value(waiting) < 4:
            stream.extend(cluster.trigger_many("one", [{"work": {"sleep": 0.05}}] * 4))
        ages.append(
            cluster.value("select value from flowforge.health where name = 'oldest_eligible_seconds'")
        )
        return len(cluster.executions("end")) >= 30

    wait_until(overtaken, "thirty that overtake")
    assert cluster.states(low) == {"work": "pending"}
    # What is told is the age of the one that waits, though all others are newer.
    age = """
        select extract(epoch from clock_timestamp() - available_at) from flowforge.task_run where run_id = %s
    """
    told = """
        select least(h.value, extract(epoch from q.oldest_eligible_age)),
            greatest(h.value, extract(epoch from q.oldest_eligible_age))
        from flowforge.health h, flowforge.queue_status q
        where h.name = 'oldest_eligible_seconds' and q.queue = 'default'
    """
    before, ((least, most),), after = cluster.value(age, low), cluster.rows(told), cluster.value(age, low)
    assert before <= least <= most <= after
    assert ages == sorted(ages)
    assert cluster.wait_ended(low, *stream) == ["succeeded"] * (1 + len(stream))
    (last,) = [number for number, each in enumerate(cluster.executions()) if each["run"] == low]
    assert last >= 30
    cluster.check()


def test_hd_46_what_is_locked_is_passed_and_comes_next(cluster: Cluster) -> None:
    """The oldest in line are locked by a stranger: what comes after them is dispatched, however small the
    batch; they are dispatched by the next look after the lock has gone, though nobody is told of it."""
    locked = cluster.trigger_many("one", [{}] * 20)
    free = cluster.trigger_many("one", [{}] * 5)
    with cluster.db.connect(autocommit=False) as stranger:
        stranger.execute("select from flowforge.task_run where run_id = any (%s) for update", [locked])
        for _ in free:
            assert cluster.value("select flowforge.dispatch_ready(1)") == 1
        assert cluster.value("select flowforge.dispatch_ready(1)") == 0
        daemons = cluster.daemons(workers=1)
        assert set(cluster.wait_ended(*free)) == {"succeeded"}
        asleep = "select asleep from flowforge.scheduler"
        wait_until(lambda: cluster.value(asleep), "the scheduler's sleep")
        assert {state for run in locked for state in cluster.states(run).values()} == {"pending"}
        wait_until(lambda: {each.health() for each in daemons} == {"ok"}, "their health")
    assert set(cluster.wait_ended(*locked)) == {"succeeded"}
    spec = json.dumps({"name": "w", "tasks": [{"name": "a", "queue": "elsewhere"}]})
    cluster.value("select version from flowforge.define_workflow(%s)", spec)
    assert daemons[0].stop() == 0
    first, second = cluster.trigger_many("w", [{}] * 2)
    with cluster.db.connect(autocommit=False) as stranger:
        stranger.execute("select from flowforge.task_run where run_id = %s for update", [first])
        assert cluster.value("select flowforge.dispatch_ready()") == 1
        assert cluster.states(second) == {"a": "ready"}
        stranger.rollback()
        # One look is enough.
        assert cluster.value("select flowforge.dispatch_ready()") == 1
    assert cluster.states(first) == {"a": "ready"}
    cluster.check()
