"""Random calls, valid and invalid, against the real functions; tests/sql/model.py says what each must do.

After the last step of each example everything is driven to its end. FLOWFORGE_TEST_EXAMPLES=3000 makes a
longer run, with other examples each time.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.services.database import Clock, Database
from tests.sql.machine import MAX_WIDTH, QUEUES
from tests.sql.machine_daemons import DaemonMachine

# What every change is tested with: always the same examples, less than a minute of them.
EXAMPLES, STEPS = 300, 50


class Machine(DaemonMachine):
    """All of it, brought to an end."""

    def teardown(self) -> None:
        if self.agreed:  # otherwise a step has failed
            self.drive_to_the_end()

    def drive_to_the_end(self) -> None:
        """Daemons that do their duty bring every run to its end, whatever the workers do."""
        model = self.model
        for number, queue in enumerate(QUEUES):
            if queue in model.paused:
                self.resume(number)
        for _ in range(1000):
            self.schedule()
            if all(run.state != "running" for run in model.runs.values()):
                break
            tokens = self.claim_all()
            if self.fate in ("succeeded", "failed"):
                self.finish_all(tokens, [self.fate] * len(tokens), ["x"], retryable=True)
            elif self.fate != "silence":
                for token in tokens:
                    self.give_back(token, self.fate)
            self.reap()
            self.fail_undeliverable()
            self.sweep()
            self.agrees()
            # Short steps while a lease must run out: after a gap in its ticks the reaper waits.
            self.advance(9 if model.in_state("running") else 1000)
        stuck = [row for run, row in model.rows() if run.state == "running"]
        assert not stuck, "not driven to the end"
        self.sweep()
        assert not model.orders
        self.agrees()


@pytest.mark.timeout(3600)
def test_every_function_does_what_the_model_says(
    db: Database, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """G1 to G6, legal transitions, and an end for every run, whatever is called in whatever order."""
    longer = os.environ.get("FLOWFORGE_TEST_EXAMPLES")
    count = {"examples": 0, "steps": 0}
    with closing(db.connect()) as connection:
        connection.execute("select flowforge.set_limit('max_map_width', %s)", (MAX_WIDTH,))
        members = {"connection": connection, "clock": clock, "count": count}
        run_state_machine_as_test(
            type("Machine", (Machine,), members),
            settings=settings(
                max_examples=int(longer or EXAMPLES),
                stateful_step_count=STEPS,
                derandomize=not longer,
                database=None,
                deadline=None,
                print_blob=True,
                phases=[Phase.generate, *([Phase.shrink] if longer else [])],
                suppress_health_check=list(HealthCheck),
            ),
        )
    with capsys.disabled():
        sys.stdout.write(f" [{count['examples']} examples, {count['steps']} comparisons]")
