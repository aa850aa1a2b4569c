"""`flowforge health` tells the truth about daemons that run as processes of their own: others wait for it
in production, and are restarted by it."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.python.cluster import PROGRAM, Cluster, Process
from tests.python.shell import Shell
from tests.services.database import Database
from tests.services.process import wait_until
from tests.services.rabbitmq import Broker, RabbitServer


def health(cluster: Cluster, process: Process, *options: str) -> tuple[int, str]:
    """Exit code and line of the command, run as a container's health check is."""
    file = cluster.directory / f"health-{cluster.processes.index(process)}"
    done = subprocess.run(
        [PROGRAM, "health", *options],
        env={"FLOWFORGE_HEALTH_FILE": str(file)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert not done.stderr
    return done.returncode, done.stdout.strip()


def until(cluster: Cluster, processes: list[Process], code: int, text: str, *options: str) -> None:
    for process in processes:
        wait_until(
            lambda process=process: (  # type: ignore[misc]
                (found := health(cluster, process, *options))[0] == code and text in found[1]
            ),
            f"{process.name}: {text}",
        )


def test_the_broker_is_told_of(
    db: Database, rabbit_server: RabbitServer, amqp_namespace: str, tmp_path: Path
) -> None:
    """By those who need it: not while it is away, and again when it is back."""
    with Cluster(db, tmp_path, rabbit_server, amqp_namespace) as cluster:
        scheduler, publisher, worker = everyone = cluster.daemons(workers=1)
        until(cluster, everyone, 0, ": ok, last tick")
        rabbit_server.stop()
        until(cluster, [publisher, worker], 1, ": no broker")
        until(cluster, [scheduler], 0, "scheduler: ok")
        rabbit_server.start()
        until(cluster, everyone, 0, ": ok")


def test_the_database_is_told_of(db: Database, rabbit: Broker, amqp_namespace: str, tmp_path: Path) -> None:
    """By all; a worker asks it twice a minute where RabbitMQ brings the work, and here all the time."""
    with Cluster(db, tmp_path) as cluster:
        everyone = cluster.daemons(workers=1)
        settings = {"FLOWFORGE_AMQP_URL": rabbit.url, "FLOWFORGE_NAMESPACE": amqp_namespace}
        everyone += cluster.start("publisher", **settings)
        until(cluster, everyone, 0, ": ok, last tick")
        db.server.stop()
        until(cluster, everyone, 1, ": no database")
        db.server.start()
        until(cluster, everyone, 0, ": ok")


def test_a_daemon_that_hangs_or_is_gone_is_not_well(
    db: Database, rabbit_server: RabbitServer, amqp_namespace: str, tmp_path: Path
) -> None:
    """What it last said was that all is well; the age of that gives it away."""
    with Cluster(db, tmp_path, rabbit_server, amqp_namespace) as cluster:
        everyone = cluster.daemons(workers=1)
        until(cluster, everyone, 0, ": ok")
        for process in everyone:
            process.signal(signal.SIGSTOP)
        until(cluster, everyone, 1, "; silent for ", "--max-age", "2s")
        for process in everyone:
            process.signal(signal.SIGCONT)
        until(cluster, everyone, 0, ": ok", "--max-age", "8s")
        everyone[0].kill()
        until(cluster, everyone[:1], 1, "; has ended")
        assert everyone[1].stop() == 0
        code, line = health(cluster, everyone[1])
        assert (code, line.partition(",")[0]) == (1, "publisher: stopping")


def test_the_report_as_a_document_and_of_a_named_file(tmp_path: Path) -> None:
    """By default a report may be 30 s old."""
    shell, file = Shell(""), tmp_path / "health"
    missing = shell.document("health", file, code=1)
    assert missing == {"well": False, "report": f"no health report in {file}"}
    report = {"daemon": "worker", "state": "ok", "detail": "", "last_tick": None}
    file.write_text(json.dumps(report | {"written": time.time()}))
    assert shell.document("health", file) == {"well": True, "report": "worker: ok"}
    assert shell("health", file).stdout == "worker: ok\n"
    file.write_text(json.dumps(report | {"written": 0.0}))
    assert "; silent for " in shell("health", file, code=1).stdout


@pytest.mark.parametrize("setting", ["", "file"])
def test_without_a_file_it_says_what_is_missing(setting: str, tmp_path: Path) -> None:
    shell = Shell("")
    shell.environment["FLOWFORGE_HEALTH_FILE"] = str(tmp_path / setting) if setting else ""
    found = shell("health", code=1 if setting else 3)
    assert ("no health report in" if setting else "FLOWFORGE_HEALTH_FILE") in found.output
