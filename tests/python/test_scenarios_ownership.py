"""Scenarios of owners: joins, races, dead and paused workers, poison, cancel, retry. Ids as in
docs/scenarios.md. Delivery on PostgreSQL alone, but where a scenario is about messages."""

import random
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from flowforge.migrate import SCHEMA_VERSION
from tests.python.cluster import PROGRAM, Cluster
from tests.services.process import wait_until


def test_hd_01_join_of_many_parents(cluster: Cluster) -> None:
    """Parents that finish together release their join exactly once: two hundred diamonds, and joins of
    twenty, under four workers and two schedulers."""
    cluster.daemons(workers=4, FLOWFORGE_CONCURRENCY="16")
    cluster.start("scheduler")
    # Both parents of these wait for one file; there are slots for all of them.
    gate = cluster.directory / "go"
    gated = {name: {"until": str(gate)} for name in "bc"}
    together = cluster.trigger_many("diamond", [gated] * 25)

    def at_the_gate() -> int:
        return sum(entry["task"] in gated for entry in cluster.executions())

    wait_until(lambda: at_the_gate() == 50, "both parents of each join, running")
    runs = cluster.trigger_many("diamond", [{}] * 175) + cluster.trigger_many("wide", [{}] * 20)
    gate.touch()
    assert set(cluster.wait_ended(*together, *runs)) == {"succeeded"}
    assert len(cluster.executions()) == 200 * 4 + 20 * 22
    assert cluster.value("select count(*) from flowforge.task_run where fencing_token <> 1") == 0
    cluster.check()


def test_hd_02_finish_cancel_reap_and_settle_together(cluster: Cluster) -> None:
    """Workers finish, a client cancels, two schedulers settle, dispatch and reap at once: no deadlock, and
    every run ends in a state it may have."""
    cluster.start("scheduler", "scheduler", FLOWFORGE_REAP_INTERVAL="0.05")
    (doomed,) = cluster.start("worker", FLOWFORGE_LEASE="1")
    # One task of most runs does not end before it is told to, or the file is there.
    gate = cluster.directory / "go"
    values: list[dict[str, Any]] = [{f"t{n}": {"sleep": n / 100} for n in range(40)} for _ in range(12)]
    for value in values[:8]:
        value["t0"]["until"] = str(gate)
    runs = cluster.trigger_many("forty", values)
    owned = """
        select count(*) from flowforge.task_run join flowforge.task using (task_id)
        where name = 't0' and run_id = any(%s) and state = 'running' and lease_owner like %s
    """
    wait_until(
        lambda: cluster.value(owned, runs[1:8:2], f"%:{doomed.pid}:%") > 0,
        "a task run of the doomed worker that nobody cancels",
    )
    cluster.start("worker", "worker", "worker", FLOWFORGE_LEASE="6")
    cancelled = 0
    with cluster.db.connect() as client:
        for run in runs[::2]:
            wait_until(
                lambda run=run: (  # type: ignore[misc]
                    cluster.run_state(run) != "running" or "running" in cluster.states(run).values()
                ),
                "a running task run",
            )
            row = client.execute("select flowforge.cancel_run(%s)", [run]).fetchone()
            assert row is not None
            cancelled += row[0]
            if cancelled == 2 and doomed.running():
                doomed.kill()
    assert cancelled >= 4
    assert cluster.wait_ended(*runs[:8:2]) == ["cancelled"] * 4
    gate.touch()
    states = cluster.wait_ended(*runs)
    assert cluster.value("select count(*) from flowforge.attempt where outcome = 'lease_expired'") > 0
    assert set(states) <= {"succeeded", "cancelled"}
    # A run whose last task finishes as it is cancelled has succeeded all the same.
    assert states.count("cancelled") <= cancelled
    assert not cluster.deadlocks()
    cluster.check()


def test_hd_03_finishing_twice(cluster: Cluster) -> None:
    """Repeated and stale finishes change no row; the join waits for the last parent."""
    cluster.execute(
        """
        select * from flowforge.define_workflow(
            '{"name": "three", "tasks": [
                {"name": "p1"}, {"name": "p2"}, {"name": "p3"}, {"name": "j", "after": ["p1", "p2", "p3"]}]}')
        """
    )
    run = cluster.trigger("three")

    def step() -> None:
        cluster.rows("select flowforge.settle_finished(), flowforge.dispatch_ready()")

    def claim() -> dict[str, tuple[int, int]]:
        step()
        found = cluster.rows(
            "select task, task_run_id, fencing_token"
            " from flowforge.claim_next(array['default'], 'w', gen_random_uuid(), '1 min', 10)"
        )
        return {task: (task_run, token) for task, task_run, token in found}

    def finish(task_run: int, token: int) -> str:
        return str(cluster.value("select flowforge.finish_task_run(%s, %s, 'succeeded')", task_run, token))

    parents = claim()
    assert finish(*parents["p1"]) == "accepted"
    step()
    before = cluster.rows("select tr::text from flowforge.task_run tr order by 1")
    task_run, token = parents["p1"]
    assert finish(task_run, token) == "repeated"
    assert finish(task_run, token - 1) == "fenced"
    step()
    assert cluster.rows("select tr::text from flowforge.task_run tr order by 1") == before
    assert finish(*parents["p2"]) == "accepted"
    assert claim() == {}
    assert cluster.task(run, "j")["unmet"] == 1
    assert finish(*parents["p3"]) == "accepted"
    join = claim()
    assert list(join) == ["j"]
    assert finish(*join["j"]) == "accepted"
    step()
    assert cluster.run_state(run) == "succeeded"
    assert not cluster.rows("select * from flowforge.violations()")


def test_hd_16_long_task_under_a_short_lease(cluster: Cluster) -> None:
    """A task longer than its lease runs once: its lease moves forward at each renewal; the reaper never takes
    it."""
    cluster.daemons(workers=2, FLOWFORGE_LEASE="3")
    run = cluster.trigger("one", {"work": {"until": str(cluster.directory / "go")}})
    cluster.wait_task(run, "work", "running")
    seen: set[str] = set()

    def renewed() -> bool:
        seen.add(cluster.task(run, "work")["lease_expires_at"])
        return len(seen) > 6

    wait_until(renewed, "six renewals, each at a third of the lease")
    (cluster.directory / "go").touch()
    assert cluster.wait_ended(run) == ["succeeded"]
    assert len(cluster.executions()) == 1
    assert cluster.value("select count(*) from flowforge.attempt") == 0
    cluster.check()


def test_hd_17_dead_worker_without_a_trace(cluster: Cluster) -> None:
    """A worker dies and its presence is deleted; another starts: the task run is taken over, since expiry
    depends on its own row alone."""
    cluster.start("scheduler")
    (doomed,) = cluster.start("worker", FLOWFORGE_LEASE="3")
    run = cluster.trigger("one", {"work": {"until": str(cluster.directory / "go")}})
    first = cluster.wait_task(run, "work", "running")
    wait_until(lambda: len(cluster.executions()) == 1, "the execution")
    doomed.kill()
    cluster.execute("delete from flowforge.worker")
    cluster.start("worker")
    wait_until(lambda: cluster.task(run, "work")["fencing_token"] == 2, "the take-over")
    second = cluster.task(run, "work")
    assert second["dispatch_id"] == first["dispatch_id"]
    assert second["attempt"] == 1
    assert second["lease_owner"] != first["lease_owner"]
    (cluster.directory / "go").touch()
    assert cluster.wait_ended(run) == ["succeeded"]
    assert [entry["token"] for entry in cluster.executions()] == [1, 2]
    cluster.check()


def test_hd_18_finished_just_before_the_reaper(cluster: Cluster) -> None:
    """The reaper has chosen an expired task run when its worker finishes it: the result stays."""
    finished, sibling = (cluster.trigger("one") for _ in range(2))
    cluster.execute("select flowforge.dispatch_ready()")
    claim = """
        select run_id, task_run_id, fencing_token
        from flowforge.claim_next(array['default'], 'w', gen_random_uuid(), '0.1 s', 2)
    """
    claims = {run: (task_run, token) for run, task_run, token in cluster.rows(claim)}
    expired = "select count(*) from flowforge.task_run where lease_expires_at < clock_timestamp()"
    wait_until(lambda: cluster.value(expired) == 2, "the expiry of both")
    reap = "select flowforge.reap_expired_leases()"
    with cluster.db.connect(autocommit=False) as worker:
        worker.execute("select flowforge.finish_task_run(%s, %s, 'succeeded')", claims[finished])
        # Not committed: in the reaper's eyes both have expired, and it passes over the locked row. Called
        # again, since what expires while nobody reaps is spared for a moment.
        wait_until(lambda: cluster.value(reap) == 1, "the reaper's taking one")
        assert cluster.task(sibling, "work")["state"] == "ready"
        assert cluster.value(reap) == 0
        worker.commit()
    assert cluster.value(reap) == 0
    assert cluster.task(finished, "work")["state"] == "succeeded"
    assert not cluster.rows("select * from flowforge.violations()")


def test_paused_worker_is_fenced(cluster: Cluster) -> None:
    """A worker that is stopped for longer than its lease comes back: its finish is refused and changes
    nothing, and the one that took over is the only owner."""
    cluster.start("scheduler")
    (paused,) = cluster.start("worker", FLOWFORGE_LEASE="3")
    run = cluster.trigger("one", {"work": {"until": str(cluster.directory / "go")}})
    wait_until(lambda: len(cluster.executions()) == 1, "the execution")
    paused.signal(signal.SIGSTOP)
    cluster.start("worker")
    wait_until(lambda: len(cluster.executions()) == 2, "the second execution")
    (cluster.directory / "go").touch()
    assert cluster.wait_ended(run) == ["succeeded"]
    before = cluster.rows("select tr::text from flowforge.task_run tr")
    paused.signal(signal.SIGCONT)
    wait_until(
        lambda: any(
            entry["event"].startswith(("lease lost", "result refused")) for entry in paused.entries()
        ),
        "the paused worker's knowledge of its loss",
    )
    assert cluster.rows("select tr::text from flowforge.task_run tr") == before
    assert cluster.task(run, "work")["fencing_token"] == 2
    cluster.check()


def test_hd_21_task_that_kills_its_worker(cluster: Cluster) -> None:
    """A task that ends its process is executed three times, the re-offers further and further apart, then
    fails for good; its dependents follow the rule."""
    cluster.start("scheduler")
    workers = cluster.start(
        "worker", "worker", "worker", "worker", FLOWFORGE_LEASE="3", FLOWFORGE_CONCURRENCY="1"
    )
    run = cluster.trigger("chain", {"a": {"exit": 137}})
    assert cluster.wait_ended(run) == ["failed"]
    task = cluster.task(run, "a")
    assert "lease expired, worker lost" in task["error"]
    assert task["attempt"] == 1
    assert cluster.states(run) == {"a": "failed", "b": "skipped", "c": "skipped"}
    killed = cluster.executions()
    assert {entry["token"] for entry in killed} == {1, 2, 3}
    assert len({entry["dispatch"] for entry in killed}) == 1
    gaps = cluster.rows("select ended_at from flowforge.attempt order by fencing_token")
    assert len(gaps) == 3
    assert [worker.running() for worker in workers].count(False) == 3
    # The third offer waited for its delay: at least 5 s after the second execution was given up.
    waited = """
        select third.started_at - second.ended_at >= interval '5 s'
        from flowforge.attempt second, flowforge.attempt third
        where second.fencing_token = 2 and third.fencing_token = 3
    """
    assert cluster.value(waited)
    (next_run,) = [cluster.trigger("one")]
    assert cluster.wait_ended(next_run) == ["succeeded"]
    cluster.check()


@pytest.mark.parametrize("kind", ["nul", "surrogate", "nan", "bytes", "deep"])
def test_hd_28_unstorable_result(cluster: Cluster, kind: str) -> None:
    """A result that cannot be stored fails its task run at once, once, and harms nobody else."""
    cluster.daemons(workers=1)
    bad = cluster.trigger("one", {"work": {"output": kind}})
    good = cluster.trigger_many("one", [{"work": {"output": "big"}}] * 5)
    assert cluster.wait_ended(bad) == ["failed"]
    assert cluster.task(bad, "work")["error"].startswith("result not storable: ")
    assert set(cluster.wait_ended(*good)) == {"succeeded"}
    assert cluster.task(good[0], "work")["output"] == 2**70
    assert len(cluster.executions("end")) == 6
    assert cluster.value("select max(fencing_token) from flowforge.task_run") == 1
    cluster.check()


def test_hd_28_unstorable_input(cluster: Cluster) -> None:
    """An input that cannot be stored is refused, by name, before any row exists."""
    for value in ('"a\\u0000b"', '"\\ud800"', "NaN", "[" * 20_000 + "]" * 20_000):
        done = subprocess.run(
            [PROGRAM, "trigger", "one", "--database-url", cluster.db.dsn, "--input", "-"],
            input=value, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode not in (0, 1) or "input" in done.stderr, (value[:20], done)
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
    assert cluster.value("select count(*) from flowforge.run") == 0


def test_hd_31_cancel_meets_claim(cluster: Cluster) -> None:
    """Cancel and claim released together, many times: the claim is refused, or it is won and its renewal says
    cancel; nothing of a cancelled run is published afterwards."""
    outcomes = []
    with cluster.db.connect() as one, cluster.db.connect() as other, ThreadPoolExecutor(2) as pool:

        def claim(task: dict[str, Any]) -> tuple[str, int | None]:
            row = one.execute(
                "select outcome, fencing_token"
                " from flowforge.claim_task_run(%s, %s, 'w', gen_random_uuid(), '1 min')",
                [task["task_run_id"], task["dispatch_id"]],
            ).fetchone()
            assert row is not None
            return row[0], row[1]

        def cancel(run: int) -> None:
            other.execute("select flowforge.cancel_run(%s)", [run])

        def released(barrier: threading.Barrier, call: Any, argument: Any) -> Any:
            barrier.wait()
            return call(argument)

        for number in range(250):
            run = cluster.trigger("one")
            cluster.execute("select flowforge.dispatch_ready()")
            task = cluster.task(run, "work")
            if number == 0:  # each order at least once
                outcome, token = claim(task)
                cancel(run)
            elif number == 1:
                cancel(run)
                outcome, token = claim(task)
            else:
                barrier = threading.Barrier(2)
                claimed = pool.submit(released, barrier, claim, task)
                pool.submit(released, barrier, cancel, run).result()
                outcome, token = claimed.result()
            outcomes.append(outcome)
            if outcome == "claimed":
                ids = [task["task_run_id"]], [token]
                assert cluster.rows("select outcome from flowforge.renew_leases(%s, %s, '1 min')", *ids) == [
                    ("cancel",)
                ]
                answer = cluster.value(
                    "select flowforge.finish_task_run(%s, %s, 'cancelled')", task["task_run_id"], token
                )
                assert answer == "accepted"
                cluster.execute("select flowforge.settle_finished()")
            else:
                assert outcome == "cancelled"
            assert cluster.run_state(run) == "cancelled"
            assert not cluster.rows("select * from flowforge.fetch_outbox(100)")
    assert outcomes[:2] == ["claimed", "cancelled"]
    assert not cluster.rows("select * from flowforge.violations()")


def test_hd_31_running_task_learns_of_the_cancel(cluster: Cluster) -> None:
    """A running handler is told by its renewal and ends cancelled; one that has committed its finish stays
    succeeded."""
    cluster.daemons(workers=1, FLOWFORGE_LEASE="6")
    run = cluster.trigger("chain", {"a": {"sleep": 600}})
    wait_until(lambda: len(cluster.executions()) == 1, "the execution")
    assert cluster.value("select flowforge.cancel_run(%s, 'enough')", run)
    assert cluster.wait_ended(run) == ["cancelled"]
    assert cluster.states(run) == {"a": "cancelled", "b": "cancelled", "c": "cancelled"}
    done = cluster.trigger("one")
    assert cluster.wait_ended(done) == ["succeeded"]
    assert not cluster.value("select flowforge.cancel_run(%s)", done)
    assert cluster.task(done, "work")["state"] == "succeeded"
    cluster.check()


def test_hd_32_retry_of_the_failed_part(cluster: Cluster) -> None:
    """What failed and what was skipped because of it runs again; what succeeded is not touched; two retries
    at once are one."""
    broken = cluster.directory / "broken"
    broken.touch()
    cluster.daemons(workers=2)
    run = cluster.trigger("clearable", {"c": {"fail": str(broken)}})
    assert cluster.wait_ended(run) == ["failed"]
    assert cluster.states(run) == {
        "a": "succeeded",
        "b": "succeeded",
        "c": "failed",
        "d": "skipped",
        "e": "skipped",
    }
    before = {name: cluster.task(run, name) for name in "abc"}
    broken.unlink()
    with cluster.db.connect() as one, cluster.db.connect() as other, ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(conn.execute, "select flowforge.retry_run(%s)", [run]) for conn in (one, other)]
        answers = []
        for call in calls:
            try:
                row = call.result().fetchone()
                assert row is not None
                answers.append(row[0])
            except Exception as refused:  # noqa: BLE001 - either answer is right for the second one
                assert getattr(refused, "sqlstate", None) == "WF007"  # noqa: PT017
                answers.append(0)
    assert sorted(answers) == [0, 3]
    assert cluster.wait_ended(run) == ["succeeded"]
    for name in "ab":
        after = cluster.task(run, name)
        assert (after["finished_at"], after["fencing_token"]) == (
            before[name]["finished_at"],
            before[name]["fencing_token"],
        )
    retried = cluster.task(run, "c")
    assert retried["attempt"] == 2
    assert retried["dispatch_id"] != before["c"]["dispatch_id"]
    late = cluster.rows(
        "select outcome from flowforge.claim_task_run(%s, %s, 'late', gen_random_uuid(), '1 min')",
        retried["task_run_id"], before["c"]["dispatch_id"],
    )  # fmt: skip
    assert late == [("superseded",)]
    cluster.check()


def test_hd_36_many_migrators(cluster: Cluster) -> None:
    """One migrator killed in the middle, then five at once: they succeed without a manual step."""
    name = f"fresh_{cluster.db.name}"
    cluster.execute(f"create database {name} template template0 encoding 'UTF8'")
    dsn = cluster.db.server.dsn(name)
    try:
        command = [PROGRAM, "migrate", "--database-url", dsn]
        with cluster.db.server.connect(name) as conn:
            # It stops at the first function, when the tables have been made.
            conn.execute(
                """
                create function public.wait_here() returns event_trigger language plpgsql as
                    'begin perform pg_advisory_xact_lock(36); end';
                create event trigger half on ddl_command_end when tag in ('CREATE FUNCTION')
                    execute function public.wait_here();
                select pg_advisory_lock(36);
                """
            )
            killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            waits = "select count(*) from pg_locks where locktype = 'advisory' and objid = 36 and not granted"
            wait_until(lambda: cluster.value(waits) == 1, "the middle of a migration")
            killed.kill()
            killed.wait()
            wait_until(lambda: cluster.value(waits) == 0, "the end of its session")
            half = "select to_regclass('flowforge.task_run'), to_regprocedure('flowforge.schema_version()')"
            assert conn.execute(half).fetchone() == ("flowforge.task_run", None)
            conn.execute("drop event trigger half")
        running = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for _ in range(5)
        ]
        outputs = [(process.communicate(timeout=100)[0], process.returncode) for process in running]
        assert [code for _, code in outputs] == [0] * 5, outputs
        with cluster.db.server.connect(name) as conn:
            row = conn.execute("select flowforge.schema_version()").fetchone()
            assert row == (SCHEMA_VERSION,)
    finally:
        cluster.execute(f"drop database {name} with (force)")


def test_hd_44_many_schedulers(cluster: Cluster) -> None:
    """Four schedulers and four workers, some killed and started again, runs with skips, retries and failures:
    no illegal transition (a trigger in the test database rejects it), and each dispatch is executed once
    unless its worker died."""
    cluster.start("worker", "worker", "worker", "worker", FLOWFORGE_LOG_LEVEL="info")
    schedulers = cluster.start(*["scheduler"] * 4, FLOWFORGE_LOG_LEVEL="info")
    broken = str(cluster.directory)
    runs = cluster.trigger_many("mixed", [{"broken": {"fail": True}, "flaky": {}}] * 100)
    runs += cluster.trigger_many("mixed", [{"flaky": {"fail": broken}, "broken": {}}] * 20)
    choose = random.Random(44)
    killed = 0
    done = "select count(*) from flowforge.run where finished_at is not null"
    for share in (20, 50, 80, 100):
        wait_until(lambda share=share: cluster.value(done) >= share, f"{share} runs")  # type: ignore[misc]
        alive = [process for process in schedulers if process.running()]
        choose.choice(alive).kill()
        killed += 1
        schedulers += cluster.start("scheduler", FLOWFORGE_LOG_LEVEL="info")
    assert killed == 4
    states = cluster.wait_ended(*runs)
    assert set(states) == {"failed"}
    assert cluster.states(runs[0]) == {
        "a": "succeeded", "flaky": "succeeded", "broken": "failed",
        "rescue": "succeeded", "skipped": "skipped", "end": "succeeded",
    }  # fmt: skip
    executions = [(entry["task_run"], entry["attempt"]) for entry in cluster.executions()]
    assert len(executions) == len(set(executions))
    cluster.check()


def test_hd_45_duplicate_trigger(cluster: Cluster) -> None:
    """Fifty triggers with one key at once make one run, and so does one that is repeated later; other input
    under the key is an error that names the run."""
    cluster.daemons(workers=1)

    def trigger(_: int) -> int:
        with cluster.db.connect() as client:
            row = client.execute("select flowforge.trigger('one', '{}', 'key')").fetchone()
            assert row is not None
            return int(row[0])

    with ThreadPoolExecutor(50) as pool:
        runs = set(pool.map(trigger, range(50)))
    assert len(runs) == 1
    (run,) = runs
    assert cluster.value("select count(*) from flowforge.run") == 1
    assert cluster.value("select count(*) from flowforge.task_run") == 1
    assert cluster.wait_ended(run) == ["succeeded"]
    for value, code in (('{"other": 1}', 2), ("{}", 0)):
        command = [PROGRAM, "trigger", "one", "--database-url", cluster.db.dsn, "--idempotency-key", "key"]
        done = subprocess.run([*command, "--input", value], capture_output=True, text=True, check=False)
        assert bool(done.returncode) == bool(code), done
        assert str(run) in done.stdout + done.stderr
    assert cluster.value("select count(*) from flowforge.run") == 1
    cluster.check()
