"""What a worker says at its start about workflows whose registered versions do not fit its code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowforge.config import Config
    from flowforge.definition import Workflow

_PATIENCE = 3  # seconds for the connection, and for the answer: the worker itself waits longer
_NAMES = 5  # tasks that are named

# The current version of each workflow, and those of its tasks that would be given to this worker in vain.
_LOOK = """
    select v.workflow, array(
        select t ->> 'name' from jsonb_array_elements(v.definition -> 'tasks') t
        where t ->> 'queue' = any (%s) and t ->> 'handler' <> all (%s) limit %s)
    from flowforge.workflow_version_status v where v.is_current and v.workflow = any (%s)
"""


def warn_of_unregistered(config: Config, workflows: Sequence[Workflow]) -> None:
    """Warns of workflows that were never registered, and of those with tasks in the served queues whose
    handlers are not among these. Silent where the database cannot tell: it may be away, and the login of a
    worker alone does not see definitions.
    """
    import psycopg

    from flowforge import cutoff, db, log

    handlers = [handler for workflow in workflows for handler in workflow.handlers]
    names = [workflow.name for workflow in workflows]
    try:
        with (
            db.connect(
                config.database_url,
                application_name="flowforge worker",
                connect_timeout=min(config.connect_timeout, _PATIENCE),
                prepared_statements=config.prepared_statements,
            ) as connection,
            cutoff.guard(connection, _PATIENCE),
        ):
            values = [list(config.queues), handlers, _NAMES, names]
            found = db.call(connection, _LOOK, values, lock_timeout=1.0)
    except psycopg.Error:
        return
    registered: dict[str, list[str]] = dict(found)
    for name in names:
        if name not in registered:
            log.of("worker").warning(f"workflow {name!r} is not registered; run flowforge define MODULE")
        elif registered[name]:
            log.of("worker").warning(
                f"the registered version of workflow {name!r} has tasks whose handlers this worker lacks; "
                "run flowforge define MODULE, or give it the present code",
                tasks=",".join(registered[name]),
            )
