"""What a daemon says of its own health, in a file too, and how a health check reads it."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowforge.errors import ConfigError


class Health:
    """The state of one daemon, kept in memory and, when a path is given, in a file that a health check can
    read. Raises ConfigError when that file cannot be written.

    States: starting, ok, no database, no broker, blocked, error, stopping, failed. Thread-safe.
    """

    def __init__(self, daemon: str, path: str | os.PathLike[str] | None = None) -> None:
        self._lock = threading.Lock()
        self._path = Path(path).absolute() if path else None  # a handler may change the directory
        self._written_at = float("-inf")  # by time.monotonic(): nobody sets that clock
        self._state: dict[str, Any] = {
            "daemon": daemon,
            "pid": os.getpid(),
            "pid_space": _pid_space(),
            "state": "starting",
            "detail": "",
            "last_tick": None,
        }
        try:
            self._write()
        except OSError as exc:
            raise ConfigError(f"the health file {path} cannot be written: {exc.strerror}") from None

    @property
    def state(self) -> str:
        """The present state's name."""
        return str(self._state["state"])

    def report(self, state: str, detail: str = "") -> bool:
        """Set the state; whether it changed."""
        changed = (state, detail) != (self._state["state"], self._state["detail"])
        self._state |= {"state": state, "detail": detail}
        self.beat(force=changed)
        return changed

    def ticked(self, trouble: str = "") -> None:
        """A tick was made: the state is ok, or error where there is `trouble`."""
        self._state["last_tick"] = time.time()
        self.report("error" if trouble else "ok", trouble)

    def beat(self, *, force: bool = False) -> None:
        """Write the file if it is older than a second. Call it every few seconds while alive."""
        if time.monotonic() - self._written_at >= 1 or force:
            # A full disk is no reason to stop working; whoever reads the file sees that it has grown old.
            with suppress(OSError):
                self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        with self._lock:
            self._written_at = time.monotonic()
            draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            draft.write_text(json.dumps(self._state | {"written": time.time()}))
            draft.replace(self._path)


def _pid_space() -> str | None:
    """What process ids have a meaning in: this boot of the machine, and the namespace, as of a container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return None


def _has_ended(report: dict[str, Any]) -> bool:
    """Whether the daemon is gone, which only a reader in the same place can tell."""
    pid, space = report.get("pid"), report.get("pid_space")
    if space is None or space != _pid_space() or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except ProcessLookupError:
        return True
    except (OSError, IndexError):  # another user's
        return False


_CLOCK_SLEW = 2.0  # seconds that a clock may be set back by as a matter of course


def read_health(path: str | os.PathLike[str], max_age: float = 30.0) -> tuple[bool, str]:
    """Whether the daemon that writes `path` is well, and one line saying how it is. It is well when it
    reported within `max_age` seconds that its state is ok.

    A report from the future was made before the clock was set back: it says nothing of how old it is, and a
    daemon that is alive replaces it within seconds."""
    try:
        found = json.loads(Path(path).read_text())
        age = time.time() - found["written"]
        line = f"{found['daemon']}: {found['state']}" + (f" ({found['detail']})" if found["detail"] else "")
        if found["last_tick"] is not None:
            line += f", last tick {time.time() - found['last_tick']:.0f} s ago"
    except (OSError, ValueError, KeyError, TypeError):
        return False, f"no health report in {path}"
    if _has_ended(found):
        return False, f"{line}; has ended"
    if age < -_CLOCK_SLEW:
        return False, f"{line}; the clock was set back by {-age:.0f} s since"
    if age > max_age:
        return False, f"{line}; silent for {age:.0f} s"
    return found["state"] == "ok", line
