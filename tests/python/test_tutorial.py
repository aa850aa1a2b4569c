"""The tutorial, followed word by word: each file written, each line typed into a terminal, in the order of
the page, by somebody who has nothing but Python; and what the page shows is what is seen."""

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.services.process import kill_tree, wait_until

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/tutorial.md").read_text()
BLOCKS = re.findall(r"^```(console \d|python)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)

# What a reader does again until it shows what the page shows.
LOOKS = ("flowforge show ",)
STAYS = ("flowforge up",)
READY = "<<ready>> "
SHELL = "import pty; pty.spawn(['bash', '--norc', '--noprofile', '--noediting'])"


class Terminal:
    """A shell on a terminal of 110 columns."""

    def __init__(self, home: Path, environment: dict[str, str]) -> None:
        self._home, self._text, self._seen = str(home), "", 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", SHELL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=home,
            env={**environment, "PS1": READY},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._send("stty -echo rows 50 cols 110\n")
        self.wait(lambda: self._text.endswith(READY), "a prompt")
        self.run("true")

    def _read(self) -> None:
        assert self._process.stdout is not None
        while data := os.read(self._process.stdout.fileno(), 65536):
            self._text += data.decode(errors="replace")

    def _send(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        try:
            wait_until(condition, what, 120)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.seen}") from None

    @property
    def seen(self) -> str:
        """What has appeared since the last line was typed, for a reader who lives in /home/ann."""
        text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", self._text[self._seen :])
        return text.replace(self._home, "/home/ann")

    def run(self, command: str) -> None:
        """Type a line, and wait until the next can be typed, unless the command stays."""
        self._seen = len(self._text)
        if command == "^C":
            self._send("\x03")
        else:
            self._send(f"{command}\n")
        if not command.startswith(STAYS):
            self.wait(lambda: self._text[self._seen :].endswith(READY), f"the end of {command!r}")

    def expect(self, command: str, shown: list[str]) -> None:
        """That each line that the page shows has appeared, or appears yet."""
        looks = 0
        while left := [line for line in shown if not re.search(loosened(line), self.seen)]:
            looks += 1
            again = command.startswith(LOOKS) and looks < 100
            stays = command.startswith(STAYS) and looks == 1
            assert again or stays, f"{command!r} did not show {left}, but:\n{self.seen}"
            if again:
                self.run(command)
            else:
                self.wait(lambda: re.search(loosened(shown[-1]), self.seen) is not None, shown[-1])

    def close(self) -> None:
        kill_tree(self._process)
        self._reader.join()
        with self._process:  # closes the pipes
            pass


def loosened(line: str) -> str:
    """A pattern of a line: whatever the numbers, the places and hosts, and the widths. … stands for lines."""
    words = []
    for word in line.replace("…", "").split():
        if re.fullmatch(r"(worker=)?host:.*", word):
            words.append(r"\S+")
        elif re.fullmatch(r"[-+━]+", word):
            words.append(r"[-+━]+")
        elif word.startswith("/") and not word.startswith("/home/ann"):
            words.append(r"/\S+")
        else:
            words.append(re.sub(r"\d+", r"\\d+", re.escape(word)))
    return r"\s+".join(words)


@pytest.fixture
def home() -> Iterator[Path]:
    """A home directory that a server of root's can pass through, too."""
    with tempfile.TemporaryDirectory(prefix="ff-") as directory:
        Path(directory).chmod(0o711)
        yield Path(directory)


def test_the_tutorial_works_as_it_is_written(home: Path) -> None:
    base = Path(sys.base_prefix, "bin")
    cache = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    environment = {
        name: text for name, text in os.environ.items() if name.startswith(("PIP_", "LC_", "LANG"))
    }
    environment |= {"HOME": str(home), "PATH": f"{base}:/usr/local/bin:/usr/bin:/bin", "TERM": "xterm"}
    environment |= {"XDG_DATA_HOME": str(home / ".local/share"), "XDG_CACHE_HOME": str(cache)}
    (home / ".local/share").mkdir(parents=True)
    terminals: dict[str, Terminal] = {}
    try:
        for language, text in BLOCKS:
            if language == "python":
                (home / "tutorial/inventory.py").write_text(text)
                continue
            terminal = terminals.get(language) or terminals.setdefault(language, Terminal(home, environment))
            for step in re.split(r"^(?=\$ |\^C$)", text, flags=re.MULTILINE)[1:]:
                command, *shown = step.splitlines()
                terminal.run(command.removeprefix("$ ").replace("/path/to/checkout", str(ROOT)))
                terminal.expect(command.removeprefix("$ "), shown)
        left = psutil.process_iter(["cwd"])
        assert not [each for each in left if f"{home}/.local" in str(each.info["cwd"])], (
            "it left a server behind"
        )
    finally:
        for terminal in terminals.values():
            terminal.close()
