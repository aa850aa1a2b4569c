"""Fixtures of the tests of daemons: an engine on a fresh database, with either delivery."""

from collections.abc import Iterator

import pytest

from tests.python.workbench import Bench, LossyProxy
from tests.services.database import Database
from tests.services.rabbitmq import Broker


@pytest.fixture
def bench(db: Database) -> Iterator[Bench]:
    """Delivery by PostgreSQL alone."""
    bench = Bench(db)
    bench.start()
    yield bench
    bench.close()


@pytest.fixture
def rabbit_bench(db: Database, rabbit: Broker, amqp_namespace: str) -> Iterator[Bench]:
    """Delivery by RabbitMQ."""
    bench = Bench(db, rabbit.url, amqp_namespace)
    bench.start()
    yield bench
    bench.close()


@pytest.fixture(params=["postgresql", "rabbitmq"])
def any_bench(request: pytest.FixtureRequest) -> Bench:
    """Either delivery: the guarantees are the same."""
    bench: Bench = request.getfixturevalue("bench" if request.param == "postgresql" else "rabbit_bench")
    return bench


@pytest.fixture
def proxy(db: Database) -> Iterator[LossyProxy]:
    proxy = LossyProxy(db.dsn)
    yield proxy
    proxy.close()
