"""Fixtures: real servers, a fresh migrated database per test, a clock, a namespace in the broker.

Servers are started when the first test asks for them. `--pg` says on which PostgreSQL.
"""

import os
import uuid
from collections.abc import Iterator

import pytest
from pytest_postgresql import factories
from pytest_postgresql.executors import NoopExecutor

from flowforge import log
from tests.services import postgres
from tests.services.database import Clock, Database, prepare_template
from tests.services.postgres import PostgresServer
from tests.services.rabbitmq import Broker, RabbitServer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pg",
        default="18",
        help="the PostgreSQL to test on: 18 (from the environment), 15 (Debian's) or a directory of binaries",
    )


def pytest_configure() -> None:
    # What a developer's shell says about databases must not reach the tests.
    for name in list(os.environ):
        if name.startswith("PG") or (
            name.startswith("FLOWFORGE_") and not name.startswith("FLOWFORGE_TEST_")
        ):
            del os.environ[name]


def pytest_report_header(config: pytest.Config) -> str:
    return f"postgresql: {config.getoption('--pg')}"


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """A command run inside the tests' process sets up the logging, which is the process's."""
    yield
    log.reset()


@pytest.fixture(scope="session")
def pg_server(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """The PostgreSQL server of this test session."""
    with PostgresServer(*postgres.binaries(request.config.getoption("--pg"))) as server:
        yield server


# The database that every test's is copied from: migrated once per session.
template = factories.postgresql_noproc(
    depends_on="pg_server", dbname="template_flowforge", load=[prepare_template], load_autocommit=True
)


@pytest.fixture
def db(pg_server: PostgresServer, template: NoopExecutor) -> Iterator[Database]:
    """A fresh, migrated database."""
    if not pg_server.is_running():
        pg_server.start()
    database = Database(pg_server, template.template_dbname)
    yield database
    forbidden = database.forbidden_transitions()
    database.drop()
    assert not forbidden


@pytest.fixture
def clock(db: Database) -> Iterator[Clock]:
    """The database's clock, stopped, for the test to move."""
    clock = Clock(db)
    yield clock
    clock.close()


@pytest.fixture(scope="session")
def _session_rabbit_server() -> Iterator[RabbitServer]:
    with RabbitServer() as server:
        yield server


@pytest.fixture
def rabbit_server(_session_rabbit_server: RabbitServer) -> Iterator[RabbitServer]:
    """A private broker that the test may stop, kill and restart; it runs again after the test."""
    yield _session_rabbit_server
    if not _session_rabbit_server.is_running():
        _session_rabbit_server.start()


@pytest.fixture
def rabbit(request: pytest.FixtureRequest) -> Broker:
    """A broker: the one FLOWFORGE_TEST_AMQP_URL names, otherwise the private one of this session."""
    if url := os.environ.get("FLOWFORGE_TEST_AMQP_URL"):
        return Broker(url)
    server: RabbitServer = request.getfixturevalue("rabbit_server")
    return server


@pytest.fixture
def amqp_namespace(rabbit: Broker) -> Iterator[str]:
    """A prefix for exchanges and queues that only this test uses; what it names is deleted afterwards."""
    namespace = f"t{uuid.uuid4().hex[:12]}"
    yield namespace
    rabbit.delete_namespace(namespace)
