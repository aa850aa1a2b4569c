"""HD-40: a process dies at each step at which one can die, one after the other, under a load of mixed graphs
over both deliveries; so do the servers. Ids as in docs/scenarios.md."""

import json
import re
import signal
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import flowforge
from flowforge.scheduler import Scheduler
from tests.python.cluster import PROGRAM, Cluster, Process
from tests.services.process import wait_until
from tests.services.rabbitmq import RabbitServer

RUNS = 100
LEASE = "3"
ITEMS = [1, 2, 3, 4]
LOAD: list[tuple[str, dict[str, Any]]] = [
    ("diamond", {"b": {"sleep": 0.1}}),
    ("mixed", {"broken": {"fail": True}, "flaky": {"attempts": 2}}),
    ("mapped", {"items": {"output": ITEMS}}),
    ("chain", {}),
    ("late", {}),
]
# Queues without a worker: what is late is published again and again, and not started in time; what is by hand
# is claimed by the test.
UNSERVED: list[dict[str, Any]] = [
    {"name": "late", "tasks": [{"name": "work", "queue": "nobody", "start_within": 2}]},
    {"name": "by hand", "tasks": [{"name": "work", "queue": "hand"}]},
]


def steps() -> dict[str, list[str]]:
    """Every crash point of the program by its daemon, in the order of the text; those of workers apart by
    delivery."""
    found: dict[str, list[str]] = defaultdict(list)
    move_nothing = {"advance_frontiers", "declare_scheduler", "next_due"}
    duties = [each for each in Scheduler.functions if each not in move_nothing]
    for path in sorted(Path(flowforge.__file__).parent.rglob("*.py")):
        for name in re.findall(r'crash_point\(f?"([^"]+)"\)', path.read_text()):
            lane = name.split(":")[0]
            for each in [name.replace("{duty.function}", duty) for duty in duties] if "{" in name else [name]:
                if lane == "worker" and path.name in ("messages.py", "finishing.py"):
                    found["worker, RabbitMQ"].append(each)
                if lane == "worker" and path.name in ("dispatches.py", "finishing.py"):
                    found["worker, PostgreSQL"].append(each)
                if lane != "worker":
                    found[lane].append(each)
    return found


class Lane:
    """A daemon that is started again and again, each time to die at the next step. At last it lives; but a
    worker not by itself: it would leave nothing to do for the others' steps."""

    def __init__(self, cluster: Cluster, name: str, points: list[str], **environment: str) -> None:
        self._cluster, self._name, self._environment = cluster, name, environment
        self._left = list(points)
        self.point: str | None = None
        self.dead: list[tuple[str, Process]] = []
        self._process: Process | None = self._start()

    def _start(self) -> Process:
        self.point = self._left.pop(0) if self._left else None
        crash = {"FLOWFORGE_CRASH_AT": self.point} if self.point else {}
        (process,) = self._cluster.start(self._name, **self._environment, **crash)
        return process

    def done(self) -> bool:
        """Whether all steps are behind it. One that has died is followed by the next."""
        if self._process is not None and not self._process.running():
            assert self._process.wait() == -signal.SIGKILL, f"{self.point}: {self._process.log.read_text()}"
            assert self.point is not None, "died of something else"
            self.dead.append((self.point, self._process))
            if self._left or self._name != "worker":
                self._process = self._start()
            else:
                self._process = self.point = None
        return self.point is None

    def live(self) -> None:
        """From now on, if it does not already."""
        self._process = self._process or self._start()


class Load:
    """Runs of mixed graphs, so that there is always something to do."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.runs: list[int] = []
        self.abandoned: int | None = None
        self._provided: set[str] = set()
        for spec in UNSERVED:
            cluster.value("select version from flowforge.define_workflow(%s)", json.dumps(spec))
        cluster.execute("select flowforge.configure_queue('nobody', null, '0.1 s')")

    def keep_up(self, active: int = 12) -> None:
        """Trigger some more where few are left."""
        left = "select count(*) from flowforge.run where finished_at is null"
        if self._cluster.value(left) < active:
            for workflow, value in LOAD:
                self.runs.append(self._cluster.trigger(workflow, value))
        if len(self.runs) % 4 == 1:
            self._cluster.rows("select flowforge.cancel_run(%s)", self.runs[-2])

    def provide(self, point: str | None) -> None:
        """What a step needs that may not come by itself."""
        if point is None or point in self._provided:
            return
        self._provided.add(point)
        if point == "scheduler:after-cancel_leftovers":
            self._leave_over()
        elif point == "scheduler:after-reap_expired_leases":
            self.abandoned, _ = self._claim_by_hand("0.1 s")

    def _leave_over(self) -> None:
        """A run being cancelled in which something is ready again: given back while the cancel came."""
        run, held = self._claim_by_hand("1 min")
        with self._cluster.db.connect(autocommit=False) as worker:
            worker.execute("select flowforge.release_task_run(%s, %s, 'unstarted')", held)
            assert self._cluster.value("select flowforge.cancel_run(%s)", run) is True
            worker.commit()

    def _claim_by_hand(self, lease: str) -> tuple[int, tuple[int, int]]:
        """A run, and the task run and token that nobody executes."""
        cluster, run = self._cluster, self._cluster.trigger("by hand")
        self.runs.append(run)

        def ready() -> bool:
            # The scheduler may be dead just now.
            cluster.execute("select flowforge.dispatch_ready()")
            return bool(cluster.task(run, "work")["state"] == "ready")

        wait_until(ready, "the dispatch")
        claim = """
            select task_run_id, fencing_token
            from flowforge.claim_task_run(%s, %s, 'the test', gen_random_uuid(), %s::interval)
        """
        task = cluster.task(run, "work")
        ((task_run, token),) = cluster.rows(claim, task["task_run_id"], task["dispatch_id"], lease)
        return run, (task_run, token)


def check_executions(cluster: Cluster, killed: set[int]) -> int:
    """Wherever an attempt was executed again, its worker before had been killed, or its lease run out; how
    many there were."""
    executed: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for entry in cluster.executions():
        executed[entry["task_run"], entry["attempt"]].append(entry)
    taken_back = {
        (task_run, token)
        for task_run, token in cluster.rows(
            "select task_run_id, fencing_token from flowforge.attempt where outcome = 'lease_expired'"
        )
    }
    extra = 0
    for (task_run, attempt), entries in executed.items():
        entries.sort(key=lambda entry: entry["token"])
        for before in entries[:-1]:
            extra += 1
            assert (task_run, before["token"]) in taken_back, (
                f"attempt {attempt} of task run {task_run} was executed again, though nobody lost {before}; "
                f"its worker was {'' if before['pid'] in killed else 'not '}killed"
            )
    return extra


@pytest.mark.timeout(600)
def test_hd_40_a_process_dies_at_every_step(rabbit_cluster: Cluster, rabbit_server: RabbitServer) -> None:
    """All runs end by themselves, and what was executed again had lost its worker."""
    cluster, load, points = rabbit_cluster, Load(rabbit_cluster), steps()
    assert set(points) == {"scheduler", "publisher", "worker, RabbitMQ", "worker, PostgreSQL", "migrate"}
    worker = {"FLOWFORGE_LEASE": LEASE, "FLOWFORGE_CONCURRENCY": "4"}
    lanes = {
        "scheduler": Lane(cluster, "scheduler", points["scheduler"], FLOWFORGE_SWEEP_INTERVAL="0.2"),
        "publisher": Lane(cluster, "publisher", points["publisher"]),
        "worker, RabbitMQ": Lane(cluster, "worker", points["worker, RabbitMQ"], **worker),
        "worker, PostgreSQL": Lane(
            cluster, "worker", points["worker, PostgreSQL"], FLOWFORGE_AMQP_URL="", **worker
        ),
    }

    workers = [name for name in lanes if "worker" in name]

    def walked() -> bool:
        load.keep_up()
        load.provide(lanes["scheduler"].point)
        # Each of them is asked, also when an earlier one has steps left.
        done = {name: lane.done() for name, lane in lanes.items()}
        if all(done[name] for name in workers):
            for name in workers:
                lanes[name].live()
        return all(done.values())

    try:
        wait_until(walked, "all steps", 200)
    except TimeoutError:
        pytest.fail(f"never reached: {[lane.point for lane in lanes.values() if lane.point]}")
    for name, lane in lanes.items():
        assert [point for point, _ in lane.dead] == points[name]
    assert load.abandoned is not None
    cluster.rows("select flowforge.cancel_run(%s)", load.abandoned)
    _migrate(cluster, points["migrate"])
    killed = {process.pid for lane in lanes.values() for _, process in lane.dead}
    killed.add(_die_in_a_task(cluster, load, worker))
    load.runs += cluster.trigger_many("diamond", [{}] * max(10, RUNS - len(load.runs)))
    cluster.db.server.kill()
    cluster.db.server.start()
    cluster.reconnect()
    rabbit_server.kill()
    load.runs += cluster.trigger_many("chain", [{}] * 10)
    rabbit_server.start()
    cluster.wait_ended(*load.runs, timeout=120)
    assert len(load.runs) >= RUNS
    _check_ends(cluster)
    assert check_executions(cluster, killed) >= 1
    cluster.check()


def _migrate(cluster: Cluster, points: list[str]) -> None:
    """The migrator dies, too, and the next one needs no help."""
    command = [PROGRAM, "migrate", "--database-url", cluster.db.dsn]
    for point in [*points, None]:
        environment = cluster.environment | ({"FLOWFORGE_CRASH_AT": point} if point else {})
        environment["FLOWFORGE_TEST_CRASHES"] = "1"
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == (-signal.SIGKILL if point else 0), done


def _die_in_a_task(cluster: Cluster, load: Load, environment: dict[str, str]) -> int:
    """A handler is under way when its worker dies; the worker's process id."""
    flag = cluster.directory / "died"
    cluster.start("worker", **environment)
    load.runs.append(cluster.trigger("one", {"work": {"die": str(flag)}}))
    workers = [each for each in cluster.processes if "worker" in each.name and each.running()]
    wait_until(lambda: not all(each.running() for each in workers), "the death of a worker in its task")
    (dead,) = [each for each in workers if not each.running()]
    assert dead.wait() == -signal.SIGKILL
    return dead.pid


def _check_ends(cluster: Cluster) -> None:
    """Each run ended as it should, or its task run had lost three workers."""
    rows = cluster.rows(
        """
        select w.name, r.state::text, r.cancel_requested_at is not null,
            array(select tr.error from flowforge.task_run tr
                  where tr.run_id = r.run_id and tr.state = 'failed')
        from flowforge.run r join flowforge.workflow w using (workflow_id)
        """
    )
    wanted = {"mixed": "failed", "late": "failed", "by hand": "cancelled"}
    for workflow, state, cancelled, errors in rows:
        lost = any("given up after 3 executions" in error for error in errors)
        assert state == wanted.get(workflow, "succeeded") or cancelled or lost, (workflow, state, errors)
