"""Show runs in the terminal while they train.

A frame has state, curves, where the time goes, how ranks compare, and the last warnings. `show_runs(places)` draws until Ctrl-C and
leaves the last frame on the screen. If the output is not a terminal it prints one frame as plain text; on a dumb terminal (TERM=dumb) it
prints one every few seconds. Narrow and ASCII-only terminals are supported. Texts from files cannot move the cursor. Nothing is written.
Imports rich, so the command imports this module only for `--terminal`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Final

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from slipstream.observability.report.text_charts import (
    apportion,
    draw_curve,
    draw_levels,
    escape_control,
    format_number,
    select_latest_attempt,
)
from slipstream.observability.report.watcher import RunWatcher, WatchedRun, sort_newest_first
from slipstream.observability.run_dir.folder import started_at
from slipstream.observability.run_dir.reader import Run
from slipstream.observability.run_dir.series import Series

__all__ = ["render_runs", "show_runs"]

_COLUMN: Final = 38
_RECENT_INTERVALS: Final = 30
"""Intervals of the ledger that "now" means."""
_PRINT_SECONDS: Final = 10.0
"""Seconds between pictures on a terminal that cannot draw over the last one."""
_READ_SECONDS: Final = 1.0
"""A long run is drawn this often while it is read."""
_SHOWN_EVENTS: Final = ("warning", "guard", "memory")
_STATES: Final[Mapping[str, str]] = MappingProxyType(
    {"running": "bold green", "finished": "bold blue", "failed": "bold red", "killed": "bold red", "interrupted": "bold yellow"}
)
_PHASES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "forward": ("f", "blue"),
        "backward": ("b", "bright_blue"),
        "optimizer": ("o", "cyan"),
        "data": ("d", "yellow"),
        "communication": ("c", "magenta"),
        "waiting": ("w", "red"),
        "checkpoint": ("k", "bright_magenta"),
        "evaluation": ("e", "green"),
        "other": (".", "bright_black"),
    }
)
"""Letter and colour of each phase; the letter is the bar itself where there are no colours."""


def show_runs(
    places: Sequence[str | os.PathLike[str]],
    *,
    console: Console | None = None,
    interval: float = 0.5,
    wait: Callable[[float], object] = time.sleep,
) -> None:
    """Draw the runs at these places until Ctrl-C; once, if the output is not a terminal."""
    console = Console() if console is None else console
    watch = RunWatcher(places, wait=console.is_terminal)
    try:
        if not console.is_terminal or console.is_dumb_terminal:
            watch.look()
            console.print(_render_all(watch, console))
            while console.is_terminal:
                wait(_PRINT_SECONDS)
                watch.look()
                console.print(_render_all(watch, console))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                watch.look(seconds=_READ_SECONDS)
                live.update(_render_all(watch, console, console.height), refresh=True)
                wait(interval)
    except KeyboardInterrupt:  # the way to end it
        if not console.is_dumb_terminal:
            console.print(_render_all(watch, console))


def _render_all(watch: RunWatcher, console: Console, height: int | None = None) -> RenderableType:
    """Return the picture of the runs, and below it which folders are left out."""
    runs = watch.runs()
    lines = [_crop(Text(f"left out: {escape_control(why)}", style="yellow"), console.width) for _, why in watch.unreadable]
    if not runs:
        return Group(Text("waiting for the first run", style="dim"), *lines)
    if height is None:
        return Group(render_runs(runs, console, None), *lines)
    shown = lines[: height // 3]
    return Group(render_runs(runs, console, height - len(shown)), *shown)


def render_runs(runs: Iterable[WatchedRun], console: Console, height: int | None) -> RenderableType:
    """Return what is drawn of these runs, the running and the newest first; with a `height` those that fit."""
    order = sort_newest_first(runs)
    lines: list[Text] = []
    for place, watched in enumerate(order):
        with watched.reading() as run:
            drawn = _render_run(watched.key, run, console, small=len(order) > 1)
        if height is not None and lines and len(lines) + len(drawn) >= height:
            left = len(order) - place
            lines.append(Text(f"and {left} more run{'' if left == 1 else 's'}: name one to see it", style="dim"))
            break
        lines.extend(drawn)
    shown = lines if height is None else lines[: height - 1]
    return Group(*(_crop(line, console.width) for line in shown))


def _crop(line: Text, width: int) -> Text:
    line.no_wrap = True
    line.truncate(width, overflow="crop")
    return line


def _render_run(key: str, run: Run, console: Console, small: bool) -> list[Text]:
    width = max(20, console.width)
    lines = [_render_title(key, run, run.current_info(), width), _render_figures(run)]
    lines += _render_curves(run, width, 2 if small else 4, 1 if small else 3, console.options.ascii_only)
    lines += _render_times(run, width, console)
    lines += _render_ranks(run, width, console)
    lines += _render_warnings(run, width, 2 if small else 5)
    return [line for line in lines if line.plain.strip()] + [Text("")]


# -- words ----------------------------------------------------------------------------------------------------------------


def _render_title(key: str, run: Run, info: Mapping[str, Any], width: int) -> Text:
    state = escape_control(info.get("state") or "no state")[:20]
    silent = info.get("silent")
    text = Text(escape_control(key)[: max(8, width - len(state) - 14)], style="bold")
    text.append("  ")
    text.append(state, style=_STATES.get(state, "dim"))
    if silent is not None:
        text.append(f", no sign of life for {_format_rough(silent)}", style="yellow")
    started = started_at(info)
    if started:
        ended = run.touched if silent is not None else started_at({"started": info.get("ended")}) or time.time()
        text.append(f"  {_format_duration(max(0.0, ended - started))}", style="dim")
    return text


def _render_figures(run: Run) -> Text:
    recent = [interval for interval in run.ledger[-_RECENT_INTERVALS:] if interval["steps"]]  # not what came after the last step
    seconds = _sum(recent, "seconds")
    last = max((curve.steps[-1] for curve in run.series.values() if len(curve)), default=None)
    step = next((interval["last"] for interval in reversed(run.ledger) if interval["last"] is not None), last)
    found = [] if step is None else [f"step {int(step):,}"]
    if not _is_current(run.current_info()):
        return Text("  ".join(found))
    for name, unit in (("steps", "steps/s"), ("samples", "samples/s"), ("tokens", "tokens/s")):
        if seconds and (total := _sum(recent, name)):
            found.append(f"{format_number(total / seconds)} {unit}")
    utilisation = next((interval["mfu"] for interval in reversed(recent) if interval["mfu"] is not None), None)
    if utilisation is not None:
        found.append(f"{utilisation:.1%} of peak FLOPs")
    return Text("  ".join(found))


def _is_current(info: Mapping[str, Any]) -> bool:
    """Return whether the last intervals show the current speed of a run: not if it was killed or is silent."""
    return info.get("state") != "killed" and "silent" not in info


def _format_rough(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds // 60:.0f} min"


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _sum(intervals: Iterable[Mapping[str, Any]], name: str) -> float:
    return float(sum(interval[name] or 0 for interval in intervals))


# -- curves ---------------------------------------------------------------------------------------------------------------


def _render_curves(run: Run, width: int, height: int, rows: int, ascii_only: bool) -> list[Text]:
    """Return the curves side by side, those of losses first."""
    count = max(1, width // _COLUMN)
    each = (width - 2 * (count - 1)) // count
    names = sorted(run.series, key=lambda name: ("loss" not in name.lower(), name))
    shown = names[: count * rows]
    lines: list[Text] = []
    for first in range(0, len(shown), count):
        blocks = [_render_curve(name, run.series[name], each, height, ascii_only) for name in shown[first : first + count]]
        for parts in zip_longest(*blocks, fillvalue=Text(" " * each)):
            lines.append(Text("  ").join(parts))
    if len(names) > len(shown):
        left = len(names) - len(shown)
        lines.append(Text(f"and {left} more curve{'' if left == 1 else 's'}", style="dim"))
    return lines


def _render_curve(name: str, series: Series, width: int, height: int, ascii_only: bool) -> list[Text]:
    view = series.view(8 * width)
    steps, values = select_latest_attempt(view["steps"], view["values"])
    latest = format_number(values[-1] if values else None)
    label = escape_control(name)
    room = max(4, width - len(latest) - 1)
    label = label if cell_len(label) <= room else f"{set_cell_size(label, room - 2)}.."
    title = Text(set_cell_size(label, room) + " ")
    title.append(latest.rjust(width - room - 1), style="bold")
    return [title, *(Text(line, style="cyan") for line in draw_curve(steps, values, width, height, ascii_only=ascii_only))]


# -- the ledger -----------------------------------------------------------------------------------------------------------


def _render_times(run: Run, width: int, console: Console) -> list[Text]:
    """Return where the time of the last seconds went: a bar, and its legend."""
    sums: dict[str, float] = dict.fromkeys(_PHASES, 0.0)
    for interval in run.ledger[-_RECENT_INTERVALS:]:
        for name, seconds in interval["phases"].items():
            known = [second for second in seconds if second is not None]
            sums[name] = sums.get(name, 0.0) + (max(0.0, sum(known) / len(known)) if known else 0.0)
    total = sum(sums.values())
    if not total:
        return []
    plain = console.no_color or console.color_system is None or console.options.ascii_only
    bar, legend = Text("time "), [Text("    ")]
    for name, count in apportion(sums, max(4, width - 5)).items():
        letter, colour = _PHASES.get(name, (escape_control(name)[:1] or "?", "white"))
        bar.append((letter if plain else "█") * count, style=colour)
    for name, seconds in sorted(sums.items(), key=lambda phase: -phase[1]):
        if seconds / total >= 0.005:
            letter, colour = _PHASES.get(name, (escape_control(name)[:1] or "?", "white"))
            item = Text(" ").append(f"{letter}=" if plain else "█ ", style=colour).append(f"{escape_control(name)} {seconds / total:.0%}")
            if legend[-1].cell_len + item.cell_len > width and legend[-1].plain.strip():
                legend.append(Text("    "))
            legend[-1].append(item)
    return [bar, *legend]


def _render_ranks(run: Run, width: int, console: Console) -> list[Text]:
    """Return a cell for each rank, higher and redder the longer its own work takes, and who the others waited for."""
    own: list[float] = []
    slowest: list[float] = []
    for interval in run.ledger[-_RECENT_INTERVALS:]:
        for name, seconds in interval["phases"].items():
            if name not in ("waiting", "communication"):
                own = [total + (other or 0.0) for total, other in zip_longest(own, seconds, fillvalue=0.0)]
        slowest = [total + (other or 0) for total, other in zip_longest(slowest, interval["slowest"] or [], fillvalue=0)]
    if len(own) < 2:
        return []
    room = max(4, min(len(own), width - 8))
    grouped = [max(own[len(own) * index // room : len(own) * (index + 1) // room] or [0.0]) for index in range(min(room, len(own)))]
    usual = sorted(own)[len(own) // 2]
    text = Text("ranks ")
    for value, mark in zip(grouped, draw_levels(grouped, ascii_only=console.options.ascii_only, low=0.0), strict=True):
        text.append(mark, style="red" if value > 1.3 * usual else "yellow" if value > 1.1 * usual else "green")
    if sum(slowest) > 0:
        worst = max(range(len(slowest)), key=slowest.__getitem__)
        text.append(f"  rank {worst} came last in {slowest[worst] / sum(slowest):.0%} of steps", style="dim")
    return [text]


def _render_warnings(run: Run, width: int, count: int) -> list[Text]:
    loud = [event for event in run.events if event["kind"] in _SHOWN_EVENTS][-count:]
    lines = []
    for event in loud:
        step = f"step {event['step']} " if isinstance(event.get("step"), int) else ""
        rank = f"rank {event['rank']} " if isinstance(event.get("rank"), int) else ""
        lines.append(Text(f"! {step}{rank}{escape_control(event.get('text') or event['kind'])}"[: 4 * width], style="yellow"))
    if run.progress < 1:
        lines.append(Text(f"{run.progress:.0%} read so far", style="yellow"))
    if run.skipped:
        lines.append(Text("left out: " + "; ".join(f"{escape_control(why)} ({times})" for why, times in run.skipped.items()), style="dim"))
    return lines
