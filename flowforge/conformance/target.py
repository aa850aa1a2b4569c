"""Whether a database is somebody's: conformance works for all of it meanwhile, and leaves workflows and
queues in it, which nothing removes."""

from __future__ import annotations

import time
from contextlib import closing

from flowforge import connecting, db
from flowforge.config import Config
from flowforge.errors import MissingPrivilege
from flowforge.stopping import Stop

_PATIENCE = 5.0  # seconds for the server to notice that an earlier conformance has ended
_PACES = 3.0  # seconds in which a scheduler ticks, unless it was made slow

_WORKFLOW = "select name from flowforge.workflow where name not like 'conformance\\_%' order by name limit 1"
_WORKER = """
    select worker from flowforge.worker_status
    where alive and exists (select from unnest(queues) queue where queue not like 'conformance\\_%')
    order by worker limit 1
"""
_SESSION = """
    select true from pg_stat_activity
    where datname = current_database() and application_name like 'flowforge scheduler%' limit 1
"""
# Behind a pooler a session may have another name. The scheduler of an earlier conformance leaves a tick as
# well, so it must be seen to go on.
_TICK = "select reaper_ticked_at from flowforge.scheduler where reaper_ticked_at > now() - interval '30 s'"


def connect(config: Config, stop: Stop) -> db.Connection:
    """A connection with the owner's rights.

    Raises FlowForgeError, psycopg.Error."""
    functions = "define_workflow", "dispatch_ready", "claim_next"
    try:
        return connecting.connect(config, "conformance", stop, functions, "flowforge_owner")
    except MissingPrivilege as error:
        # No login is to become the owner for that.
        lacks = str(error).partition("; remedy: ")[0]
        raise MissingPrivilege(f"{lacks}; remedy: give it the login that migrated its database") from None


def in_use(config: Config) -> str:
    """What shows that the database is in use by others than conformance; empty when nothing does.

    Raises FlowForgeError, psycopg.Error."""
    with closing(connect(config, Stop())) as connection:
        for what, query in (("the workflow", _WORKFLOW), ("the worker", _WORKER)):
            if found := db.call(connection, query):
                return f"there is {what} {found[0][0]!r}"
        deadline = time.monotonic() + _PATIENCE
        while db.call(connection, _SESSION):
            if time.monotonic() > deadline:
                return "a scheduler is connected"
            time.sleep(0.1)
        deadline, last = time.monotonic() + _PACES, db.call(connection, _TICK)
        while last and time.monotonic() < deadline:
            if db.call(connection, _TICK) != last:
                return "a scheduler is at work"
            time.sleep(0.1)
    return ""
