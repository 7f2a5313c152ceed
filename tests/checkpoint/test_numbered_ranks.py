"""Numbered checkpoints saved again without a step in between: each has the files of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slipstream import Accelerator
from slipstream.utils import ProjectConfiguration


def test_every_number_files_of_own_save(ranks: Any, tmp_path: Path) -> None:
    """Every number has the files of its own save."""
    def save_in_a_row() -> None:
        project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
        accelerator = Accelerator(project_config=project)
        accelerator.prepare(torch.nn.Linear(2, 2))
        for _ in range(5):
            accelerator.save_state()
        accelerator.wait_for_everyone()

    ranks(3).run(save_in_a_row)
    for number in range(5):
        folder = tmp_path / "checkpoints" / f"checkpoint_{number}"
        assert sorted(path.name[:6] for path in folder.glob("rank_*")) == ["rank_0", "rank_1", "rank_2"]
    assert not list((tmp_path / "checkpoints").glob(".*"))
