"""The demo's workflow: a census of a tree of Python source, one task run for each package.

Its input is `{"root": directory, "title": text}`. Workers must see the same files as the client.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowforge import Context, Retry, Workflow
from flowforge.demo import census as counting
from flowforge.demo import report as reports

census = Workflow(
    "stdlib_census",
    description="Counts the lines, functions, classes, nesting and imports in the standard library.",
)


@census.task
def list_packages(ctx: Context) -> list[dict[str, str]]:
    """The packages below the root."""
    return counting.list_packages(Path(ctx.input["root"]))


@census.task(map=list_packages, retry=Retry(max_attempts=3, delay=0.5))
def census_package(ctx: Context) -> dict[str, Any]:
    """The figures of one package."""
    return counting.census_package(Path(ctx.input["root"]), ctx.item)


@census.task(after=census_package)
def totals(ctx: Context) -> dict[str, Any]:
    """The figures of all of them."""
    return counting.total(ctx.upstream["census_package"])


@census.task(after=totals)
def report(ctx: Context) -> dict[str, str]:
    """The figures as text and as a page."""
    figures, title = ctx.upstream["totals"], ctx.input["title"]
    return {"text": reports.text(title, figures), "html": reports.html(title, figures)}
