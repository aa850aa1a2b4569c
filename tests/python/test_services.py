"""The servers for the tests keep what they promise."""

from tests.services.postgres import PostgresServer
from tests.services.rabbitmq import Broker


def test_postgres_answers(pg_server: PostgresServer) -> None:
    with pg_server.connect() as connection:
        row = connection.execute("select current_setting('server_version_num')::int / 10000").fetchone()
    assert row == (pg_server.version,)


def test_broker_holds_messages(rabbit: Broker) -> None:
    rabbit.declare("held")
    with rabbit.channel() as channel:
        channel.confirm_delivery()
        channel.basic_publish("", "held", b"x", mandatory=True)
    rabbit.delete_queue("held")
    assert rabbit.counts("held") is None
