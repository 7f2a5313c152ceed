"""`slipstream merge-weights`: the command as it is typed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from torch import nn

from slipstream.checkpoint.model_io import save_model
from slipstream.cli.main import main


@pytest.fixture
def parts(tmp_path):
    save_model(nn.Linear(8, 8), tmp_path / "parts", max_shard_size=100)
    return tmp_path / "parts"


def test_one_file_is_made_and_named(parts, tmp_path, capsys):
    assert main(["merge-weights", str(parts), str(tmp_path / "whole")]) == 0
    path = tmp_path / "whole" / "model.safetensors"
    assert capsys.readouterr().out == f"{path} ({path.stat().st_size:,} bytes)\n"
    assert sorted(safetensors.torch.load_file(path)) == ["bias", "weight"]
    assert len(os.listdir(parts)) == 3


@pytest.mark.parametrize("flag", ["--remove_checkpoint_dir", "--remove-checkpoint-dir"])
def test_the_many_go_when_asked(parts, tmp_path, flag):
    assert main(["merge-weights", str(parts), str(tmp_path / "whole"), flag]) == 0
    assert not parts.exists()


@pytest.mark.parametrize("flag", ["--unsafe_serialization", "--unsafe-serialization"])
def test_the_format_of_torch_when_asked(parts, tmp_path, flag):
    assert main(["merge-weights", str(parts), str(tmp_path / "whole"), flag]) == 0
    assert sorted(torch.load(tmp_path / "whole" / "pytorch_model.bin", weights_only=True)) == ["bias", "weight"]


def test_mistakes_are_messages(parts, tmp_path, capsys):
    assert main(["merge-weights", str(tmp_path / "absent"), str(tmp_path / "whole")]) == 1
    assert "There is nothing at" in capsys.readouterr().err
    assert main(["merge-weights", str(parts), str(parts / "model-00001-of-00002.safetensors")]) == 2
    assert "to merge" in capsys.readouterr().err
    assert main(["merge-weights", str(parts)]) == 2
    assert main(["merge_weights"]) == 2


def test_help_needs_no_torch():
    program = "import sys; from slipstream.cli.main import main; main(['merge-weights', '--help']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "FOLDER OUTPUT" in done.stdout
