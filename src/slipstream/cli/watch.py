"""`slipstream watch`: show runs while they are in progress, in a browser or in the terminal.

    slipstream watch outputs                     the runs below outputs/runs, including later ones
    slipstream watch outputs/runs/first other    some of them
    slipstream watch outputs --terminal          without a browser

Nothing here imports torch or changes a file. The server listens on this machine only unless --host says otherwise.
"""

from __future__ import annotations

import sys
import webbrowser

import click

from slipstream.observability.report.server import DEFAULT_PORT, ReportServer, is_loopback
from slipstream.observability.report.text_charts import escape_control

__all__ = ["command"]


@click.command(name="watch", short_help="Show runs in progress, in a browser or in the terminal.")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--port", type=click.IntRange(0, 65535), help=f"Port of the page; 0 takes any that is free. Default: {DEFAULT_PORT}.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; other machines can reach any other address.")
@click.option("--terminal", is_flag=True, help="Show them here, without a server.")
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
def command(paths: tuple[str, ...], port: int | None, host: str, terminal: bool, show: bool) -> None:
    """Show runs in progress.

    A PATH is the folder of a run, or a project_dir that has runs/ in it, or will
    have; runs that begin later are shown too. Ctrl-C ends it, and no run notices.

    \b
    Examples:
      slipstream watch outputs
      slipstream watch outputs --port 0 --open
      slipstream watch outputs/runs/first --terminal
    """
    if terminal:
        given = [f"--{name}" for name in ("port", "host", "open") if _was_given("show" if name == "open" else name)]
        if given:
            raise click.UsageError(
                f"--terminal shows the runs here and serves no page, so {' and '.join(given)} would do nothing: leave one out."
            )
        from slipstream.observability.report.terminal import show_runs as show_here

        show_here(paths)
        return
    _serve(ReportServer(paths, host=host, port=port), show, asked=port is None)


def _was_given(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _serve(server: ReportServer, show: bool, asked: bool) -> None:
    if asked and server.server_port != DEFAULT_PORT:
        click.echo(f"Port {DEFAULT_PORT} is in use, so this is another one; --port N names one.", err=True)
    if not is_loopback(server.host):
        click.echo(
            f"Everybody who can reach {server.host} on port {server.server_port} can read these runs: curves, settings, environment, "
            "pictures. There is no encryption and no password.",
            err=True,
        )
    if server.watch.left_out:
        click.echo(f"{len(server.watch.left_out)} older runs are left out; name the folder of a run to see it.", err=True)
    for _, why in server.watch.unreadable:
        click.echo(f"Left out: {escape_control(why)}", err=True)
    count = len(server.watch.runs())
    what = f"{count} run{'' if count == 1 else 's'}" if count else "for the first run"
    click.echo(f"Watching {what} at {server.url} (Ctrl-C ends it)")
    sys.stdout.flush()
    if show:
        webbrowser.open(server.url)
    try:
        server.serve()
    except KeyboardInterrupt:  # the way to end it
        return
