"""Settings: every bad value is refused by name, and no password is ever shown."""

import dataclasses
from pathlib import Path

import pytest

from flowforge.config import Config, variable, without_password
from flowforge.errors import ConfigError

QUEUES = "queue names, comma separated, other than dead, the dead-letter queue"
NAMESPACE = "up to 44 letters, digits, _ and -, other than amq"


def test_the_environment_sets_values_of_their_own_types_and_flags_override() -> None:
    config = Config.from_environment(
        {
            "FLOWFORGE_DATABASE_URL": "dbname=x",
            "FLOWFORGE_AMQP_URL": "amqp://one, amqps://two/v,",
            "FLOWFORGE_LEASE": "2.5",
            "FLOWFORGE_GRACE": "2 m",
            "FLOWFORGE_CONNECT_TIMEOUT": "15s",
            "FLOWFORGE_PUBLISH_BATCH": "7",
            "FLOWFORGE_QUEUES": "a,b,a",
            "FLOWFORGE_PREPARED_STATEMENTS": "off",
            "FLOWFORGE_NAMESPACE": "",
            "HOME": "/",
        }
    )
    assert config.amqp_urls == ("amqp://one", "amqps://two/v")
    assert config.uses_broker
    assert (config.lease, config.publish_batch, config.queues) == (2.5, 7, ("a", "b"))
    assert (config.grace, config.connect_timeout) == (120.0, 15)
    assert config.prepared_statements is False
    changed = config.replace(lease=4, publish_batch=None)
    assert (changed.lease, changed.publish_batch) == (4.0, 7)
    assert not Config.from_environment({}).uses_broker


def in_file(path: Path, text: str, **environment: str) -> Config:
    path.write_text(text)
    return Config.from_environment({"FLOWFORGE_CONFIG": str(path), **environment})


def test_the_environment_goes_before_the_file(tmp_path: Path) -> None:
    text = """
        database_url = "service=x"
        amqp_url = ["amqp://one,", "amqps://two/v"]
        lease = "5s"
        grace = 1.5
        concurrency = 3
        prepared_statements = false
        queues = "a, b"
    """
    config = in_file(tmp_path / "f", text, FLOWFORGE_CONCURRENCY="4", FLOWFORGE_GRACE="")
    assert (config.database_url, config.amqp_urls) == ("service=x", ("amqp://one,", "amqps://two/v"))
    assert (config.lease, config.grace, config.concurrency) == (5.0, 1.5, 4)
    assert (config.prepared_statements, config.queues) == (False, ("a", "b"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("conurrency = 1", "{path}: there is no setting 'conurrency'; did you mean concurrency?"),
        ("amqp_urls = []", "{path}: there is no setting 'amqp_urls'; did you mean amqp_url?"),
        ("[worker]", "{path}: there is no setting 'worker'; `flowforge config` lists all"),
        ("lease = 0", "lease in {path} is '0'; allowed is a number of seconds from 1 to 86400"),
        ("concurrency = 1.5", "concurrency in {path} is '1.5'; allowed is a whole number from 1 to 10000"),
        ("concurrency = true", "concurrency in {path} is 'True'; allowed is a whole number from 1 to 10000"),
        ("queues = [1]", f"queues in {{path}} is '1'; allowed is {QUEUES}"),
        ("queues = {a = 1}", f"queues in {{path}} is \"{{{{'a': 1}}}}\"; allowed is {QUEUES}"),
        ("namespace = 2026-01-01", f"namespace in {{path}} is '2026-01-01'; allowed is {NAMESPACE}"),
        ("lease = ", "the settings file {path} is not TOML: Invalid value (at end of document)"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        in_file(tmp_path / "f", text)
    assert str(caught.value) == said.format(path=tmp_path / "f")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the settings file /nowhere/f: No such file"):
        Config.from_environment({"FLOWFORGE_CONFIG": "/nowhere/f"})
    (tmp_path / "f").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=f"the settings file {tmp_path}/f is not TOML"):
        Config.from_environment({"FLOWFORGE_CONFIG": str(tmp_path / "f")})


def test_nothing_of_a_password_in_the_file_is_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"amqp_url in .* cannot be read") as caught:
        in_file(tmp_path / "f", 'amqp_url = "amqp:/user:s3cret@host"')
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("FLOWFORGE_LEASE", "soon", "a number of seconds from 1 to 86400"),
        ("FLOWFORGE_LEASE", "3x", "a number of seconds from 1 to 86400"),
        ("FLOWFORGE_CONNECT_TIMEOUT", "2.5s", "a whole number of seconds from 2 to 600"),
        ("FLOWFORGE_LEASE", "nan", "a number of seconds from 1 to 86400"),
        ("FLOWFORGE_LEASE", "0", "a number of seconds from 1 to 86400"),
        ("FLOWFORGE_PUBLISH_BATCH", "1.5", "a whole number from 1 to 10000"),
        ("FLOWFORGE_PUBLISH_BATCH", "10001", "a whole number from 1 to 10000"),
        ("FLOWFORGE_QUEUE_TYPE", "stream", "quorum or classic"),
        ("FLOWFORGE_LOG_FORMAT", "JSON", "json or text"),
        ("FLOWFORGE_LOG_LEVEL", "loud", "debug, info, warning or error"),
        ("FLOWFORGE_PREPARED_STATEMENTS", "maybe", "on or off"),
        ("FLOWFORGE_NAMESPACE", "a.b", NAMESPACE),
        ("FLOWFORGE_NAMESPACE", "amq", NAMESPACE),
        ("FLOWFORGE_NAMESPACE", "n" * 45, NAMESPACE),
        ("FLOWFORGE_QUEUES", "a\x07", QUEUES),
        ("FLOWFORGE_QUEUES", "a,dead", QUEUES),
        ("FLOWFORGE_QUEUES", " ,", QUEUES),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(name: str, value: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_environment({name: value})
    assert str(caught.value) == f"{name} is {value!r}; allowed is {allowed}"


def test_a_bad_flag_is_named_alike() -> None:
    with pytest.raises(ConfigError, match="FLOWFORGE_CONCURRENCY is '0'"):
        Config().replace(concurrency=0)
    with pytest.raises(ConfigError, match="FLOWFORGE_CONCURRENCY is 'True'"):
        Config().replace(concurrency=True)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:s3cret@host/db",
        "postgresql://user:s3cret@[::1]:5432,other/db?sslpassword=s3cret&x=1&password=s3cret",
        "postgresql://user:s3cret@[broken/db",
        "host=h password=s3cret dbname=d",
        "password = 's3cret \\' s3cret' sslpassword=s3cret",
        "amqps://user:s3cret@host:5671/%2f?heartbeat=5",
        "amqp://user:s3@cret:s3cret@host",
        "amqp://user:pa/s3cret@host/",
        "amqp://user:pa?s3cret#s3cret@host/",
        "amqp://user:1/s3cret@host/",
        "amqp://user:pa?password=x@s3cret@host/",
        "postgresql://user@host/db?password=x@s3cret",
        "postgresql://host/db?password=s3cret",
        r"host=h password=foo\ s3cret",
        r"host=h password = foo\\\'\ s3cret oauth_client_secret=s3cret port=1",
        "scram_client_key=s3cret scram_server_key='s3cret' host=h",
        "host=h password='s3cret",
        "host=h password= 'a'sslpassword=s3cret",
        "postgresql://h/d?pass%77ord=s3cret&%6Fauth_client_secret=s3cret",
        "postgresql://u:p@h/d?pass%77ord=x@s3cret",
        "postgresql://h/d?password=a&s3cret",
    ],
)
def test_passwords_are_never_shown(url: str) -> None:
    assert "s3cret" not in without_password(url)
    if "://" not in url or url.startswith("postgresql"):
        assert "s3cret" not in repr(Config(database_url=url))
    else:
        assert "s3cret" not in repr(Config(amqp_urls=(url,)))
    with pytest.raises(ConfigError) as caught:
        Config(amqp_urls=(f"x{url}",))
    assert "s3cret" not in str(caught.value)
    assert "FLOWFORGE_AMQP_URL cannot be read" in str(caught.value)


def test_a_password_with_a_comma_is_not_shown_either() -> None:
    with pytest.raises(ConfigError, match=r"FLOWFORGE_AMQP_URL cannot be read.*%2C") as caught:
        Config.from_environment({"FLOWFORGE_AMQP_URL": "amqp://user:s3,cret@host/"})
    assert not {part for part in ("s3", "cret", "user") if part in str(caught.value)}


def test_what_is_not_a_password_is_shown() -> None:
    assert without_password("postgresql://u:p@h:1/d?x=1") == "postgresql://u:***@h:1/d?x=1"
    assert without_password("host=h password=p dbname=d") == "host=h password=*** dbname=d"
    assert without_password(r"host=h\ x  password=a\ b user='u v'") == r"host=h\ x  password=*** user='u v'"
    assert without_password("postgresql://h/d?sslmode=require") == "postgresql://h/d?sslmode=require"
    assert without_password("host=h password=a://s3cret@h") == "host=h password=***"
    assert without_password("amqp://u@h") == "amqp://u@h"


def test_a_value_that_is_not_unicode_is_told() -> None:
    """But for the names of files, which are any bytes."""
    strange = b"h\xe9".decode(errors="surrogateescape")
    for name in ("FLOWFORGE_DATABASE_URL", "FLOWFORGE_AMQP_URL", "FLOWFORGE_QUEUES"):
        with pytest.raises(ConfigError) as caught:
            Config.from_environment({name: f"amqp://{strange}"})
        assert str(caught.value) == f"{name} is not text in UTF-8"
    assert Config.from_environment({"FLOWFORGE_HEALTH_FILE": strange}).health_file == strange


def test_every_setting_says_what_it_means() -> None:
    for each in dataclasses.fields(Config):
        assert each.metadata["help"], each.name
        assert each.metadata["allowed"], each.name
        assert variable(each).startswith("FLOWFORGE_")
