"""What became slower: the figures of a run against those of an earlier commit, kept in `baseline.json`.

Two figures differ only if their spreads do not overlap and the values are more than 5 % apart (25 % where one of them was measured once
and has no spread); everything else is noise. Compared is the ratio to the other side, which varies less between machines than the time;
without another side it is the value itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from figures import Figure, Record, load, number

BASELINE = Path(__file__).with_name("baseline.json")
TOLERANCE = 0.05
WITHOUT_SPREAD = 0.25
"""The tolerance of figures that were measured once."""
KINDS = ("slower", "faster", "new", "vanished", "same")


@dataclass(frozen=True)
class Change:
    """What became of one figure: one of `KINDS`."""

    kind: str
    group: str
    before: Figure | None
    after: Figure | None

    def __str__(self) -> str:
        figure = self.after or self.before
        assert figure is not None
        name = f"{self.group}: {figure.what}" + (f" / {figure.other}" if figure.other else "")
        if self.before is None or self.after is None:
            return f"{self.kind}: {name}, {_said(figure)}"
        change = f", {self.after.value / self.before.value - 1:+.0%}" if self.before.value else ""
        return f"{self.kind}: {name}, {_said(self.before)} -> {_said(self.after)}{change}"


def read_baseline(path: Path = BASELINE) -> dict[str, Record]:
    """Return the records of the baseline, by group; raise SystemExit with what to do where there is none."""
    if not path.exists():
        raise SystemExit(f"there is no {path} to compare with; write one with: python benchmarks/run.py --quick --save-baseline")
    return load(path)


def compare(before: Mapping[str, Sequence[Figure]], after: Mapping[str, Sequence[Figure]]) -> list[Change]:
    """Return what became of each figure of the groups that were measured, slower ones first."""
    found = [change for group in after for change in _changes(group, before.get(group, ()), after[group])]
    return sorted(found, key=lambda change: KINDS.index(change.kind))


def _changes(group: str, before: Sequence[Figure], after: Sequence[Figure]) -> Iterator[Change]:
    earlier = {(figure.what, figure.other): figure for figure in before}
    for figure in after:
        old = earlier.pop((figure.what, figure.other), None)
        yield Change("new" if old is None else kind_of(old, figure), group, old, figure)
    for figure in earlier.values():
        yield Change("vanished", group, figure, None)


def kind_of(before: Figure, after: Figure) -> str:
    """Return whether a figure became slower or faster, or is the same within the noise."""
    (low, high), (new_low, new_high) = before.interval, after.interval
    tolerance = WITHOUT_SPREAD if before.low is None or after.low is None else TOLERANCE
    if new_low > high and after.value > before.value * (1 + tolerance):
        return "slower"
    if new_high < low and after.value < before.value * (1 - tolerance):
        return "faster"
    return "same"


def _said(figure: Figure) -> str:
    """Return the value with its unit and its spread."""
    _, ours, _, ratio, spread, *_ = figure.cells
    return (ratio or ours) + (f" ({spread})" if spread else "")


def summary(changes: Sequence[Change], baseline: Mapping[str, Record], measured: Mapping[str, object]) -> str:
    """Return the lines that say what changed, against which commits, and whether the machine is another one."""
    records = [baseline[group] for group in measured if group in baseline]
    commits = ", ".join(dict.fromkeys(f"{record.commit} ({record.date[:10]})" for record in records)) or "nothing measured before"
    lines = [f"against the baseline of {commits}:"]
    lines += [f"  {change}" for change in changes if change.kind != "same"]
    same = sum(change.kind == "same" for change in changes)
    return "\n".join([*lines, f"  {number(same)} figures are the same within their spread and {TOLERANCE:.0%}"])


def differences(record: Record, machine: Mapping[str, object]) -> list[str]:
    """Return in what another machine differs from the one of a record, except in the version of Slipstream."""
    keys = [key for key in machine if key != "slipstream"]
    return [f"{key} {record.machine.get(key)} -> {machine[key]}" for key in keys if record.machine.get(key) != machine[key]]
