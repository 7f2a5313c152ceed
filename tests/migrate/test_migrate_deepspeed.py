"""Scripts for DeepSpeed's engine become scripts for Slipstream: what changes, and that the result trains as plain PyTorch does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.migrate.migration import Migration, migrate_text

FOLDER = Path(__file__).parent
SCRIPTS = ["ds_dict_config", "ds_json_config", "ds_own_optimizer"]


def migration_of(name: str) -> Migration:
    path = FOLDER / "scripts" / f"{name}.py"
    return migrate_text(path.read_text(), str(path))


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_is_left(name: str) -> None:
    """No call of DeepSpeed is left, and a second migration changes nothing."""
    migration = migration_of(name)
    code = migration.new.split('"""', 2)[2]
    assert [line for line in code.splitlines() if "deepspeed" in line and not line.strip().startswith("#")] == []
    assert migrate_text(migration.new, migration.name).diff() == ""


def notes_of(name: str) -> str:
    return "\n".join(f"{note.line}: {note.text}" for note in migration_of(name).notes)


def test_notes() -> None:
    """What belongs to the launch, or has no counterpart, is noted with the line."""
    assert "43: ZeRO stage 2 (line 32)" in notes_of("ds_dict_config")
    noted = notes_of("ds_json_config")
    assert "--use_fsdp --fsdp_reshard_after_forward true --fsdp_offload_params true" in noted
    assert "comms_logger (ds_config.json) has no counterpart" in noted


def test_configuration() -> None:
    """Accumulation, clipping and the optimizer of the configuration are in the script."""
    new = migration_of("ds_dict_config").new
    assert "Accelerator(gradient_accumulation_steps=2)" in new
    assert "torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.999), eps=1e-8, weight_decay=3e-7)" in new
    assert "accelerator.clip_grad_norm_(model_engine.parameters(), 1.0)" in new
    assert "with accelerator.accumulate(model_engine):" in new



@pytest.mark.parametrize(
    ("config", "targets", "expected"),
    [
        ('{"optimizer": {"type": "OneBitAdam"}}', "engine, optimizer, _, _", "torch has no optimizer OneBitAdam"),
        ("{}", "engine, optimizer, _, _", "it has no optimizer"),
        ('{"optimizer": {"type": "SGD"}}', "result", "assign the result to four variables"),
    ],
)
def test_left_alone(config: str, targets: str, expected: str) -> None:
    """An engine that cannot be taken apart stays, with a note that says what to write."""
    text = f"import deepspeed\nconfig = {config}\n{targets} = deepspeed.initialize(model=net, config=config)\n"
    migration = migrate_text(text)
    assert not migration.is_changed
    assert any(expected in note.text and note.line == 3 for note in migration.notes)


def test_device_of_the_engine() -> None:
    """`.to(engine.local_rank)` names a device; elsewhere it is the rank. Quotation marks inside of an f-string are the other ones."""
    start = "import deepspeed\nengine, _, _, _ = deepspeed.initialize(model=net, optimizer=opt, config={})\n"
    new = migrate_text(start + 'x = x.to(engine.local_rank)\nprint(engine.local_rank, f"{engine.get_lr()}")\n').new
    rates = "[group['lr'] for group in optimizer.param_groups]"
    assert new.endswith(f'x = x.to(accelerator.device)\nprint(accelerator.local_process_index, f"{{{rates}}}")\n')


def test_broken_configuration(tmp_path: Path) -> None:
    """A JSON file that cannot be read is an error that names it."""
    (tmp_path / "ds.json").write_text("{,}")
    text = 'import deepspeed\nengine, _, _, _ = deepspeed.initialize(model=net, config="ds.json")\n'
    with pytest.raises(ConfigError, match=r"ds\.json is not JSON"):
        migrate_text(text, str(tmp_path / "train.py"))


def weights(model: torch.nn.Module) -> str:
    return f"weights {sum(parameter.abs().sum().item() for parameter in model.parameters()):.4f}"


def plain_json_config() -> str:
    """What `ds_json_config.py` trains, in plain PyTorch on one process."""
    torch.manual_seed(0)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(2))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in (*x.split(8), *x.split(8)):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return weights(model)


def plain_own_optimizer() -> str:
    """What `ds_own_optimizer.py` trains, in plain PyTorch on one process."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    data = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(3))
    for number, batch in enumerate(data, 1):
        (torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True)) / 2).backward()
        if number % 2 == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return weights(model)


@pytest.mark.launched
def test_same_weights(tmp_path: Path) -> None:
    """On one and on two processes migrated scripts train the weights of plain PyTorch."""
    found = {}
    for processes in ("1", "2"):
        folder = tmp_path / processes
        folder.mkdir()
        for name in SCRIPTS:
            (folder / f"{name}.py").write_text(migration_of(name).new)
        start = (sys.executable, "-m", "slipstream", "launch", "--cpu", "--num_processes", processes, str(FOLDER / "run_scripts.py"))
        scripts = [str(folder / f"{name}.py") for name in SCRIPTS]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*start, str(folder), *scripts], env=environment, text=True, capture_output=True, timeout=110)
        assert done.returncode == 0, done.stderr
        found[processes] = {name: (folder / f"{name}.0.txt").read_text().splitlines()[-1] for name in SCRIPTS}
    assert found["1"] == found["2"]
    assert found["2"]["ds_json_config"] == plain_json_config()
    assert found["2"]["ds_own_optimizer"] == plain_own_optimizer()
