"""What the benchmarks make of their measurements: drawings. Nothing is measured here."""

from __future__ import annotations

import doctest
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import curves  # noqa: E402
import figures  # noqa: E402
import turns  # noqa: E402
from curves import Curve, Growth  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
LINEAR = Curve("ours", ((1, 1.0), (10, 10.0), (100, 100.0)))
FLAT = Curve("bare torch", ((1, 10.0), (10, 10.0), (100, 10.0)), dashed=True)
GROWTH = Growth("made-up", "a <barrier>", "ranks", "ms", (LINEAR, FLAT), note="made up")


@pytest.mark.parametrize("module", [curves, figures, turns])
def test_examples_in_docstrings(module):
    """The examples in the docstrings of the shared modules are right."""
    assert doctest.testmod(module).failed == 0


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
