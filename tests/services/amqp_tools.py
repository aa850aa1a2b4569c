"""What the worker in shell needs besides bash."""

import os
import shutil
from pathlib import Path

from tests.services import debian
from tests.services.postgres import binaries


def shell_path(directory: Path) -> str:
    """The PATH with psql, and amqp-tools with their libraries, for which the directory is to be kept."""
    programs, _ = binaries("18")
    psql = shutil.which("psql", path=f"{programs}{os.pathsep}{os.defpath}")
    assert psql is not None
    tools = debian.found("amqp-tools", "usr/bin")
    for name in ("amqp-consume", "amqp-publish"):
        libraries = debian.library_path(tools.parents[1])
        (directory / name).write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {tools / name} "$@"\n')
        (directory / name).chmod(0o755)
    return os.pathsep.join([str(directory), str(Path(psql).parent), os.defpath])
