"""How each fault is done to the cluster; those of the servers are in outages.py."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from tests.chaos import outages
from tests.chaos.cluster import Cluster
from tests.chaos.faults import Fault
from tests.chaos.loop import Task, after, either
from tests.python.proxy import Proxy

_STEP_LIMIT = 15.0  # seconds that a step is waited for


def strike(cluster: Cluster, fault: Fault) -> Task:
    """Do the fault; `began`, `ended` and `result` tell when, and with which success."""
    fault.began = time.monotonic()
    try:
        yield from _STRIKES[fault.kind](cluster, fault)
    finally:
        fault.ended = time.monotonic()


# -- daemons


def _killed(cluster: Cluster, fault: Fault) -> Task:
    daemon = cluster.daemons[fault.target]
    yield lambda: daemon.running
    fault.began, fault.pid = time.monotonic(), daemon.pid
    daemon.send(signal.SIGKILL)
    yield lambda: daemon.pid != fault.pid if daemon.process else False


def _killed_at_a_step(cluster: Cluster, fault: Fault) -> Task:
    daemon = cluster.daemons[fault.target]
    yield lambda: daemon.running
    pid, deaths = daemon.pid, len(daemon.deaths)
    daemon.step.write_text(fault.detail["step"])
    yield either(lambda: len(daemon.deaths) > deaths, after(_STEP_LIMIT))
    if daemon.step.exists():
        daemon.step.unlink(missing_ok=True)
        fault.result = "not done: it did not come to that step in time"
        return
    yield lambda: len(daemon.deaths) > deaths
    if daemon.deaths[-1].code != -signal.SIGKILL:
        fault.result = f"not done: it ended with exit code {daemon.deaths[-1].code} before"
    fault.began, fault.pid = daemon.deaths[-1].at, pid


def _told_to_stop(cluster: Cluster, fault: Fault) -> Task:
    daemon = cluster.daemons[fault.target]
    yield lambda: daemon.running
    fault.began, deaths = time.monotonic(), len(daemon.deaths)
    daemon.send(signal.SIGTERM)
    yield lambda: len(daemon.deaths) > deaths
    fault.result = f"exit code {daemon.deaths[-1].code}"


def _stopped(cluster: Cluster, fault: Fault) -> Task:
    daemon = cluster.daemons[fault.target]
    yield lambda: daemon.running
    fault.began = time.monotonic()
    daemon.send(signal.SIGSTOP)
    yield after(fault.lasts)
    daemon.send(signal.SIGCONT)


def _child_killed(cluster: Cluster, fault: Fault) -> Task:
    """One that runs a handler, if the witness tells of one."""
    daemon = cluster.daemons[fault.target]
    busy = list[int]()

    def found() -> bool:
        running = busy_processes(cluster.witness)
        busy[:] = sorted(child.pid for child in daemon.children() if child.pid in running)
        return bool(busy)

    yield either(found, after(_STEP_LIMIT))
    if not busy:
        fault.result = "not done: no child had anything to do"
        return
    fault.began, fault.pid = time.monotonic(), busy[0]
    with suppress(ProcessLookupError):
        os.kill(busy[0], signal.SIGKILL)


def busy_processes(witness: Path, most: int = 20_000) -> set[int]:
    """Those that have begun a handler and not ended it, by the last bytes of the witness."""
    with witness.open("rb") as file:
        file.seek(max(0, witness.stat().st_size - most))
        lines = file.read().decode(errors="replace").splitlines()[1:]
    busy = dict[int, str]()
    for line in lines:
        event, _, _, _, _, pid, *_ = line.split(" ")
        busy[int(pid)] = event
    return {pid for pid, event in busy.items() if event == "start"}


def _clock_shifted(cluster: Cluster, fault: Fault) -> Task:
    clock = cluster.daemons[fault.target].clock
    clock.write_text(f"{fault.detail['by']}\n")
    yield after(fault.lasts)
    clock.write_text("+0\n")


# -- links


def _link(cluster: Cluster, fault: Fault) -> Proxy:
    if fault.target == "client":
        return cluster.client_link
    daemon = cluster.daemons[fault.target]
    link = daemon.database if fault.kind.startswith("database") else daemon.broker
    assert link is not None
    return link


def _link_cut(cluster: Cluster, fault: Fault) -> Task:
    link = _link(cluster, fault)
    link.refusing = True
    link.cut()
    yield after(fault.lasts)
    link.refusing = False


def _link_slow(cluster: Cluster, fault: Fault) -> Task:
    link = _link(cluster, fault)
    link.delay = fault.detail["delay"]
    yield after(fault.lasts)
    link.delay = 0.0


def _link_half_open(cluster: Cluster, fault: Fault) -> Task:
    link = _link(cluster, fault)
    link.stalled = True
    yield after(fault.lasts)
    if fault.detail["then"] == "cut":
        link.cut()
    link.stalled = False


_STRIKES: dict[str, outages.Strike] = {
    "killed": _killed,
    "killed at a step": _killed_at_a_step,
    "told to stop": _told_to_stop,
    "stopped past its lease": _stopped,
    "stopped for a moment": _stopped,
    "child killed": _child_killed,
    "clock shifted": _clock_shifted,
    "database link cut": _link_cut,
    "database link slow": _link_slow,
    "database link half-open": _link_half_open,
    "broker link cut": _link_cut,
    "broker link slow": _link_slow,
    "broker link half-open": _link_half_open,
    **outages.STRIKES,
}
