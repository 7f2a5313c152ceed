"""What the benchmarks make of their measurements: spreads, files, comparisons, drawings. Nothing is measured here."""

from __future__ import annotations

import argparse
import dataclasses
import doctest
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import baseline  # noqa: E402
import curves  # noqa: E402
import figures  # noqa: E402
import page  # noqa: E402
import run  # noqa: E402
import turns  # noqa: E402
from curves import Curve, Growth  # noqa: E402
from figures import Figure  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
LINEAR = Curve("ours", ((1, 1.0), (10, 10.0), (100, 100.0)))
FLAT = Curve("bare torch", ((1, 10.0), (10, 10.0), (100, 10.0)), dashed=True)
GROWTH = Growth("made-up", "a <barrier>", "ranks", "ms", (LINEAR, FLAT), note="made up")


@pytest.mark.parametrize("module", [curves, figures, turns])
def test_examples_in_docstrings(module):
    """The examples in the docstrings of the shared modules are right."""
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf"])
def test_times_that_make_no_sense(text):
    """A time on the command line is above zero, and ends."""
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text} is not a number above zero"):
        figures.above_zero(text)


# -- drawings ---------------------------------------------------------------------------------------------------------


def drawn(growth: Growth) -> ElementTree.Element:
    return ElementTree.fromstring(curves.svg(growth))


def points(line: ElementTree.Element) -> list[tuple[float, float]]:
    return [tuple(float(number) for number in pair.split(",")) for pair in line.attrib["points"].split()]


def test_equal_factors_are_equal_distances():
    """A power is a straight line from edge to edge, and the same cost is the same height in every curve."""
    linear, flat = (points(line) for line in drawn(GROWTH).iter(f"{SVG}polyline"))
    assert [x for x, _ in linear] == [curves.LEFT, (curves.LEFT + curves.RIGHT) / 2, curves.RIGHT]
    assert linear[1][1] - linear[0][1] == pytest.approx(linear[2][1] - linear[1][1], abs=0.2)
    assert linear[0][1] > linear[2][1]  # dearer is further up
    assert {y for _, y in flat} == {linear[1][1]}


def test_other_side_is_dashed():
    """Only the curve of the other side is dashed."""
    assert ["stroke-dasharray" in line.attrib for line in drawn(GROWTH).iter(f"{SVG}polyline")] == [False, True]


def test_labels_say_what_is_drawn():
    """The drawing has the title, both units, the sizes, and at the end of each curve its name with the last cost."""
    texts = [str(text.text).replace("\N{NO-BREAK SPACE}", " ") for text in drawn(GROWTH).iter(f"{SVG}text")]
    assert {"a <barrier>", "ranks", "ms", "1", "10", "100", "ours: 100 ms", "bare torch: 10 ms"} <= set(texts)


def test_labels_do_not_overlap():
    """Names of curves that end at the same place stand one below the other, inside the picture."""
    same = [Curve(f"a curve with a name of two lines, number {number}", ((1, 1.0), (10, 1.0 + number / 100))) for number in range(6)]
    found = drawn(Growth("n", "t", "x", "s", tuple(same)))
    heights = sorted(float(text.attrib["y"]) for text in found.iter(f"{SVG}text") if float(text.attrib["x"]) > curves.RIGHT)
    assert len(heights) == 12
    assert min(after - before for before, after in zip(heights, heights[1:], strict=False)) >= curves.LINE - 0.2
    assert 0 < heights[0] < heights[-1] < curves.HEIGHT


def test_one_point_is_drawn():
    """A curve with one size, and costs that are all the same, have a drawing."""
    assert points(next(drawn(Growth("n", "t", "x", "s", (Curve("ours", ((5, 2.0),)),))).iter(f"{SVG}polyline")))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ((), "1 to 6 curves, not 0"),
        ((Curve("ours", ((1, 0.0),)),), "above 0"),
        ((Curve("ours", ((2, 1.0), (1, 1.0))),), "order of their sizes"),
    ],
)
def test_what_cannot_be_drawn(wrong, says):
    """Curves that logarithmic axes cannot show are errors that name the drawing."""
    with pytest.raises(ValueError, match=f"made-up.*{says}"):
        curves.svg(Growth("made-up", "t", "x", "s", wrong))


@pytest.mark.parametrize(("costs", "says"), [((1, 10, 100), "x^1"), ((5, 5, 4.9), "x^0"), ((100, 10, 1), "x^-1")])
def test_growth_is_said(costs, says):
    """The last row says with which power of the size a cost grows or falls."""
    curve = Curve("ours", tuple(zip((1, 10, 100), costs, strict=True)))
    assert curves.rows(Growth("n", "t", "x", "s", (curve,)))[-1] == ("growth", says)


def test_growth_survives_its_file(tmp_path):
    """A saved drawing is loaded as it was, and the file says where it comes from."""
    curves.save(tmp_path / "new" / "growth.json", [GROWTH], "python benchmarks/growth_made_up.py")
    assert curves.load(tmp_path / "new" / "growth.json") == [GROWTH]
    assert '"command": "python benchmarks/growth_made_up.py"' in (tmp_path / "new" / "growth.json").read_text()


def test_program_of_a_growth_script(tmp_path, monkeypatch, capsys):
    """The shared `main` measures as asked, prints the points, and keeps them with the command."""
    monkeypatch.setattr(sys, "argv", ["benchmarks/growth_made_up.py", "--quick", "--json", str(tmp_path / "g.json")])
    asked = []
    curves.main(lambda quick: asked.append(quick) or [GROWTH], "made up")
    assert asked == [True]
    assert "ranks   ours  bare torch" in capsys.readouterr().out
    assert '"python benchmarks/growth_made_up.py --quick"' in (tmp_path / "g.json").read_text()


# -- figures ----------------------------------------------------------------------------------------------------------

STEP = Figure("a step", 2.0, "us", 1.0, "plain", goal=2.5, spread="(a note)", low=1.9, high=2.2)


def test_figures_survive_their_file(tmp_path):
    """Saved figures are loaded as they were, with their command; groups that a file already has are kept."""
    figures.save(tmp_path / "new" / "f.json", {"training": [STEP]}, "python benchmarks/training.py")
    figures.save(tmp_path / "new" / "f.json", {"launch": [Figure("a fork", 1.0, "ms")]}, "python benchmarks/launch.py")
    found = figures.load(tmp_path / "new" / "f.json")
    assert found["training"].figures == (STEP,)
    assert {name: record.command for name, record in found.items()} == {
        "training": "python benchmarks/training.py",
        "launch": "python benchmarks/launch.py",
    }
    assert all(record.commit and record.date and record.machine["torch"] for record in found.values())


@pytest.mark.parametrize("text", ["", "[]", '{"training": {"figures": [{"what": "a step"}]}}', '{"training": {"figures": []}}'])
def test_broken_file_of_figures(tmp_path, text):
    """A file that is not one of figures is an error that names it and says why."""
    (tmp_path / "f.json").write_text(text)
    if text == "[]":
        with pytest.raises(SystemExit, match="AttributeError"):
            figures.load(tmp_path / "f.json")
    else:
        with pytest.raises(SystemExit, match=r"f\.json is not a file of figures \(\w+: "):
            figures.load(tmp_path / "f.json")


def test_command_without_its_file(monkeypatch):
    """The command that is kept with figures leaves out where they go."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/training.py", "--ranks", "2", "--json", "x.json", "--quick"])
    assert figures.own_command() == "python benchmarks/training.py --ranks 2 --quick"


def test_missing_library_says_so():
    """A library that is compared with and not installed is named, with what to do."""
    with pytest.raises(figures.Missing, match="needs no_such_library, not installed .* `make bench`"):
        figures.require("sys", "no_such_library")


def test_paired_rounds_have_a_spread():
    """The spread of contenders in turns is that of the parts of the run, around the median."""
    ours = {"cpu": [1.0] * 10 + [1.2] * 10, "wall": [1.0] * 20}
    plain = {"cpu": [1.0] * 20, "wall": [1.0] * 20}
    found = turns.compared("a step", 1.05, ours, plain, "plain")
    assert (found.low, found.ratio, found.high) == (1.0, pytest.approx(1.1), 1.2)


# -- what became slower -----------------------------------------------------------------------------------------------


def ratio(low: float, value: float, high: float) -> Figure:
    return Figure("a step", value, "us", 1.0, "plain", low=low, high=high)


@pytest.mark.parametrize(
    ("after", "kind"),
    [
        (ratio(1.10, 1.12, 1.15), "slower"),
        (ratio(0.80, 0.85, 0.90), "faster"),
        (ratio(1.01, 1.12, 1.15), "same"),  # the spreads overlap
        (ratio(1.025, 1.03, 1.04), "same"),  # they do not, but it is less than 5 %
        (ratio(0.97, 0.98, 0.99), "same"),
    ],
)
def test_change_of_a_figure(after, kind):
    """A figure became slower or faster only where the spreads do not overlap and more than 5 % lie between."""
    [change] = baseline.compare({"training": [ratio(0.99, 1.0, 1.02)]}, {"training": [after]})
    assert change.kind == kind


def test_figures_without_a_spread():
    """What was measured once has to differ by more; one from nothing always differs."""
    before = Figure("a fork", 10.0, "ms")
    found = [baseline.kind_of(before, Figure("a fork", now, "ms")) for now in (12.0, 13.0, 7.0)]
    assert found == ["same", "slower", "faster"]
    [change] = baseline.compare({"imports": [Figure("modules", 0, "modules")]}, {"imports": [Figure("modules", 1, "modules")]})
    assert str(change) == "slower: imports: modules, 0 modules -> 1 modules"


def test_new_and_vanished_figures():
    """Rows that only one side has are named; groups that were not measured now are not missed."""
    before = {"training": [ratio(1, 1, 1), Figure("gone", 1.0, "s")], "launch": [Figure("not measured now", 1.0, "s")]}
    after = {"training": [ratio(1, 1, 1), Figure("fresh", 2.0, "s")], "data": [Figure("of a new group", 3.0, "s")]}
    found = [str(change) for change in baseline.compare(before, after) if change.kind != "same"]
    assert found == ["new: training: fresh, 2 s", "new: data: of a new group, 3 s", "vanished: training: gone, 1 s"]


def test_missing_baseline(tmp_path):
    """Without a baseline the error says how to write one."""
    with pytest.raises(SystemExit, match=r"no .*baseline\.json to compare with; write one with: python .* --save-baseline"):
        baseline.read_baseline(tmp_path / "baseline.json")


# -- the pages --------------------------------------------------------------------------------------------------------


def made_up_results() -> page.Results:
    found = (STEP, Figure("alone", 5.0, "us", goal=4.0))
    record = figures.Record(found, "python benchmarks/run.py --only training", {}, "abc", "2026-01-02T03")
    cases = [
        {"case": "the step | plain", "group": "training", "what": "a step"},
        {"case": "our calls", "group": "training", "what": "alone", "reason": "because"},
        {"case": "later", "group": "sharded training", "what": "a step"},
    ]
    return page.Results({"training": record}, {}, {"issue": cases})


def part(kind: str) -> str:
    return f"before\n<!-- measured: {kind} -->\nold\n<!-- end of measured -->\nafter"


def test_table_of_chosen_figures():
    """A case has its figure with spread and command, the reason only where the goal is missed, and says where it was not measured."""
    assert page.written(part("cases issue"), made_up_results()).splitlines() == [
        "before",
        "<!-- measured: cases issue -->",
        "| case | ours | other | ratio | spread | at most |  | why | command |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| the step \\| plain | 2 us | plain 1 us | 2.00 | 1.90 to 2.20 | 2.5 | met |  | `python benchmarks/run.py --only training` |",
        "| our calls | 5 us |  |  |  | 4 us | **missed** | because | `python benchmarks/run.py --only training` |",
        "| later |  |  |  |  |  | not measured |  | `python benchmarks/run.py --only 'sharded training'` |",
        "<!-- end of measured -->",
        "after",
    ]


def test_table_of_a_group():
    """All figures of a group stand below their command, commit and day; columns that are empty are left out."""
    lines = page.written(part("figures training"), made_up_results()).splitlines()
    assert lines[2] == "`python benchmarks/run.py --only training` (commit abc, 2026-01-02)"
    assert lines[6] == "| a step | 2 us | plain 1 us | 2.00 | 1.90 to 2.20 | 2.5 | met | a note |"
    assert "Not measured: `python benchmarks/run.py --only launch --save`" in page.written(part("figures launch"), made_up_results())


def test_case_at_the_end_of_a_curve():
    """A case can be the end of our curve in a drawing, beside those of the others, with a goal in its unit."""
    case = {"case": "at 100 ranks", "growth": "ranks", "drawing": "made-up", "at most": 50, "reason": "because"}
    kept = {"command": "python benchmarks/growth_ranks.py", "growth": [dataclasses.asdict(GROWTH)]}
    lines = page.written(part("cases issue"), page.Results({}, {"ranks": kept}, {"issue": [case]})).splitlines()
    row = "| at 100 ranks | 100 ms at 100 | bare torch 10 ms at 100 | 50 ms | **missed** | because | `python benchmarks/growth_ranks.py` |"
    assert lines[4] == row
    assert "not measured" in page.written(part("cases issue"), page.Results({}, {}, {"issue": [case]}))


def test_unknown_part_of_a_page():
    """A part that nothing makes is an error that names it."""
    with pytest.raises(SystemExit, match="'tables'; the kinds are cases"):
        page.written(part("tables"), made_up_results())


@pytest.mark.parametrize("path", page.PAGES, ids=lambda path: path.name)
def test_pages_are_what_the_results_give(path):
    """The measured parts of the pages are those that `python benchmarks/page.py` writes."""
    assert path.read_text() == page.written(path.read_text(), page.read_results())


def test_drawings_are_what_the_results_give():
    """There is a drawing for each kept growth, as `python benchmarks/page.py` writes it, and no other."""
    wanted = {f"growth-{growth.name}.svg": curves.svg(growth) for path in run.RESULTS.glob("growth_*.json") for growth in curves.load(path)}
    assert {path.name: path.read_text() for path in curves.PICTURES.glob("growth-*.svg")} == wanted


def test_figures_of_the_readme_have_commands():
    """Every row of the README's measured table ends with the command that measures it."""
    rows = page.PART.search((ROOT / "README.md").read_text())[0].splitlines()[3:-1]
    assert len(rows) > 5
    assert [row for row in rows if not row.endswith("` |") or "| `python benchmarks/" not in row] == []


def test_missed_goals_have_reasons():
    """Every goal of the page's first table that is missed has its reason."""
    results = page.read_results()
    rows = [(case["case"], page._case(results, case)) for case in results.cases["issue"]]
    assert [case for case, (*_, verdict, reason, _) in rows if verdict == "**missed**" and not reason] == []


def test_cases_are_of_groups():
    """Every chosen figure names a group of `run.py`."""
    chosen = [case for cases in page.read_results().cases.values() for case in cases]
    assert {case["group"] for case in chosen if "group" in case} <= set(run.GROUPS)
    assert {case["growth"] for case in chosen if "growth" in case} <= set(run.GROWTHS)


# -- the program ------------------------------------------------------------------------------------------------------


class Script:
    """Stands for a module of a group."""

    def __init__(self, value: float) -> None:
        self.value = value

    def measure(self, quick: bool) -> list[Figure]:
        return [ratio(self.value - 0.01, self.value, self.value + 0.01)]


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """Return a function that runs the program with made-up groups in a folder of its own: its exit code and its output."""
    scripts = {"_fast": Script(1.0)}
    monkeypatch.setattr(run, "GROUPS", {"training": "_fast", "other": "_not_there"})
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(run.importlib, "import_module", lambda name: scripts[name] if name in scripts else __import__(name))

    def start(*words: str, value: float = 1.0) -> tuple[object, str]:
        scripts["_fast"].value = value
        monkeypatch.setattr(sys, "argv", ["run.py", "--baseline", str(tmp_path / "baseline.json"), *words])
        with pytest.raises(SystemExit) as ended:
            run.main()
        shown = capsys.readouterr()
        return ended.value.code, shown.out + shown.err

    return start


def test_regression_is_noticed(bench):
    """After `--save-baseline`, a slower run is named, and is the exit code with `--strict`."""
    assert bench("--save-baseline")[0] == 0
    code, said = bench("--strict")
    assert code == 0
    assert "1 figures are the same" in said
    code, said = bench("--strict", value=1.2)
    assert code == 1
    assert "slower: training: a step / plain, 1.00 (0.99 to 1.01) -> 1.20 (1.19 to 1.21), +20%" in said
    assert bench(value=1.2)[0] == 0


def test_group_that_cannot_be_measured(bench):
    """A group that lacks a library says so, and the others are measured."""
    _, said = bench("--save-baseline")
    assert "other: not measured: No module named '_not_there'" in said
    assert "the baseline of training is written" in said


def test_group_that_fails(bench, monkeypatch):
    """A group whose worker fails does not end the run, and is the exit code."""
    monkeypatch.setattr(Script, "measure", lambda self, quick: figures.job(1, "_no_such_worker.py"))
    code, said = bench("--save-baseline")
    assert code == 1
    assert "training: FAILED" in said
    assert "0 of 0 goals met" in said


def test_other_command_is_said(bench):
    """Figures of a quick run against a baseline of a whole one come with a warning."""
    bench("--save-baseline")
    assert "beware, training: its command was python benchmarks/run.py --only training" in bench("--quick")[1]


def test_results_are_kept(bench, tmp_path):
    """With `--save` the figures are in the folder of results, with the command of their group alone."""
    bench("--save-baseline", "--save", "--runs", "2", "--only", "training")
    record = figures.load(tmp_path / "results" / "_fast.json")["training"]
    assert record.command == "python benchmarks/run.py --only training --runs 2"
    assert record.figures[0].interval == (1.0, 1.0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--only", "no such"], "no group 'no such'; the groups are: training, other"),
        (["--growth", "--only", "training"], "no group of growth 'training'"),
        (["--runs", "0"], "at least once"),
        (["--growth", "--strict"], "--growth draws curves"),
        ([], "baseline.json to compare with"),
    ],
)
def test_wrong_options(bench, words, says):
    """Wrong options end with an error before anything is measured."""
    code, said = bench(*words)
    assert code
    assert says in said + str(code)
    assert "measuring" not in said


def test_groups_are_scripts():
    """Every group is a script with `measure`, and every script that measures is a group, a growth, or part of the soak."""
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "def measure(quick: bool" in path.read_text()}
    assert scripts == {*run.GROUPS.values(), *run.GROWTHS.values()}


@pytest.mark.parametrize("group", run.GROUPS)
def test_groups_are_shown(group):
    """The figures of every group have their place on the page."""
    assert f"<!-- measured: figures {group} -->" in (ROOT / "docs" / "benchmarks.md").read_text()


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "benchmarks").glob("[!_]*.py")))
def test_scripts_are_documented(name):
    """Every script is named on the page."""
    assert f"`{name}`" in (ROOT / "docs" / "benchmarks.md").read_text()
