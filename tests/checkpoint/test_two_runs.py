"""Two runs in one project: neither replaces a checkpoint of the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream import Accelerator, ConfigError, MissingCheckpointError
from slipstream.utils import ProjectConfiguration


def begin(folder: Path) -> Accelerator:
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(project_config=project)
    accelerator.prepare(torch.nn.Linear(1, 1))
    return accelerator


def test_number_another_run_used_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A number that another run has used is left out."""
    entry, other = begin(tmp_path), begin(tmp_path)
    saved = [Path(run.save_state()).name for run in (entry, other, other, entry)]
    assert saved == ["checkpoint_0", "checkpoint_1", "checkpoint_2", "checkpoint_3"]
    assert sum("was saved by another run since this one began" in record.message for record in caplog.records) == 2


def test_keeping_best_needs_limit() -> None:
    """Keeping the best needs a limit."""
    with pytest.raises(ConfigError, match="keep_best=2.*without total_limit"):
        ProjectConfiguration(keep_best=2)


def test_nothing_saved_yet_missing_file_too(tmp_path: Path) -> None:
    """Nothing saved yet is a missing file too."""
    for wanted in (None, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="there is no checkpoint") as caught:
            begin(tmp_path).load_state(wanted)
        assert isinstance(caught.value, MissingCheckpointError)
