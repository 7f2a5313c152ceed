"""`slipstream checkpoint` looks into folders of torch.distributed.checkpoint, and into Accelerate's FSDP checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate_layout
import dcp_layout
import pytest
import torch
from click.testing import CliRunner, Result
from sharding import net

from slipstream.cli.checkpoint import command
from slipstream.cli.main import main


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint as Accelerate saves it under FSDP."""
    model = net(1)
    optimizer = torch.optim.AdamW(model.mid.parameters(), lr=0.0)
    model.mid(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    folder = dcp_layout.save_fsdp(tmp_path / "saved", model, optimizer)
    accelerate_layout.write(folder)
    return folder


def test_show_names_parts(saved: Path) -> None:
    """What is shown: models and optimizers, with their tensors."""
    shown = run("show", "--tensors", saved)
    assert shown.exit_code == 0
    assert "model 0 " in shown.output
    assert "optimizer 0 " in shown.output
    assert "model.mid.weight" in shown.output
    data = json.loads(run("show", "--json", saved / "optimizer_0").output)
    assert [part["tensors"] for part in data["parts"]] == [6]
    assert "optimizer.param_groups.0.lr" in data["parts"][0]["values"]


def test_verify_finds_damage(saved: Path) -> None:
    """Every byte is read, and a changed one is found."""
    assert run("verify", saved).exit_code == 0
    path = saved / "optimizer_0" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    found = run("verify", saved)
    assert found.exit_code == 1
    assert str(path) in found.output


@pytest.mark.parametrize("kind", dcp_layout.KINDS[1:])
def test_verify_headers_of_safetensors(tmp_path: Path, kind: str) -> None:
    """Files without checksums are compared with what should be in them, as far as that goes."""
    state = {"weight": torch.ones(4, 4), "bias": torch.ones(4)}
    folder = dcp_layout.save(state, tmp_path / "saved", kind=kind)
    assert run("verify", folder).exit_code == 0
    (path,) = (path for path in folder.iterdir() if path.suffix in (".distcp", ".safetensors"))
    path.write_bytes(path.read_bytes()[:-8])
    assert run("verify", folder).exit_code == 1


def test_diff_of_two_folders(saved: Path, tmp_path: Path) -> None:
    """Two folders are compared tensor by tensor and value by value; what is equal has exit code 0."""
    first = saved / "pytorch_model_fsdp_0"
    state = {name: tensor.clone() for name, tensor in net(1).state_dict().items()}
    same = dcp_layout.save({"model": state}, tmp_path / "same", kind="safetensors")
    assert run("diff", first, same).exit_code == 0
    state["mid.bias"][0] += 1
    other = dcp_layout.save({"model": state, "epoch": 3}, tmp_path / "other")
    found = run("diff", first, other)
    assert found.exit_code == 1
    assert "model.mid.bias F32 [3]: 33.3 % changed, largest difference 1" in found.output
    assert "epoch: only in the second" in found.output
    assert run("diff", saved, first).exit_code == 1


def test_diff_of_different_kinds(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of torch and a checkpoint of ours are not compared, and the message says what to do."""
    from sharding import not_at_all, prepared

    prepared(not_at_all)[0].save_state(tmp_path / "ours")
    assert main(["checkpoint", "diff", str(saved), str(tmp_path / "ours")]) == 2
    assert "export-dcp" in capsys.readouterr().err


def test_ls_says_what_it_is(saved: Path) -> None:
    """The list names such a folder for what it is."""
    assert "is a checkpoint of Accelerate" in run("ls", saved).output
    assert "was written by torch.distributed.checkpoint" in run("ls", saved / "optimizer_0").output


def test_show_imports_no_torch(saved: Path) -> None:
    """Looking into such a folder does not import torch."""
    program = (
        "import sys; from slipstream.cli.checkpoint import command;"
        f"command(['show', {str(saved)!r}], standalone_mode=False); command(['verify', {str(saved)!r}], standalone_mode=False);"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False"
