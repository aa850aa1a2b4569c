"""What the tests of the daemons share: one under way in a thread or a process, and a client and worker in
plain SQL."""

import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

from psycopg.types.json import Jsonb

from flowforge import runner
from flowforge.config import Config
from flowforge.health import Health
from flowforge.runner import Daemon
from flowforge.stopping import Stop
from tests.services.database import Database
from tests.services.process import wait_until

TIMEOUT = 30.0
CHECKOUT = Path(__file__).resolve().parents[2]


class Running:
    """A daemon under way in a thread; leaving the block stops it and waits for its end."""

    def __init__(self, daemon: Daemon, config: Config) -> None:
        self.stop, self.health = Stop(), Health(daemon.name, config.health_file)
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, args=(daemon, config))

    def _run(self, daemon: Daemon, config: Config) -> None:
        self.code = runner.run(daemon, config, stop=self.stop, health=self.health)

    def __enter__(self) -> "Running":
        self._thread.start()
        return self

    def join(self) -> None:
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()

    def __exit__(self, *_: object) -> None:
        self.stop.request()
        self.join()

    def until(self, state: str) -> None:
        """Wait for a state of health."""
        wait_until(lambda: self.health.state == state, f"the state {state!r}", TIMEOUT)


PROGRAM = """
import importlib, sys
from flowforge import log, runner
from flowforge.config import Config
config = Config.from_environment()
log.configure(config.log_format, config.log_level)
daemon = getattr(importlib.import_module(f"flowforge.{sys.argv[1].lower()}"), sys.argv[1])
sys.exit(runner.run(daemon(config), config))
"""


def process(daemon: str, config: Config, **environment: str) -> subprocess.Popen[str]:
    """Start a daemon, Scheduler or Publisher, as a process of its own that logs JSON lines to stderr."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, daemon],
        cwd=CHECKOUT,
        env={
            **os.environ,
            "FLOWFORGE_DATABASE_URL": config.database_url,
            "FLOWFORGE_AMQP_URL": ",".join(config.amqp_urls),
            "FLOWFORGE_NAMESPACE": config.namespace,
            "FLOWFORGE_HEALTH_FILE": config.health_file,
            "FLOWFORGE_POLL_INTERVAL": str(config.poll_interval),
            "FLOWFORGE_LOG_FORMAT": "json",
            "FLOWFORGE_TEST_CRASHES": "1",
            **environment,
        },
        stderr=subprocess.PIPE,
        text=True,
    )


class Flow:
    """One workflow, and what a client and a worker do, by SQL alone."""

    def __init__(self, db: Database, *tasks: dict[str, Any]) -> None:
        self.conn = db.connect()
        self.name = f"flow {uuid.uuid4().hex[:8]}"
        spec = {"name": self.name, "tasks": list(tasks) or [{"name": "one"}]}
        self.conn.execute("select flowforge.define_workflow(%s)", [Jsonb(spec)])

    def close(self) -> None:
        self.conn.close()

    def value(self, query: str, *params: Any) -> Any:
        row = self.conn.execute(query.encode(), params or None).fetchone()
        assert row is not None
        return row[0]

    def trigger(self, **arguments: Any) -> int:
        names = ", ".join(f"{name} => %s" for name in arguments)
        return int(
            self.value(
                f"select flowforge.trigger(%s{', ' if names else ''}{names})", self.name, *arguments.values()
            )
        )

    def states(self, run: int) -> list[str]:
        query = "select state::text from flowforge.task_run where run_id = %s order by task_run_id"
        return [row[0] for row in self.conn.execute(query, [run])]

    def run_state(self, run: int) -> str:
        return str(self.value("select state::text from flowforge.run where run_id = %s", run))

    def claim(self, max_rows: int = 1, lease: str = "1 minute") -> list[tuple[int, int]]:
        """Take dispatches as a worker without a broker does: task run ids and tokens."""
        query = """
            select task_run_id, fencing_token
            from flowforge.claim_next(array['default'], 'tester', gen_random_uuid(), %s::interval, %s)
            where outcome = 'claimed'
        """
        return self.conn.execute(query, [lease, max_rows]).fetchall()

    def finish(self, claims: list[tuple[int, int]], outcome: str = "succeeded") -> None:
        for task_run, token in claims:
            answer = self.value("select flowforge.finish_task_run(%s, %s, %s)", task_run, token, outcome)
            assert answer == "accepted"

    def work_until(self, *runs: int) -> None:
        """Claim and finish until the runs have ended."""

        def ended() -> bool:
            self.finish(self.claim(100))
            return all(self.run_state(run) != "running" for run in runs)

        wait_until(ended, f"the end of the runs {runs}", TIMEOUT)

    def healthy(self) -> None:
        """No invariant is broken."""
        assert self.conn.execute("select * from flowforge.violations()").fetchall() == []
