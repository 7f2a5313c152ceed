"""What the documents say is so: every Python block runs, every link leads somewhere, every example in a docstring is right."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.checkpoint.format import parse

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```python *(?P<kind>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> Iterator[Any]:
    for page in PAGES:
        text = page.read_text()
        for found in FENCE.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            if found["kind"] == kind:
                yield pytest.param(found["code"], id=f"{page.relative_to(ROOT)}:{line}")


def run_as_script(code: str, folder: Path) -> None:
    """Runs a block in a folder that the processes share; the pool puts the working directory back."""
    os.chdir(folder)
    exec(compile(code, "script.py", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("code", list(blocks("")))
def test_a_python_block_runs_on_two_processes(ranks, tmp_path, code):
    ranks(2).run(run_as_script, code, tmp_path)


def test_the_blocks_of_tests_pass(pytester):
    """In one session, which shares its pools of ranks."""
    pytester.makeconftest('pytest_plugins = ["slipstream.testing.plugin"]')
    found = list(blocks("pytest"))
    pytester.makepyfile(**{re.sub(r"\W", "_", f"test_{block.id}"): block.values[0] for block in found})
    counts = pytester.runpytest_inprocess("-p", "no:cacheprovider").parseoutcomes()
    assert set(counts) == {"passed"}
    assert counts["passed"] >= len(found) > 2


def printed() -> Iterator[Any]:
    """Blocks that are followed by what they print; not those of the page whose lines have a time."""
    output = re.compile(r"\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for page in PAGES:
        text = page.read_text()
        for found in FENCE.finditer(text):
            shown = output.match(text, found.end())
            if shown is not None and found["kind"] == "" and page.name != "logging.md":
                yield pytest.param(found["code"], shown[1], id=f"{page.relative_to(ROOT)}: {shown[1][:30]}")


@pytest.mark.parametrize(("code", "shown"), list(printed()))
def test_pages_show_what_is_really_printed(ranks, tmp_path, code, shown):
    assert shown.strip() in ranks(2).outcomes(run_as_script, code, tmp_path)[0].output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    lost = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        if "://" in target:
            continue
        there = page.parent / target if target else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            lost.append(f"{target}#{anchor}")
    assert lost == []


def anchors(page: Path) -> set[str]:
    """What the headings of a page can be linked by."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_dependency_has_its_reason_and_no_other_is_listed():
    section, listed = "", {}
    for line in (ROOT / "docs" / "dependencies.md").read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif (row := re.match(r"\| ([\w-]+) \| (.+) \|", line)) and row[1] != "package":
            listed.setdefault(section, set()).add(row[1].lower())
    declared: dict[str, set[str]] = {}
    for requirement in metadata.requires("slipstream") or []:
        name = re.match(r"[\w-]+", requirement)
        extra = re.search(r"extra == ['\"](\w+)['\"]", requirement)
        assert name is not None
        declared.setdefault(extra[1] if extra else "Always installed", set()).add(name[0].lower())
    assert listed == declared


def modules_with_examples() -> Iterator[Any]:
    for found in pkgutil.walk_packages(slipstream.__path__, "slipstream."):
        if not found.name.endswith("__main__"):
            tests = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(found.name))
            if any(test.examples for test in tests):
                yield pytest.param(found.name, id=found.name)


@pytest.mark.parametrize("name", list(modules_with_examples()))
def test_examples_in_docstrings_are_right(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_the_manifest_that_is_shown_is_a_real_one():
    shown = re.search(r"^```json\n(.*?)\n^```$", (ROOT / "docs" / "checkpoint-format.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert parse(shown[1].encode(), "docs/checkpoint-format.md").models[0].aliases == {"head.weight": "embed.weight"}
