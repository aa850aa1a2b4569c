"""What compose.yaml describes, run without containers: the very command of each service as a process, with
exactly its environment, on real servers.

Only what a container has to itself is translated: host names of the network, the secrets granted to the
service below /run/secrets, and its tmpfs. PostgreSQL's and RabbitMQ's images are played by servers of the
tests, to which the init script, the settings file and the health checks of the document are given."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from flowforge.config import Config, variable
from tests.services.postgres import PostgresServer, binaries
from tests.services.process import free_port, start_child, wait_until
from tests.services.rabbitmq import RabbitServer

CHECKOUT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PATIENCE = 60.0

Document = dict[str, Any]


class ServiceFailed(Exception):
    """A service does not do what the document says."""

    def __init__(self, service: str, reason: str) -> None:
        super().__init__(f"{service}: {reason}")
        self.service = service


def compose(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Compose without an engine, untouched by the settings of whoever runs the tests."""
    return subprocess.run(
        [BIN / "docker-compose", "--env-file", os.devnull, "--project-directory", CHECKOUT, *arguments],
        env={"PATH": os.defpath, "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def load() -> Document:
    """The document as it stands."""
    document: Document = yaml.safe_load((CHECKOUT / "compose.yaml").read_text())
    return document


def resolve(document: Document, directory: Path) -> Document:
    """The document as Compose understands it: variables and short forms replaced, the default profile and all
    others. Raises ValueError with its complaint."""
    file = directory / "compose.yaml"
    file.write_text(yaml.safe_dump(document))
    done = compose("--file", file, "--profile", "*", "config", "--format", "json")
    if done.returncode:
        raise ValueError(done.stderr)
    resolved: Document = json.loads(done.stdout.replace("$$", "$"))
    return resolved


def make_secrets(directory: Path) -> Path:
    """The secrets, as the documented script makes them."""
    secrets = directory / "secrets"
    subprocess.run([CHECKOUT / "deploy/secrets.sh", secrets], check=True)
    return secrets


class Servers:
    """The servers that play the images of one composition after the other, and the secrets of all; a context
    manager. The broker's only login is that of the secrets."""

    def __init__(self, directory: Path) -> None:
        self.secrets = make_secrets(directory)
        self.postgres = PostgresServer(*binaries(load()["services"]["postgres"]["image"].partition(":")[2]))
        self.broker = RabbitServer((self.secrets / "rabbitmq.conf").read_text())
        # A check takes the broker's tools a second, and it is the same broker for all.
        self.answered: set[tuple[str, ...]] = set()

    def __enter__(self) -> Self:
        try:
            self.postgres.start()
            self.broker.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.postgres.remove()
        self.broker.remove()

    def clear(self) -> None:
        """Make the database server as new: its first start is part of what is tested."""
        with self.postgres.connect() as connection:
            databases = "select datname from pg_database where datname !~ '^(postgres|template.)$'"
            for (name,) in connection.execute(databases).fetchall():
                self.postgres.drop_database(name)
            for (role,) in connection.execute("select rolname from pg_roles where oid >= 16384").fetchall():
                connection.execute(f"drop role {role}".encode())


class Composition:
    """One deployment; leaving the block kills what still runs.

    `late`: the service that starts after all others that may start without it, since nobody promises an order
    that depends_on does not. `patience`: seconds that a service has to become healthy or end, PATIENCE unless
    given.
    """

    def __init__(
        self,
        document: Document,
        directory: Path,
        servers: Servers,
        *,
        late: str = "",
        patience: Mapping[str, float] | None = None,
    ) -> None:
        self._resolved = resolve(document, directory)
        self.services: dict[str, Document] = self._resolved["services"]
        self._directory, self._servers = directory, servers
        self._late, self._patience = late, patience or {}
        self._state: dict[str, str] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # The servers run already, as starting them takes long: nobody may reach them before their turn.
        self._ports = {"postgres": free_port(), "rabbitmq": free_port()}
        for name in self.services:
            (directory / name / "secrets").mkdir(parents=True)
            for each in self.services[name].get("secrets", []):
                if Path(each["target"]).parent == Path("/run/secrets"):
                    target = directory / name / "secrets" / Path(each["target"]).name
                    target.symlink_to(self._secret(each["source"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._servers.clear()

    # -- what is done to it

    def up(self) -> None:
        """Start every service without a profile as soon as its conditions hold, one after the other, and wait
        until it is healthy or, without a restart policy, has ended well."""
        waiting = [name for name, service in self.services.items() if not service.get("profiles")]
        while waiting:
            ready = [name for name in waiting if self._may_start(name)]
            if not ready:
                raise ServiceFailed(waiting[0], "what it waits for never happens")
            name = [each for each in ready if each != self._late or len(ready) == 1][-1]
            waiting.remove(name)
            self._start(name)

    def run(self, service: str, *arguments: str) -> str:
        """What `docker compose run` does, in the place of the service's command; its output."""
        done = subprocess.run(
            self._command(service, list(arguments)),
            env=self._environment(service),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * PATIENCE,
        )
        if done.returncode:
            raise ServiceFailed(service, f"exit code {done.returncode} of {arguments}\n{done.stderr[-2000:]}")
        return done.stdout

    def smoke(self) -> dict[str, Any]:
        """All of it: up, a run of the demo's workflow as the client's login, the operator's commands, still
        healthy, down in order.

        Returns the outputs of the run. Raises ServiceFailed.
        """
        self.up()
        tree = self._directory / "tree"
        tree.mkdir()
        (tree / "module.py").write_text("def function():\n    return 1\n")
        limit = f"{self._patience.get('client', PATIENCE)}s"
        value = json.dumps({"root": str(tree), "title": "Smoke"})
        answer = self.run(
            "client", "trigger", "stdlib_census", "--input", value, "--wait", "--timeout", limit, "--json"
        )
        if not any(consumers for _, _, consumers in self._servers.broker.queues().values()):
            raise ServiceFailed("worker", "takes nothing from RabbitMQ")
        self.run("operator", "doctor")
        for command in (
            ["runs"],
            ["pause", "default"],
            ["resume", "default"],
            ["prune", "--older-than", "1d"],
        ):
            self.run("operator", *command)
        for name, state in self._state.items():
            if state == "healthy" and not self._is_healthy(name):
                raise ServiceFailed(name, f"is not healthy any more\n{self.log(name)}")
        self.down()
        outputs: dict[str, Any] = json.loads(answer)["outputs"]
        return outputs

    def down(self) -> None:
        """Ask each to stop, the last that started first, as Compose does.

        Raises ServiceFailed for one that does not end in order within its stop_grace_period.
        """
        for name, process in reversed(self._processes.items()):
            if process.poll() is not None:
                continue
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(duration(self.services[name]["stop_grace_period"]))
            except subprocess.TimeoutExpired:
                raise ServiceFailed(name, "did not stop in its stop_grace_period") from None
            if code:
                raise ServiceFailed(name, f"exit code {code} when stopped\n{self.log(name)}")

    def log(self, name: str) -> str:
        """The end of what the service wrote."""
        return (self._directory / name / "log").read_text()[-3000:]

    # -- starting

    def _secret(self, name: str) -> Path:
        file = Path(self._resolved["secrets"][name]["file"])
        return self._servers.secrets / file.relative_to(CHECKOUT / "secrets")

    def _may_start(self, name: str) -> bool:
        wanted = {"service_healthy": "healthy", "service_completed_successfully": "completed"}
        conditions = self.services[name].get("depends_on", {})
        return all(
            self._state.get(each) == wanted[how["condition"]] for each, how in conditions.items()
        )  # a condition that is not known here fails loudly

    def _start(self, name: str) -> None:
        service = self.services[name]
        if name == "postgres":
            self._start_postgres()
        elif name == "rabbitmq":
            self._start_rabbitmq()
        else:
            known = {variable(each) for each in dataclasses.fields(Config)}
            for key in service.get("environment", {}):
                if key.startswith("FLOWFORGE_") and key not in known:
                    raise ServiceFailed(name, f"there is no setting {key}")
            self._processes[name] = start_child(
                self._command(name, service["command"]),
                log=self._directory / name / "log",
                env=self._environment(name),
                death_signal=signal.SIGKILL,
            )
        ends = service.get("restart", "no") == "no"
        try:
            wait_until(
                lambda: self._has_ended(name) if ends else self._is_healthy(name),
                "it to end" if ends else "its health check to succeed",
                self._patience.get(name, PATIENCE),
            )
        except TimeoutError as error:
            log = self.log(name) if name in self._processes else ""
            raise ServiceFailed(name, f"{error}\n{log}") from None
        self._state[name] = "completed" if ends else "healthy"

    def _start_postgres(self) -> None:
        """What the image does with an empty data directory: the password, the database, the scripts."""
        service, server = self.services["postgres"], self._servers.postgres
        environment = self._environment("postgres")
        password = Path(environment["POSTGRES_PASSWORD_FILE"]).read_text()
        with server.connect() as connection:
            connection.execute(f"alter role postgres password '{password}'".encode())
        server.create_database(environment["POSTGRES_DB"])
        for volume in service.get("volumes", []):
            if not volume["target"].startswith("/docker-entrypoint-initdb.d/"):
                continue
            source = Path(volume["source"])
            script = self._directory / "postgres" / Path(volume["target"]).name
            script.write_text(self._translate("postgres", source.read_text()))
            script.chmod(source.stat().st_mode)
            done = subprocess.run(
                [script], env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE
            )
            if done.returncode:
                raise ServiceFailed("postgres", f"{script.name}: {done.stderr}")
        self._ports["postgres"] = server.port

    def _start_rabbitmq(self) -> None:
        """What the image does with its settings: the running broker has those of the unbroken document."""
        files = [
            self._secret(each["source"]).read_text()
            for each in self.services["rabbitmq"].get("secrets", [])
            if re.fullmatch(r"/etc/rabbitmq/conf\.d/[^/]+\.conf", each["target"])
        ]
        has = (self._servers.broker.directory / "rabbitmq.conf").read_text()
        if not files or not all(file in has for file in files):
            raise ServiceFailed("rabbitmq", "nothing makes its login")
        self._ports["rabbitmq"] = self._servers.broker.port

    # -- translation

    def _translate(self, name: str, text: str) -> str:
        own = self._directory / name
        for place in self.services[name].get("tmpfs", []):
            if text.startswith(f"{place}/"):
                text = str(own / text.removeprefix(f"{place}/"))
        for host, port in self._ports.items():
            text = re.sub(rf"@{host}(:\d+)?/", f"@127.0.0.1:{port}/", text)
        return text.replace("/run/secrets", str(own / "secrets"))

    def _environment(self, name: str) -> dict[str, str]:
        given = self.services[name].get("environment", {})
        environment = {key: self._translate(name, str(value)) for key, value in given.items()}
        if name == "postgres":
            server = self._servers.postgres
            return {
                **environment,
                "PATH": f"{server.programs}{os.pathsep}{os.defpath}",
                "PGHOST": server.host,
                "PGPORT": str(server.port),
            }
        if name == "rabbitmq":
            broker = self._servers.broker
            return {**broker._env, **environment, "PATH": f"{broker._programs}:{broker._env['PATH']}"}
        return {"PATH": f"{BIN}{os.pathsep}{os.defpath}", **environment}

    def _command(self, name: str, arguments: list[str]) -> list[str]:
        entrypoint = self.services[name].get("entrypoint") or image_entrypoint()
        program, *rest = [self._translate(name, each) for each in [*entrypoint, *arguments]]
        found = shutil.which(program, path=self._environment(name)["PATH"])
        if found is None:
            raise ServiceFailed(name, f"there is no program {program}")
        return [found, *rest]

    # -- how it is

    def _has_ended(self, name: str) -> bool:
        code = self._processes[name].poll()
        if code:
            raise ServiceFailed(name, f"exit code {code}\n{self.log(name)}")
        return code is not None

    def _is_healthy(self, name: str) -> bool:
        process = self._processes.get(name)
        if process is not None and process.poll() is not None:
            raise ServiceFailed(name, f"ended with exit code {process.poll()}\n{self.log(name)}")
        check = self.services[name].get("healthcheck", {})
        kind, *command = check.get("test", ["NONE"])
        if kind not in ("CMD", "CMD-SHELL"):
            raise ServiceFailed(name, "has no health check")
        environment = self._environment(name)
        if kind == "CMD-SHELL":
            command = ["/bin/sh", "-c", *command]
        if (name, *command) in self._servers.answered:
            return True
        program = shutil.which(command[0], path=environment["PATH"])
        if program is None:
            raise ServiceFailed(name, f"there is no program {command[0]}")
        done = subprocess.run(
            [program, *command[1:]],
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=PATIENCE,
            start_new_session=True,
        )
        if name == "rabbitmq" and not done.returncode:
            self._servers.answered.add((name, *command))
        return done.returncode == 0


def image_entrypoint() -> list[str]:
    """The entry point of the image."""
    (line,) = re.findall(r"^ENTRYPOINT (.+)$", (CHECKOUT / "Dockerfile").read_text(), re.MULTILINE)
    return [str(each) for each in json.loads(line)]


def duration(text: str) -> float:
    """Compose's way to write a length of time, as in 1m30s, in seconds."""
    units = {"h": 3600, "m": 60, "s": 1}
    return float(sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", text)))
