"""A worker's connections: how a new one is made, and how long renewal waits for the next try."""

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from flowforge import db as database
from flowforge.config import Config
from flowforge.worker.context import Context
from flowforge.worker.session import Session, Unanswered
from tests.python.slots import an_execution
from tests.python.workbench import Bench, LossyProxy, Witness
from tests.services.database import Database
from tests.services.process import wait_until


@pytest.mark.parametrize("failure", ["select 1 / 0", "select pg_terminate_backend(pg_backend_pid())"])
def test_a_connection_that_was_not_prepared_is_not_used(db: Database, failure: str) -> None:
    """Whatever kept it from that: kept, it would for good be one that does not LISTEN. And nothing was sent
    on it."""
    preparations = [failure, "listen probe"]

    def prepare(conn: database.Connection) -> None:
        conn.execute(preparations.pop(0).encode())

    session = Session(Config(database_url=db.dsn), "probe", prepare)
    with pytest.raises(Unanswered) as unanswered:
        session.call("select 1", [])
    assert not unanswered.value.sent
    assert session.call("select pg_listening_channels()", []) == [("probe",)]
    assert session.healthy
    session.close()


def test_a_new_connection_takes_no_longer_than_the_call_may(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of the lease is what renewal gives a call; the connection that replaces a lost one is part of
    it."""
    asked: list[object] = []
    real = psycopg.connect

    def connect(**parameters: Any) -> object:
        asked.append(parameters["connect_timeout"])
        return real(**parameters)

    monkeypatch.setattr(psycopg, "connect", connect)
    for limit in (60.0, 3.9, 0.5):
        session = Session(Config(database_url=db.dsn, connect_timeout=8), "renew")
        session.call("select 1", [], limit=limit)
        session.close()
    assert asked == [8, 3, 2]  # less than two seconds libpq does not take


def test_renewal_tries_again_while_the_lease_lasts(
    bench: Bench, proxy: LossyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the database has been away for, and so the back-off grown."""
    real: Callable[[Session], float] = Session.pause
    monkeypatch.setattr(
        Session, "pause", lambda session: 1e9 if session.purpose == "renew" else real(session)
    )
    witness = Witness(lease=10).closed()
    bench.define(witness.workflow)
    run = bench.trigger(witness.workflow)
    with bench.worker(witness.workflow, database_url=proxy.dsn) as worker:
        witness.gate.await_arrivals()
        session = worker.worker._keeper._session
        with proxy.down():
            wait_until(lambda: session.lost_since_answer >= 2, "another try")
        wait_until(lambda: session.lost_since_answer == 0, "an answer")
        witness.gate.open()
        assert bench.wait_run(run) == ["succeeded"]


@pytest.mark.parametrize("ours", [True, False])
def test_a_connection_string_that_is_refused_for_a_while_ends_no_thread(
    db: Database, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    """It was good when the worker started: the pooler was set up anew, and will be again. Of the worker's own
    connections, which say so in its health, and of those for handlers' transactions."""
    real, tries = psycopg.connect, list[int]()

    def connect(**parameters: Any) -> object:
        tries.append(1)
        if len(tries) == 1:
            raise psycopg.OperationalError("FATAL:  unsupported startup parameter in options: search_path")
        return real(**parameters)

    config = Config(database_url=db.dsn)
    monkeypatch.setattr(psycopg, "connect", connect)
    if ours:
        session = Session(config, "renew")
        with pytest.raises(Unanswered) as unanswered:
            session.call("select 1", [])
        assert (unanswered.value.sent, session.refused) == (False, True)
        assert session.call("select 1", []) == [(1,)]
        assert session.healthy
        session.close()
    else:
        keeper: Any = None
        Context(an_execution(), keeper, config)._connect().close()
    assert len(tries) == 2
