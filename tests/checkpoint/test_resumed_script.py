"""The loop that the README shows, cut at every checkpoint and resumed in a fresh Accelerator, equals the loop that was never cut."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from slipstream import Accelerator, skip_first_batches
from slipstream.utils import DataLoaderConfiguration, ProjectConfiguration, gather_object, set_seed

EPOCHS, SAMPLES, BATCH = 3, 22, 8


class Progress:
    """The epoch counter that a script keeps by hand."""

    def __init__(self) -> None:
        self.epoch = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


class Rows(IterableDataset[Any]):
    """The same rows as a stream."""

    def __init__(self, rows: TensorDataset) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


class Backwards(Sampler[list[int]]):
    """A batch sampler of the script's own, with batches of two sizes and a generator."""

    def __init__(self, size: int) -> None:
        self.size, self.generator = size, torch.Generator().manual_seed(3)

    def __iter__(self) -> Any:
        order = torch.randperm(SAMPLES, generator=self.generator).tolist()
        while order:
            cut = self.size + len(order) % 2
            yield order[:cut]
            order = order[cut:]

    def __len__(self) -> int:
        return len(list(iter(Backwards(self.size))))


def rows() -> TensorDataset:
    x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True).sin(), torch.arange(SAMPLES))


def shuffled(size: int) -> DataLoader[Any]:
    return DataLoader(rows(), batch_size=size, shuffle=True)


LOADERS: dict[str, tuple[Callable[[int], DataLoader[Any]], dict[str, Any]]] = {
    "shuffled": (shuffled, {"even_batches": False}),
    "short batches dropped": (lambda size: DataLoader(rows(), batch_size=size, shuffle=True, drop_last=True), {}),
    "two workers": (lambda size: DataLoader(rows(), batch_size=size, shuffle=True, num_workers=2), {}),
    "stream": (lambda size: DataLoader(Rows(rows()), batch_size=size), {}),
    "own batches": (lambda size: DataLoader(rows(), batch_sampler=Backwards(size)), {}),
    "dispatched": (shuffled, {"dispatch_batches": True}),
}


class Script:
    """A training script: what it does is noted, as far as the rest of its run has to repeat it."""

    def __init__(self, folder: Path, *, kind: str = "shuffled", seed: int = 5, saves: bool = True, **options: Any) -> None:
        make, config = LOADERS[kind]
        project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
        self.accelerator = Accelerator(project_config=project, dataloader_config=DataLoaderConfiguration(**config), **options)
        set_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        test = DataLoader(rows(), batch_size=BATCH)
        loader = make(BATCH // self.accelerator.num_processes)
        self.model, self.optimizer, self.loader, self.test = self.accelerator.prepare(model, optimizer, loader, test)
        self.progress, self.folder, self.saves = Progress(), folder, saves
        self.accelerator.register_for_checkpointing(self.progress)
        self.read: list[Any] = []
        """(epoch, samples of this rank, loss), and (epoch, "evaluated", samples) after each epoch."""
        self.cuts: list[tuple[str, int, int]] = []
        """(checkpoint, how much was read before it, steps before it)."""
        self.steps = 0

    def save(self) -> None:
        if self.saves:
            self.cuts.append((self.accelerator.save_state(), len(self.read), self.steps))

    def train(self, epoch: int, batches: Any) -> None:
        for x, y, index in batches:
            with self.accelerator.accumulate(self.model):
                loss = torch.nn.functional.mse_loss(self.model(x), y)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.steps += 1
            self.read.append((epoch, index.tolist(), loss.item()))
            self.save()

    def evaluate(self, epoch: int) -> None:
        found = [sample for _, _, index in self.test for sample in self.accelerator.gather_for_metrics(index).tolist()]
        self.read.append((epoch, "evaluated", found))

    def run(self) -> Script:
        """As the README has it."""
        for epoch in range(self.progress.epoch, EPOCHS):
            self.progress.epoch = epoch
            self.train(epoch, self.loader)
            self.evaluate(epoch)
            self.progress.epoch = epoch + 1
            self.save()
        return self

    def run_by_arithmetic(self, steps: int) -> Script:
        """As the examples of Accelerate have it: where to continue is computed from the number of steps."""
        first, skipped = divmod(steps, len(self.loader))
        for epoch in range(first, EPOCHS):
            self.train(epoch, skip_first_batches(self.loader, skipped) if epoch == first else self.loader)
            self.evaluate(epoch)
        return self

    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.accelerator.unwrap_model(self.model).parameters()])


def straight(folder: Path, **options: Any) -> Script:
    """The loop that is never cut: it saves before the first step, after every step, and between epochs."""
    script = Script(folder, **options)
    script.save()
    script.run()
    script.accelerator.wait_for_everyone()
    return script


def resumed(folder: Path, checkpoint: str, **options: Any) -> Script:
    """A fresh script, with other random numbers, that has loaded a checkpoint."""
    script = Script(folder, seed=99, saves=False, **options)
    script.accelerator.load_state(checkpoint)
    return script


def trained(read: list[Any]) -> list[Any]:
    return [entry for entry in read if entry[1] != "evaluated"]


def cut_everywhere(folder: Path, arithmetic: bool = False, every: int = 1, **options: Any) -> int:
    """Compares the rest of the loop after every checkpoint with that of the straight one, bit for bit; how many there were."""
    whole = straight(folder, **options)
    weights = whole.weights()
    for checkpoint, before, steps in whole.cuts[::every]:
        script = resumed(folder, checkpoint, **options)
        rest = whole.read[before:]
        if arithmetic:
            script.run_by_arithmetic(steps)
            assert trained(script.read) == trained(rest), checkpoint
        else:
            script.run()
            assert script.read == rest, checkpoint
        assert torch.equal(script.weights(), weights), checkpoint
        script.accelerator.free_memory()
    return len(whole.cuts[::every])


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("arithmetic", [False, True], ids=["plain", "arithmetic"])
def test_process(tmp_path: Path, arithmetic: bool, accumulation: int) -> None:
    """The README's loop, and that of Accelerate's examples, resume exactly from every checkpoint."""
    assert cut_everywhere(tmp_path, arithmetic, gradient_accumulation_steps=accumulation) == 1 + EPOCHS * (3 + 1)


@pytest.mark.parametrize("arithmetic", [False, True], ids=["plain", "arithmetic"])
def test_two_processes(ranks: Any, tmp_path: Path, arithmetic: bool) -> None:
    """So they do on two processes."""
    assert ranks(2).run(lambda: cut_everywhere(tmp_path, arithmetic)) == [1 + EPOCHS * (3 + 1)] * 2


@pytest.mark.parametrize("kind", [kind for kind in LOADERS if kind != "shuffled"])
def test_kinds_of_loaders(tmp_path: Path, kind: str) -> None:
    """Every kind of data resumes by default."""
    assert cut_everywhere(tmp_path, kind=kind, every=1 if kind != "two workers" else 4) > 3


@pytest.mark.parametrize("kind", ["stream", "own batches", "dispatched"])
def test_kinds_of_loaders_on_two_processes(ranks: Any, tmp_path: Path, kind: str) -> None:
    """Every kind of data resumes by default on two processes."""
    assert min(ranks(2).run(lambda: cut_everywhere(tmp_path, kind=kind, every=2))) > 3


@pytest.mark.parametrize("arithmetic", [False, True], ids=["plain", "arithmetic"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_world(ranks: Any, tmp_path: Path, before: int, after: int, arithmetic: bool) -> None:
    """On another number of processes the rest of the loop reads the same samples, batch by batch."""

    def samples(script: Script, begin: int = 0) -> list[Any]:
        """Global batches: (epoch, samples in order)."""
        own = [(epoch, index) for epoch, index, *_ in script.read[begin:] if index != "evaluated"]
        parts = gather_object([own])
        return [(batch[0][0], sorted({sample for _, index in batch for sample in index})) for batch in zip(*parts, strict=True)]

    def first() -> Any:
        script = straight(tmp_path)
        return script.cuts, [samples(script, begin) for _, begin, _ in script.cuts]

    cuts, expected = ranks(before).run(first)[0]

    def second() -> Any:
        found = []
        for checkpoint, _, steps in cuts:
            script = resumed(tmp_path, checkpoint)
            found.append(samples(script.run_by_arithmetic(steps) if arithmetic else script.run()))
        return found

    assert ranks(after).run(second) == [expected] * after


# -- several loaders, folders, breaks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 2])
def test_nested_evaluation(tmp_path: Path, at: int) -> None:
    """Saved inside of an evaluation in a batch of an epoch: training continues exactly, and the next evaluation is a whole one."""
    script = Script(tmp_path, saves=False)
    checkpoints = []
    for number, _ in enumerate(script.loader):
        script.accelerator.backward(script.model(torch.ones(1, 3, device=script.accelerator.device)).sum())
        if number == at:
            for _ in script.test:
                checkpoints.append(script.accelerator.save_state())
    rest = [index.tolist() for epoch in range(2) for _, _, index in script.loader]
    assert len(checkpoints) == 3
    for checkpoint in checkpoints:
        again = resumed(tmp_path, checkpoint)
        assert len(list(again.loader)) == 2 - at
        again.evaluate(0)
        assert again.read == [(0, "evaluated", list(range(SAMPLES)))], checkpoint
        assert [index.tolist() for epoch in range(2) for _, _, index in again.loader] == rest


def test_newest_folder(tmp_path: Path) -> None:
    """`load_state()` without a folder resumes from the newest numbered checkpoint, and numbers go on."""
    script = Script(tmp_path)
    batches = iter(script.loader)
    script.train(0, [next(batches)])
    script.train(0, [next(batches)])
    expected = [index.tolist() for _, _, index in batches]
    again = Script(tmp_path, seed=99)
    assert again.accelerator.load_state() == script.cuts[-1][0]
    assert [index.tolist() for _, _, index in again.loader] == expected
    assert os.path.basename(again.accelerator.save_state()) == "checkpoint_2"


def test_break_then_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A loop that was left by `break` before the save: the next epoch, as in the saved run; a warning tells how to read the rest."""
    script = Script(tmp_path, saves=False)
    for number, (x, _, _) in enumerate(script.loader, 1):
        script.accelerator.backward(script.model(x).sum())
        if number == 2:
            break
    checkpoint = script.accelerator.save_state()
    whole = Script(tmp_path)
    epochs = [[index.tolist() for _, _, index in whole.loader] for _ in range(2)]
    again = resumed(tmp_path, checkpoint)
    assert [index.tolist() for _, _, index in skip_first_batches(again.loader, 2)] == epochs[0][2:]
    assert [index.tolist() for _, _, index in again.loader] == epochs[1]
    again.accelerator.load_state(checkpoint)
    again.accelerator.load_state(again.accelerator.save_state())
    assert not caplog.text
    assert [index.tolist() for _, _, index in again.loader] == epochs[1]
    assert "left by break, 2 batches into epoch 0: the pass that begins now is epoch 1" in caplog.text
    assert "write skip_first_batches(loader, 2)" in caplog.text


def test_once_anew(tmp_path: Path) -> None:
    """`load_state(resume=False)`, and `resume="manual"` for all, begin the epoch anew."""
    script = Script(tmp_path, saves=False)
    for number, _ in enumerate(script.loader):
        if number == 1:
            checkpoint = script.accelerator.save_state()
    for config, options in ((DataLoaderConfiguration(), {"resume": False}), (DataLoaderConfiguration(resume="manual"), {})):
        accelerator = Accelerator(dataloader_config=config)
        loader = accelerator.prepare(shuffled(BATCH))
        accelerator.load_state(checkpoint, strict=False, **options)
        assert len(list(loader)) == 3
    accelerator.load_state(checkpoint, strict=False, resume=True)
    assert len(list(loader)) == 1


def test_empty_pass(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Saved at the last batch of an epoch, the first pass is empty and says why; `set_epoch` of the next epoch begins it whole."""
    script = Script(tmp_path)
    script.train(0, script.loader)
    following = [index.tolist() for _, _, index in script.loader]
    again = resumed(tmp_path, script.cuts[-1][0])
    with caplog.at_level(logging.INFO, "slipstream"):
        assert list(again.loader) == []
    assert "is empty: its position was saved after the last batch of epoch 0" in caplog.text
    assert "loader.set_epoch(epoch)" in caplog.text
    assert [index.tolist() for _, _, index in again.loader] == following
    caplog.clear()
    again.accelerator.load_state(script.cuts[-1][0])
    again.loader.set_epoch(1)
    assert [index.tolist() for _, _, index in again.loader] == following
    assert "epoch" not in caplog.text


def test_evaluation_between_epochs(tmp_path: Path) -> None:
    """Saved inside of an evaluation between two epochs: training begins the next epoch, and its evaluation is a whole one."""
    script = Script(tmp_path, saves=False)
    script.train(0, script.loader)
    checkpoints = [script.accelerator.save_state() for _ in script.test]
    following = [index.tolist() for _, _, index in script.loader]
    for checkpoint in checkpoints:
        again = resumed(tmp_path, checkpoint)
        again.train(1, again.loader)
        assert [index for _, index, _ in again.read] == following
        again.evaluate(1)
        assert again.read[-1] == (1, "evaluated", list(range(SAMPLES))), checkpoint


def test_inference(tmp_path: Path) -> None:
    """A script that only reads continues in the middle of its pass, too."""
    script = Script(tmp_path, saves=False)
    checkpoints = [script.accelerator.save_state() for _ in script.test]
    for number, checkpoint in enumerate(checkpoints, 1):
        again = resumed(tmp_path, checkpoint)
        assert [index.tolist() for _, _, index in again.test] == [list(range(SAMPLES))[n : n + BATCH] for n in (0, 8, 16)][number:]


@pytest.mark.parametrize("after", [False, True], ids=["before the load", "after the load"])
@pytest.mark.parametrize("held", [False, True], ids=["dropped", "kept"])
def test_look(tmp_path: Path, after: bool, held: bool) -> None:
    """A script that looks at a batch first, and may keep the iterator, resumes exactly from every checkpoint inside of its loop."""

    def look(script: Script) -> Any:
        iterator = iter(script.loader)
        next(iterator)
        return iterator if held else None

    whole = Script(tmp_path)
    kept = [look(whole)]
    whole.run()
    for checkpoint, before, _ in whole.cuts:
        script = Script(tmp_path, seed=99, saves=False)
        if not after:
            kept.append(look(script))
        script.accelerator.load_state(checkpoint)
        assert script.loader.epoch == whole.read[min(before, len(whole.read) - 1)][0] + 1 + (before == len(whole.read))
        position = script.loader.state_dict()
        if after and (position["samples"] == 0 or position["ended"]):
            continue  # there a look is an epoch, or finds nothing
        if after:
            kept.append(look(script))
        assert script.run().read == whole.read[before:], checkpoint
        assert torch.equal(script.weights(), whole.weights()), checkpoint
