"""Settings: a TOML file, under environment variables FLOWFORGE_*, under command-line flags (by `replace`).

One frozen dataclass holds them all; every value is checked when it is made, so a `Config` that exists is
valid. The variable of a field is FLOWFORGE_ and its name in capitals, except FLOWFORGE_AMQP_URL
(`amqp_urls`); its key in the file is the same in small letters, without FLOWFORGE_. FLOWFORGE_CONFIG names
the file."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from flowforge.errors import ConfigError

# Variables that are read elsewhere, or by tests.
_NO_SETTINGS = ("FLOWFORGE_CONFIG", "FLOWFORGE_PG_BIN", "FLOWFORGE_CRASH_AT", "FLOWFORGE_TEST_")

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def length_of_time(text: str) -> float:
    """Seconds of a length of time as people write it: 90, 1.5s, 10m, 2h, 1d. Raises ValueError."""
    unit = _UNITS.get(text.strip()[-1:])
    number = float(text.strip()[:-1] if unit else text) * (unit or 1)
    if not 0 <= number < float("inf"):
        raise ValueError(f"{text!r} is no length of time")
    return number


def _text(
    default: str | tuple[str, ...],
    meaning: str,
    pattern: str = r"(?s).*",
    allowed: str = "any text",
    secret: bool = False,
) -> Any:
    """A setting that is text, or with a tuple for its default a comma separated list of texts. A `secret` one
    may hold a password."""
    rules = {"help": meaning, "pattern": pattern, "allowed": allowed, "secret": secret}
    return field(default=default, metadata=rules)


def _seconds(default: float, low: float, high: float, meaning: str) -> Any:
    """A length of time. One whose default is whole is of whole seconds."""
    allowed = f"a {'whole ' if isinstance(default, int) else ''}number of seconds from {low:g} to {high:g}"
    rules = {"help": meaning, "low": low, "high": high, "allowed": allowed, "is_time": True}
    return field(default=default, metadata=rules)


def _count(default: int, low: int, high: int, meaning: str) -> Any:
    allowed = f"a whole number from {low} to {high}"
    return field(default=default, metadata={"help": meaning, "low": low, "high": high, "allowed": allowed})


@dataclass(frozen=True)
class Config:
    """All settings. Durations are in seconds.

    Raises ConfigError, naming the variable, what is allowed and, unless it may hold a password, its value.
    """

    database_url: str = _text("", "PostgreSQL connection string (URI or key=value)", secret=True)
    amqp_urls: tuple[str, ...] = _text(
        (),
        "RabbitMQ URLs, comma separated, tried in turn; empty: delivery by PostgreSQL only",
        r"amqps?://.+",
        "amqp:// or amqps:// URLs, comma separated (a comma inside of a password is written %2C)",
        secret=True,
    )
    amqp_password_file: str = _text(
        "", "file with the password for RabbitMQ, in place of one in the URLs; empty: none"
    )
    amqp_ca_file: str = _text(
        "", "file with the certificates of authorities that amqps:// trusts; empty: the system's"
    )
    amqp_cert_file: str = _text("", "file with the certificate shown to RabbitMQ; empty: none")
    amqp_key_file: str = _text("", "file with that certificate's key; empty: the same file")
    namespace: str = _text(
        "",
        "prefix of exchanges and queues, so that several databases can share a broker; the same for all "
        "publishers and workers of one",
        r"(?!amq$)[A-Za-z0-9_-]{0,44}",
        "up to 44 letters, digits, _ and -, other than amq",
    )
    queue_type: str = _text(
        "quorum", "type of the work queues on RabbitMQ", r"quorum|classic", "quorum or classic"
    )

    log_format: str = _text("text", "form of the log lines", r"json|text", "json or text")
    log_level: str = _text(
        "info",
        "least important log line that is written",
        r"debug|info|warning|error",
        "debug, info, warning or error",
    )
    health_file: str = _text("", "file that a daemon keeps its state of health in; empty: none")

    metrics_port: int = _count(
        0,
        0,
        65_535,
        "port where a daemon serves its metrics to Prometheus (needs the extra metrics); 0: none",
    )
    metrics_host: str = _text(
        "127.0.0.1", "address that this port is opened on", r"[A-Za-z0-9.:_-]+", "a host name or IP address"
    )

    poll_interval: float = _seconds(
        1.0, 0.01, 3600, "longest wait between two looks for work, notified or not"
    )
    reap_interval: float = _seconds(0.5, 0.05, 5, "scheduler: time between two looks for expired leases")
    recover_interval: float = _seconds(
        1.0, 0.05, 3600, "scheduler: time between two looks for lost, undeliverable and cancelled dispatches"
    )
    sweep_interval: float = _seconds(2.0, 0.05, 3600, "scheduler: time between two sweeps of the outbox")
    settle_batch: int = _count(1000, 1, 100_000, "scheduler: finished task runs settled by one call")
    dispatch_batch: int = _count(500, 1, 100_000, "scheduler: task runs dispatched by one call")

    publish_batch: int = _count(1000, 1, 10_000, "publisher: messages of one transaction")
    confirm_window: int = _count(
        1000, 1, 65_535, "publisher: messages under way to the broker and not yet confirmed"
    )
    confirm_timeout: float = _seconds(10.0, 0.1, 600, "publisher: longest wait for a batch's confirms")
    blocked_timeout: float = _seconds(5.0, 0.1, 600, "longest time that a blocked broker is waited for")
    amqp_heartbeat: int = _seconds(30, 0, 3600, "AMQP heartbeat; 0 turns it off")

    lease: float = _seconds(30.0, 1, 86_400, "worker: lease of a claim, unless the definition sets one")
    grace: float = _seconds(30.0, 0, 86_400, "worker: time that handlers get to finish after SIGTERM")
    concurrency: int = _count(8, 1, 10_000, "worker: handlers that run at the same time")
    isolation: str = _text(
        "threads",
        "worker: where handlers run, unless their tasks say so themselves: as threads of the worker, or in "
        "processes of their own, which can be killed",
        r"threads|processes",
        "threads or processes",
    )
    memory_limit: int = _count(
        0, 0, 1_048_576, "worker: MiB that a process of handlers may have; 0: no limit"
    )
    recycle_after: int = _count(
        1000, 1, 1_000_000, "worker: tasks after which a process of handlers is replaced"
    )
    tracing: bool = field(
        default=False,
        metadata={
            "help": "worker: whether each execution of a handler is a span of OpenTelemetry (needs the extra "
            "otel)",
            "allowed": "on or off",
        },
    )
    queues: tuple[str, ...] = _text(
        ("default",),
        "worker: queues it takes work from, comma separated; left out, the commands worker and up serve "
        "those that their tasks name",
        r"(?!dead$)[^\x00-\x1f\x7f]+",
        "queue names, comma separated, other than dead, the dead-letter queue",
    )

    lock_timeout: float = _seconds(5.0, 0.1, 600, "longest wait for a row lock in any call of a daemon")
    connect_timeout: int = _seconds(10, 2, 600, "longest wait for a connection to PostgreSQL")
    prepared_statements: bool = field(
        default=True, metadata={"help": "off behind a pooler in transaction mode", "allowed": "on or off"}
    )

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            object.__setattr__(self, each.name, _checked(each, getattr(self, each.name), variable(each)))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Settings of the environment (`os.environ` unless given), and of the file that its FLOWFORGE_CONFIG
        names. An empty variable counts as not set.

        Raises ConfigError for a bad value, and for a file that cannot be read.
        """
        return cls(**{name: value for name, (value, _) in given(environ).items()})

    def replace(self, **changes: Any) -> Config:
        """A copy with `changes`; a change that is None is left out, so that absent flags can be passed as
        they are."""
        return dataclasses.replace(
            self, **{key: value for key, value in changes.items() if value is not None}
        )

    @property
    def uses_broker(self) -> bool:
        """Whether messages travel by RabbitMQ; if not, workers take dispatches from PostgreSQL."""
        return bool(self.amqp_urls)

    def __repr__(self) -> str:
        shown = dataclasses.asdict(self)
        shown["database_url"] = without_password(self.database_url)
        shown["amqp_urls"] = tuple(map(without_password, self.amqp_urls))
        return f"Config({', '.join(f'{key}={value!r}' for key, value in shown.items())})"


def variable(each: dataclasses.Field[Any]) -> str:
    """The environment variable of a field."""
    return "FLOWFORGE_AMQP_URL" if each.name == "amqp_urls" else f"FLOWFORGE_{each.name.upper()}"


def given(environ: Mapping[str, str] | None = None) -> dict[str, tuple[Any, str]]:
    """What is set in the environment or in its file: by the field's name the value, and where it is from.

    Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    fields = dataclasses.fields(Config)
    found: dict[str, tuple[Any, str]] = {}
    if path := environ.get("FLOWFORGE_CONFIG"):
        keys = {key(each): each for each in fields}
        for name, value in _read(path).items():
            if name not in keys:
                near = difflib.get_close_matches(name, keys, 1)
                hint = f"; did you mean {near[0]}?" if near else "; `flowforge config` lists all"
                raise ConfigError(f"{path}: there is no setting {name!r}{hint}")
            source = f"{name} in {path}"
            found[keys[name].name] = _checked(keys[name], value, source), source
    for each in fields:
        if (text := environ.get(variable(each), "")).strip():
            found[each.name] = _checked(each, text, variable(each)), variable(each)
    return found


_options: dict[str, str] = {}


def call_by_option(name: str, option: str) -> Callable[[], object]:
    """From now on messages call the setting `name` by the option that gave it, until what this returns is
    called."""
    _options[name] = option
    return lambda: _options.pop(name, None)


def called(name: str) -> str:
    """What a message calls the setting of that field: as it was given, or else its variable."""
    with suppress(ConfigError):
        if found := _options.get(name) or given().get(name, (None, ""))[1]:
            return found
    return next(variable(each) for each in dataclasses.fields(Config) if each.name == name)


def unknown_variables(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Variables FLOWFORGE_* that are no settings, each with the one that it may be meant for."""
    known = {variable(each) for each in dataclasses.fields(Config)}
    strange = sorted(
        name
        for name in (os.environ if environ is None else environ)
        if name.startswith("FLOWFORGE_") and name not in known and not name.startswith(_NO_SETTINGS)
    )
    return {name: next(iter(difflib.get_close_matches(name, known, 1)), None) for name in strange}


def _read(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # what is not UTF-8 is a ValueError as well
        raise ConfigError(f"the settings file {path} is not TOML: {error}") from None


def key(each: dataclasses.Field[Any]) -> str:
    """The key of a field in the settings file."""
    return variable(each).removeprefix("FLOWFORGE_").lower()


_SECRET = re.compile(r"password|secret|scram_.*_key", re.IGNORECASE)


def is_secret(keyword: str) -> bool:
    """Whether the value of that keyword of a connection string is to be kept from view."""
    return _SECRET.search(keyword) is not None


# As libpq reads it: a value ends at a blank, or is quoted; a backslash takes the next character as it is.
_PAIR = re.compile(
    r"[ \t\n\r\f\v]*(?P<key>[^= \t\n\r\f\v]+)(?P<equals>[ \t\n\r\f\v]*=[ \t\n\r\f\v]*)"
    r"(?:'(?:[^'\\]|\\.)*'|(?!')(?:[^\\ \t\n\r\f\v]|\\.?)*)[ \t\n\r\f\v]*",
    re.DOTALL,
)


def without_password(url: str) -> str:
    """`url` (a URI or libpq's key=value) with every password, and what else is secret, replaced by ***."""
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", url):
        return _pairs_without_password(url)
    # Parsers disagree about a password with / ? # or @ in it, so none is asked: all between the user's name
    # and the last @ may belong to it.
    scheme, _, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    user, colon, _ = login.partition(":")
    if "?" in login or re.search(r"[/#]", user):
        return f"{scheme}://***"  # the @ stands behind the host, whatever it means there
    place, mark, query = place.partition("?")
    place += mark + "&".join(map(_parameter_without_password, query.split("&")))
    return f"{scheme}://{user}{':***' if colon else ''}{at}{place}"


def _pairs_without_password(text: str) -> str:
    shown, end = "", 0
    while end < len(text):
        pair = _PAIR.match(text, end)
        if pair is None:
            return "***"  # nobody can tell where a secret in it ends
        if is_secret(pair["key"]):
            blank = " " if pair[0][-1].isspace() and pair.end() < len(text) else ""
            shown += f"{text[end : pair.end('equals')]}***{blank}"
        else:
            shown += pair[0]
        end = pair.end()
    return shown


def _parameter_without_password(parameter: str) -> str:
    """One parameter of a URI, whose keyword may be encoded. What has none may be the rest of a secret."""
    keyword, equals, _ = parameter.partition("=")
    if equals and not is_secret(unquote(keyword)):
        return parameter
    return f"{keyword}=***" if equals else parameter and "***"


def _checked(each: dataclasses.Field[Any], value: Any, source: str) -> Any:
    """The value of one field in its own type, or a ConfigError that blames `source`."""
    rules = each.metadata
    # The names of files are any bytes.
    if isinstance(value, str) and not each.name.endswith("_file") and not _is_unicode(value):
        raise ConfigError(f"{source} is not text in UTF-8")
    try:
        if "low" in rules:
            if isinstance(value, bool) or (isinstance(value, float) and not isinstance(each.default, float)):
                raise ValueError
            if isinstance(value, str) and "is_time" in rules:
                number = length_of_time(value)
                if isinstance(each.default, int):
                    if number != int(number):
                        raise ValueError
                    number = int(number)
            else:
                number = float(value) if isinstance(each.default, float) else int(value)
            if not rules["low"] <= number <= rules["high"]:
                raise ValueError
            return number
        if isinstance(each.default, bool):
            return value if isinstance(value, bool) else {"on": True, "off": False}[value]
        if isinstance(each.default, tuple):
            if not isinstance(value, str | list | tuple):
                raise TypeError
            items = value.split(",") if isinstance(value, str) else value
            found = tuple(dict.fromkeys(item.strip() for item in items if item.strip()))
            if not found and each.default:
                raise ValueError
            if not all(re.fullmatch(rules["pattern"], item) for item in found):
                raise ValueError
            return found
        if not isinstance(value, str) or not re.fullmatch(rules["pattern"], value.strip()):
            raise ValueError
        return value.strip()  # a file that holds a connection string ends with a newline
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        if rules.get("secret"):
            # Where the password begins and ends is known only of what can be read.
            raise ConfigError(f"{source} cannot be read; allowed is {rules['allowed']}") from None
        shown = ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
        raise ConfigError(f"{source} is {shown!r}; allowed is {rules['allowed']}") from None


def _is_unicode(text: str) -> bool:
    """Whether the text can be sent anywhere. The environment may hold any bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
