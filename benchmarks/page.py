"""Writes the measured parts of `docs/benchmarks.md` and `README.md` from `results/*.json`; the prose around them is written by hand.

    python benchmarks/page.py            write both pages, and the drawings
    python benchmarks/page.py --check    exit with 1 where one of them is not what the results give

A part stands between `<!-- measured: KIND NAME -->` and `<!-- end of measured -->`. The kinds: `cases LIST` is a table of chosen figures
(`cases.json` says which, and has the hand-written reasons of missed goals) and `readme LIST` a shorter one; `figures GROUP` are all figures
of a group, `growth` the drawings with their points, `soak` the parts of the soak, `scripts` what each script does, `machines` where it was
measured.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import curves
from figures import HERE, TITLES, Figure, Record, load

ROOT = HERE.parent
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")
SOAK = HERE / "results" / "soak" / "results.md"
PART = re.compile(r"(<!-- measured: (?P<kind>\w+) ?(?P<name>[^\n]*?) -->\n).*?(<!-- end of measured -->)", re.DOTALL)


@dataclass(frozen=True)
class Results:
    """All that was measured and kept."""

    records: dict[str, Record]
    """By group."""
    growths: dict[str, dict[str, Any]]
    """The files of curves, by topic."""
    cases: dict[str, list[dict[str, Any]]]
    """The chosen figures, by list."""


def read_results(folder: Path = HERE / "results", cases: Path = HERE / "cases.json") -> Results:
    """Return everything in the folder of results."""
    files = sorted(folder.glob("*.json"))
    growths = {path.stem.removeprefix("growth_"): json.loads(path.read_text()) for path in files if path.stem.startswith("growth_")}
    records = {name: record for path in files if not path.stem.startswith("growth_") for name, record in load(path).items()}
    return Results(records, growths, json.loads(cases.read_text()))


def written(text: str, results: Results) -> str:
    """Return a page with its measured parts made anew."""

    def part(found: re.Match[str]) -> str:
        if found["kind"] not in KINDS:
            raise SystemExit(f"a page has the part '{found['kind']}'; the kinds are {', '.join(KINDS)}")
        return found[1] + "\n".join(KINDS[found["kind"]](results, found["name"])) + "\n" + found[4]

    return PART.sub(part, text)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, without columns that are empty."""
    used = [column for column in range(len(head)) if any(row[column] for row in rows)]
    for row in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(row[column].replace("|", "\\|") for column in used) + " |"


# -- kinds of parts ---------------------------------------------------------------------------------------------------


def cases(results: Results, name: str) -> Iterator[str]:
    """Yield the table of chosen figures; a figure that was not measured says so, with the command that measures it."""
    head = ("case", "ours", "other", "ratio", "spread", "at most", "", "why", "command")
    yield from markdown(head, [_case(results, case) for case in results.cases[name]])


def _case(results: Results, case: dict[str, Any]) -> tuple[str, ...]:
    if "growth" in case:
        return _end_of_curve(results, case)
    record = results.records.get(case["group"])
    figure = next((figure for figure in record.figures if _is(figure, case)), None) if record else None
    if record is None or figure is None:
        command = f"python benchmarks/run.py --only {shlex.quote(case['group'])}"
        return case["case"], *[""] * 5, "not measured", case.get("reason", ""), f"`{command}`"
    _, ours, other, ratio, spread, goal, verdict, _ = cells(figure)
    reason = case.get("reason", "") if figure.met is False else ""
    return case["case"], ours, other, ratio, spread, goal, verdict, reason, f"`{record.command}`"


def _end_of_curve(results: Results, case: dict[str, Any]) -> tuple[str, ...]:
    """Return the row of a case that is the end of our first curve in a drawing, beside that of the other side."""
    found = results.growths.get(case["growth"])
    if found is None:
        command = f"python benchmarks/run.py --growth --only {shlex.quote(case['growth'])}"
        return case["case"], *[""] * 5, "not measured", case.get("reason", ""), f"`{command}`"
    drawing = next(curves.from_json(entry) for entry in found["growth"] if entry["name"] == case["drawing"])
    ours, *others = [curve for curve in drawing.curves if not curve.dashed][:1] + [curve for curve in drawing.curves if curve.dashed]
    said = [f"{curve.what} {curves.number(curve.points[-1][1])} {drawing.y} at {curves.number(curve.points[-1][0])}" for curve in others]
    size, cost = ours.points[-1]
    figure = Figure(case["case"], cost, drawing.y, goal=case["at most"])
    verdict, reason = cells(figure)[6], case.get("reason", "") if not figure.met else ""
    at = f"{curves.number(cost)} {drawing.y} at {curves.number(size)}"
    return case["case"], at, "; ".join(said), "", "", f"{case['at most']:g} {drawing.y}", verdict, reason, f"`{found['command']}`"


def _is(figure: Figure, case: dict[str, Any]) -> bool:
    """Return whether a case means this figure; `*` stands for a size, which depends on `--quick`."""
    return fnmatchcase(figure.what, case["what"]) and case.get("other", figure.other) == figure.other


def readme(results: Results, name: str) -> Iterator[str]:
    """Yield the chosen figures in short: the ratio with its spread, and the command."""
    rows = [_case(results, case) for case in results.cases[name]]
    short = [(case, ratio or ours, spread or verdict, command) for case, ours, _, ratio, spread, _, verdict, _, command in rows]
    yield from markdown(("", "ours / other", "spread", "command"), short)


def group(results: Results, name: str) -> Iterator[str]:
    """Yield the command, and all figures of a group."""
    record = results.records.get(name)
    if record is None:
        yield f"Not measured: `python benchmarks/run.py --only {shlex.quote(name)} --save`"
        return
    yield f"`{record.command}` (commit {record.commit}, {record.date[:10]})"
    yield ""
    yield from markdown(TITLES, [cells(figure) for figure in record.figures])


def cells(figure: Figure) -> tuple[str, ...]:
    """Return the columns of a figure, with a missed goal in bold and a note without its brackets."""
    *front, verdict, note = figure.cells
    return (*front, "**missed**" if verdict == "MISSED" else verdict, note.removeprefix("(").removesuffix(")"))


def growth(results: Results, name: str) -> Iterator[str]:
    """Yield all drawings, each with its command, its points and its note."""
    for found in results.growths.values():
        for drawing in map(curves.from_json, found["growth"]):
            yield f"### {drawing.title}\n"
            yield f"`{found['command']}` (commit {found['commit']}, {found['date'][:10]})\n"
            yield f"![{drawing.title}: {drawing.y} over {drawing.x}](pictures/growth-{drawing.name}.svg)\n"
            head, *rows = curves.rows(drawing)
            yield from markdown((head[0], *(f"{what} ({drawing.y})" for what in head[1:])), rows)
            yield f"\n{drawing.note}\n" if drawing.note else ""


def soak(results: Results, name: str) -> Iterator[str]:
    """Yield the table that `soak.py` wrote, with the command."""
    command = f"python benchmarks/soak.py --results {SOAK.relative_to(ROOT)}"
    yield f"`{command}`\n" if SOAK.exists() else f"Not run: `{command}`"
    yield from SOAK.read_text().splitlines() if SOAK.exists() else ()


def scripts(results: Results, name: str) -> Iterator[str]:
    """Yield what each script says about itself in its first line; workers, which other scripts start, are left out."""
    paths = sorted(HERE.glob("[!_]*.py"))
    yield from markdown(("script", "what it does"), [(f"`{path.name}`", _first_line(path)) for path in paths])


def _first_line(path: Path) -> str:
    return path.read_text().removeprefix('"""').split("\n", 1)[0].removesuffix('"""')


def machines(results: Results, name: str) -> Iterator[str]:
    """Yield a line for each machine, with what was measured on it."""
    where: dict[str, list[str]] = {}
    for group_name, entry in [*((key, record.machine) for key, record in results.records.items()), *_grown(results)]:
        said = f"{entry['cores']} cores, {entry['system']}, Python {entry['python']}, torch {entry['torch']}"
        where.setdefault(said, []).append(group_name)
    for said, names in where.items():
        yield f"- {said}" + (f" ({', '.join(names)})" if len(where) > 1 else "")


def _grown(results: Results) -> Iterator[tuple[str, dict[str, Any]]]:
    for topic, found in results.growths.items():
        yield f"growth of {topic}", found["machine"]


KINDS: dict[str, Callable[[Results, str], Iterator[str]]] = {
    "cases": cases,
    "figures": group,
    "growth": growth,
    "machines": machines,
    "readme": readme,
    "scripts": scripts,
    "soak": soak,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page is not up to date")
    given = parser.parse_args()
    results = read_results()
    drawings = {curves.PICTURES / f"growth-{entry['name']}.svg": curves.svg(curves.from_json(entry)) for entry in _entries(results)}
    wanted = {**{page: written(page.read_text(), results) for page in PAGES}, **drawings}
    old = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in old:
        print(f"{path.relative_to(ROOT)} {'is not what the results give' if given.check else 'is written anew'}")
        if not given.check:
            path.write_text(wanted[path])
    sys.exit(given.check and bool(old))


def _entries(results: Results) -> list[dict[str, Any]]:
    return [entry for found in results.growths.values() for entry in found["growth"]]


if __name__ == "__main__":
    main()
