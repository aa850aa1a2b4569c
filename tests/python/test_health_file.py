"""The health file and clocks that are set: a live daemon is well, one that died is not."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from flowforge import health as health_module
from flowforge.health import Health, read_health
from tests.services.process import wait_until


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the wall clock of this module's daemons back or forward by so many seconds."""
    off = 0.0

    def move(seconds: float) -> None:
        nonlocal off
        off += seconds

    clocks = SimpleNamespace(time=lambda: time.time() + off, monotonic=time.monotonic)
    monkeypatch.setattr(health_module, "time", clocks)
    return move


def test_a_clock_that_is_set_back_keeps_no_report_from_being_written(
    tmp_path: Path, set_clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("flowforge.health.time.monotonic", lambda: now)
    path = tmp_path / "health"
    health = Health("probe", path)
    health.ticked()
    set_clock(-3600)
    now += 1
    health.ticked()
    assert read_health(path) == (True, "probe: ok, last tick 0 s ago")


def test_a_report_from_the_future_says_nothing(tmp_path: Path, set_clock: Callable[[float], None]) -> None:
    """It may be of a daemon that died long ago."""
    path = tmp_path / "health"
    Health("probe", path).ticked()
    assert read_health(path)[0]
    set_clock(-3600)
    well, line = read_health(path)
    assert not well
    assert "the clock was set back by 3600 s" in line


def test_a_daemon_that_was_killed_has_ended_at_once(tmp_path: Path) -> None:
    """Before its parent has noticed too. Of one in another container nobody here can tell."""
    path = tmp_path / "health"
    program = f"from flowforge.health import Health; Health('probe', {str(path)!r}).ticked(); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        wait_until(lambda: read_health(path)[0], "a good report")
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not read_health(path)[0], "not yet waited for"
    well, line = read_health(path)
    assert not well
    assert line.endswith("; has ended")
    report = json.loads(path.read_text())
    path.write_text(json.dumps(report | {"pid_space": f"{report['pid_space']}0"}))
    assert read_health(path)[0]


def test_reports_are_written_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(health_module, "time", SimpleNamespace(time=time.time, monotonic=lambda: now))
    health = Health("probe", path := tmp_path / "health")
    health.ticked()
    path.unlink()
    health.ticked()
    assert not path.exists()
    now += 1
    health.ticked()
    assert path.exists()
