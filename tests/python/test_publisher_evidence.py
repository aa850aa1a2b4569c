"""A queue that was gone is evidence that its messages are lost; it is kept until they are offered again."""

from typing import Any

import psycopg
import pytest

from flowforge import publisher
from flowforge.config import Config
from flowforge.publisher import Publisher
from tests.services.database import Database


class Channel:
    """A publishing connection that has found a queue gone."""

    def __init__(self, *_: object) -> None:
        self.gone = {"default"}

    def start(self) -> None:
        pass


@pytest.fixture
def evident(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(publisher, "PublishChannel", Channel)
    return Publisher(Config(database_url="dbname=x", amqp_urls=("amqp://x",)))


def test_a_queue_that_is_lost_again_during_the_call_is_offered_again(db: Database, evident: Any) -> None:
    """The connection's thread notes the second loss while the first is dealt with."""
    call, calls = evident._call, list[str]()

    def lose_again(conn: Any, query: str, *params: Any) -> Any:
        calls.append(query)
        answer = call(conn, query, *params)
        if len(calls) == 1:
            evident._channel.gone.add("default")
        return answer

    evident._call = lose_again
    with db.connect() as conn:
        conn.execute("""select flowforge.define_workflow('{"name": "w", "tasks": [{"name": "t"}]}')""")
        evident._offer_again(conn)
        assert evident._channel.gone == {"default"}
        evident._offer_again(conn)
    assert evident._channel.gone == set()
    assert calls == ["select flowforge.redispatch(%s)"] * 2


def test_the_evidence_outlasts_a_failure(db: Database, evident: Any) -> None:
    with db.connect() as conn:
        conn.execute("drop function flowforge.redispatch")
        with pytest.raises(psycopg.errors.UndefinedFunction):
            evident._offer_again(conn)
    assert evident._channel.gone == {"default"}
