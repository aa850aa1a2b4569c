"""Everything that `flowforge up` runs, in the background of a test."""

import contextlib
import threading
from collections.abc import Iterator

from flowforge import Workflow, up
from flowforge.config import Config
from flowforge.stopping import Stop


class Running:
    """What became of the daemons: their exit code, once they have ended."""

    code: int | None = None
    error: BaseException | None = None


@contextlib.contextmanager
def running(config: Config, *workflows: Workflow) -> Iterator[Running]:
    """Scheduler, worker and, where the configuration names a broker, publisher, ready within the block."""
    stop, ready, state = Stop(), threading.Event(), Running()

    def main() -> None:
        try:
            state.code = up.run(config, workflows, ready=lambda _: ready.set(), stop=stop)
        except BaseException as error:  # noqa: BLE001 - raised again in the test's own thread
            state.error = error
        finally:
            ready.set()

    thread = threading.Thread(target=main)
    thread.start()
    try:
        assert ready.wait(60)
        if state.error is not None:
            raise state.error
        yield state
    finally:
        stop.request()
        thread.join()
