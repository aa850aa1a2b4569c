"""The page about concepts: its diagram is the state machine, and the life of its task run is lived."""

import re
from pathlib import Path

from tests.services.database import TRANSITIONS, Clock, Database

PAGE = (Path(__file__).resolve().parents[2] / "docs/concepts.md").read_text()


def test_the_diagram_is_the_state_machine() -> None:
    drawn = re.findall(r"^    (\w+) --> (\w+) : ", PAGE, re.MULTILINE)
    allowed = re.findall(r"when '(\w+) → (\w+)'", TRANSITIONS.read_text())
    assert sorted(drawn) == sorted({pair for pair in allowed if pair[0] != pair[1]})


def test_the_life_of_the_task_run_is_as_it_is_told(db: Database, clock: Clock) -> None:
    definition = re.search(r"```sql\n(.*?)```", PAGE, re.DOTALL)
    assert definition is not None
    rows = re.findall(r"^\| (?:client|scheduler|worker|nobody).*", PAGE, re.MULTILINE)
    with db.connect() as conn:
        conn.execute(definition[1].encode())
        for row in rows:
            who, does, answer, *expected = [cell.strip("` ") for cell in row.strip("|").split("|")]
            if who == "nobody":
                for _ in range(6 if "30 seconds" in does else 0):
                    assert conn.execute("select flowforge.reap_expired_leases()").fetchone() == (0,)
                    clock.advance("5 seconds")
                clock.advance("2 seconds")
            else:
                call = does.partition("`")[0]
                found = conn.execute(f"select * from flowforge.{call}".encode()).fetchall()
                assert str(found[0][1 if does.startswith("claim") else 0]) == answer, row
            query = "select state::text, attempt::text, fencing_token::text from flowforge.task_run"
            assert conn.execute(query.encode()).fetchall() == [tuple(expected)], row
        ended = conn.execute("select state from flowforge.run_status").fetchall()
        kept = conn.execute("select attempt, outcome from flowforge.attempt_status order by fencing_token")
        assert (ended, kept.fetchall()) == ([("succeeded",)], [(1, "lease_expired"), (1, "failed")])
