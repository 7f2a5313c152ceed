"""`slipstream report`: write one page about one or several runs, as a file that opens without a network.

    slipstream report runs/first                     writes runs/first/report.html
    slipstream report runs/first runs/second         compares both, in ./report.html
    slipstream report project -o page.html --open    all runs of a project, and opens the page
    slipstream report runs/first -o -                writes the page to standard output

Nothing here imports torch. A report is replaced as a whole; a file that is not a report is not overwritten.
"""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from slipstream.observability.report.page import render_report, write

__all__ = ["command"]


@click.command(name="report", short_help="Make a page of curves, times and settings of one or several runs.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Where the page goes; - is the standard output.  [default: report.html in the run's folder; in this folder for several runs]",
)
@click.option("--title", metavar="TEXT", help="The heading of the page.  [default: the name of the run]")
@click.option("--points", type=click.IntRange(min=50), default=4000, show_default=True, help="How many points a curve keeps at most.")
@click.option("--open", "open_it", is_flag=True, help="Open the page in a browser.")
def command(runs: tuple[Path, ...], output: str | None, title: str | None, points: int, open_it: bool) -> None:
    """Make one page of RUN...: curves, where the time went, ranks, memory, settings, events.

    RUN is the folder of a run, or a folder that has runs/ in it. The page is one file without anything outside of it: send it, keep it,
    open it offline.
    """
    if output == "-" and open_it:
        raise click.UsageError("--open needs a file: give it a name with -o FILE.")
    left_out: list[tuple[Path, str]] = []
    if output == "-":
        click.echo(render_report(runs, title=title, points=points, left_out=left_out), nl=False)
        path = Path()
    else:
        path = write(runs, output, title=title, points=points, left_out=left_out)
        click.echo(str(path))
    for _, why in left_out:  # which names the folder
        click.echo(f"Left out: {why}", err=True)
    if open_it and not webbrowser.open(path.resolve().as_uri()):
        click.echo("There is no browser here that could be opened: open the file yourself.", err=True)
