"""Scripts for Accelerate become scripts for Slipstream: what changes, what is noted, and that the result does the same.

The originals run on the drop-in, which keeps what Accelerate does. The scripts of `tests/ported_scripts` have the shapes of Accelerate's
examples; with their imports turned back to Accelerate, a migration gives the same scripts again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
from slipstream.migrate.accelerate_scripts import ABSENT_ATTRIBUTES
from slipstream.migrate.migration import migrate_text

FOLDER = Path(__file__).parent
SCRIPTS = sorted(path.stem for path in (FOLDER / "scripts").glob("acc_*.py"))
RUN = ["acc_accumulation", "acc_inference", "acc_text"]
PORTED = sorted((FOLDER.parent / "ported_scripts").glob("*_shape.py"))
EXAMPLES = sorted((FOLDER.parents[1] / "examples").glob("*.py"))


def original(name: str) -> str:
    return (FOLDER / "scripts" / f"{name}.py").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_idempotent(name: str) -> None:
    """A second migration changes nothing."""
    new = migrate_text(original(name)).new
    assert migrate_text(new).diff() == ""


@pytest.mark.parametrize("path", [*PORTED, *EXAMPLES], ids=lambda path: path.stem)
def test_shapes_of_examples(path: Path) -> None:
    """Examples whose imports are turned back to Accelerate come back unchanged, except for the rule of schedulers."""
    text = path.read_text()
    before = text.replace("from slipstream", "from accelerate").replace("import slipstream", "import accelerate")
    new = migrate_text(before, path.name).new
    assert new.replace(", scheduler_steps_per_process=True", "").replace("scheduler_steps_per_process=True", "") == text.replace(
        ", scheduler_steps_per_process=True", ""
    ).replace("scheduler_steps_per_process=True", "")


def test_names_elsewhere() -> None:
    """A name that lives elsewhere is imported from there; parentheses and comments of other imports stay."""
    text = "from accelerate.utils import (\n    set_seed,  # all\n    tqdm,\n)\nfrom accelerate.accelerator import Accelerator\n"
    assert migrate_text(text).new == text.replace("accelerate.accelerator", "slipstream").replace("from accelerate", "from slipstream")


def notes_of(text: str) -> list[tuple[int, str]]:
    return [(note.line, note.text) for note in migrate_text(text).notes]


def test_missing_names() -> None:
    """A name that is not here stays, with a note that says what to use."""
    migration = migrate_text(original("acc_old"))
    told = {note.line: note.text for note in migration.notes}
    assert "from accelerate import DeepSpeedPlugin\n" in migration.new
    assert "several processes train replicas" in told[8]
    assert "ACCELERATE_DYNAMO_SOMETHING" in told[12]
    assert "accelerator.state.deepspeed_plugin is None" in told[14]


def test_absent_attributes() -> None:
    """The table of missing attributes lists attributes that are missing."""
    assert [name for name in ABSENT_ATTRIBUTES if hasattr(slipstream.Accelerator, name)] == []


def test_moved_arguments() -> None:
    """Arguments of older versions go where they belong, with their imports."""
    new = migrate_text(original("acc_old")).new
    expected = 'Accelerator(mixed_precision="fp16", dataloader_config=DataLoaderConfiguration(dispatch_batches=True, even_batches=False), '
    assert expected + 'project_config=ProjectConfiguration(project_dir="logs", logging_dir="logs"))' in new
    assert "from slipstream.utils import DataLoaderConfiguration, ProjectConfiguration\n" in new
    assert 'os.environ["SLIPSTREAM_MIXED_PRECISION"]' in new


def test_schedulers() -> None:
    """A prepared scheduler keeps its speed; one that the script steps by itself does not need it."""
    text = "from accelerate import Accelerator\na = Accelerator({})\nmodel, scheduler = a.prepare(model, scheduler)\n"
    assert "Accelerator(scheduler_steps_per_process=True)" in migrate_text(text.format("")).new
    own = text.format("step_scheduler_with_optimizer=False")
    assert migrate_text(own).new == own.replace("accelerate", "slipstream")


def test_defaults_that_differ() -> None:
    """A script that prepares loaders is told that no sample is repeated any more."""
    ((line, told),) = notes_of("from accelerate import Accelerator\naccelerator = Accelerator()\nloader = accelerator.prepare(loader)\n")
    assert line == 3
    assert "even_batches=True" in told


@pytest.mark.launched
def test_same_results(tmp_path: Path) -> None:
    """Migrated scripts print what the originals print on the drop-in, on two processes."""
    folders = [tmp_path / "before", tmp_path / "after"]
    scripts: list[list[str]] = [[], []]
    for folder, listed, after in zip(folders, scripts, (False, True), strict=True):
        folder.mkdir()
        for name in RUN:
            text = original(name)
            (folder / f"{name}.py").write_text(migrate_text(text).new if after else text)
            listed.append(str(folder / f"{name}.py"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parents[1] / "compat" / "src")}
    for folder, listed in zip(folders, scripts, strict=True):
        start = (sys.executable, "-m", "slipstream", "launch", "--cpu", "--num_processes", "2", str(FOLDER / "run_scripts.py"))
        done = subprocess.run([*start, str(folder), *listed], env=environment, text=True, capture_output=True, timeout=110)
        assert done.returncode == 0, done.stderr
    before, after = ({name: (folder / f"{name}.0.txt").read_text() for name in RUN} for folder in folders)
    assert before == after
    assert "weights" in after["acc_text"]
