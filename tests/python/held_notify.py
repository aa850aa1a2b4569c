"""The lock that every NOTIFY takes at its commit, held by somebody for as long as the test says."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from tests.services.database import Database
from tests.services.process import wait_until

# Object 0 of pg_database: one lock for the whole server.
HELD = """
    select count(*) from pg_locks where locktype = 'object' and classid = 1262 and objid = 0 and granted = %s
"""


@contextmanager
def held_notify(db: Database) -> Iterator[None]:
    """Within the block somebody's NOTIFY is at its commit, which waits for a standby that does not exist. The
    sessions of this database that begin in the block wait for no standby, but for that lock if they need it.
    """
    with db.server.connect() as operator:

        def count(granted: bool) -> int:
            row = operator.execute(HELD, [granted]).fetchone()
            assert row is not None
            return int(row[0])

        def configure(names: str) -> None:
            operator.execute(f"alter system set synchronous_standby_names = '{names}'".encode())
            operator.execute("select pg_reload_conf()")

        operator.execute("set synchronous_commit = local")
        with db.connect() as holder:
            holder.execute("set synchronous_commit = on")
            over = Event()

            def notify() -> None:
                # Until the server's own processes know of the standby, commits do not wait.
                while not over.is_set():
                    holder.execute("notify elsewhere")

            thread = Thread(target=notify)
            configure("nobody")
            try:
                thread.start()
                waits = "select count(*) from pg_stat_activity where wait_event = 'SyncRep'"
                wait_until(lambda: operator.execute(waits).fetchone() == (1,), "a commit that waits")
                assert count(True) == 1
                yield
            finally:
                over.set()
                configure("")
                thread.join()


def wait_for_waiters(db: Database, number: int) -> None:
    """Wait until so many sessions wait for that lock."""
    with db.server.connect() as operator:
        wait_until(
            lambda: operator.execute(HELD, [False]).fetchone() == (number,), "sessions that wait for the lock"
        )
