"""Scenarios of processes: clocks, heartbeats, forks, requests to stop. Ids as in docs/scenarios.md. Delivery
on PostgreSQL alone, but where the publisher is concerned."""

import signal
import time
from pathlib import Path

import pytest

from flowforge.exits import EXIT_INTERRUPTED, EXIT_OK
from tests.python.cluster import Cluster, Process
from tests.services import debian
from tests.services.process import wait_until


@pytest.fixture(scope="session")
def shifted() -> dict[str, str]:
    """The environment of a process whose clock FAKETIME shifts, but for the one that measures durations."""
    library = debian.found("faketime", "usr/lib/*/faketime/libfaketimeMT.so.1")
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "PYTHONPATH": str(Path(__file__).with_name("shifted")),
    }


def test_hd_19_clocks_that_are_wrong(cluster: Cluster, shifted: dict[str, str]) -> None:
    """A worker ten minutes ahead, one ten minutes behind and a scheduler that reaps an hour ahead: as if
    their clocks were right."""
    cluster.start("scheduler", **shifted, FAKETIME="+1h")
    early, late = (
        cluster.start("worker", **shifted, FAKETIME=shift, FLOWFORGE_LEASE="3", FLOWFORGE_CONCURRENCY="1")[0]
        for shift in ("+10m", "-10m")
    )
    go = cluster.directory / "go"
    runs = [cluster.trigger("one", {"work": {"until": str(go)}}) for _ in range(2)]
    wait_until(lambda: len(cluster.executions()) == 2, "an execution by each worker")
    told = [entry["at"] - time.time() for entry in cluster.executions()]
    assert min(told) < -500, "no clock was behind"
    assert max(told) > 500, "no clock was ahead"
    assert {entry["pid"] for entry in cluster.executions()} == {early.pid, late.pid}
    outlasted = """
        select count(*) from flowforge.task_run where lease_expires_at > started_at + interval '9 s'
    """
    wait_until(lambda: cluster.value(outlasted) == 2, "renewals for three leases")
    go.touch()
    assert cluster.wait_ended(*runs) == ["succeeded", "succeeded"]
    assert cluster.value("select sum(reaps) + max(fencing_token) from flowforge.task_run") == 1
    # What a dead one holds is taken over no earlier and no later than its lease says.
    held = cluster.trigger("one", {"work": {"until": str(cluster.directory / "never")}})
    wait_until(lambda: len(cluster.executions()) == 3, "the next execution")
    dead = next(each for each in (early, late) if each.pid == cluster.executions()[2]["pid"])
    dead.kill()
    expiry = cluster.task(held, "work")["lease_expires_at"]
    wait_until(lambda: len(cluster.executions()) == 4, "the other one's execution")
    assert cluster.value(
        "select started_at > %s::timestamptz from flowforge.task_run order by task_run_id desc limit 1",
        expiry,
    )
    (cluster.directory / "never").touch()
    assert cluster.wait_ended(held) == ["succeeded"]
    cluster.check()


def test_hd_20_computing_for_many_leases(cluster: Cluster) -> None:
    """A handler that computes in Python for three leases keeps its lease: one execution."""
    cluster.daemons(workers=2, FLOWFORGE_LEASE="3", FLOWFORGE_CONCURRENCY="1")
    run = cluster.trigger("one", {"work": {"spin": str(cluster.directory / "go")}})
    outlasted = "select lease_expires_at > started_at + interval '12 s' from flowforge.task_run"
    cluster.wait_task(run, "work", "running")
    wait_until(lambda: cluster.value(outlasted) is True, "renewals for three leases")
    (cluster.directory / "go").touch()
    assert cluster.wait_ended(run) == ["succeeded"]
    assert len(cluster.executions()) == 1
    cluster.check()


def test_hd_20_holding_the_interpreter_for_many_leases(cluster: Cluster) -> None:
    """A handler that holds the interpreter's lock in C loses its lease: another worker takes over, and what
    the first one says afterwards changes nothing."""
    cluster.start("scheduler")
    workers = cluster.start("worker", "worker", FLOWFORGE_LEASE="2", FLOWFORGE_CONCURRENCY="1")
    run = cluster.trigger("one", {"work": {"hold": 8}})
    assert cluster.wait_ended(run) == ["succeeded"]
    before = cluster.rows("select tr::text from flowforge.task_run tr")
    first, second = cluster.executions()
    assert (first["token"], second["token"]) == (1, 2)
    (hung,) = [worker for worker in workers if worker.pid == first["pid"]]
    assert second["pid"] != hung.pid
    wait_until(
        lambda: any(entry["event"].startswith(("lease lost", "result refused")) for entry in hung.entries()),
        "its knowledge of its loss",
    )
    assert cluster.rows("select tr::text from flowforge.task_run tr") == before
    cluster.check()


@pytest.fixture
def daemons(rabbit_cluster: Cluster) -> dict[str, Process]:
    """A scheduler, a publisher and a worker, idle."""
    names = ("scheduler", "publisher", "worker")
    started = dict(zip(names, rabbit_cluster.daemons(workers=1, FLOWFORGE_GRACE="2"), strict=True))
    rabbit_cluster.wait_declared()
    wait_until(lambda: all(each.health() == "ok" for each in started.values()), "their health")
    return started


@pytest.mark.parametrize("times", [1, 2])
def test_hd_39_sigterm_to_idle_daemons(daemons: dict[str, Process], times: int) -> None:
    """Each ends in order, with 0, asked once; or twice at once, by two signals."""
    for process in daemons.values():
        for number in (signal.SIGTERM, signal.SIGINT)[:times]:
            process.signal(number)
        assert process.wait() in ([EXIT_OK] if times == 1 else [EXIT_OK, EXIT_INTERRUPTED])


@pytest.mark.parametrize("name", ["scheduler", "publisher"])
def test_hd_39_sigterm_in_the_middle_of_a_transaction(
    rabbit_cluster: Cluster, daemons: dict[str, Process], name: str
) -> None:
    """A daemon whose statement waits for a lock ends after its commit or roll-back, leaving no session."""
    cluster = rabbit_cluster
    lock = {"scheduler": "flowforge.queue", "publisher": "flowforge.outbox"}[name]
    waiting = """
        select count(*) from pg_stat_activity
        where wait_event_type = 'Lock' and datname = current_database()
    """
    with cluster.db.connect(autocommit=False) as other:
        other.execute(f"lock table {lock} in access exclusive mode".encode())
        run = cluster.trigger("one")
        wait_until(lambda: cluster.value(waiting) > 0, "a statement that waits")
        daemons[name].signal(signal.SIGTERM)
        other.rollback()
    assert daemons[name].wait() == 0
    cluster.start(name)
    assert cluster.wait_ended(run) == ["succeeded"]
    assert len(cluster.executions()) == 1
    cluster.check()


def test_hd_39_sigterm_in_the_middle_of_tasks(rabbit_cluster: Cluster, daemons: dict[str, Process]) -> None:
    """A worker takes nothing new, lets a short task finish, and gives a long one back before its time is
    over: ready at once, under the same dispatch, attempt and reaps uncounted."""
    cluster, worker = rabbit_cluster, daemons["worker"]
    go = cluster.directory / "go"
    short = cluster.trigger("one", {"work": {"until": str(go)}})
    long = cluster.trigger("one", {"work": {"until": str(cluster.directory / "later")}})
    wait_until(lambda: len(cluster.executions()) == 2, "both executions")
    before = cluster.task(long, "work")
    worker.signal(signal.SIGTERM)
    wait_until(lambda: worker.health() == "stopping", "its notice")
    new = cluster.trigger("one")
    go.touch()
    assert worker.wait() == 0
    assert cluster.wait_ended(short) == ["succeeded"]
    after = cluster.task(long, "work")
    assert after["state"] == "ready"
    assert [after[key] for key in ("attempt", "dispatch_id", "reaps")] == [1, before["dispatch_id"], 0]
    assert cluster.task(new, "work")["fencing_token"] == 0
    cluster.start("worker")
    (cluster.directory / "later").touch()
    assert cluster.wait_ended(long, new) == ["succeeded", "succeeded"]
    cluster.check()
