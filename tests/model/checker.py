"""Checks the model of the protocol with spin, which writes a program that visits every state, and tcc, which
compiles that at once.

./dev run python -m tests.model.checker -DFAULTS=2 -DMISTAKE_NO_REDISPATCH tells what is violated, and how;
with -DLIVENESS it looks for what goes on for ever. docs/model.md explains the model, and its bounds.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.services import debian

HERE = Path(__file__).parent
SOURCES = [HERE / name for name in ("protocol.pml", "functions.pml", "processes.pml")]
LIVENESS = "-DLIVENESS"


@dataclass(frozen=True)
class Answer:
    """What a search found."""

    violated: str  # a property's name, or "" for none
    states: int
    trace: str  # the steps that lead to the violation, each with what it changed


def properties() -> set[str]:
    """The names that protocol.pml gives to what must hold."""
    source = SOURCES[0].read_text()
    names = source[
        source.index("one_execution_for_each_token") : source.index(";", source.index("hidden byte"))
    ]
    return set(re.findall(r"\w+", names))


@dataclass(frozen=True)
class _Tools:
    spin: str
    preprocessor: str
    compiler: list[str]
    libraries: list[str]


def _tools() -> _Tools:
    if given := os.environ.get(debian.INSTEAD["spin"][0]):
        tcc = f"{given}/tcc"
        return _Tools(f"{given}/spin", f"{tcc} -E -x c", [tcc], [])
    spin = debian.found("spin", "usr/bin/spin")
    usr = spin.parents[1]
    tcc = str(usr / "bin/tcc")
    (own,) = usr.glob("lib/*/tcc")
    lib = own.parent
    includes = [f"-I{path}" for path in (own / "include", usr / "include" / lib.name, usr / "include")]
    # Named one by one: what is found by itself is the system's, which may have none of these.
    start, end = [str(lib / "crt1.o"), str(lib / "crti.o")], str(lib / "crtn.o")
    c_library = [f"/lib/{lib.name}/libc.so.6", str(lib / "libc_nonshared.a"), str(own / "libtcc1.a")]
    return _Tools(
        str(spin),
        f"{tcc} -E -x c",
        [tcc, f"-B{own}", "-nostdinc", "-nostdlib", *includes, *start],
        [*c_library, end],
    )


def _run(command: Sequence[str], directory: str) -> str:
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}")
    return done.stdout


def check(*defines: str) -> Answer:
    """Search all states of the model with these definitions; for cycles, under fairness, with LIVENESS.

    Raises RuntimeError when the search is not exhaustive, unless a violation ended it.
    """
    tools = _tools()
    with tempfile.TemporaryDirectory(prefix="flowforge-model-") as directory:
        for source in SOURCES:
            shutil.copy(source, directory)
        spin = [tools.spin, f"-P{tools.preprocessor}", *defines]
        _run([*spin, "-a", "protocol.pml"], directory)
        kind, search = ["-DSAFETY", "-DNOFAIR"], []
        if LIVENESS in defines:
            kind, search = ["-DNFAIR=4"], ["-a", "-f"]  # NFAIR: for up to 14 processes
        _run([*tools.compiler, *kind, "-o", "pan", "pan.c", *tools.libraries], directory)
        # -m: the deepest path, far beyond any of the model; -w: 2 ** 22 slots in the table of states.
        told = _run(["./pan", *search, "-m100000", "-w22"], directory)
        counted = re.search(r"^ *(\d+) states, stored", told, re.MULTILINE)
        if counted is None:
            raise RuntimeError(told)
        states = int(counted[1])
        if found := re.search(r"^pan:1: (.*)", told, re.MULTILINE):
            trace = _run([*spin, "-t", "-p", "-g", "protocol.pml"], directory)
            return Answer(_property(found[1]), states, "\n".join(_steps(trace)))
    if not re.search(r"errors: 0$", told, re.MULTILINE) or "not completed" in told or "too small" in told:
        raise RuntimeError(told)
    return Answer("", states, "")


def _property(message: str) -> str:
    if message.startswith("acceptance cycle"):
        return "every_task_run_ends"
    (named,) = ({*properties(), "within_the_bounds"}).intersection(re.findall(r"\w+", message))
    return named


def _steps(trace: str) -> Iterator[str]:
    """One line for each step: who, where, and which variables it changed."""
    values: dict[str, str] = {}
    changed: dict[str, str] = {}
    step = where = ""
    steps, _, _ = trace.partition("#processes:")  # what follows is the last state
    for line in [*steps.splitlines(), "0: proc 0 (end:1) end:0 "]:
        if begins := re.match(r" *(\d+):\s+proc +\d+ \((\w+):\d+\) ([\w.]+:\d+) ", line):
            if begins[1] != step:
                if changed:
                    yield f"{step:>4} {where}: {', '.join(map(' = '.join, changed.items()))}"
                step, where, changed = begins[1], f"{begins[2]} ({begins[3]})", {}
        elif sets := re.match(r"\s+([\w\[\]]+) = (\w+)$", line):
            name, value = sets.groups()
            if values.get(name, "0") != value and name not in ("i", "found", "sees"):
                changed[name] = value
            values[name] = value
        elif "START OF CYCLE" in line:
            yield "     from here on again and again:"


if __name__ == "__main__":
    answer = check(*sys.argv[1:])
    told = f"{answer.violated or 'all properties hold'}; {answer.states} states"
    sys.stdout.write("\n".join(filter(None, [answer.trace, told])) + "\n")
