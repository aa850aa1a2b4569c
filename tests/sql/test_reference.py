"""The SQL reference says what the catalogue says, and the catalogue what the functions do."""

import re

from tests.services.database import Database
from tests.sql.reference import DOCUMENT, document, functions
from tests.sql.test_catalogue import FILES

# Reached by the text of a helper alone: no caller of it finishes as cancelled.
NEVER_RAISED = {"reap_expired_leases": {"WF007"}, "release_task_run": {"WF007"}}


def bodies() -> dict[str, str]:
    """By name: the text of each function, without comments."""
    found = {}
    for text in FILES.values():
        code = re.sub(r"^comment on .*?;$", "", re.sub("--.*", "", text), flags=re.MULTILINE | re.DOTALL)
        for each in re.split(r"^create or replace (?:function|view) flowforge\.", code, flags=re.MULTILINE)[
            1:
        ]:
            found[re.split(r"\W", each)[0]] = each
    return found


def raised(name: str, texts: dict[str, str], seen: set[str]) -> set[str]:
    """The SQLSTATEs that a function raises by itself or through those that it calls."""
    if name in seen or name not in texts:
        return set()
    seen.add(name)
    called = re.findall(r"flowforge\.(\w+)\(", texts[name])
    own = set(re.findall(r"errcode = '(\w+)'", texts[name]))
    return own.union(*(raised(each, texts, seen) for each in called))


def test_the_reference_is_current(db: Database) -> None:
    """After changing a comment: ./dev run python -m tests.sql.reference"""
    with db.connect() as connection:
        assert document(connection) == DOCUMENT.read_text(encoding="utf-8")


def test_comments_name_the_errors_that_functions_raise(db: Database) -> None:
    """All of them and no other."""
    texts = bodies()
    with db.connect() as connection:
        described = functions(connection)
    assert len(described) > 30
    for name, (_, comment) in described.items():
        said = set(re.findall(r"\bWF\d{3}\b|\b40001\b", comment.partition(" Raises ")[2]))
        assert said == raised(name, texts, set()) - NEVER_RAISED.get(name, set()), name
