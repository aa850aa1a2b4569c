"""Counting Python source: what the demo's tasks compute, as plain functions that know nothing of FlowForge.

Everything is ordered and depends on nothing but the files, so that two counts of one tree are equal.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOP_LEVEL = "(top level)"
_LEFT_OUT = frozenset({"__pycache__", "site-packages", "dist-packages"})
_TOP = 10

# The parser warns about the file by this name, so that just these warnings can be told to be quiet.
_FILE_NAME = "<census>"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# CPython counts how deep it is in making a tree once for all threads, up to 3.12 at least: two that are at it
# at a time can fail each other (SystemError). One at a time loses nothing: parsing holds the interpreter.
_PARSING = threading.Lock()
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


def list_packages(root: Path) -> list[dict[str, str]]:
    """The directories below `root`, itself included, that hold Python modules: dotted name, relative path.

    Those with the most source come first, so that no large one is left for the end.
    """
    packages = []
    for directory, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT)
        modules = [path for path in (Path(directory) / name for name in files) if _is_module(path)]
        if modules:
            relative = Path(directory).relative_to(root)
            size = sum(path.stat().st_size for path in modules)
            package = {"package": ".".join(relative.parts) or TOP_LEVEL, "path": relative.as_posix()}
            packages.append((-size, relative.as_posix(), package))
    return [package for *_, package in sorted(packages, key=lambda each: each[:2])]


def census_package(root: Path, package: dict[str, str]) -> dict[str, Any]:
    """The figures of the modules that lie directly in one directory.

    A module that cannot be parsed counts its lines and is named under `unparsable`.
    """
    _hush_parser()
    sums: Counter[str] = Counter()
    imports: Counter[str] = Counter()
    unparsable: list[str] = []
    deepest: dict[str, Any] = {"depth": 0, "module": "", "line": 0}
    longest: dict[str, Any] = {"lines": 0, "module": "", "line": 0, "function": ""}
    prefix = "" if package["package"] == TOP_LEVEL else package["package"] + "."
    for path in sorted(filter(_is_module, (root / package["path"]).iterdir())):
        source = path.read_bytes()
        module = prefix + path.stem
        sums["modules"] += 1
        sums["lines"] += source.count(b"\n") + (not source.endswith(b"\n") and source != b"")
        try:
            with _PARSING:
                tree = ast.parse(source, filename=_FILE_NAME)
        except _UNREADABLE:
            unparsable.append(module)
            continue
        imported: set[str] = set()
        for statement, depth in _statements(tree):
            if isinstance(statement, _FUNCTIONS):
                sums["functions"] += 1
                lines = (statement.end_lineno or statement.lineno) - statement.lineno + 1
                if lines > longest["lines"]:
                    longest = {"lines": lines} | _place(module, statement) | {"function": statement.name}
            elif isinstance(statement, ast.ClassDef):
                sums["classes"] += 1
            elif isinstance(statement, ast.Import):
                imported.update(alias.name.partition(".")[0] for alias in statement.names)
            elif isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module:
                imported.add(statement.module.partition(".")[0])
            if depth > deepest["depth"]:
                deepest = {"depth": depth} | _place(module, statement)
        imports.update(imported)
    return {
        "package": package["package"],
        **{name: sums[name] for name in ("modules", "lines", "functions", "classes")},
        "unparsable": unparsable,
        "deepest": deepest,
        "longest": longest,
        "imports": dict(sorted(imports.items())),
    }


def total(packages: list[dict[str, Any]]) -> dict[str, Any]:
    """The sums over all packages and the tables of the largest; equals are ordered by name."""
    imports: Counter[str] = Counter()
    for each in packages:
        imports.update(each["imports"])
    kept = ("package", "modules", "lines", "functions", "classes")
    return {
        "packages": len(packages),
        **{name: sum(each[name] for each in packages) for name in kept[1:]},
        "unparsable": sorted(module for each in packages for module in each["unparsable"]),
        "largest": [
            {name: each[name] for name in kept}
            for each in sorted(packages, key=lambda each: (-each["lines"], each["package"]))[:_TOP]
        ],
        "imported": [
            {"module": module, "by": count}
            for module, count in sorted(imports.items(), key=lambda each: (-each[1], each[0]))[:_TOP]
        ],
        "deepest": _largest([each["deepest"] for each in packages], "depth"),
        "longest": _largest([each["longest"] for each in packages], "lines"),
    }


def _is_module(path: Path) -> bool:
    return path.suffix == ".py" and path.is_file()  # a link may lead nowhere


def _place(module: str, statement: ast.stmt) -> dict[str, Any]:
    return {"module": module, "line": statement.lineno}


def straight_count(root: Path) -> dict[str, Any]:
    """The same figures, in one go."""
    return total([census_package(root, package) for package in list_packages(root)])


def _largest(found: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    return sorted((each for each in found if each[key]), key=lambda each: (-each[key], each["module"]))[:_TOP]


def _statements(tree: ast.Module) -> Iterator[tuple[ast.stmt, int]]:
    """Every statement with its depth: how many statements it lies within. An elif lies beside its if."""
    pending: list[tuple[ast.stmt, int]] = [(statement, 0) for statement in reversed(tree.body)]
    while pending:
        statement, depth = pending.pop()
        yield statement, depth
        inner: list[tuple[ast.stmt, int]] = []
        for name in ("body", "handlers", "cases", "orelse", "finalbody"):
            for child in getattr(statement, name, ()):
                if isinstance(child, ast.stmt):
                    beside = name == "orelse" and _is_elif(child, statement)
                    inner.append((child, depth if beside else depth + 1))
                else:  # an except clause or a case: a part of the statement that holds statements itself
                    inner += [(each, depth + 1) for each in child.body]
        pending += reversed(inner)


def _is_elif(child: ast.stmt, parent: ast.stmt) -> bool:
    """Whether a statement of an else branch is in truth an elif: it then stands in the column of its if."""
    return isinstance(child, ast.If) and isinstance(parent, ast.If) and child.col_offset == parent.col_offset


def _hush_parser() -> None:
    """Ignores what the parser has to say about old code, in this process and about these files only."""
    rule = ("ignore", None, Warning, re.compile(re.escape(_FILE_NAME)), 0)
    if rule not in warnings.filters:
        warnings.filterwarnings("ignore", module=re.escape(_FILE_NAME))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(straight_count(Path(sys.argv[1]))))
