"""Everything in one foreground process: PostgreSQL unless one is given, schema, scheduler, worker, publisher.

For development, demonstrations and small installations. Each daemon has a thread of its own and shares
nothing with the others but the request to stop; the server is stopped last, when their results are in.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flowforge import exits, log, runner, threads
from flowforge.client import Client, Defined
from flowforge.config import Config
from flowforge.definition import Workflow
from flowforge.embedded import EmbeddedPostgres
from flowforge.errors import ConfigError
from flowforge.health import Health
from flowforge.migrate import migrate
from flowforge.scheduler import Scheduler
from flowforge.stopping import Stop, signals
from flowforge.worker.daemon import Worker, handlers_of
from flowforge.worker.executor import Handler

_log = log.of("up")

# What ends sooner is not worth a word.
_MOMENT = 0.5
# How often the threads are looked at. Nobody waits for it: they wake each other.
_LOOK = 0.1


@dataclass(frozen=True)
class Up:
    """What is up: the connection string to use, the directory of the embedded server (None when a database
    was given), and the workflows as they are registered.
    """

    database_url: str
    directory: Path | None
    workflows: tuple[Defined, ...]


@dataclass
class _Part:
    """One daemon in its thread."""

    name: str
    main: Callable[[], int]
    health: Health
    stops_within: float  # seconds
    left_behind: Callable[[], bool] = lambda: False  # whether a handler is left that did not stop
    code: int = exits.EXIT_FAILED

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name=f"flowforge-{self.name}", daemon=True)

    def _run(self) -> None:
        try:
            self.code = self.main()
        except Exception:  # noqa: BLE001 - the end of the thread, whose caller only has its code
            log.of(self.name).exception("ended by an error")
            self.health.report("failed", "ended by an error; see the log")


def run(
    config: Config,
    workflows: Sequence[Workflow],
    *,
    sources: Sequence[str] = (),
    server: EmbeddedPostgres | None = None,
    ready: Callable[[Up], None] = lambda _: None,
    abandoned: Callable[[], None] = lambda: None,
    stop: Stop | None = None,
) -> int:
    """Runs all daemons until asked to stop; returns the exit code of the first one that failed, or 0.

    `sources` are the modules (MODULE[:NAME]) of `workflows`, for handlers in processes of their own.
    `server` is started if it is not running, and stopped at the end if it was started here; without it the
    database of `config` is used. `workflows` are registered (without any there is no worker, which would only
    take work from those who have handlers), and `ready` is called once every daemon works. `abandoned` is
    called last when handlers are left that did not stop, also when this raises: the interpreter's own end is
    no place for them.
    Without `stop` the signals of the process ask for it (main thread only), and interrupt whatever is waited
    for before the daemons run; a request that another thread makes meanwhile counts from then on.

    Raises FlowForgeError when the database cannot be started, reached or migrated, or a definition is
    refused.
    """
    if stop is None:
        with signals(Stop()) as own:
            return run(
                config, workflows, sources=sources, server=server, ready=ready, abandoned=abandoned, stop=own
            )
    if server is None and not config.database_url:
        raise ConfigError("FLOWFORGE_DATABASE_URL is not set, and no embedded server was asked for")
    handlers = handlers_of(workflows)
    for workflow in workflows:
        workflow.spec()  # what can be told to be wrong before anything is started
    parts: list[_Part] = []
    try:
        with contextlib.ExitStack() as cleanup:
            with _interrupted_by(stop):
                if server is not None:
                    if not server.alive:
                        cleanup.enter_context(server)
                    config = config.replace(database_url=server.dsn)
                migrate(config.database_url)
                with Client(config.database_url) as client:
                    defined = tuple(client.define_all(workflows))
            up = Up(config.database_url, server.directory if server else None, defined)
            parts = _parts(config, handlers, sources, stop)
            return _run_parts(parts, config, server, stop, lambda: ready(up))
    except KeyboardInterrupt:
        if not stop.requested:
            raise
        return exits.EXIT_INTERRUPTED if stop.immediate else exits.EXIT_OK
    finally:
        if any(part.left_behind() for part in parts):
            abandoned()


@contextlib.contextmanager
def _interrupted_by(stop: Stop) -> Iterator[None]:
    """Within the block a request that is made in this thread, as by a signal, raises KeyboardInterrupt: there
    is nothing yet that would have to end in order, and much that may take long."""
    thread = threading.get_ident()
    within = True

    def interrupt() -> None:
        if within and threading.get_ident() == thread:
            raise KeyboardInterrupt

    try:
        stop.on_request(interrupt)
        yield
    finally:
        within = False


def _parts(
    config: Config, handlers: Mapping[str, Handler], sources: Sequence[str], stop: Stop
) -> list[_Part]:
    # One file cannot hold the health of several daemons: they report in memory, and `run` writes the worst.
    parts = [_daemon(Scheduler(config), config, stop)]
    if handlers:
        health = Health("worker")
        worker = Worker(handlers, config, stop, health, sources=sources)
        parts.append(_Part("worker", worker.run, health, config.grace, lambda: worker.left_behind))
    if config.uses_broker:
        from flowforge.publisher import Publisher

        parts.append(_daemon(Publisher(config), config, stop))
    return parts


def _daemon(daemon: runner.Daemon, config: Config, stop: Stop) -> _Part:
    health = Health(daemon.name)
    main = partial(runner.run, daemon, config, stop=stop, health=health)
    return _Part(daemon.name, main, health, config.lock_timeout + daemon.stop_limit)


def _run_parts(
    parts: list[_Part],
    config: Config,
    server: EmbeddedPostgres | None,
    stop: Stop,
    ready: Callable[[], None],
) -> int:
    health = Health("up", config.health_file)
    try:
        for part in parts:
            threads.start(part.thread)
        failure = _watch(parts, server, stop, ready, health)
    except BaseException:
        # Of `ready`, perhaps, whose output is gone. What runs must not outlive the server that it needs.
        stop.request()
        raise
    finally:
        health.report("stopping")
        _await([part for part in parts if part.thread.ident is not None], stop)
    if failure is not None:
        return failure
    if stop.immediate:
        return exits.EXIT_INTERRUPTED
    return next((part.code for part in parts if part.code != exits.EXIT_OK), exits.EXIT_OK)


def _watch(
    parts: list[_Part],
    server: EmbeddedPostgres | None,
    stop: Stop,
    ready: Callable[[], None],
    health: Health,
) -> int | None:
    """Until asked to stop. The exit code of what ended by itself, which asks for it too."""
    announced = False
    failure: int | None = None
    while not stop.wait(_LOOK):
        worst = next((part for part in parts if part.health.state != "ok"), None)
        if worst is None:
            health.ticked()
            if not announced:
                announced = True
                ready()
        else:
            health.report(worst.health.state, f"{worst.name}: {worst.health.state}")
        ended = next((part for part in parts if not part.thread.is_alive()), None)
        if ended is not None and not stop.requested:
            failure = ended.code or exits.EXIT_FAILED
            _log.error("a daemon ended; stopping the others", part=ended.name)
            stop.request()
        elif server is not None and not server.alive:
            failure = exits.EXIT_DATABASE
            _log.error(
                "the embedded PostgreSQL ended; stopping", log=str(server.log), error=server.log_tail(1)
            )
            # Nothing can be finished without it: no daemon needs to be waited for.
            stop.request()
            stop.request()
    return failure


def _await(parts: list[_Part], stop: Stop) -> None:
    """Returns when all parts have ended. Says what is waited for when that takes a moment."""
    deadline = time.monotonic() + _MOMENT
    for part in parts:
        part.thread.join(max(0.0, deadline - time.monotonic()))
    left = [part for part in parts if part.thread.is_alive()]
    if left and not stop.immediate:
        _log.warning(
            "waiting for what still runs; a second Ctrl-C or SIGTERM stops at once",
            part=", ".join(part.name for part in left),
            at_most=f"{max(part.stops_within for part in left):g} s",
        )
    for part in parts:
        part.thread.join()
