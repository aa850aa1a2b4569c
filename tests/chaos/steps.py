"""The launcher of the daemons: `python -m tests.chaos.steps scheduler|publisher|worker …` runs that command
of FlowForge, and dies by SIGKILL at the step that a file asks for.

The file, CHAOS_STEP, holds the name of a step; the first time that the daemon comes there it takes the file
away and kills itself. A call of the database has three steps: `before-NAME`, `in-NAME` (the statement has
been executed, and is not committed) and `after-NAME`. The others are steps of the publisher (fetch, publish,
confirm, mark, commit) and of the worker (delivery, acknowledge, transaction).
"""

import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flowforge import cli, db, publisher
from flowforge.broker import ConsumeChannel, PublishChannel
from flowforge.worker import context, messages

CALLS = {
    "dispatch": "dispatch_ready",
    "settle": "settle_finished",
    "expand": "expand_map",
    "reap": "reap_expired_leases",
    "redispatch": "redispatch_lost",
    "sweep": "sweep_outbox",
    "claim": "claim_task_runs",
    "claim-next": "claim_next",
    "finish": "finish_task_runs",
    "release": "release_task_run",
    "renew": "renew_leases",
}
"""Steps that are calls of the database, and the functions called."""


def _calls(*names: str) -> list[str]:
    return [f"{when}-{name}" for name in names for when in ("before", "in", "after")]


AT = {
    "scheduler": _calls("dispatch", "settle", "expand", "sweep"),
    "publisher": [
        *("after-fetch", "before-publish", "after-publish", "after-confirm", "before-mark", "after-mark"),
        "after-commit",
    ],
    "worker": [
        *_calls("claim", "finish", "renew"),
        *("after-delivery", "before-acknowledge", "after-acknowledge", "before-transaction"),
        "after-transaction",
    ],
    "worker by PostgreSQL": _calls("claim-next", "finish", "renew"),
}
"""The steps at which each kind of daemon is killed: those that it comes by within a moment."""

_wish = Path(os.environ.get("CHAOS_STEP", "/nonexistent"))
_lock = threading.Lock()


def _wished(step: str) -> bool:
    try:
        return _wish.read_text() == step
    except OSError:
        return False


def reach(step: str) -> None:
    """The daemon has come to this step."""
    if _wished(step):
        with _lock:  # whichever thread comes first
            _wish.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()


_real_call = db.call


def _call(
    conn: db.Connection, query: str, params: Sequence[Any] = (), *, lock_timeout: float = 5.0
) -> list[tuple[Any, ...]]:
    found = re.search(r"flowforge\.(\w+)\(", query)
    name = next((step for step, function in CALLS.items() if found and found[1] == function), "")
    if not name:
        return _real_call(conn, query, params, lock_timeout=lock_timeout)
    reach(f"before-{name}")
    if _wished(f"in-{name}"):
        with db.begin(conn, lock_timeout=lock_timeout):
            conn.execute(query.encode(), params or None)
            reach(f"in-{name}")
    rows = _real_call(conn, query, params, lock_timeout=lock_timeout)
    reach(f"after-{name}")
    return rows


def _around(kind: type[Any], method: str, before: str, after: str) -> None:
    """Steps before and after a method, where they are named."""
    real: Callable[..., Any] = getattr(kind, method)

    def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
        if before:
            reach(before)
        answer = real(self, *arguments, **options)
        if after:
            reach(after)
        return answer

    setattr(kind, method, wrapped)


def lay() -> None:
    """Put the steps around the daemons' functions."""
    db.call = _call
    _around(PublishChannel, "publish_batch", "before-publish", "after-confirm")
    _around(PublishChannel, "_begin", "", "after-publish")  # sent, as far as the window goes; in its thread
    _around(publisher.Publisher, "_mark", "before-mark", "after-mark")
    for module in (publisher, messages):
        vars(module)["crash_point"] = _of_product
    _around(ConsumeChannel, "_acknowledge", "before-acknowledge", "after-acknowledge")
    _around(context.Transaction, "_finish", "before-transaction", "after-transaction")


def _of_product(point: str) -> None:
    """Two steps at which the product itself has a point for tests, and which lie inside a function."""
    named = {
        "publisher:after-fetch": "after-fetch",
        "publisher:after-commit": "after-commit",
        "worker:after-delivery": "after-delivery",
    }
    if point in named:
        reach(named[point])


if __name__ == "__main__":
    lay()
    cli.main()
