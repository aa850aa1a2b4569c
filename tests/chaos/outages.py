"""How faults of the servers are done: PostgreSQL and its standby, and the broker."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import psutil
from psycopg.errors import Error

from tests.chaos.cluster import Cluster
from tests.chaos.faults import Fault
from tests.chaos.loop import Task, after
from tests.chaos.servers import SLOTS
from tests.services.postgres import PostgresServer
from tests.services.process import descendants

Strike = Callable[[Cluster, Fault], Task]


# -- the database


def _returned(fault: Fault) -> Callable[[], None]:
    def note() -> None:
        fault.returned = time.monotonic()

    return note


def _server_process_killed(cluster: Cluster, fault: Fault) -> Task:
    """One backend dies, and the postmaster ends all others and recovers."""
    pair = cluster.pair
    asked = cluster.loop.background(
        pair.ask, "select pid from pg_stat_activity where application_name like 'flowforge%%' order by pid"
    )
    yield asked.done
    pids = [pid for (pid,) in asked.result() if isinstance(pid, int)]
    if not pids:
        fault.result = "not done: there was no session"
        return
    os.kill(pids[fault.detail["which"] % len(pids)], signal.SIGKILL)
    yield after(0.1)
    yield cluster.loop.repeat(0.05, pair.primary.answers)
    _returned(fault)()


def _server_killed(cluster: Cluster, fault: Fault) -> Task:
    cluster.pair.may_be_down = True
    cluster.pair.primary.kill()
    yield from cluster.pair.come_back(fault.lasts, _returned(fault))


def _server_restarted(cluster: Cluster, fault: Fault) -> Task:
    cluster.pair.may_be_down = True
    stopping = cluster.loop.background(cluster.pair.primary.stop)
    yield stopping.done
    yield from cluster.pair.come_back(fault.lasts, _returned(fault))


def _server_stopped(cluster: Cluster, fault: Fault) -> Task:
    process = cluster.pair.primary.process
    assert process is not None
    all_of_it = [psutil.Process(process.pid), *descendants(process.pid)]
    _send(all_of_it, signal.SIGSTOP)
    yield after(fault.lasts)
    _send(all_of_it, signal.SIGCONT)


def _send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _failover(cluster: Cluster, fault: Fault) -> Task:
    yield lambda: cluster.pair.following
    fault.began = time.monotonic()
    yield from cluster.pair.fail_over(fault.lasts, _returned(fault))


def _standby_killed(cluster: Cluster, fault: Fault) -> Task:
    yield lambda: cluster.pair.following
    fault.began = time.monotonic()
    yield from cluster.pair.kill_standby()


def _sessions_terminated(cluster: Cluster, fault: Fault) -> Task:
    query = (
        "select count(pg_terminate_backend(pid)) from pg_stat_activity"
        " where application_name like 'flowforge%%'"
    )
    ended = 0
    for _ in range(fault.detail["times"]):
        asked = cluster.loop.background(cluster.pair.ask, query)
        yield asked.done
        ended += int(str(asked.result()[0][0]))
        yield after(fault.lasts / fault.detail["times"])
    fault.result = f"{ended} sessions"


def _no_slots(cluster: Cluster, fault: Fault) -> Task:
    """Sessions of the daemons' own login take what is left."""
    taken = list[object]()

    def take() -> None:
        with suppress(Error):
            while len(taken) < SLOTS:
                taken.append(cluster.pair.primary.connect("postgres", "chaos", connect_timeout=3))

    until = time.monotonic() + fault.lasts
    while time.monotonic() < until:
        taking = cluster.loop.background(take)
        yield taking.done
        yield after(0.2)
    fault.result = f"{len(taken)} taken"
    while taken:
        taken.pop().close()  # type: ignore[attr-defined]  # a connection


def _setting(name: str, value: Callable[[Fault], str]) -> Strike:
    def change(cluster: Cluster, fault: Fault) -> Task:
        pair = cluster.pair
        commands = (f"alter system set {name} = '{value(fault)}'", f"alter system reset {name}")
        for index, command in enumerate(commands):
            # However often it takes: what a fault has set must not stay.
            yield cluster.loop.repeat(0.2, partial(_configure, pair.ask, command))
            if index == 0:
                yield after(fault.lasts)

    return change


def _configure(ask: Callable[[str], object], command: str) -> bool:
    ask(command)
    ask("select pg_reload_conf()")
    return True


def _files_limited(cluster: Cluster, fault: Fault) -> Task:
    """No file may grow beyond what the largest table is, as where a quota is reached. The log's segments are
    smaller."""
    asked = cluster.loop.background(
        cluster.pair.ask,
        "select max(pg_relation_size(c.oid)) from pg_class c join pg_namespace n on n.oid = relnamespace"
        " where nspname in ('flowforge', 'public')",
    )
    yield asked.done
    limit = max(1024 * 1024, int(str(asked.result()[0][0])))
    server = cluster.pair.primary
    before = server.log().count("File too large")
    for each in (str(limit), "unlimited"):
        limiting = cluster.loop.background(_limit, server, each)
        yield limiting.done
        limiting.result()
        if each != "unlimited":
            yield after(fault.lasts)
    fault.result = f"{server.log().count('File too large') - before} writes refused"


def _limit(server: PostgresServer, limit: str) -> None:
    """For all of its processes; as the server's own user, whom even root may need to be for it."""
    assert server.process is not None
    for pid in (server.process.pid, *(each.pid for each in descendants(server.process.pid))):
        done = subprocess.run(
            ["prlimit", f"--pid={pid}", f"--fsize={limit}:"],
            check=False, cwd="/", stderr=subprocess.PIPE, text=True,
            user=server.account.pw_uid if server.account else None,
            group=server.account.pw_gid if server.account else None,
            extra_groups=[] if server.account else None,
        )  # fmt: skip
        if done.returncode and psutil.pid_exists(pid):
            raise RuntimeError(done.stderr)


def _notify_off(cluster: Cluster, fault: Fault) -> Task:
    for value in (0, 1):
        command = f"select flowforge.set_limit('notify', {value})"
        yield cluster.loop.repeat(0.2, partial(_done, cluster.pair.ask, command))
        if value == 0:
            yield after(fault.lasts)


def _done(function: Callable[..., object], *arguments: str) -> bool:
    """It has not raised."""
    function(*arguments)
    return True


# -- the broker


def _broker_down(how: Callable[[Cluster], None]) -> Strike:
    def down(cluster: Cluster, fault: Fault) -> Task:
        cluster.broker_may_be_down = True
        ending = cluster.loop.background(how, cluster)
        yield ending.done
        yield after(fault.lasts)
        cluster.broker.launch()
        cluster.broker_may_be_down = False
        yield cluster.broker_answers
        fault.returned = time.monotonic()

    return down


def _broker_stopped(cluster: Cluster, fault: Fault) -> Task:
    assert cluster.broker.process is not None
    process = psutil.Process(cluster.broker.process.pid)
    all_of_it = [process, *process.children(recursive=True)]
    _send(all_of_it, signal.SIGSTOP)
    yield after(fault.lasts)
    _send(all_of_it, signal.SIGCONT)


def _ctl(*commands: tuple[str, ...], then: tuple[tuple[str, ...], ...] = ()) -> Strike:
    """Commands of rabbitmqctl, and others at the fault's end."""

    def control(cluster: Cluster, fault: Fault) -> Task:
        for each in commands:
            asked = cluster.loop.background(cluster.broker.ctl, *each)
            yield asked.done
            if (error := asked.exception()) is not None:
                fault.result = f"not done: {error}"
        yield after(fault.lasts)
        for each in then:
            # Whatever has become of the broker meanwhile, an alarm must not stay.
            yield cluster.loop.repeat(0.5, partial(_done, cluster.broker.ctl, *each))

    return control


def _queue(fault: Fault) -> str:
    return f"flowforge.{fault.detail['queue']}"


def _queue_purged(cluster: Cluster, fault: Fault) -> Task:
    """Again and again: what workers have fetched already is not in the queue any more."""

    def purge() -> int:
        lost, until = 0, time.monotonic() + fault.lasts
        with cluster.broker.channel() as channel:
            while time.monotonic() < until:
                lost += channel.queue_purge(_queue(fault)).method.message_count
        return lost

    asked = cluster.loop.background(purge)
    yield asked.done
    fault.result = f"{asked.result()} messages"


def _queue_deleted(cluster: Cluster, fault: Fault) -> Task:
    asked = cluster.loop.background(cluster.broker.delete_queue, _queue(fault))
    yield asked.done
    asked.result()


def _queue_otherwise(cluster: Cluster, fault: Fault) -> Task:
    """Somebody deletes it and is the first to declare it again, with other arguments; later it is deleted."""

    def replace() -> bool:
        with cluster.broker.channel() as channel:
            channel.queue_delete(_queue(fault))
            channel.queue_declare(_queue(fault), durable=True, arguments={"x-max-length": 1000})
        return True

    yield cluster.loop.repeat(0.1, replace)
    yield after(fault.lasts)
    yield cluster.loop.repeat(0.3, partial(_done, cluster.broker.delete_queue, _queue(fault)))


STRIKES: dict[str, Strike] = {
    "server process killed": _server_process_killed,
    "server killed": _server_killed,
    "server restarted": _server_restarted,
    "server stopped for a moment": _server_stopped,
    "failover": _failover,
    "standby killed": _standby_killed,
    "sessions terminated": _sessions_terminated,
    "no connection slots": _no_slots,
    "statement_timeout": _setting("statement_timeout", lambda fault: f"{fault.detail['milliseconds']}ms"),
    "idle_in_transaction_session_timeout": _setting(
        "idle_in_transaction_session_timeout", lambda fault: f"{fault.detail['milliseconds']}ms"
    ),
    "read-only": _setting("default_transaction_read_only", lambda _: "on"),
    "files limited": _files_limited,
    "NOTIFY off": _notify_off,
    "broker killed": _broker_down(lambda cluster: cluster.broker.kill()),
    "broker restarted": _broker_down(lambda cluster: cluster.broker.stop()),
    "broker stopped for a moment": _broker_stopped,
    "broker reset": _ctl(("stop_app",), ("reset",), then=(("start_app",),)),
    "memory alarm": _ctl(
        ("set_vm_memory_high_watermark", "0"), then=(("set_vm_memory_high_watermark", "0.4"),)
    ),
    "disk alarm": _ctl(("set_disk_free_limit", "100000GB"), then=(("set_disk_free_limit", "50MB"),)),
    "queue purged": _queue_purged,
    "queue deleted": _queue_deleted,
    "queue declared otherwise": _queue_otherwise,
    "broker closes connections": _ctl(("close_all_connections", "by the laboratory")),
}
