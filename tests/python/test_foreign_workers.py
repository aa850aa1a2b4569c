"""Workers in other languages, as the examples show them."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.python.workbench import Bench
from tests.services.postgres import binaries
from tests.services.process import wait_until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def shell_worker(bench: Bench) -> Iterator[subprocess.Popen[bytes]]:
    """The worker in shell, as a member of flowforge_worker and nothing more."""
    login = conninfo_to_dict(bench.db.create_login("flowforge_worker"))
    programs, library_path = binaries("18")
    psql = shutil.which("psql", path=f"{programs}{os.pathsep}{os.defpath}")
    assert psql is not None
    environment = {
        "PATH": f"{Path(psql).parent}{os.pathsep}{os.defpath}",
        "LD_LIBRARY_PATH": library_path,
        "PGHOST": str(login["host"]),
        "PGPORT": str(login["port"]),
        "PGUSER": str(login["user"]),
        "PGPASSWORD": str(login.get("password", "")),
        "PGDATABASE": str(login["dbname"]),
        "LEASE": "6",
    }
    process = subprocess.Popen([EXAMPLES / "worker.sh"], env=environment, stdin=subprocess.DEVNULL)
    yield process
    process.terminate()
    assert process.wait(60) == 0


def start(bench: Bench, task: str, value: Any = None, **options: Any) -> int:
    spec = {"name": task, "tasks": [{"name": task, "handler": f"shell.{task}", **options}]}
    bench.execute("select flowforge.define_workflow(%s)", json.dumps(spec))
    run: int = bench.one("select flowforge.trigger(%s, %s)", task, json.dumps(value))
    return run


@pytest.mark.usefixtures("shell_worker")
def test_a_worker_in_shell_finishes_what_it_claims(bench: Bench) -> None:
    runs = [start(bench, "words", "one two three"), start(bench, "fail"), start(bench, "words", "a\tb\n'c")]
    assert bench.wait_run(*runs) == ["succeeded", "failed", "succeeded"]
    outputs = [bench.one("select flowforge.task_output(%s, 'words')", run) for run in (runs[0], runs[2])]
    assert outputs == [3, 1]
    assert bench.task(runs[1], "fail")["error"] == "nothing to be done, exit code 1"
    assert bench.violations() == []


@pytest.mark.usefixtures("shell_worker")
def test_a_worker_in_shell_gives_back_what_it_does_not_know(bench: Bench) -> None:
    run = start(bench, "other")
    wait_until(lambda: bench.task(run, "other")["unknown_handler_since"] is not None, "its way back")
    assert bench.task(run, "other")["attempt"] == 1


@pytest.mark.usefixtures("shell_worker")
def test_a_worker_in_shell_renews_its_lease_and_hears_of_a_cancel(bench: Bench) -> None:
    run = start(bench, "sleep")
    first = bench.wait_state(run, "sleep", "running")["lease_expires_at"]
    wait_until(lambda: bench.task(run, "sleep")["lease_expires_at"] != first, "a renewal")
    bench.execute("select flowforge.cancel_run(%s)", run)
    assert bench.wait_run(run) == ["cancelled"]
    assert bench.task(run, "sleep")["reaps"] == 0
