"""Mistakes that random calls have found, each by the shortest sequence that shows it."""

import pytest

from tests.sql.helpers import Engine


@pytest.mark.parametrize(
    "call",
    [
        "claim_task_runs('{1}', '{}', 'worker', gen_random_uuid(), '30 s')",
        "renew_leases('{1}', '{1, 2}', '30 s')",
        "finish_task_runs('{1}', '{1}', '{succeeded, failed}', '{null}', '{null}', '{true}')",
        "mark_refused('{1}', '{}')",
    ],
)
def test_arrays_of_different_lengths_are_refused(engine: Engine, call: str) -> None:
    with engine.refuses("WF001"):
        engine.rows(f"select * from flowforge.{call}")
