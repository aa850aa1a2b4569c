"""What both servers need: a child that dies with its parent, a free port, waiting, ending process trees."""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from random import SystemRandom
from typing import Any

import psutil

LAUNCHER = Path(__file__).with_name("launch.py")

PATIENCE = float(os.environ.get("FLOWFORGE_TEST_PATIENCE", "60"))
"""Seconds that a test waits for a condition; less where most conditions are expected not to hold."""

MEMORY = Path("/dev/shm")  # noqa: S108 -- Scratch makes names that nobody foresees
PLENTY = 8 << 30
"""Bytes of memory, free and in files, from which on a server's data may be kept there."""


def place_for_many_files() -> Path:
    """Where to make and delete thousands of files: in memory where there is plenty, otherwise where temporary
    files go.

    Each test's database is three hundred files, and a file system may look long for a free inode where many
    were just deleted: ext4 without a journal took a third of all tests' time for that.
    """
    with contextlib.suppress(OSError, StopIteration):
        free = os.statvfs(MEMORY)
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10
        if min(free.f_bavail * free.f_frsize, available) >= PLENTY and os.access(MEMORY, os.W_OK):
            return MEMORY
    return Path(tempfile.gettempdir())


def is_alive(pid: int) -> bool:
    """Whether it runs; not one that has ended and was not waited for."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Scratch:
    """A temporary directory that a later one removes if this process is killed before it can.

    Each holds a locked file; one that nobody has locked belonged to a process that is gone.
    """

    def __init__(self, kind: str, place: Path | None = None) -> None:
        temporary = Path(tempfile.gettempdir())
        for old in [each for where in {temporary, MEMORY} for each in where.glob("flowforge-test-*")]:
            with contextlib.suppress(OSError):  # in use, or somebody else's
                lock = os.open(old / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(old)
                finally:
                    os.close(lock)
        self.path = Path(tempfile.mkdtemp(prefix=f"flowforge-test-{kind}-", dir=place or temporary))
        self._lock: int | None = os.open(self.path / "new", os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / "new").rename(self.path / "lock")  # found by others only once it is locked

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def start_child(
    command: list[str],
    *,
    log: Path,
    env: Mapping[str, str],
    death_signal: signal.Signals,
    uid: int | None = None,
    gid: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a server as a direct child whose output is appended to `log`.

    It gets `death_signal` when the thread that called this ends, or its process does, however that happens:
    call it from the main thread.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", str(LAUNCHER)),
                *(str(int(death_signal)), str(os.getuid() if uid is None else uid)),
                *(str(os.getgid() if gid is None else gid), str(os.getpid()), *command),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            cwd="/",
            start_new_session=True,  # Ctrl-C is pytest's, which then stops the server in order
        )


def free_port() -> int:
    """A TCP port nobody listens on, below the range that the kernel takes for outgoing connections.

    From inside that range, someone's connection could take the port while the server restarts.
    """
    choose = SystemRandom()
    while True:
        port = choose.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_until(condition: Callable[[], bool], what: str, timeout: float = PATIENCE) -> None:
    """Return once `condition` holds, asked every 20 ms; TimeoutError tells `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:g} s in vain: {what}")
        time.sleep(0.02)


def accepts_connections(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def descendants(pid: int) -> list[psutil.Process]:
    """The processes below `pid`, as they are now."""
    return psutil.Process(pid).children(recursive=True)


def has_ended(process: psutil.Process) -> bool:
    """Whether the process runs no more; one that only awaits its parent's notice has ended."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_end(processes: Iterable[psutil.Process]) -> None:
    """Return when all of them have ended."""
    remaining = list(processes)
    wait_until(lambda: all(map(has_ended, remaining)), f"the end of {remaining}")


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """SIGKILL a child and everything below it, and wait until all of it is gone."""
    below = descendants(process.pid)
    process.kill()
    process.wait()
    for child in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    wait_for_end(below)
