"""The installed daemons as processes of their own on real servers, a witness, and the checks that hold at the
end of every scenario (G1 to G7 of docs/scenarios.md)."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flowforge import Workflow
from tests.python import scenario_flows
from tests.python.amqp_proxy import AmqpProxy
from tests.services.database import NOTES, Database
from tests.services.process import wait_until
from tests.services.rabbitmq import Broker

PROGRAM = str(Path(sys.executable).with_name("flowforge"))
FLOWS = "tests.python.scenario_flows"
CHECKOUT = Path(__file__).resolve().parents[2]


class Process:
    """One daemon as a process. `kill`, `stop` and `signal` are what the scenario does to it."""

    def __init__(
        self, name: str, command: list[str], environment: dict[str, str], log: Path, cwd: Path = CHECKOUT
    ) -> None:
        self.name, self.log = name, log
        self._health = Path(environment["FLOWFORGE_HEALTH_FILE"])
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, env=environment, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self.pid = self._process.pid

    def running(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and see it die of that."""
        self._process.kill()
        assert self._process.wait(10) == -signal.SIGKILL

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self.running():
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)

    def wait(self) -> int:
        """Wait for its own end; the exit code."""
        return self._process.wait(60)

    def health(self) -> str:
        """The state of health that it reports."""
        return str(json.loads(self._health.read_text())["state"]) if self._health.exists() else "starting"

    def entries(self) -> list[dict[str, Any]]:
        """Its log."""
        return [json.loads(line) for line in whole_lines(self.log) if line.startswith("{")]

    def said(self, event: str) -> int:
        """How often its log tells of this event."""
        return sum(entry["event"] == event for entry in self.entries())


def whole_lines(file: Path) -> list[str]:
    """What is in the file but for what is being written."""
    return file.read_text().rpartition("\n")[0].splitlines()


class Cluster:
    """A database, perhaps a broker, and processes. Leaving the block stops what still runs; a daemon that did
    not end in order fails the test."""

    def __init__(
        self, db: Database, directory: Path, broker: Broker | None = None, namespace: str = ""
    ) -> None:
        self.db, self.broker, self.namespace, self.directory = db, broker, namespace, directory
        # Publishers reach the broker through it.
        self._wire = AmqpProxy(broker.url) if broker else None
        self._witness = directory / "witness"
        self._witness.touch()
        self.processes: list[Process] = []
        self._connection = db.connect()
        self._connection.execute(NOTES.read_bytes())
        for workflow in vars(scenario_flows).values():
            if isinstance(workflow, Workflow):
                self.value("select version from flowforge.define_workflow(%s)", json.dumps(workflow.spec()))

    def __enter__(self) -> Self:
        if self._wire is not None:
            self._wire.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        running = [process for process in self.processes if process.running()]
        try:
            codes = {process.name: process.stop() for process in running}
        finally:
            if self._wire is not None:
                self._wire.__exit__()
        self._connection.close()
        if error is None:
            assert set(codes.values()) <= {0}, codes
        else:
            for process in self.processes:
                sys.stderr.write(f"--- {process.name}\n{process.log.read_text()[-4000:]}\n")

    # -- processes

    @property
    def environment(self) -> dict[str, str]:
        """What the daemons and commands of this set-up have in common."""
        return {
            **os.environ,
            "FLOWFORGE_DATABASE_URL": self.db.dsn,
            "FLOWFORGE_AMQP_URL": self.broker.url if self.broker else "",
            "FLOWFORGE_NAMESPACE": self.namespace,
        }

    def start(self, *names: str, **environment: str) -> list[Process]:
        """Start daemons by name: scheduler, publisher, worker. They log JSON lines, debug included."""
        started = []
        for name in names:
            command = [PROGRAM, name, *([FLOWS] if name == "worker" else [])]
            number = len(self.processes)
            settings = self.environment | {
                "FLOWFORGE_LOG_FORMAT": "json",
                "FLOWFORGE_LOG_LEVEL": "debug",
                "FLOWFORGE_HEALTH_FILE": str(self.directory / f"health-{number}"),
                "FLOWFORGE_TEST_WITNESS": str(self._witness),
                "FLOWFORGE_TEST_CRASHES": "1",
                "FLOWFORGE_POLL_INTERVAL": "0.2",
                "FLOWFORGE_REAP_INTERVAL": "0.1",
                "FLOWFORGE_RECOVER_INTERVAL": "0.1",
                "FLOWFORGE_GRACE": "5",
                "FLOWFORGE_LEASE": "20",
                "PYTHONFAULTHANDLER": "1",
            }
            if name == "publisher" and self._wire is not None:
                settings["FLOWFORGE_AMQP_URL"] = self._wire.url
            log = self.directory / f"log-{number}-{name}"
            process = Process(f"{name} {number}", command, {**settings, **environment}, log)
            self.processes.append(process)
            started.append(process)
        return started

    def daemons(self, workers: int = 2, **environment: str) -> list[Process]:
        """Everything: a scheduler, a publisher where there is a broker, and workers."""
        publisher = ["publisher"] if self.broker else []
        return self.start("scheduler", *publisher, *["worker"] * workers, **environment)

    def everyone(self, **environment: str) -> list[Process]:
        """All kinds of daemons: scheduler, publisher, a worker of the broker, and one that knows of none."""
        started = self.daemons(workers=1, **environment)
        return [*started, *self.start("worker", FLOWFORGE_AMQP_URL="", **environment)]

    # -- SQL

    def reconnect(self) -> None:
        """After a fault that has cost the test its own connection."""
        self._connection.close()
        self._connection = self.db.connect()

    def sessions(self) -> dict[str, set[int]]:
        """The server processes of the daemons' sessions, by application_name without the prefix."""
        found: dict[str, set[int]] = defaultdict(set)
        for name, pid in self.rows(
            "select application_name, pid from pg_stat_activity"
            " where datname = current_database() and application_name like 'flowforge %%'"
        ):
            found[name.removeprefix("flowforge ")].add(pid)
        return found

    def terminate(self, *names: str) -> None:
        """End the daemons' sessions, those of these names if any is named, and see them gone."""
        pids = [pid for name, pids in self.sessions().items() if name in names or not names for pid in pids]
        self.rows("select pg_terminate_backend(pid) from unnest(%s::int[]) as u (pid)", pids)
        left = "select count(*) from pg_stat_activity where pid = any(%s::int[])"
        wait_until(lambda: self.value(left, pids) == 0, "the end of the sessions")

    def rows(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(query.encode(), parameters).fetchall()

    def value(self, query: str, *parameters: Any) -> Any:
        return self.rows(query, *parameters)[0][0]

    def execute(self, query: str, *parameters: Any) -> None:
        self._connection.execute(query.encode(), parameters)

    def trigger(self, workflow: str, value: Any = None, **more: Any) -> int:
        names = "".join(f", {name} => %s" for name in more)
        query = f"select flowforge.trigger(%s, %s::jsonb{names})"
        return int(self.value(query, workflow, json.dumps(value or {}), *more.values()))

    def trigger_many(self, workflow: str, values: list[Any]) -> list[int]:
        query = "select flowforge.trigger_many(%s, %s::text[]::jsonb[])"
        return list(self.value(query, workflow, [json.dumps(value) for value in values]))

    def task(self, run: int, name: str) -> dict[str, Any]:
        """A task run's whole row, its own row if it is a map."""
        found: dict[str, Any] = self.value(
            "select to_jsonb(tr) from flowforge.task_run tr join flowforge.task t using (task_id)"
            " where tr.run_id = %s and t.name = %s and tr.map_index is null",
            run, name,
        )  # fmt: skip
        return found

    def states(self, run: int) -> dict[str, str]:
        query = """
            select t.name, tr.state::text from flowforge.task_run tr join flowforge.task t using (task_id)
            where tr.run_id = %s and tr.map_index is null
        """
        return dict(self.rows(query, run))

    def run_state(self, run: int) -> str:
        return str(self.value("select state::text from flowforge.run where run_id = %s", run))

    def wait_ended(self, *runs: int, timeout: float = 90) -> list[str]:
        """Wait until the runs have ended, all when none is named; their states."""
        some = list(runs) or [run for (run,) in self.rows("select run_id from flowforge.run")]
        query = "select count(*) from flowforge.run where run_id = any(%s) and finished_at is null"
        wait_until(lambda: self.value(query, some) == 0, "the end of the runs", timeout)
        return [self.run_state(run) for run in some]

    def wait_task(self, run: int, name: str, state: str) -> dict[str, Any]:
        wait_until(lambda: self.task(run, name)["state"] == state, f"task {name} {state}")
        return self.task(run, name)

    # -- what happened

    def executions(self, event: str = "start") -> list[dict[str, Any]]:
        """What the handlers told the witness."""
        found = [json.loads(line) for line in whole_lines(self._witness)]
        return [entry for entry in found if entry["event"] == event]

    def published(self) -> int:
        """Orders that are marked as published."""
        return int(self.value("select count(*) from flowforge.outbox where published_at is not null"))

    def wait_declared(self) -> None:
        """Wait until the work queue exists and is bound, and the publishers are well."""
        assert self.broker is not None
        broker, queue = self.broker, self.queue()
        wait_until(lambda: broker.counts(queue) is not None, "the work queue")
        publishers = [each for each in self.processes if "publisher" in each.name and each.running()]
        wait_until(lambda: all(each.health() == "ok" for each in publishers), "the publishers' health")

    def queue(self, name: str = "default") -> str:
        """The broker's name of a work queue."""
        return f"{self.namespace}.flowforge.{name}" if self.namespace else f"flowforge.{name}"

    def check(self) -> None:
        """G1 to G7: the invariants in the tables, what was accepted against the tokens handed out and what
        the witness saw, and each mark of an order against what passed between publisher and broker."""
        violations = self.rows("select * from flowforge.violations()")
        assert not violations, violations
        self._check_tokens()
        self._check_marks()
        assert not self.deadlocks(), "the server's log tells of a deadlock"

    def _check_tokens(self) -> None:
        """G5 and G6."""
        handed: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for task_run, *pair in self.rows(
            "select task_run_id, attempt, token from public.handed_out order by id"
        ):
            handed[task_run].append((pair[0], pair[1]))
        for task_run, pairs in handed.items():
            assert all(old[0] <= new[0] and old[1] < new[1] for old, new in itertools.pairwise(pairs)), (
                f"G6: attempt or token of task run {task_run} went back: {pairs}"
            )
        executed: dict[tuple[int, int], list[int]] = defaultdict(list)
        for entry in self.executions():
            executed[entry["task_run"], entry["attempt"]].append(entry["token"])
        for (task_run, attempt), tokens in executed.items():
            assert len(set(tokens)) == len(tokens), f"a token of task run {task_run} was executed twice"
            unknown = {(attempt, token) for token in tokens} - set(handed[task_run])
            assert not unknown, f"task run {task_run} was executed under tokens never handed out: {unknown}"
        accepted = self.rows("select task_run_id, attempt, answer from public.accepted")
        count = Counter((task_run, attempt) for task_run, attempt, _ in accepted)
        assert set(count.values()) <= {1}, "G5: two accepted finishes of one attempt"
        for task_run, attempt, answer in accepted:
            assert executed[task_run, attempt], f"G5: {task_run}, attempt {attempt}, was never executed"
            highest = max(token for which, token in handed[task_run] if which == attempt)
            if (named := re.search(r'token"?:? (\d+)', answer or "")) is not None:
                assert int(named[1]) == highest, f"G5: {task_run}: accepted {answer}, handed out {highest}"

    def _check_marks(self) -> None:
        """G7. Each mark has a confirm of its own, from within the transaction that fetched the order: a
        confirm of another order of the same dispatch, or of an earlier try, proves nothing."""
        confirms: dict[str, list[float]] = defaultdict(list)
        for confirm in self._wire.confirms if self._wire else []:
            confirms[confirm.message_id].append(confirm.at)
        for outbox, dispatch, fetched, marked in self.rows(
            """
            select outbox_id, dispatch_id::text, extract(epoch from fetched_at)::float8,
                extract(epoch from at)::float8
            from public.marked order by at
            """
        ):
            own = [at for at in confirms[dispatch] if fetched <= at <= marked]
            assert own, f"G7: order {outbox} of dispatch {dispatch} was marked without a confirm"
            confirms[dispatch].remove(own[0])

    def deadlocks(self) -> list[str]:
        return [line for line in self.db.log() if "deadlock detected" in line]
