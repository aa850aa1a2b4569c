"""Running the demo: servers up, the workflow through, and its figures checked against a straight count."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowforge import threads, up
from flowforge.client import Client
from flowforge.config import Config
from flowforge.demo.workflow import census
from flowforge.embedded import EmbeddedPostgres
from flowforge.errors import FlowForgeError
from flowforge.stopping import Stop


@dataclass(frozen=True)
class Outcome:
    """What the demo found. `equal`: whether the workflow's figures are those of the straight count."""

    run_id: int
    state: str
    seconds: float
    totals: dict[str, Any]
    straight: dict[str, Any]
    text: str
    html: str

    @property
    def equal(self) -> bool:
        return self.totals == self.straight


def run(root: Path, title: str, data_dir: Path | None, show: Callable[[str, int], object]) -> Outcome:
    """Counts the modules below `root` by the workflow and, meanwhile, in one go in a process of its own.

    The database is a temporary one, or that of `data_dir`, which is kept. `show` is called with the
    connection string and the run's id, and returns when the run has ended. Raises FlowForgeError.
    """
    root = root.resolve()
    with contextlib.ExitStack() as cleanup:
        straight = cleanup.enter_context(_straight_count(root))
        server = cleanup.enter_context(
            EmbeddedPostgres(data_dir) if data_dir is not None else EmbeddedPostgres.temporary()
        )
        cleanup.enter_context(_daemons(server))
        client = cleanup.enter_context(Client(server.dsn))
        started = time.monotonic()
        run_id = client.trigger(census, {"root": str(root), "title": title})
        show(server.dsn, run_id)
        result = client.wait(run_id)
        seconds = time.monotonic() - started
        if not result.succeeded:
            reasons = "; ".join(f"{task}: {error}" for task, error in result.errors.items())
            raise FlowForgeError(f"run {run_id} {result.state}: {reasons or 'no reason given'}")
        output, _ = straight.communicate()
        if straight.returncode != 0:
            raise FlowForgeError(f"the straight count ended with exit code {straight.returncode}")
        return Outcome(
            run_id,
            result.state,
            seconds,
            client.result(run_id, "totals"),
            json.loads(output),
            **result.outputs["report"],
        )


@contextlib.contextmanager
def _straight_count(root: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "flowforge.demo.census", str(root)]
    # A session of its own: Ctrl-C is this process's to handle.
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def _daemons(server: EmbeddedPostgres) -> Iterator[None]:
    """Scheduler and worker in the background, from when they are ready until the context ends."""
    # The environment's own settings count, but for where things are: the demo touches no other installation.
    config = Config.from_environment().replace(database_url=server.dsn, amqp_urls=(), queues=("default",))
    stop, ready = Stop(), threading.Event()
    failure: list[BaseException | int] = []

    def main() -> None:
        try:
            code = up.run(
                config,
                [census],
                sources=["flowforge.demo.census"],
                server=server,
                ready=lambda _: ready.set(),
                stop=stop,
            )
            if code:
                failure.append(code)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            failure.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=main, name="flowforge-up", daemon=True)
    threads.start(thread)
    try:
        ready.wait()
        for found in failure:
            if isinstance(found, BaseException):
                raise found
            raise FlowForgeError(f"the daemons ended with exit code {found}")
        yield
    finally:
        stop.request()
        thread.join()
