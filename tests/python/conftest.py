"""Fixtures of the tests of daemons: an engine on a fresh database, with either delivery; what is logged."""

import io
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowforge import Client, log
from flowforge.config import Config
from tests.python.cluster import Cluster
from tests.python.isolation import Scene
from tests.python.orders import flow
from tests.python.running import running
from tests.python.shell import Shell
from tests.python.slots import Slots
from tests.python.workbench import Bench, LossyProxy
from tests.services.database import Database
from tests.services.rabbitmq import Broker, RabbitServer


@pytest.fixture
def hears_hang_ups() -> Iterator[None]:
    """A SIGHUP is not ignored, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


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
def table_of_effects(bench: Bench) -> None:
    """For side effects of handlers."""
    bench.execute("create table public.effect (task_run_id bigint, what text)")


@pytest.fixture
def scene(bench: Bench, tmp_path: Path) -> Scene:
    """For handlers in processes of their own."""
    return Scene(bench, tmp_path)


@pytest.fixture
def any_scene(any_bench: Bench, tmp_path: Path) -> Scene:
    """The same, with either delivery."""
    return Scene(any_bench, tmp_path)


@pytest.fixture
def cluster(db: Database, tmp_path: Path) -> Iterator[Cluster]:
    """Daemons as processes of their own; delivery by PostgreSQL alone."""
    with Cluster(db, tmp_path) as cluster:
        yield cluster


@pytest.fixture
def rabbit_cluster(
    db: Database, rabbit_server: RabbitServer, amqp_namespace: str, tmp_path: Path
) -> Iterator[Cluster]:
    """Daemons as processes of their own; delivery by a RabbitMQ that may be maltreated. What is lost is sent
    again after a second."""
    with Cluster(db, tmp_path, rabbit_server, amqp_namespace) as cluster:
        cluster.execute("select flowforge.configure_queue('default', null, '1 s')")
        yield cluster


@pytest.fixture
def proxy(db: Database) -> Iterator[LossyProxy]:
    proxy = LossyProxy(db.dsn)
    yield proxy
    proxy.close()


@pytest.fixture
def slots() -> Iterator[Callable[..., Slots]]:
    """Makes executors; they are closed after the test."""
    made: list[Slots] = []

    def make(count: int = 2, **handlers: Callable[[Any], Any]) -> Slots:
        made.append(Slots(count, **handlers))
        return made[-1]

    yield make
    for each in made:
        each.executor.close()


@pytest.fixture
def shell(db: Database) -> Shell:
    """Commands against a database that knows the workflow "orders", where nothing runs it."""
    with Client(db.dsn) as client:
        client.define(flow)
    return Shell(db.dsn)


@pytest.fixture
def live(db: Database, shell: Shell) -> Iterator[Shell]:
    """The same, with everything running."""
    with running(Config(database_url=db.dsn), flow):
        yield shell


@pytest.fixture
def config(db: Database) -> Config:
    """Of a daemon without a broker, that polls so seldom that whatever happens within a test is not the
    poll's doing."""
    return Config(database_url=db.dsn, poll_interval=3600)


@pytest.fixture
def written() -> Iterator[Callable[[], list[dict[str, object]]]]:
    """What was logged, as JSON lines."""
    stream = io.StringIO()
    log.configure("json", "debug", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    log.reset()
