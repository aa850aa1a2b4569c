"""A private RabbitMQ broker, or the running one that FLOWFORGE_TEST_AMQP_URL names."""

import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import pika
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import AMQPConnectionError, ChannelClosedByBroker

from tests.services import debian
from tests.services.process import Scratch, accepts_connections, free_port, kill_tree, start_child, wait_until

CONFIGURATION = """\
listeners.tcp.1 = 127.0.0.1:{port}
default_user = flowforge
default_pass = {password}
loopback_users = none
log.file.level = info
"""

ERLANG_ARGUMENTS = " ".join(
    [
        "-noinput",
        # One scheduler that never spins: a broker for tests shares a small machine with what it serves.
        "+S 1:1 +sbwt none +sbwtdcpu none +sbwtdio none",
        "-kernel inet_dist_use_interface {127,0,0,1}",
        # Quorum queues report their counts to rabbitmqctl so often (milliseconds); 5000 by default.
        "-rabbit quorum_tick_interval 200",
    ]
)


class Broker:
    """What tests do to a broker over AMQP. `url` is what the product gets."""

    def __init__(self, url: str) -> None:
        self.url = url

    @contextlib.contextmanager
    def channel(self) -> Iterator[BlockingChannel]:
        """A channel on a connection of its own."""
        connection: BlockingConnection = BlockingConnection(pika.URLParameters(self.url))
        try:
            yield connection.channel()
        finally:
            with contextlib.suppress(AMQPConnectionError):
                if connection.is_open:
                    connection.close()

    def declare(self, queue: str, *, durable: bool = True, arguments: dict[str, Any] | None = None) -> None:
        """Declare a queue (quorum unless the arguments say otherwise)."""
        arguments = {"x-queue-type": "quorum"} if arguments is None else arguments
        with self.channel() as channel:
            channel.queue_declare(queue, durable=durable, arguments=arguments)

    def delete_queue(self, queue: str) -> None:
        """Delete a queue with all it holds; one that does not exist is no error."""
        with self.channel() as channel:
            channel.queue_delete(queue)

    def delete_namespace(self, namespace: str) -> None:
        """Delete the queues whose names begin so; somebody else's broker cannot be asked and keeps them."""

    def purge(self, queue: str) -> int:
        """Throw away the messages of a queue that nobody has been given yet; how many they were."""
        with self.channel() as channel:
            purged: int = channel.queue_purge(queue).method.message_count
            return purged

    def counts(self, queue: str) -> tuple[int, int] | None:
        """Messages waiting in a queue (not those given out) and its consumers; None: no such queue."""
        try:
            with self.channel() as channel:
                answer = channel.queue_declare(queue, passive=True).method
        except ChannelClosedByBroker as error:
            if error.reply_code == 404:
                return None
            raise
        return answer.message_count, answer.consumer_count


class RabbitServer(Broker):
    """One broker with its own node, ports, home and data in a temporary directory; a context manager.

    `configuration` is added to its rabbitmq.conf.
    """

    def __init__(self, configuration: str = "") -> None:
        root = debian.unpacked("rabbitmq")
        (self._programs,) = root.glob("usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin")
        self._epmd_program = root / "usr/lib/erlang/bin/epmd"
        self.port, distribution_port, self._epmd_port = free_port(), free_port(), free_port()
        password = secrets.token_hex(8)
        super().__init__(f"amqp://flowforge:{password}@127.0.0.1:{self.port}/%2F")
        self._scratch = Scratch("mq")
        self.directory = self._scratch.path
        (self.directory / "plugins").write_text("[].\n")
        (self.directory / "rabbitmq.conf").write_text(
            CONFIGURATION.format(port=self.port, password=password) + configuration
        )
        self._output = self.directory / "output"
        self._env = {
            k: v for k, v in os.environ.items() if not k.startswith(("RABBITMQ_", "ERL_", "NOTIFY_"))
        }
        self._env |= {
            "PATH": f"{root / 'usr/lib/erlang/bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "LD_LIBRARY_PATH": debian.library_path(root),
            "LC_ALL": "C.UTF-8",
            "HOME": str(self.directory),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"flowforge{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(distribution_port),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_CONFIG_FILE": str(self.directory / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.directory / "data"),
            "RABBITMQ_LOG_BASE": str(self.directory / "log"),
            # The start script then becomes the broker instead of watching it, so that the broker is our
            # child.
            "RABBITMQ_ALLOW_INPUT": "1",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": ERLANG_ARGUMENTS,
        }
        self.process: subprocess.Popen[bytes] | None = None
        self._epmd: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def start(self) -> None:
        """Start the broker; return when it accepts connections, or raise RuntimeError with its output.

        To be called from the main thread: the broker ends with the thread that started it.
        """
        process = self.launch()
        try:
            wait_until(
                lambda: process.poll() is not None or accepts_connections(self.port), "RabbitMQ's start", 120
            )
            ended = process.poll() is not None
        except TimeoutError:
            self.kill()
            ended = True
        if ended:
            raise RuntimeError(f"RabbitMQ did not start; the end of its output:\n{self.log()[-4000:]}")

    def launch(self) -> subprocess.Popen[bytes]:
        """As `start`, without waiting for the broker."""
        if self._epmd is None or self._epmd.poll() is not None:
            # Started here, or the broker would start one that stays for ever.
            self._epmd = self._child([str(self._epmd_program), "-port", str(self._epmd_port)])
            wait_until(lambda: accepts_connections(self._epmd_port), "epmd's start")
        self.process = self._child([str(self._programs / "rabbitmq-server")])
        return self.process

    def _child(self, command: list[str]) -> subprocess.Popen[bytes]:
        return start_child(command, log=self._output, env=self._env, death_signal=signal.SIGKILL)

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """Stop the broker in order; what is durable stays."""
        if self.process is not None and self.is_running():
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """SIGKILL the broker. Confirmed messages stay, unless their queue was made less than a second ago."""
        if self.process is not None and self.is_running():
            kill_tree(self.process)

    def restart(self) -> None:
        """Stop in order and start again on the same port."""
        self.stop()
        self.start()

    def remove(self) -> None:
        """Kill the broker and its epmd, and delete its data."""
        self.kill()
        if self._epmd is not None and self._epmd.poll() is None:
            kill_tree(self._epmd)
        self._scratch.remove()

    def log(self) -> str:
        """What the broker printed and logged."""
        files = [self._output, *sorted((self.directory / "log").glob("*.log"))]
        return "".join(file.read_text(errors="replace") for file in files if file.exists())

    def ctl(self, *arguments: str) -> str:
        """Run rabbitmqctl (a third of a second) and return its output; RuntimeError with its message."""
        done = subprocess.run(
            [self._programs / "rabbitmqctl", "--quiet", *arguments],
            env=self._env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            start_new_session=True,  # Erlang answers Ctrl-C with a menu, and waits for a choice
        )
        if done.returncode:
            raise RuntimeError(f"rabbitmqctl {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    def stop_app(self) -> None:
        """Stop the broker application; its Erlang node stays. Connections are closed and refused."""
        self.ctl("stop_app")

    def start_app(self) -> None:
        self.ctl("start_app")

    def queues(self) -> dict[str, tuple[int, int, int]]:
        """For each queue: messages waiting, messages given out and not acknowledged, consumers.

        The counts of quorum queues are up to 200 ms old; `counts` is always of now.
        """
        columns = ("name", "messages_ready", "messages_unacknowledged", "consumers")
        lines = self.ctl("list_queues", "--no-table-headers", *columns).splitlines()
        rows = [line.split("\t") for line in lines if line.strip()]
        return {name: (int(ready), int(given), int(consumers)) for name, ready, given, consumers in rows}

    def delete_namespace(self, namespace: str) -> None:
        if not self.is_running():  # queues come back with it
            self.start()
        self.ctl(
            "eval",
            f'Ours = <<"{namespace}">>,'
            "[rabbit_amqqueue:delete(Q, false, false, <<>>) || Q <- rabbit_amqqueue:list(),"
            " binary:longest_common_prefix([element(4, amqqueue:get_name(Q)), Ours]) == size(Ours)].",
        )

    def set_policy(self, name: str, pattern: str, definition: str) -> None:
        """Lay a policy (JSON) on the queues whose name matches the pattern."""
        self.ctl("set_policy", "--apply-to", "queues", name, pattern, definition)

    def clear_policy(self, name: str) -> None:
        self.ctl("clear_policy", name)

    def set_memory_watermark(self, fraction: float) -> None:
        """0 raises the memory alarm, which blocks all that publish, and returns once they know; 0.4 is the
        default."""
        self.ctl("set_vm_memory_high_watermark", str(fraction))
        if fraction == 0:
            listed = "list_connections", "--no-table-headers", "state"
            running = {"running", "flow"}
            wait_until(lambda: running.isdisjoint(self.ctl(*listed).split()), "connections to be blocked")

    def close_connections(self, reason: str) -> None:
        """Close every client's connection from the broker's side."""
        self.ctl("close_all_connections", reason)


@contextlib.contextmanager
def broker() -> Iterator[Broker]:
    """The broker for the tests: the one FLOWFORGE_TEST_AMQP_URL names, or a private one."""
    if url := os.environ.get("FLOWFORGE_TEST_AMQP_URL"):
        yield Broker(url)
    else:
        with RabbitServer() as server:
            yield server
