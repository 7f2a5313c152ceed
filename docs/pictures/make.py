"""Make the pictures of the documentation: open reports in Chromium and take PNGs of parts of them.

    python docs/pictures/make.py                        those of docs/report.md, from synthetic runs (made_up.py)
    python docs/pictures/make.py RUN... --name demo     demo-light.png and demo-dark.png, of real runs

Needs chromium and its driver, and selenium. Uses no network.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from looking import Looker, chromium
from made_up import make_run

from slipstream.observability.report import write

HERE = Path(__file__).parent
WIDTH = 1360
LARGEST = 200_000
"""Bytes of one picture."""


def opened(driver: Any, page: Path, **options: Any) -> Looker:
    """Open a page with all of its charts drawn, and light smoothing."""
    width = options.pop("width", WIDTH)
    looker = Looker(driver, page, width=width, **options)
    looker.driver.execute_script(
        "const slider = document.getElementById('smoothing'); slider.value = 0.9; slider.dispatchEvent(new Event('input'))"
    )
    looker.resize(width, looker.ask("document.body.scrollHeight"))
    looker.until("slipstream.page.plots.every((one) => one.visible && !one.dirty)")
    looker.settle()
    return looker


def section(looker: Looker, name: str, path: Path, after: str | None = None) -> None:
    """Take one section, or from one to the beginning of another."""
    top = looker.ask("document.getElementById(arguments[0]).getBoundingClientRect().top + scrollY", name) + 14
    edge = "top" if after else "bottom"
    bottom = looker.ask(f"document.getElementById(arguments[0]).getBoundingClientRect().{edge} + scrollY", after or name) + 14
    saved(looker, path, top, bottom - top)


def end_of(looker: Looker, selector: str) -> float:
    return float(looker.ask("document.querySelector(arguments[0]).getBoundingClientRect().bottom + scrollY", selector)) + 8


def saved(looker: Looker, path: Path, top: float, height: float, width: int = WIDTH) -> None:
    looker.picture(path, top, height, width)
    size = path.stat().st_size
    print(f"{path}  {size / 1000:.0f} kB")
    if size > LARGEST:
        raise SystemExit(f"{path} is larger than {LARGEST / 1000:.0f} kB: show less of the page.")


def of_real_runs(driver: Any, runs: list[Path], name: str, folder: Path, height: int | None) -> None:
    page = write(runs, folder / "page.html")
    for theme in ("light", "dark"):
        looker = opened(driver, page, dark=theme == "dark")
        saved(
            looker,
            HERE / f"{name}-{theme}.png",
            0,
            min(height, looker.ask("document.body.scrollHeight")) if height else end_of(looker, "#time .wide"),
        )


def of_made_up_runs(driver: Any, folder: Path) -> None:
    first = make_run(folder / "runs" / "calm-lake")
    second = make_run(folder / "runs" / "steep-hill", seed=1, rate=1e-3)
    one, two = write(first), write([first, second], folder / "two.html")
    looker = opened(driver, two)
    saved(looker, HERE / "report-light.png", 0, end_of(looker, "#curves"))
    section(looker, "config", HERE / "report-config.png", after="environment")
    looker = opened(driver, two, dark=True)
    saved(looker, HERE / "report-dark.png", 0, end_of(looker, "#curves"))
    looker = opened(driver, one)
    bottom = "document.querySelector('#time .charts').getBoundingClientRect().top + scrollY"
    top = looker.ask("document.getElementById('time').getBoundingClientRect().top + scrollY") + 14
    saved(looker, HERE / "report-time.png", top, looker.ask(bottom) - top)
    section(looker, "ranks", HERE / "report-ranks.png")
    looker.driver.execute_script("slipstream.page.state.set({range: [1200, 2200], hover: 1800})")
    looker.settle()
    section(looker, "curves", HERE / "report-zoom.png", after="time")
    looker = opened(driver, one, width=400)
    saved(looker, HERE / "report-phone.png", 0, 800, width=400)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs; made-up ones where none is given")
    parser.add_argument("--name", default="demo", help="how the pictures of real runs begin")
    parser.add_argument(
        "--height", type=int, help="how much of the page is shown, in pixels; up to the areas of the ledger where none is given"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, chromium(Path(name) / "profile") as driver:
        if given.runs:
            of_real_runs(driver, given.runs, given.name, Path(name), given.height)
        else:
            of_made_up_runs(driver, Path(name))


if __name__ == "__main__":
    main()
