"""FlowForge: a durable workflow engine whose correctness lives in PostgreSQL.

The names below are the public surface, together with `flowforge.errors`. Each is imported when first asked
for, so that a program pays only for what it uses.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowforge.client import Client, Defined, RunResult
    from flowforge.definition import Retry, Task, Workflow
    from flowforge.errors import Cancelled, FlowForgeError, NotStorable, PermanentError, TimeLimitExceeded
    from flowforge.worker.context import Context, Transaction

__version__ = "0.1.0"

_HOMES = {
    "Cancelled": "errors",
    "Client": "client",
    "Context": "worker.context",
    "Defined": "client",
    "FlowForgeError": "errors",
    "NotStorable": "errors",
    "PermanentError": "errors",
    "Retry": "definition",
    "RunResult": "client",
    "Task": "definition",
    "TimeLimitExceeded": "errors",
    "Transaction": "worker.context",
    "Workflow": "definition",
}

__all__ = [
    "Cancelled",
    "Client",
    "Context",
    "Defined",
    "FlowForgeError",
    "NotStorable",
    "PermanentError",
    "Retry",
    "RunResult",
    "Task",
    "TimeLimitExceeded",
    "Transaction",
    "Workflow",
]


if not TYPE_CHECKING:  # a name that is not there is an error to the type checker too

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted(__all__)
