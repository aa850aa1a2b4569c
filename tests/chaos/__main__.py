"""The fault laboratory: a cluster of real processes under a seeded load and seeded faults, and an account of
what became of every run; docs/chaos.md says how. Exit code 0: every claim held; 1: not; 2: wrong use."""

import argparse
import json
import random
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tests.chaos import account, strike
from tests.chaos.cluster import ROLES, Cluster, cluster
from tests.chaos.evidence import gather
from tests.chaos.faults import KINDS, Fault, drawn
from tests.chaos.judge import Verdict, judge
from tests.chaos.load import Load
from tests.services.debian import CHECKOUT
from tests.services.postgres import Connection
from tests.services.process import Scratch
from tests.sql.instrument import FUNCTIONS
from tests.sql.mutants import MUTANTS

PER_MINUTE = 12
"""Faults of a minute, unless told otherwise."""

_DRAWN = {"minutes": 10.0, "faults": None, "kinds": None, "rate": 5.0, "mistake": None, "pg": "18"}
"""The options that say what is run, with their defaults."""

FAULTS_LIMIT = 300.0
"""Seconds that faults may go on after their time: a slow machine takes 40 to start a broker."""

QUIET_LIMIT = 180.0
"""Seconds in which everything under way has to end once nothing is broken any more."""


def say(text: str) -> None:
    sys.stderr.write(f"chaos: {text}\n")
    sys.stderr.flush()


class Laboratory:
    """One run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.seed: int = options.seed
        self.seconds = 60.0 * options.minutes
        self.per_second: float = options.rate
        count = round(PER_MINUTE * options.minutes) if options.faults is None else options.faults
        kinds = options.kinds.split(",") if options.kinds else None
        self.faults = drawn(self.seed, self.seconds, count, kinds) if count else []
        draw = random.Random(f"circumstances/{self.seed}")
        self.holds_snapshot = draw.random() < 0.5
        self.deaf = frozenset(
            role.name for role in ROLES if role.name in ("scheduler-2", "worker-4") and draw.random() < 0.5
        )
        self.version: str = options.pg
        self.mistake = next((each for each in MUTANTS if each.name == options.mistake), None)
        self.command = command_of(options)

    @property
    def extras(self) -> dict[str, str]:
        return {
            "a transaction open all the time": "yes" if self.holds_snapshot else "no",
            "daemons that hear no NOTIFY": ", ".join(sorted(self.deaf)) or "none",
        }

    def run(self, directory: Path) -> tuple[Verdict, dict[str, Any]]:
        with cluster(directory, self.version, self.deaf) as running:
            if self.mistake is not None:
                with running.pair.connect() as connection:
                    connection.execute(
                        self.mistake.apply((FUNCTIONS / self.mistake.file).read_text()).encode()
                    )
            self._until(running, lambda: running.pair.following, 60)
            load = Load(running.dsn(running.client_link), self.seed, self.per_second)
            load.start()
            began = time.monotonic()
            say(f"under load; {len(self.faults)} faults in {self.seconds:.0f} s")
            snapshot = _Snapshot(running) if self.holds_snapshot else None
            self._break(running, began, snapshot)
            self._calm(running, load, began)
            exits = running.stop_daemons()
            evidence = gather(running, self.seed, began, load.runs, self.faults)
            verdict = judge(evidence)
            if load.error is not None:
                verdict.against["lost"].append(f"the client broke down: {load.error!r}")
            verdict.against["stuck"] += [
                f"{name} ended with exit code {code}" for name, code in exits.items() if code not in (0, None)
            ]
            around = account.Circumstances(
                self.command, self.seconds, self._postgresql(running),
                running.broker.ctl("version").strip(), self.extras,
            )  # fmt: skip
            return verdict, account.account(evidence, verdict, around, load.counts)

    def _postgresql(self, running: Cluster) -> str:
        return str(running.pair.ask("show server_version")[0][0])

    def _break(self, running: Cluster, began: float, snapshot: "_Snapshot | None") -> None:
        left, busy = list(self.faults), dict[str, Fault]()
        while left or busy or time.monotonic() < began + self.seconds:
            running.look()
            busy = {target: fault for target, fault in busy.items() if fault.ended is None}
            now = time.monotonic() - began
            for fault in [each for each in left if each.at <= now and each.target not in busy]:
                left.remove(fault)
                busy[fault.target] = fault
                say(f"{now:6.1f} s: {fault.kind} ({fault.target}) {fault.detail or ''}")
                running.loop.start(strike.strike(running, fault), _not_done(fault))
            if snapshot is not None:
                snapshot.keep()
            if now > self.seconds + FAULTS_LIMIT:
                names = ", ".join(f"{fault.kind} ({fault.target})" for fault in busy.values())
                raise TimeoutError(f"faults do not end: {names}")
            time.sleep(0.02)

    def _calm(self, running: Cluster, load: Load, began: float) -> None:
        """Nothing is broken any more: everything has to end."""
        say(
            f"{time.monotonic() - began:6.1f} s: no more faults; waiting for the end of {len(load.runs)} runs"
        )
        running.heal()
        load.end()
        try:
            self._until(running, lambda: not load.is_alive(), QUIET_LIMIT)
            ended = running.loop.repeat(
                0.3,
                lambda: (
                    running.pair.ask("select count(*) from flowforge.run where finished_at is null") == [(0,)]
                ),
            )
            self._until(running, ended, QUIET_LIMIT)
        except TimeoutError:
            load.abandon()
            load.join(10)
        say(f"{time.monotonic() - began:6.1f} s: checking")

    def _until(self, running: Cluster, condition: Callable[[], bool], limit: float) -> None:
        until = time.monotonic() + limit
        while not condition():
            running.look()
            if time.monotonic() > until:
                raise TimeoutError(f"waited {limit:g} s in vain")
            time.sleep(0.02)


class _Snapshot:
    """A transaction that is open all the time, so that no dead row can be taken away."""

    def __init__(self, running: Cluster) -> None:
        self._running, self._next = running, 0.0
        self._connection: Connection | None = None

    def keep(self) -> None:
        """Begin it, and again where its server has gone."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 1
        self._running.loop.background(self._look)

    def _look(self) -> None:
        if self._connection is None or self._connection.closed or self._connection.broken:
            connection = self._running.pair.connect(autocommit=False)
            connection.execute("set transaction isolation level repeatable read")
            connection.execute("select count(*) from flowforge.run")
            self._connection = connection


def _not_done(fault: Fault) -> Callable[[Exception], None]:
    def note(error: Exception) -> None:
        fault.result = f"not done: {type(error).__name__}: {error}"[:200].replace("\n", " ")
        say(f"  {fault.kind} ({fault.target}): {fault.result}")

    return note


def command_of(options: argparse.Namespace) -> str:
    """The command that draws the same again."""
    given = {name: getattr(options, name) for name in ("seed", *_DRAWN)}
    words = [
        word
        for name, value in given.items()
        if value is not None and value != _DRAWN.get(name)
        for word in (f"--{name}", f"{value:g}" if isinstance(value, float) else str(value))
    ]
    return "./dev chaos " + shlex.join(words)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev chaos", description=__doc__, allow_abbrev=False)
    parser.add_argument("--seed", type=int, help="draws the load and the faults")
    parser.add_argument("--minutes", type=float, help="how long there are faults (default: 10)")
    parser.add_argument("--faults", type=int, help=f"how many (default: {PER_MINUTE} for each minute)")
    parser.add_argument("--kinds", help="only these kinds of faults, comma separated; see --list")
    parser.add_argument("--rate", type=float, help="runs triggered in a second (default: 5)")
    parser.add_argument(
        "--mistake",
        choices=[mutant.name for mutant in MUTANTS],
        metavar="NAME",
        help="put one of the mistakes of tests/sql/mistakes into the functions: is it found?",
    )
    parser.add_argument("--pg", help="PostgreSQL: 18, 15 or a directory (default: 18)")
    parser.add_argument("--plan", action="store_true", help="print the schedule of faults, and do nothing")
    parser.add_argument("--list", action="store_true", help="print the kinds of faults, and do nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the account there as JSON")
    parser.add_argument("--write", action="store_true", help="write it to docs/chaos/seed-N.md")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and the witness there")
    parser.set_defaults(**_DRAWN)
    options = parser.parse_args(arguments)
    if options.seed is None and not options.list:
        parser.error("--seed is needed")
    if unknown := [kind for kind in (options.kinds or "").split(",") if kind and kind not in KINDS]:
        parser.error(f"no such kind: {', '.join(unknown)}; see --list")
    if options.minutes <= 0 or options.rate <= 0:
        parser.error("--minutes and --rate must be more than 0")
    return options


def main(arguments: list[str]) -> int:
    options = parsed(arguments)
    if options.list:
        sys.stdout.write("".join(f"{kind.name}: {', '.join(kind.targets)}\n" for kind in KINDS.values()))
        return 0
    laboratory = Laboratory(options)
    if options.plan:
        for fault in laboratory.faults:
            sys.stdout.write(json.dumps(fault.plan()) + "\n")
        return 0
    signal.signal(signal.SIGTERM, _interrupted)
    scratch = None if options.keep else Scratch("chaos")
    directory = options.keep or (scratch.path if scratch else Path(tempfile.gettempdir()))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        verdict, found = laboratory.run(directory.absolute())
    finally:
        if scratch is not None:
            scratch.remove()
    sys.stdout.write(account.summary(found, verdict) + "\n")
    if options.json:
        options.json.write_text(json.dumps({**found, "found": verdict.against}, indent=1) + "\n")
    if options.write:
        target = CHECKOUT / "docs" / "chaos" / f"seed-{options.seed}.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text(account.page(found))
    if not verdict.holds:
        sys.stdout.write(f"NOT every claim held. Again: {laboratory.command}\n")
        return 1
    sys.stdout.write("every claim held\n")
    return 0


def _interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        say("interrupted; all is stopped")
        sys.exit(130)
