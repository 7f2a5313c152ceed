"""The table of mistakes with accelerators fits the sources. Planting them takes long: `make mutations`."""

from __future__ import annotations

import ast

import pytest
from device_mutations import BEGIN, DOCUMENT, END, MUTATIONS, ROOT, Finding, Mutation, render


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_fits(mutation: Mutation) -> None:
    """Its text occurs once in a source that is one of Python with the mistake too, and its tests exist."""
    text = (ROOT / "src/slipstream" / mutation.file).read_text()
    changed = ast.dump(ast.parse(mutation.apply(text)))
    assert changed != ast.dump(ast.parse(text))
    for test in (*mutation.standin, *mutation.cpu):
        assert (ROOT / test).is_file(), test
    assert any("standin" in (ROOT / test).read_text() for test in mutation.standin)


def test_moved_text_is_told() -> None:
    """A text that is gone, or occurs twice, is an error that names the mistake."""
    with pytest.raises(ValueError, match="no prefetch: its text occurs 2 times"):
        next(mutation for mutation in MUTATIONS if mutation.name == "no prefetch").apply("        if following is not self.block:\n" * 2)


def test_thirty_different_mistakes() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len({(m.file, m.old) for m in MUTATIONS}) == 30


def test_documented_table() -> None:
    """The table in the documentation is about these mistakes, in this order."""
    shown = DOCUMENT.read_text().split(BEGIN)[1].split(END)[0]
    rows = [line.split(" | ")[0] for line in shown.splitlines() if line.startswith("| **")]
    assert rows == [f"| **{mutation.name}**: {mutation.mistake}" for mutation in MUTATIONS]


def test_table() -> None:
    first, second = MUTATIONS[:2]
    noticed, missed = Finding("tests/a/test_b.py::test_c[1]"), Finding()
    table = render((first, second), {first.name: {True: noticed, False: missed}, second.name: {True: missed, False: missed}})
    assert "| `test_b.py::test_c` | no |" in table
    assert "Noticed on the stand-in: 1 of 2." in table
    assert "Noticed on the CPU alone: 0 of 2." in table
