"""The model of the protocol holds what it must, no longer does so with any mistake put in, and is as
docs/model.md tells. The bounds of all checks stand there.

FLOWFORGE_TEST_MODEL=deep checks more faults at once, which takes some minutes and a gigabyte of memory.
"""

import os
import re
from pathlib import Path

import pytest

from tests.model.checker import LIVENESS, SOURCES, check, properties

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/model.md").read_text()
MODEL = "".join(source.read_text() for source in SOURCES)
FILES = (
    "cancel_run",
    "claim",
    "dispatch_ready",
    "finish",
    "publish",
    "redispatch",
    "release_and_reap",
    "renew_leases",
    "retry_run",
    "settle_finished",
)


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def checks(text: str) -> dict[str, tuple[str, int]]:
    """Bounds and number of states of each check, by its name."""
    found = re.findall(r"^\| ([\w, ]+) \| `(-D.*)` \| ([\d,]+) \|$", text, re.MULTILINE)
    return {name: (bounds, int(states.replace(",", ""))) for name, bounds, states in found}


USUAL, DEEP = map(
    checks, section("Bounds, and how many states there were").split("FLOWFORGE_TEST_MODEL=deep")
)
CHECKS = {**USUAL, **DEEP} if os.environ.get("FLOWFORGE_TEST_MODEL") == "deep" else USUAL
MISTAKES = {
    name: (bounds, broken)
    for name, bounds, broken in re.findall(
        r"^\| .*: `(MISTAKE_\w+)` \| `(-D.*)` \| `(\w+)` \|$", section("Mistakes"), re.MULTILINE
    )
}


@pytest.mark.parametrize("name", CHECKS)
def test_every_property_holds(name: str) -> None:
    bounds, states = CHECKS[name]
    answer = check(*bounds.split())
    assert not answer.violated, f"{answer.violated}\n{answer.trace}"
    assert answer.states == states


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_breaks_its_property(mistake: str) -> None:
    bounds, broken = MISTAKES[mistake]
    answer = check(f"-D{mistake}", *bounds.split())
    assert answer.violated == broken
    assert answer.trace


def test_the_checks_use_every_bound_and_delivery() -> None:
    used = set(re.findall(r"-D(\w+)", " ".join(bounds for bounds, _ in USUAL.values())))
    assert used >= {"FAULTS", "CANCELS", "RETRIES", "TIME_LIMIT", "PUBLISHERS", "WORKERS", "CLAIM_NEXT"}
    assert {LIVENESS} < {define for bounds, _ in USUAL.values() for define in bounds.split()}
    assert len(DEEP) > 0


def test_every_mistake_of_the_model_is_tried_and_every_property_broken_by_one() -> None:
    assert set(re.findall(r"MISTAKE_[A-Z_]+", MODEL)) - {"MISTAKE_"} == set(MISTAKES)
    assert {broken for _, broken in MISTAKES.values()} == properties()
    assert set(re.findall(r"^\| `(\w+)` \| ", section("What must hold"), re.MULTILINE)) == properties()


def test_every_function_of_the_protocol_is_told_of() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section("Which function is where"), re.MULTILINE)
    modelled = {function for function, _ in rows}
    left_out = set(
        re.findall(
            r"`(\w+)`",
            " ".join(re.findall(r"^\| (`.*?) \|", section("What is left out, and why"), re.MULTILINE)),
        )
    )
    source = "".join((ROOT / f"sql/functions/{name}.sql").read_text() for name in FILES)
    functions = set(re.findall(r"^create or replace function flowforge\.(\w+)\(", source, re.MULTILINE))
    assert modelled | left_out == functions
    assert not modelled & left_out

    words = set(re.findall(r"\w+", re.sub(r"/\*.*?\*/", "", MODEL, flags=re.DOTALL)))
    for function, place in rows:
        named = set(re.findall(r"`(\w+)`|\b([A-Z]\w+)", place))
        assert named, function
        assert {code or process for code, process in named} <= words, function


def test_what_functions_pml_names_after_a_function_is_one() -> None:
    inlines = set(re.findall(r"^inline (\w+)\(", SOURCES[1].read_text(), re.MULTILINE))
    of_its_own = {"insert_order", "no_lease", "next_attempt", "new_dispatch_id"}
    told = section("Which function is where")
    assert [name for name in sorted(inlines - of_its_own) if f"| `{name}` |" not in told] == []
