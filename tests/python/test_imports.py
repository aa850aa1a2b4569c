"""Who may import whom, and what may never be imported: told from the source, without running it."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import flowforge

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = CHECKOUT / "flowforge"
BANNED = {"celery", "kombu", "billiard", "vine"}

# From what everything rests on to what rests on everything: a module may import those of lower layers.
LAYERS = {
    "errors": 0,
    "log": 0,
    "waking": 0,
    "crash": 0,
    "extras": 0,
    "threads": 1,
    "exits": 1,
    "health": 1,
    "config": 1,
    "stopping": 2,
    "streams": 3,
    "definition": 2,
    "binaries": 2,
    "cutoff": 2,
    "db": 3,
    "broker": 4,
    "listen": 4,
    "metrics": 4,
    "tracing": 4,
    "migrate": 4,
    "embedded": 4,
    "loading": 4,
    "arguments": 4,
    "client": 5,
    "connecting": 5,
    "runner": 6,
    "web_server": 6,
    "worker": 7,
    "scheduler": 7,
    "publisher": 7,
    "web": 7,
    "up": 8,
    "doctor": 8,
    "conformance": 9,
    "demo": 9,
    "cli": 10,
    "__main__": 11,
}
DAEMONS = ("scheduler", "publisher", "worker")


def top_level_imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module that the file imports, anywhere in it, and whether only type checkers see that."""
    tree = ast.parse(path.read_bytes())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for part in node.body
        for inner in ast.walk(part)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is relative, which hides what it imports"
            if node.module == "flowforge":  # `from flowforge import db` imports flowforge.db
                yield from ((f"flowforge.{alias.name}", id(node) in for_types) for alias in node.names)
            else:
                yield node.module or "", id(node) in for_types


def part_of(path: Path) -> str:
    """The module of the package that a file is, or belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imported_parts(path: Path) -> set[str]:
    """The modules of the package that the file imports when it runs."""
    names = (name for name, for_types in top_level_imports(path) if not for_types)
    return {name.split(".")[1] for name in names if name.startswith("flowforge.")}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards(path: Path) -> None:
    """cli → daemons → (runner, db, broker) → config. The package itself is the lazy public surface."""
    own = part_of(path)
    if own == "__init__":
        assert imported_parts(path) == set()
        return
    surface = {"Workflow": "definition", "Retry": "definition", "Context": "worker", "__version__": "errors"}
    parts = {surface.get(name, name) for name in imported_parts(path)}
    assert parts <= LAYERS.keys(), "name the new module in LAYERS"
    assert not {name for name in parts - {own} if LAYERS[name] >= LAYERS[own]}


def test_daemons_never_import_each_other() -> None:
    """Not even through what they share."""
    for daemon in DAEMONS:
        reached, pending = set[str](), [daemon]
        while pending:
            part = pending.pop()
            if part not in reached:
                reached.add(part)
                for path in sources():
                    if part_of(path) == part:
                        pending += imported_parts(path)
        assert not reached & (set(DAEMONS) - {daemon})
        assert not reached & {"cli", "up", "demo", "embedded", "client"}


@pytest.mark.parametrize(
    ("library", "home"),
    [
        *(("pika", "broker"), ("yoyo", "migrate"), ("prometheus_client", "metrics")),
        *(("starlette", "web"), ("uvicorn", "web_server"), ("opentelemetry", "tracing")),
    ],
)
def test_library_is_imported_in_one_place(library: str, home: str) -> None:
    users = {
        part_of(path)
        for path in sources()
        for name, _ in top_level_imports(path)
        if name.split(".")[0] == library
    }
    assert users == {home}


def test_what_handlers_catch_and_annotate_is_public() -> None:
    assert set(flowforge.__all__) >= {
        "Cancelled", "NotStorable", "PermanentError", "TimeLimitExceeded", "Transaction"
    }  # fmt: skip
    for name in flowforge.__all__:
        assert getattr(flowforge, name).__name__ == name


def test_using_the_package_imports_neither_broker_nor_migrations() -> None:
    """Whoever only triggers runs pays for a database driver, whoever only defines workflows for nothing."""
    script = (
        "import sys, flowforge\n"
        "flowforge.Workflow, flowforge.Retry\n"
        "assert not {'psycopg', 'pika', 'yoyo', 'click', 'rich'} & sys.modules.keys()\n"
        "flowforge.Client, flowforge.Context\n"
        "assert not {'pika', 'yoyo', 'click', 'rich', 'opentelemetry'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=CHECKOUT)


def test_help_imports_no_driver() -> None:
    script = (
        "import sys\n"
        "from flowforge.cli import cli\n"
        "for name in cli.list_commands(None): cli.get_command(None, name)\n"
        "assert not {'psycopg', 'pika', 'yoyo', 'rich'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=CHECKOUT)


def test_public_surface_is_what_it_says() -> None:
    import flowforge

    assert [getattr(flowforge, name).__name__ for name in flowforge.__all__] == flowforge.__all__
    with pytest.raises(AttributeError, match="nosuch"):
        _ = flowforge.nosuch  # type: ignore[attr-defined]


# -- the ban


def test_banned_are_imported_nowhere() -> None:
    """Nor by tests and tools: any second idea of retries and ownership would be one too many."""
    files = [path for place in ("flowforge", "tests") for path in (CHECKOUT / place).rglob("*.py")]
    files += [CHECKOUT / "dev"]
    assert len(files) > 30
    for path in files:
        found = {name.split(".")[0] for name, _ in top_level_imports(path)}
        assert not found & BANNED, path
        dynamic = {
            node.args[0].value.split(".")[0]
            for node in ast.walk(ast.parse(path.read_bytes()))
            if isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("__import__", "importlib.import_module", "import_module")
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        }
        assert not dynamic & BANNED, path


def test_banned_are_required_nowhere() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    extras = project["project"].get("optional-dependencies", {})
    declared = [*project["project"]["dependencies"], *(each for extra in extras.values() for each in extra)]
    installed = importlib.metadata.requires("flowforge") or []
    assert {distribution_name(each) for each in installed} >= {"psycopg", "pika", "click"}
    assert not {distribution_name(each) for each in [*declared, *installed]} & BANNED


def test_banned_are_not_brought_in_by_others() -> None:
    """Everything that the requirements, and theirs in turn, have installed here."""
    reached, pending = set[str](), ["flowforge"]
    while pending:
        name = pending.pop()
        if name in reached:
            continue
        reached.add(name)
        try:
            pending += [distribution_name(each) for each in importlib.metadata.requires(name) or []]
        except importlib.metadata.PackageNotFoundError:
            continue  # of an extra that nobody asked for
    installed = {name for name in reached if is_installed(name)}
    assert {"psycopg", "pika", "yoyo-migrations", "sqlparse", "click", "rich"} <= installed
    assert not installed & BANNED


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def distribution_name(requirement: str) -> str:
    """The normalised name at the start of a requirement."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()
