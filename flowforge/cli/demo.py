"""The command demo."""

from __future__ import annotations

import platform
import sys
import sysconfig
from pathlib import Path

import click

from flowforge.cli.common import console, database, json_option, print_json
from flowforge.exits import EXIT_FAILED

_PAGE = "flowforge-census.html"


@click.command()
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Directory for the page, made if it is missing. Default: the present one.",
)
@click.option(
    "--source",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Count the Python modules of this directory instead of the standard library.",
)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the database in this directory. Default: a temporary one.",
)
@json_option
@click.pass_context
def demo(ctx: click.Context, output: Path, source: Path | None, data_dir: Path | None, as_json: bool) -> None:
    """Take a census of Python's standard library.

    FlowForge at work on this machine, with nothing to set up.

    Brings up a private PostgreSQL, a scheduler and a worker, and runs a workflow that parses every module,
    one task run for each package. Prints the report, writes it as a page, and checks its figures against
    those of a plain loop over the same files; exit code 1 when they differ.

    \b
    Examples:
      flowforge demo
      flowforge demo --output /tmp --json
    """
    from flowforge import log
    from flowforge.demo.run import run

    page = _writable(output)
    log.configure(level="error")  # the live picture leaves no room for lines of the daemons
    out = console()
    if not as_json:
        out.print("Starting PostgreSQL, scheduler and worker …")

    def show(dsn: str, run_id: int) -> None:
        from flowforge.cli.snapshots import snapshots
        from flowforge.cli.watch import follow

        if as_json:
            return
        with database(dsn) as connection:
            follow(snapshots(connection, run_id), out=out)
        out.print()

    root = source or Path(sysconfig.get_path("stdlib"))
    title = str(source) if source else f"Python {platform.python_version()}: the standard library"
    outcome = run(root, title, data_dir, show)
    page.write_text(outcome.html, encoding="utf-8")
    if as_json:
        print_json(
            {
                "run_id": outcome.run_id,
                "state": outcome.state,
                "seconds": round(outcome.seconds, 3),
                "equal": outcome.equal,
                "totals": outcome.totals,
                "page": str(page.resolve()),
            }
        )
    else:
        click.echo(outcome.text)
        click.echo(f"The run took {outcome.seconds:.1f} s. The page: {page.resolve()}")
        if outcome.equal:
            click.secho("Checked: every figure equals that of a straight count in one process.", fg="green")
    if not outcome.equal:
        click.secho("The figures differ from those of a straight count in one process.", fg="red", err=True)
        sys.stderr.flush()
        ctx.exit(EXIT_FAILED)


def _writable(output: Path) -> Path:
    """The file of the page, in a directory that is made if it is missing. Found out before all the work."""
    page = output / _PAGE
    try:
        output.mkdir(parents=True, exist_ok=True)
        made = not page.exists()
        with page.open("a"):
            pass
        if made:
            page.unlink()
    except OSError as error:
        raise click.BadParameter(f"cannot write {page}: {error.strerror}", param_hint="--output") from None
    return page
