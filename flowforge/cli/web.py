"""The command web."""

from __future__ import annotations

import click

from flowforge import streams
from flowforge.cli.common import Integer, acting, database_option, find_database, say
from flowforge.cli.telling import tell


def _host(text: str) -> str:
    """To the system an empty one is all addresses: not what an unset variable shall mean."""
    if not text.strip():
        raise click.BadParameter("it is empty")
    return text


@click.command()
@database_option
@click.option(
    "--host",
    type=_host,
    default="127.0.0.1",
    show_default=True,
    metavar="HOST",
    help="Address to listen on; 0.0.0.0 for all of IPv4, :: for all.",
)
@click.option(
    "--port", type=Integer(0, 65535), default=8080, show_default=True, help="Port; 0: any that is free."
)
def web(database_url: str | None, host: str, port: int) -> None:
    """Serve a read-only page for operators.

    Runs and their graphs, queues, workers, figures of health; no input and no output of any task. Needs the
    extra web, and a login with flowforge_reader. It asks nobody who he is: on another address than this
    machine's own, put something in front of it that does. Stops on SIGTERM or Ctrl-C, after 5
    s at most for requests under way; on a second one at once.

    \b
    Example:
      flowforge web --database-url service=reader
    """
    from flowforge import log, stopping
    from flowforge.web import serve

    config = find_database(database_url)
    log.configure(config.log_format, config.log_level)
    with acting(), streams.read_or_stopped() as readers:
        code = serve(config, host, port, lambda address: tell(say, f"The page is at {address}"))
    if code := readers.exit_code(code):
        stopping.end_now(code)
