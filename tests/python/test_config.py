"""Settings: every bad value is refused by name, and no password is ever shown."""

import dataclasses

import pytest

from flowforge.config import Config, variable, without_password
from flowforge.errors import ConfigError


def test_the_environment_sets_values_of_their_own_types_and_flags_override() -> None:
    config = Config.from_environment(
        {
            "FLOWFORGE_DATABASE_URL": "dbname=x",
            "FLOWFORGE_AMQP_URL": "amqp://one, amqps://two/v,",
            "FLOWFORGE_LEASE": "2.5",
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
    assert config.prepared_statements is False
    changed = config.replace(lease=4, publish_batch=None)
    assert (changed.lease, changed.publish_batch) == (4.0, 7)
    assert not Config.from_environment({}).uses_broker


QUEUES = "queue names, comma separated, other than dead, the dead-letter queue"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("FLOWFORGE_LEASE", "soon", "a number of seconds from 1 to 86400"),
        ("FLOWFORGE_LEASE", "nan", "a number of seconds from 1 to 86400"),
        ("FLOWFORGE_LEASE", "0", "a number of seconds from 1 to 86400"),
        ("FLOWFORGE_PUBLISH_BATCH", "1.5", "a whole number from 1 to 10000"),
        ("FLOWFORGE_PUBLISH_BATCH", "10001", "a whole number from 1 to 10000"),
        ("FLOWFORGE_QUEUE_TYPE", "stream", "quorum or classic"),
        ("FLOWFORGE_LOG_FORMAT", "JSON", "json or text"),
        ("FLOWFORGE_LOG_LEVEL", "loud", "debug, info, warning or error"),
        ("FLOWFORGE_PREPARED_STATEMENTS", "maybe", "on or off"),
        ("FLOWFORGE_NAMESPACE", "a.b", "up to 44 letters, digits, _ and -, other than amq"),
        ("FLOWFORGE_NAMESPACE", "amq", "up to 44 letters, digits, _ and -, other than amq"),
        ("FLOWFORGE_NAMESPACE", "n" * 45, "up to 44 letters, digits, _ and -, other than amq"),
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
    assert without_password("amqp://u@h") == "amqp://u@h"


def test_every_setting_says_what_it_means() -> None:
    for each in dataclasses.fields(Config):
        assert each.metadata["help"], each.name
        assert each.metadata["allowed"], each.name
        assert variable(each).startswith("FLOWFORGE_")
