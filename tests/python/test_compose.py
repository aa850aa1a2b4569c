"""The deployment by Compose works, as far as that shows without an engine: see composing.py. And the
procedure that says so notices what can be wrong with it."""

import copy
import json
import re
import stat
import subprocess
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address
from pathlib import Path

import click
import pytest
import yaml

from flowforge.cli import cli
from flowforge.config import Config
from tests.python.composing import (
    BIN,
    CHECKOUT,
    Composition,
    Document,
    Servers,
    ServiceFailed,
    compose,
    duration,
    load,
    make_secrets,
    resolve,
)

DOCUMENT = load()
EDGES = [
    (name, other) for name, service in DOCUMENT["services"].items() for other in service.get("depends_on", {})
]


@pytest.fixture
def document() -> Document:
    """A copy to be changed. Services share what the anchors of the file give them: here each has its own."""
    changed: Document = copy.deepcopy(DOCUMENT)
    changed["services"] = {name: copy.deepcopy(service) for name, service in changed["services"].items()}
    return changed


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with Servers(tmp_path_factory.mktemp("compose")) as servers:
        yield servers


def test_the_deployment_runs_a_workflow(document: Document, tmp_path: Path, servers: Servers) -> None:
    """In the least favourable order that depends_on allows, and with no more than the logins of their own."""
    with Composition(document, tmp_path, servers, late="migrate") as composition:
        outputs = composition.smoke()
        with servers.postgres.connect() as connection:
            roles = "select pg_has_role('ff_scheduler', 'flowforge_reader', 'usage')"
            assert connection.execute(roles).fetchone() == (True,), "else its metrics tell half"
    assert "Smoke" in outputs["report"]["text"]
    assert "administrator" not in servers.broker.ctl("list_users")


@pytest.mark.parametrize(("service", "gate"), EDGES)
def test_a_missing_gate_is_reported(
    service: str, gate: str, document: Document, tmp_path: Path, servers: Servers
) -> None:
    """Each condition is needed: without it the service may start too early."""
    del document["services"][service]["depends_on"][gate]
    with (
        Composition(document, tmp_path, servers, late=gate, patience={service: 3}) as composition,
        pytest.raises(ServiceFailed) as failed,
    ):
        composition.smoke()
    assert failed.value.service == service, failed.value


Break = Callable[[Document], None]


def put(*path: str, value: object) -> Break:
    def change(service: Document) -> None:
        *parents, last = path
        for key in parents:
            service = service[key]
        service[last] = value

    return change


def drop(*path: str) -> Break:
    def change(service: Document) -> None:
        *parents, last = path
        for key in parents:
            service = service[key]
        del service[last]

    return change


def rename(path: str, old: str, new: str) -> Break:
    def change(service: Document) -> None:
        service[path][new] = service[path].pop(old)

    return change


def login(name: str, *, secret: bool) -> Break:
    """Another's login; with its password, or with the service's own."""

    def change(service: Document) -> None:
        environment = service["environment"]
        environment["FLOWFORGE_DATABASE_URL"] = re.sub(
            "//ff_[a-z]+@", f"//{name}@", environment["FLOWFORGE_DATABASE_URL"]
        )
        if secret:
            environment["PGSERVICEFILE"] = f"/run/secrets/{name}"
            service["secrets"].append(name)

    return change


URL, REPORT = "FLOWFORGE_AMQP_URL", "FLOWFORGE_HEALTH_FILE"

# The service that is changed, how, and the one that is reported, with its patience where only that ends it.
BROKEN: dict[str, tuple[str, Break, str, float | None]] = {
    "wrong command": ("scheduler", put("command", value=["schedular"]), "scheduler", None),
    "wrong program": ("worker", put("entrypoint", value=["flowforge-worker"]), "worker", None),
    "wrong workflows": ("define", put("command", value="define flowforge.demo.none"), "define", None),
    "gate that never ends": ("migrate", put("entrypoint", value=["sleep", "infinity"]), "migrate", 2),
    "gate that fails": ("migrate", put("command", value=["migrate", "--nonsense"]), "migrate", None),
    "check that always fails": (
        "scheduler",
        put("healthcheck", "test", value=["CMD", "false"]),
        "scheduler",
        2,
    ),
    "no check": ("publisher", drop("healthcheck"), "publisher", None),
    "no report of health": ("scheduler", drop("environment", REPORT), "scheduler", 2),
    "wrong variable": ("worker", rename("environment", URL, f"{URL}S"), "worker", None),
    "wrong value": ("worker", put("environment", "FLOWFORGE_GRACE", value="long"), "worker", None),
    "worker without a broker": ("worker", drop("environment", URL), "worker", None),
    "publisher without a broker": ("publisher", drop("environment", URL), "publisher", None),
    "another namespace": ("publisher", put("environment", "FLOWFORGE_NAMESPACE", value="o"), "client", 3),
    "wrong password": ("scheduler", login("ff_worker", secret=False), "scheduler", None),
    "daemon's login without the right": ("publisher", login("ff_worker", secret=True), "publisher", None),
    "migration by a lesser login": ("migrate", login("ff_client", secret=True), "migrate", None),
    "trigger by another login": ("client", login("ff_publisher", secret=True), "client", None),
    "operator's login without the right": ("operator", login("ff_client", secret=True), "operator", None),
    "operator without a broker": (
        "operator",
        drop("environment", "FLOWFORGE_AMQP_PASSWORD_FILE"),
        "operator",
        None,
    ),
    "secret that was not granted": ("define", drop("secrets"), "define", None),
    "no logins": ("postgres", put("volumes", value=[]), "migrate", None),
    "no login for the broker": ("rabbitmq", drop("secrets"), "rabbitmq", None),
    "wrong database": ("postgres", put("environment", "POSTGRES_DB", value="other"), "migrate", None),
}


@pytest.mark.parametrize(("service", "change", "reported", "patience"), BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_with_a_service_is_reported(
    service: str,
    change: Break,
    reported: str,
    patience: float | None,
    document: Document,
    tmp_path: Path,
    servers: Servers,
) -> None:
    change(document["services"][service])
    limits = {} if patience is None else {reported: patience}
    with (
        Composition(document, tmp_path, servers, patience=limits) as composition,
        pytest.raises(ServiceFailed) as failed,
    ):
        composition.smoke()
    assert failed.value.service == reported, failed.value


# -- the files themselves


def test_compose_accepts_the_file_and_refuses_typos(tmp_path: Path) -> None:
    done = compose("--file", CHECKOUT / "compose.yaml", "config", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    text = (CHECKOUT / "compose.yaml").read_text()
    file = tmp_path / "compose.yaml"
    for old, new in {"depends_on:": "depend_on:", "{condition: service_healthy}": "{condition: healthy}",
                     "[ff_owner]": "[ff_ownr]", "init: true": "init: [true"}.items():  # fmt: skip
        assert old in text
        file.write_text(text.replace(old, new))
        assert compose("--file", file, "config", "--quiet").returncode, new


def test_hadolint_accepts_the_dockerfile_and_refuses_typos(tmp_path: Path) -> None:
    def lint(file: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BIN / "hadolint", "--no-color", file], capture_output=True, text=True, check=False, timeout=60
        )

    done = lint(CHECKOUT / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")
    text = (CHECKOUT / "Dockerfile").read_text()
    file = tmp_path / "Dockerfile"
    for old, new in {"ENTRYPOINT": "ENTRYPONT", "python:3.13-slim-trixie": "python"}.items():
        file.write_text(text.replace(old, new))
        assert lint(file).returncode, new


def test_no_password_and_no_right_too_many(tmp_path: Path) -> None:
    """What no process of a smoke test would show."""
    resolved = resolve(DOCUMENT, tmp_path)
    ours = {name: each for name, each in resolved["services"].items() if each["image"] == "flowforge"}
    assert set(ours) == {"migrate", "define", "scheduler", "publisher", "worker", "client", "operator"}
    assert [name for name in ours if "build" in ours[name]] == ["migrate"]
    for name, service in resolved["services"].items():
        assert "container_name" not in service, name
        assert "ports" not in service, name
        for key, value in service.get("environment", {}).items():
            assert "password" not in key.lower() or value.startswith("/run/secrets/"), key
            assert not re.search(r"://[^@/]*:|password=", value), key
        if service.get("restart", "no") != "no":
            assert service["healthcheck"]["test"], name
    logins = []
    for name, service in ours.items():
        assert service["init"] is service["read_only"] is True, name
        assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
        [mine] = [each["source"] for each in service["secrets"] if each["source"].startswith("ff_")]
        logins.append(mine)
    assert sorted(logins) == [
        "ff_client", "ff_client", "ff_operator", "ff_owner", "ff_publisher", "ff_scheduler", "ff_worker"
    ]  # fmt: skip
    worker = ours["worker"]
    assert duration(worker["stop_grace_period"]) > float(worker["environment"]["FLOWFORGE_GRACE"])


def test_secrets_are_random_unreadable_by_others_and_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    secrets, other = make_secrets(tmp_path), make_secrets(tmp_path / "other")
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    assert {file.name for file in secrets.iterdir()} == set(DOCUMENT["secrets"])
    for file in secrets.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o444, "the programs in containers are other users"
        found = re.findall(r"[0-9a-f]{48}", file.read_text())
        assert len(found) == 1, file.name
        assert found[0] not in (other / file.name).read_text()
    before = {file: file.read_text() for file in other.iterdir()}
    again = subprocess.run(
        [CHECKOUT / "deploy/secrets.sh", other], capture_output=True, text=True, check=False
    )
    assert again.returncode == 1
    assert "nothing was changed" in again.stderr
    assert before == {file: file.read_text() for file in other.iterdir()}


def test_secrets_stay_out_of_the_repository_and_of_the_image() -> None:
    assert "/secrets/" in (CHECKOUT / ".gitignore").read_text().splitlines()
    ignored, *wanted = (CHECKOUT / ".dockerignore").read_text().splitlines()
    assert ignored == "*"
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (CHECKOUT / "Dockerfile").read_text(), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert {f"!{name}" for name in names} == {each for each in wanted if each.startswith("!")}


def test_the_overrides_and_commands_of_the_guide_fit_the_file(tmp_path: Path) -> None:
    """Compose merges each override; each command names a service and, for ours, a command that exist."""
    guide = (CHECKOUT / "docs/deploying.md").read_text()
    overrides = re.findall(r"^```yaml\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    assert len(overrides) == 3
    for text in overrides:
        file = tmp_path / "compose.override.yaml"
        file.write_text(text)
        done = compose("--file", CHECKOUT / "compose.yaml", "--file", file, "config", "--format", "json")
        assert not done.returncode, done.stderr
        services = json.loads(done.stdout)["services"]
        metrics = "METRICS" in text
        for name in ("scheduler", "publisher", "worker") if metrics else ("define", "worker"):
            environment = services[name]["environment"]
            if metrics:
                config = Config.from_environment(
                    {key: environment[key] for key in environment if "METRICS" in key}
                )
                assert config.metrics_port
                assert config.metrics_host == str(IPv4Address(0)), (
                    "within the container alone none can reach it"
                )
            else:
                assert environment.get("PYTHONPATH") == "/workflows" or services[name]["image"] == "shop"
            assert environment["PGSERVICEFILE"], "what is there already stays"
    commands = cli.list_commands(click.Context(cli))
    workflow = (CHECKOUT / ".github/workflows/test.yml").read_text()
    restoring = (CHECKOUT / "docs/howto/backing-up.md").read_text()
    for text in (guide, workflow, restoring):
        found = re.findall(r"docker compose (run|exec)(?: --rm| -T)* (\w+)(?: (\w+))?", text)
        assert {verb for verb, _, _ in found} == {"run", "exec"}
        for verb, service, argument in found:
            assert service in DOCUMENT["services"], service
            if verb == "run" and argument:
                assert argument in commands, argument
    for name, image in re.findall(r"--scale (\w+)=|docker compose build (\w+)", guide + workflow):
        assert (name or image) in DOCUMENT["services"]


def test_ci_runs_both_pythons_and_real_containers() -> None:
    jobs = yaml.safe_load((CHECKOUT / ".github/workflows/test.yml").read_text())["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.13"]
    steps = {job: "\n".join(step.get("run", "") for step in jobs[job]["steps"]) for job in jobs}
    assert "./dev test" in steps["test"]
    order = ["deploy/secrets.sh", "docker compose up", "--wait", "run --rm -T client trigger", "--wait"]
    assert re.search(".*".join(map(re.escape, order)), steps["compose"], re.DOTALL)
