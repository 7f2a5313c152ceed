"""The documentation is true: every Python block runs, every link resolves, every docstring example is right."""

from __future__ import annotations

import doctest
import importlib.util
import os
import pkgutil
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream import patch_environment
from slipstream.checkpoint.manifest import parse_manifest
from slipstream.cli.main import main
from slipstream.testing.rank_pool import Outcome
from slipstream.testing.standin.build import StandinUnavailable

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
    """Run a block in a folder that the processes share; the pool restores the working directory."""
    os.chdir(folder)
    exec(compile(code, "script.py", "exec"), {"__name__": "__main__"})


@pytest.fixture(scope="module")
def done() -> dict[str, list[Outcome]]:
    return {}


@pytest.fixture
def outcomes_of(ranks, done, tmp_path) -> Callable[[str], list[Outcome]]:
    """Return the outcomes of a block on two processes; each block runs once for all tests of this file."""

    def of(code: str) -> list[Outcome]:
        if code not in done:
            done[code] = ranks(2).outcomes(run_as_script, code, tmp_path)
        return done[code]

    return of


@pytest.mark.parametrize("code", list(blocks("")))
def test_python_blocks_run(outcomes_of, code):
    """Every Python block runs on two processes."""
    assert [outcome.traceback or outcome.summary for outcome in outcomes_of(code) if outcome.failed] == []


FOR_SEVERAL = re.compile("profile_merged|dp_shard_size=2")
TRAINING = [block for block in blocks("") if "prepare(" in block.values[0] and not FOR_SEVERAL.search(block.values[0])]
"""Blocks that place something on a device, without those that are about several processes."""


@pytest.mark.parametrize("code", TRAINING)
def test_python_blocks_run_on_an_accelerator(ranks, tmp_path, code):
    """Every block with a prepared object runs on one accelerator: tensors that it makes are where the model is."""
    ranks(1, device="standin").run(run_as_script, code, tmp_path)


@pytest.mark.parametrize("block", list(blocks("pytest")))
def test_pytest_blocks_pass(pytester, rank_pools, block):
    """Every block of tests passes in a pytest session of its own, with the rank pools of this one."""
    pytester.makeconftest("""
import pytest

pytest_plugins = ["slipstream.testing.plugin"]

@pytest.fixture(scope="session")
def rank_pools(request):
    return request.config.rank_pools
""")

    class Lend:
        def pytest_configure(self, config):
            config.rank_pools = rank_pools

    pytester.makepyfile(test_block=block)
    counts = pytester.runpytest_inprocess("-p", "no:cacheprovider", plugins=[Lend()]).parseoutcomes()
    assert set(counts) == {"passed"}
    assert counts["passed"] >= block.count("def test_") > 0


def test_pytest_blocks_exist():
    """The pages have blocks of tests, so the test above checks something."""
    assert len(list(blocks("pytest"))) > 2


def printed() -> Iterator[Any]:
    """Yield blocks that are followed by their output, except on the page whose lines have a time."""
    output = re.compile(r"\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for page in PAGES:
        text = page.read_text()
        for found in FENCE.finditer(text):
            shown = output.match(text, found.end())
            if shown is not None and found["kind"] == "" and page.name != "logging.md":
                yield pytest.param(found["code"], shown[1], id=f"{page.relative_to(ROOT)}: {shown[1][:30]}")


@pytest.mark.parametrize(("code", "shown"), list(printed()))
def test_shown_output(outcomes_of, code, shown):
    """Pages show what is printed, line by line, in order; messages of threads may come between any two lines."""
    output = iter(outcomes_of(code)[0].output.splitlines())
    assert [line for line in shown.strip().splitlines() if not any(line in printed_line for printed_line in output)] == []


def cheat_sheet() -> list[str]:
    """Return the lines in the right column of the cheat sheet, in order."""
    section = (ROOT / "docs" / "coming-from-accelerate.md").read_text().partition("## Cheat sheet")[2].partition("\nWhat to look")[0]
    cells = [row.split(" | ")[1] for row in section.splitlines() if row.startswith("| `")]
    return [line for cell in cells for line in re.findall(r"`([^`]+)`", cell)]


BEFORE_ALL = """
import os
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(16, 2)), batch_size=4)
x, rows, labels, texts, config, tokens = torch.ones(4, 2), torch.ones(3, 2), torch.ones(3), ["a", "b"], {"lr": 0.1}, 4
"""
BEFORE_WEIGHTS = "optimizer.step(); optimizer.zero_grad(); loss_sum = model(x).sum()"


def run_cheat_sheet(lines: list[str], folder: Path) -> None:
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(BEFORE_ALL, names)
    with patch_environment(slipstream_mixed_precision="no"):
        for line in lines:
            if "weight=" in line:
                exec(BEFORE_WEIGHTS, names)
            exec(compile(line, line, "exec"), names)


def test_cheat_sheet(ranks, tmp_path):
    """Every Python line of Slipstream in the cheat sheet runs on two processes, in the order of the table."""
    lines = [line for line in cheat_sheet() if not line.startswith("slipstream ")]
    assert len(lines) > 30
    ranks(2).run(run_cheat_sheet, lines, tmp_path)


def test_cheat_sheet_commands(tmp_path, monkeypatch, capsys):
    """Every command of the cheat sheet exists, and a launch with its options can be planned."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("config.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 2\n")
    commands = [line.split()[1:] for line in cheat_sheet() if line.startswith("slipstream ")]
    assert {command[0] for command in commands} > {"launch", "config", "estimate"}
    for command in commands:
        asked = [command[0], "--cpu", "--show", *command[1:]] if command[0] == "launch" else [*command, "--help"]
        assert main(asked) == 0, command
    assert "2 on this machine" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    """Every link between pages leads to a file and a heading that exist."""
    lost = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        if "://" in target:
            continue
        there = page.parent / target if target else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            lost.append(f"{target}#{anchor}")
    assert lost == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_dependencies_page():
    """Every dependency has its reason on the page, and no other is listed."""
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
    compat = re.search(r"^dependencies = \[(.*?)\]", (ROOT / "compat" / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert compat is not None
    declared["The drop-in"] = set(re.findall(r'"([\w-]+)', compat[1]))
    clients = (ROOT / "compat" / "tests" / "ecosystem" / "requirements.txt").read_text()
    declared["Clients of the drop-in"] = set(re.findall(r"^[\w-]+", clients, re.MULTILINE))
    assert listed == declared


def modules_with_examples() -> Iterator[Any]:
    for found in pkgutil.walk_packages(slipstream.__path__, "slipstream."):
        framework = re.match(r"slipstream\.integrations\.(\w+)", found.name)
        if framework is not None and importlib.util.find_spec(framework[1]) is None:
            continue  # an integration can be imported where its framework is
        if not found.name.endswith("__main__"):
            try:
                module = importlib.import_module(found.name)
            except StandinUnavailable:
                continue  # a module of the stand-in can be imported where it is built
            tests = doctest.DocTestFinder(exclude_empty=True).find(module)
            if any(test.examples for test in tests):
                yield pytest.param(found.name, id=found.name)


@pytest.mark.parametrize("name", list(modules_with_examples()))
def test_docstring_examples(name):
    """Every example in a docstring is right."""
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_shown_manifest():
    """The manifest on the format page can be parsed."""
    shown = re.search(r"^```json\n(.*?)\n^```$", (ROOT / "docs" / "checkpoint-format.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert parse_manifest(shown[1].encode(), "docs/checkpoint-format.md").models[0].aliases == {"head.weight": "embed.weight"}
