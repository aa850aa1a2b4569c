"""Finding workflows: `MODULE` or `MODULE:NAME`, as given to `flowforge worker`, `define` and `up`."""

from __future__ import annotations

import importlib
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from flowforge import streams
from flowforge.errors import ConfigError

if TYPE_CHECKING:
    from flowforge.definition import Workflow


def load_workflows(places: Iterable[str]) -> list[Workflow]:
    """The workflows of each module, or the one that is named after the colon; each once, in the order found.

    Modules are looked for in the present directory too. Raises ConfigError when there is nothing, or there
    are two of one name; InvalidDefinition for one that the database would not take, as far as can be told.
    """
    from flowforge.definition import Workflow

    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    found: dict[str, Workflow] = {}
    for place in places:
        module_name, colon, attribute = place.partition(":")
        try:
            module = _import(module_name)
        finally:
            streams.mend()
        if colon:
            named = getattr(module, attribute, None)
            if not isinstance(named, Workflow):
                raise ConfigError(f"{module_name} has no Workflow {attribute!r}; it has: {_names(module)}")
            workflows = [named]
        else:
            workflows = [value for value in vars(module).values() if isinstance(value, Workflow)]
            if not workflows:
                raise ConfigError(f"module {module_name} holds no Workflow; name one that does")
        for workflow in workflows:
            if found.setdefault(workflow.name, workflow) is not workflow:
                raise ConfigError(f"two different workflows are called {workflow.name!r}: rename one")
    for workflow in found.values():
        workflow.spec()
    return list(found.values())


def _import(name: str) -> ModuleType:
    is_file = name.endswith(".py") and Path(name).is_file()
    if is_file or not all(part.isidentifier() for part in name.split(".")):
        parts = Path(name.removesuffix(".py")).parts
        such = f": {'.'.join(parts)}" if parts and all(map(str.isidentifier, parts)) else ""
        raise ConfigError(f"no module {name!r}: give its dotted name, without .py{such}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"no module {name!r} (no {error.name!r} in {Path.cwd()} or on Python's path): "
                "give its dotted name, without .py"
            ) from None
        raise ConfigError(_blamed(name, error)) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(_blamed(name, error)) from error


def _blamed(name: str, error: BaseException) -> str:
    """What went wrong in the module and where, in one line: the innermost place that is the user's own, or
    else that is neither of Python nor of this package."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        place = f"{error.filename}:{error.lineno}"
        return f"module {name} cannot be imported: {place}: {type(error).__name__}: {error.msg}"
    python = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<frozen ")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(python) or _is_installed(frame.filename)
    ]
    own = [frame for frame in frames if not _is_installed(frame.filename)] or frames
    place = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
    return f"module {name} cannot be imported: {place}{type(error).__name__}: {error}"


def _is_installed(filename: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(filename).parts)


def _names(module: ModuleType) -> str:
    from flowforge.definition import Workflow

    names = [name for name, value in vars(module).items() if isinstance(value, Workflow)]
    return ", ".join(names) or "none"
