"""Two runs in one project: neither replaces a checkpoint of the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream import Accelerator, ConfigError, MissingCheckpointError
from slipstream.utils import ProjectConfiguration


def begin(folder: Path) -> Accelerator:
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(torch.nn.Linear(1, 1))
    return accelerator


def test_a_number_that_another_run_has_used_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry, other = begin(tmp_path), begin(tmp_path)
    saved = [Path(run.save_state()).name for run in (entry, other, other, entry)]
    assert saved == ["checkpoint_0", "checkpoint_1", "checkpoint_2", "checkpoint_3"]
    assert sum("was saved by another run since this one began" in record.message for record in caplog.records) == 2


def test_keeping_the_best_needs_a_limit() -> None:
    with pytest.raises(ConfigError, match="keep_best=2.*without total_limit"):
        ProjectConfiguration(keep_best=2)


def test_nothing_saved_yet_is_a_missing_file_too(tmp_path: Path) -> None:
    for wanted in (None, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="there is no checkpoint") as caught:
            begin(tmp_path).load_state(wanted)
        assert isinstance(caught.value, MissingCheckpointError)
