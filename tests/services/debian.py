"""PostgreSQL 15, RabbitMQ, what their scenarios need, and what checks the model, from Debian's packages,
unpacked into a cache without being installed.

apt-get does the fetching, with a state of its own, so neither root nor a change to the system is needed, and
its signatures are checked as ever. As that state knows no installed package, all dependencies are named; the
libraries among them are unpacked too and found through LD_LIBRARY_PATH, so nothing that happens to be on the
system is relied on.

Where there is no apt-get, environment variables name what is there: see INSTEAD.

`python -m tests.services.debian postgresql-15 rabbitmq` fetches them in advance.
"""

import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# What of the dependencies is unpacked. The C library must be the system's own, as the program loader is; the
# rest left out serves the installation (users, services, log rotation) or scripting languages.
WANTED = re.compile(
    r"(postgresql-(client-)?15|rabbitmq-server$|erlang-|pgbouncer$|amqp-tools$|spin$|tcc$|linux-libc-dev$|lib)"
)
UNWANTED = re.compile(
    r"(libc6$|libc-bin|libc-dev-bin|libc-l10n|libperl|libpython|libpam-modules|libpam-runtime|.*-perl$)"
)

CHECKOUT = Path(__file__).resolve().parents[2]

PACKAGES = {
    "postgresql-15": ["postgresql-15", "postgresql-15-plpgsql-check"],
    "rabbitmq": ["rabbitmq-server"],
    "faketime": ["libfaketime"],
    "pgbouncer": ["pgbouncer"],
    "spin": ["spin", "tcc", "libc6-dev"],
    "amqp-tools": ["amqp-tools"],
}
# The variable that names it where it is there already, and what to set that to.
INSTEAD = {
    "postgresql-15": ("FLOWFORGE_TEST_PG15_BIN", "a directory with PostgreSQL 15's initdb and postgres"),
    "rabbitmq": ("FLOWFORGE_TEST_AMQP_URL", "a running broker (amqp://user:password@host:5672/vhost)"),
    "faketime": ("FLOWFORGE_TEST_FAKETIME", "the library libfaketimeMT.so.1"),
    "pgbouncer": ("FLOWFORGE_TEST_PGBOUNCER", "the program pgbouncer"),
    "spin": ("FLOWFORGE_TEST_MODEL_BIN", "a directory with spin and tcc"),
    "amqp-tools": ("FLOWFORGE_TEST_AMQP_TOOLS", "a directory with amqp-consume and amqp-publish"),
}
# Raised whenever what is unpacked, or how, changes: caches made before are then left aside.
RECIPE = 1

APT_CONF = """\
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
Dir::State "{state}";
Dir::State::status "{state}/status";
Dir::Cache "{cache}";
Debug::NoLocking "1";
APT::Sandbox::User "root";
APT::Install-Recommends "0";
Acquire::Languages "none";
Acquire::Retries "3";
"""


class ServiceMissing(Exception):
    """A server for the tests cannot be had; the text says what to do."""


def reachable_by_others(path: Path) -> bool:
    """Whether a user without special rights may pass through the directory and all above it."""
    return all(directory.stat().st_mode & 0o001 for directory in (path, *path.parents))


def cache_directory() -> Path:
    """Where unpacked servers are kept: below XDG_CACHE_HOME, the user's cache, or else the checkout.

    Root's home is no place for them: PostgreSQL, which refuses to run as root, could not read them there.
    """
    root = os.getuid() == 0
    candidates = [Path("/var/cache") if root else Path.home() / ".cache", CHECKOUT / ".cache"]
    if given := os.environ.get("XDG_CACHE_HOME"):
        candidates.insert(0, Path(given))
    for base in candidates:
        directory = base / "flowforge-tests"
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(directory, os.W_OK) and (not root or reachable_by_others(directory)):
            return directory
    raise ServiceMissing(
        f"no place for the servers' programs in {', '.join(map(str, candidates))}: each is read-only"
        f"{' or closed to other users' if root else ''}. Set XDG_CACHE_HOME to a directory that is neither."
    )


def unpacked(service: str) -> Path:
    """The directory into which the service's packages are unpacked; they are fetched when it is not there."""
    cache = cache_directory()
    release = platform.freedesktop_os_release() if sys.platform == "linux" else {}
    system = f"{release.get('ID', sys.platform)}{release.get('VERSION_ID', '')}-{platform.machine()}"
    target = cache / f"{service}-{system}-{RECIPE}"
    if target.is_dir():
        return target
    with (cache / f"{service}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs starting together fetch once
        if not target.is_dir():
            _fetch(service, target)
    return target


def instead(service: str) -> str:
    return "set {} to {}".format(*INSTEAD[service])


def found(service: str, pattern: str) -> Path:
    """The file of the service that matches the pattern, or the one that its variable names."""
    if given := os.environ.get(INSTEAD[service][0]):
        return Path(given)
    (file,) = unpacked(service).glob(pattern)
    return file


def _fetch(service: str, target: Path) -> None:
    missing = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
    if missing:
        raise ServiceMissing(
            f"{service} is fetched by Debian's {' and '.join(missing)}, which this system lacks.\n"
            f"Here, {instead(service)}."
        )
    print(f"fetching {service} from Debian's packages into {target}", file=sys.stderr, flush=True)
    started = time.monotonic()
    # Built beside its final place and renamed when complete: whoever finds it finds all of it.
    with tempfile.TemporaryDirectory(prefix=f"{service}-", dir=target.parent) as temporary:
        work = Path(temporary)
        for directory in ("state/lists/partial", "cache/archives/partial", "packages", "root"):
            (work / directory).mkdir(parents=True)
        (work / "state/status").touch()
        (work / "apt.conf").write_text(APT_CONF.format(state=work / "state", cache=work / "cache"))
        apt = ["apt-get", "-c", str(work / "apt.conf"), "-q"]
        update = _run([*apt, "update"], work)
        simulated = _run([*apt, "-s", "install", *PACKAGES[service]], work)
        names = re.findall(r"^Inst (\S+)", simulated.stdout, re.MULTILINE)
        names = [name for name in names if WANTED.match(name) and not UNWANTED.match(name)]
        download = _run([*apt, "download", *names], work / "packages") if names else simulated
        if simulated.returncode or download.returncode:
            raise ServiceMissing(
                f"apt-get could not fetch {', '.join(PACKAGES[service])}:\n"
                f"{update.stderr}{simulated.stderr}{download.stderr}"
                f"This works on Debian 12 with its package servers reachable. Elsewhere, {instead(service)}."
            )
        for package in sorted((work / "packages").glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", package, work / "root"], check=True)
        _make_erlang_relocatable(work / "root")
        (work / "root").chmod(0o755)
        (work / "root").rename(target)
    print(f"fetched {service} in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _run(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(
        command, cwd=directory, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def _make_erlang_relocatable(root: Path) -> None:
    erl = root / "usr/lib/erlang/bin/erl"
    if erl.exists():
        here = 'ROOTDIR=$(cd "${0%/*}/.." && pwd -P)'
        erl.write_text(re.sub(r'ROOTDIR="?/usr/lib/erlang"?', lambda _: here, erl.read_text()))


def library_path(root: Path) -> str:
    """The value of LD_LIBRARY_PATH with which unpacked programs find the libraries unpacked with them."""
    triplets = [
        path for base in ("usr/lib", "lib") for path in (root / base).glob("*-linux-*") if path.is_dir()
    ]
    return os.pathsep.join(map(str, triplets))


def main(services: list[str]) -> int:
    try:
        for service in services:
            if not os.environ.get(INSTEAD[service][0]):
                unpacked(service)
    except ServiceMissing as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
