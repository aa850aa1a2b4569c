"""How brokers are reached: their URLs, the password, and TLS with the broker's name verified."""

from __future__ import annotations

import copy
import re
import ssl
from pathlib import Path
from urllib.parse import unquote

import pika

from flowforge.config import Config, called
from flowforge.errors import BrokerMisconfigured, ConfigError

_TIMEOUT = 10  # seconds for the socket, and again for all of the handshakes


class Addresses:
    """The brokers of the configuration, in turn.

    Raises ConfigError for a URL that cannot be read: waiting would not mend it.
    """

    def __init__(self, config: Config, connection_name: str) -> None:
        self._config = config
        self._parameters = [_parameters(config, index) for index in range(len(config.amqp_urls))]
        for parameters in self._parameters:
            parameters.client_properties = {"connection_name": connection_name}
        self._turn = 0

    def next(self) -> tuple[str, pika.URLParameters]:
        """The next broker's URL and what pika needs to reach it.

        Files are read anew each time, so that a password or certificate that was renewed is used. Raises
        BrokerMisconfigured when one cannot be.
        """
        index = self._turn % len(self._parameters)
        self._turn += 1
        config, parameters = self._config, copy.copy(self._parameters[index])
        if config.amqp_password_file:
            try:
                password = Path(config.amqp_password_file).read_text(encoding="utf-8").rstrip("\r\n")
            except (OSError, UnicodeDecodeError) as error:
                raise _unreadable(called("amqp_password_file"), config.amqp_password_file, error) from None
            if not password:
                raise BrokerMisconfigured(
                    f"{called('amqp_password_file')} names {config.amqp_password_file!r}, which is empty"
                )
            login = parameters.credentials.username
            parameters.credentials = pika.PlainCredentials(login, password)
        if parameters.ssl_options is not None:
            parameters.ssl_options = pika.SSLOptions(_tls(config), server_hostname=parameters.host)
        return config.amqp_urls[index], parameters


def _parameters(config: Config, index: int) -> pika.URLParameters:
    url = config.amqp_urls[index]
    if config.amqp_password_file:
        url = re.sub(r"^(amqps?://[^:@/?#]*)@", r"\1:@", url)  # pika wants a password where a login is
    elif alone := re.match(r"amqps?://([^:@/?#]+)@[^@]*$", url):
        raise ConfigError(
            f"URL {index + 1} of {called('amqp_urls')} has no password for user {unquote(alone[1])!r}: set "
            f"{called('amqp_password_file')}, or write it into the URL"
        )
    try:
        parameters = pika.URLParameters(url)
    except (ValueError, TypeError) as error:
        # Nothing of it is shown: where its password is cannot be told.
        raise ConfigError(
            f"URL {index + 1} of {called('amqp_urls')} cannot be read ({type(error).__name__}); in a "
            "password / ? # @ : and , are written %2F %3F %23 %40 %3A and %2C"
        ) from None
    parameters.heartbeat = config.amqp_heartbeat
    parameters.connection_attempts = 1
    parameters.socket_timeout = parameters.stack_timeout = _TIMEOUT
    return parameters


def _tls(config: Config) -> ssl.SSLContext:
    """Verifies the broker's certificate and its name, by the given authorities or else the system's."""
    try:
        context = ssl.create_default_context(cafile=config.amqp_ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise _unreadable(called("amqp_ca_file"), config.amqp_ca_file, error) from None
    if config.amqp_cert_file:
        try:
            context.load_cert_chain(config.amqp_cert_file, config.amqp_key_file or None)
        except (OSError, ssl.SSLError) as error:
            names = f"{called('amqp_cert_file')} or {called('amqp_key_file')}"
            paths = ", ".join(filter(None, [config.amqp_cert_file, config.amqp_key_file]))
            raise _unreadable(names, paths, error) from None
    return context


def _unreadable(variable: str, path: str, error: Exception) -> BrokerMisconfigured:
    reason = getattr(error, "strerror", None) or type(error).__name__
    return BrokerMisconfigured(f"{variable} names {path!r}, which cannot be used: {reason}")
