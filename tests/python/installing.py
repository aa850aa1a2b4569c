"""The package as its users get it: built, and installed where nothing else of the checkout is."""

import importlib.metadata
import os
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).resolve().parents[2]


def build(kind: str, directory: Path, source: Path = CHECKOUT) -> Path:
    """Build `source` as a wheel or sdist into `directory`; the file."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(directory)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = directory.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


class Installation:
    """A wheel in a virtual environment of its own, with what the wheel says that it needs, and no more.

    These requirements, and theirs in turn, are the distributions of the tests' environment, made visible one
    by one: nothing is downloaded, and what the wheel forgets to name is missing."""

    def __init__(self, directory: Path, wheel: Path, *extras: str) -> None:
        self.wheel = wheel
        venv.create(directory, symlinks=True)
        self.bin = directory / "bin"
        (self.packages,) = directory.glob("lib/python*/site-packages")
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "--disable-pip-version-check",
             "install", "--quiet", "--no-index", "--no-deps", "--no-compile", str(wheel)],
            check=True,
        )  # fmt: skip
        (package,) = importlib.metadata.distributions(path=[str(self.packages)])
        self.names = {canonicalize_name(package.metadata["Name"])}
        self._add(package, extras)

    def run(
        self, *command: str, cwd: Path, check: bool = True, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of the installation in the directory; nothing of the tests' settings reaches it."""
        program, *arguments = command
        return subprocess.run(
            [str(self.bin / program), *arguments],
            cwd=cwd, env=self.environment(environment), check=check, capture_output=True, text=True,
        )  # fmt: skip

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment variables of a program of the installation."""
        kept = {key: os.environ[key] for key in ("HOME", "LANG", "TMPDIR") if key in os.environ}
        return {"PATH": f"{self.bin}{os.pathsep}{os.defpath}", **kept, **(more or {})}

    def _add(self, distribution: importlib.metadata.Distribution, extras: tuple[str, ...]) -> None:
        for requirement in _requirements(distribution, extras):
            found = importlib.metadata.distribution(requirement.name)
            assert requirement.specifier.contains(found.version), (requirement, found.version)
            name = canonicalize_name(requirement.name)
            if name not in self.names:
                self.names.add(name)
                for path in _top_level(found):
                    target = self.packages / path.name
                    if not target.exists():
                        target.symlink_to(path)
            elif not requirement.extras:
                continue
            self._add(found, tuple(requirement.extras))


def _requirements(
    distribution: importlib.metadata.Distribution, extras: tuple[str, ...]
) -> Iterator[Requirement]:
    for text in distribution.requires or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            yield requirement


def _top_level(distribution: importlib.metadata.Distribution) -> set[Path]:
    """What the distribution has put directly into site-packages."""
    names = {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}
    return {Path(str(distribution.locate_file(name))) for name in names}
