"""Lightning on Slipstream: equal to Lightning's own DDP strategy, exact where data does not divide, resumable in the middle of an epoch.

Most of it runs on the pool of ranks, where Lightning is imported once. Two tests start processes as users do: Lightning's own launcher,
and `slipstream launch`.
"""

from __future__ import annotations

import math
import os
import random
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset, WeightedRandomSampler

from slipstream.errors import CheckpointError, ConfigError, StateError

pytest.importorskip("lightning")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning as L
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    from slipstream.integrations.lightning import SlipstreamFabricStrategy, SlipstreamStrategy
    from slipstream.integrations.lightning.data import ShardedLoader, global_batches

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(L.LightningModule):
    """A small regression, with a scheduler, logged losses and a parameter of the module itself."""

    def __init__(self, width: int = 8, fails_after: int | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.body = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
        self.offset = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[Any] = []
        self.losses: list[float] = []
        self.fails_after = fails_after

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs) + self.offset

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self(inputs), targets)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        if self.fails_after is not None and len(self.seen) == self.fails_after:
            raise RuntimeError("as asked for")
        self.seen.append([round(row[0].item(), 3) for row in batch[0]])
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True, on_step=True, on_epoch=True, batch_size=len(batch[0]))
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.seen.append(("eval", len(batch[0])))
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch[0]))

    def test_step(self, batch: Any, number: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True, batch_size=len(batch[0]))

    def predict_step(self, batch: Any, number: int) -> torch.Tensor:
        return batch[0][:, 0]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    def weights(self) -> dict[str, Any]:
        whole = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in self.state_dict().items()}
        return {name: value.tolist() for name, value in whole.items()}


def data(count: int, batch_size: int = 4, shuffle: bool = False, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, 4, generator=generator)
    inputs[:, 0] = torch.arange(count) / 8
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=batch_size, shuffle=shuffle, **options)


def trainer(strategy: Any, folder: Any, *, ranks: int = 2, **options: Any) -> L.Trainer:
    import slipstream.integrations.lightning  # noqa: F401 - registers the names, on a rank too

    torch.manual_seed(5)
    usual: dict[str, Any] = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    usual |= {"enable_model_summary": False, "num_sanity_val_steps": 0, "accelerator": "cpu", "devices": ranks}
    return L.Trainer(strategy=strategy, default_root_dir=str(folder), **{**usual, **options})


def fit(strategy: Any, folder: Any, count: int = 32, **options: Any) -> tuple[Any, Any]:
    model, run = Net(), trainer(strategy, folder, **options)
    run.fit(model, data(count, shuffle=True), data(16))
    metrics = {name: value.item() for name, value in run.callback_metrics.items()}
    return (model.losses, model.weights(), metrics), run


# -- equal to Lightning's own strategy ----------------------------------------------------------------------------------


def equal_runs(folder: str) -> None:
    options: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": 3}
    ours, run = fit("slipstream", folder, **options)
    theirs, _ = fit("ddp", folder, **options)
    assert isinstance(run.strategy, SlipstreamStrategy)
    assert ours == theirs  # bit for bit
    sharded, run = fit("slipstream_fsdp", folder, **options)
    assert run.strategy.runtime.shards
    for ours_, theirs_ in zip(sharded[0], theirs[0], strict=True):
        assert ours_ == pytest.approx(theirs_, rel=1e-5)
    for name, value in theirs[1].items():
        assert torch.allclose(torch.tensor(sharded[1][name]), torch.tensor(value), atol=1e-6), name


def test_equal_to_ddp(ranks, tmp_path):
    """Losses, metrics and weights are bit for bit those of Lightning's DDP, and to float tolerance under FSDP2."""
    ranks(2).run(equal_runs, str(tmp_path))


def equal_precision(folder: str) -> None:
    ours, run = fit("slipstream", folder, precision="bf16-mixed")
    assert type(run.precision_plugin).__name__ == "SlipstreamPrecision"
    assert run.precision == "bf16-mixed"
    theirs, _ = fit("ddp", folder, precision="bf16-mixed")
    assert ours == theirs
    half, run = fit(SlipstreamStrategy(mixed_precision="fp16"), folder, enable_checkpointing=True, gradient_clip_val=0.5)
    assert all(map(math.isfinite, half[0]))
    run.save_checkpoint(f"{folder}/half.ckpt")
    assert 1 < torch.load(f"{folder}/half.ckpt", weights_only=False)["MixedPrecision"]["scale"] <= 65536  # where Lightning has it
    true_half, _ = fit("slipstream", folder, precision="bf16-true", max_epochs=1)
    assert true_half[0]


def test_precision(ranks, tmp_path):
    """bf16-mixed is that of Lightning, bit for bit; fp16 runs on a CPU where the strategy is asked for it."""
    ranks(2).run(equal_precision, str(tmp_path))


def manual(folder: str) -> None:
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, number: int) -> None:
            optimizer = self.optimizers()
            for _ in range(2):
                loss = self.loss(batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.losses.append(loss.item())

    def run(strategy: str) -> Any:
        model = Manual()
        trainer(strategy, folder).fit(model, data(32))
        return model.losses, model.weights()

    assert run("slipstream") == run("ddp")


def test_manual_optimization(ranks, tmp_path):
    """Several passes per batch, by hand, are averaged as Lightning averages them."""
    ranks(2).run(manual, str(tmp_path))


# -- data -----------------------------------------------------------------------------------------------------------------


def uneven(folder: str) -> Any:
    model, run = Net(), trainer("slipstream", folder, max_epochs=1)
    loader = data(19)
    run.fit(model, loader, data(9))
    evaluated = [entry[1] for entry in model.seen if entry[0] == "eval"]
    tested = run.test(model, data(9), verbose=False)[0]["test_loss"]
    predicted = torch.cat(run.predict(model, data(9))).mul(8).int().tolist()
    return [entry for entry in model.seen if entry[0] != "eval"], model.weights(), evaluated, tested, predicted


def test_short_last_batch(ranks, tmp_path):
    """19 samples on two processes train as on one with batches of 8; evaluation and prediction see every sample once."""
    first, second = ranks(2).run(uneven, str(tmp_path))
    assert [len(batch) for batch in first[0]] == [4, 4, 2]
    assert [len(batch) for batch in second[0]] == [4, 4, 1]
    assert first[1] == second[1]
    model, (everything,) = Net(), data(19, 19)
    optimizer = model.configure_optimizers()["optimizer"]
    for shares in zip(first[0], second[0], strict=True):
        rows = [int(8 * sample) for share in shares for sample in share]
        optimizer.zero_grad()
        model.loss([tensor[rows] for tensor in everything]).backward()
        optimizer.step()
    for name, value in model.weights().items():
        assert torch.allclose(torch.tensor(first[1][name]), torch.tensor(value), atol=1e-6), name
    assert (sum(first[2]), sum(second[2])) == (5, 4)
    with torch.no_grad():
        (everything,) = data(9, 9)
        model.load_state_dict({name: torch.tensor(value) for name, value in first[1].items()})
        assert first[3] == second[3] == pytest.approx(model.loss(everything).item(), rel=1e-5)
    assert sorted(first[4] + second[4]) == list(range(9))


def read(loader: DataLoader[Any], world_size: int, last: Any, start: int | None = None, **options: Any) -> list[Any]:
    found = []
    for rank in range(world_size):
        sharded = ShardedLoader(loader, rank, world_size, lambda: last)
        if start is not None:
            sharded.load_state_dict({"samples": start, "length": sharded._length(), "epoch": 0})
        found.append([(batch.tolist(), sharded.weight) for batch in sharded])
    return found


def samples(read_by_rank: list[Any]) -> list[Any]:
    return [sample for batches in read_by_rank for batch, _ in batches for sample in batch]


def ordered(count: int, **options: Any) -> DataLoader[Any]:
    sampler: Any = DistributedSampler(range(count), num_replicas=1, rank=0, shuffle=False)
    return DataLoader(range(count), sampler=sampler, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", range(1, 30))
@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 3), (2, 1), (2, 4), (3, 2)])
def test_shares(count, world_size, batch_size):
    """Weights of a training batch add up to a mean over samples; evaluation reads each once, or says which twice."""
    read_by_rank = read(ordered(count, batch_size=batch_size), world_size, "weigh")
    assert len({len(batches) for batches in read_by_rank}) == 1
    for step in zip(*read_by_rank, strict=True):
        real = [len(batch) for batch, weight in step if weight]
        assert sum(weight for _, weight in step) == pytest.approx(world_size)
        assert all(weight == pytest.approx(len(batch) * world_size / sum(real)) for batch, weight in step if weight)
    assert sorted(sample for batches in read_by_rank for batch, weight in batches if weight for sample in batch) == list(range(count))
    evaluated = samples(read(ordered(count, batch_size=batch_size), world_size, "once"))
    assert set(evaluated) == set(range(count))
    if batch_size > 1 and count >= world_size:
        assert len(evaluated) == count
    padded = samples(read(ordered(count, batch_size=batch_size), world_size, "pad"))
    theirs = [list(DistributedSampler(range(count), world_size, rank, shuffle=False)) for rank in range(world_size)]  # type: ignore[arg-type]
    assert sorted(padded) == sorted(sum(theirs, []))


def test_positions():
    """A pass continues at any sample, on another number of ranks, and its batches are aligned as before."""
    assert read(ordered(16, batch_size=2), 2, "weigh", start=6)[0] == [([6], 1.0), ([8, 10], 1.0), ([12, 14], 1.0)]
    assert [batch for batch, _ in read(ordered(16, batch_size=4), 1, "weigh", start=8)[0]] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert global_batches(9, 4, 2, "once") == [(0, 4), (4, 7), (7, 9)]


def test_loader_kinds():
    """Batch samplers of the user are dealt out in rounds; loaders without batches share samples; other loaders stay as they are."""
    sampler: Any = DistributedSampler(range(10), num_replicas=1, rank=0, shuffle=False)

    class Pairs(BatchSampler):
        def __iter__(self) -> Any:
            return ([entry, -1] for entry in self.sampler)

        def __len__(self) -> int:
            return 10

    class Twice(list):  # type: ignore[type-arg]
        def __getitem__(self, place: Any) -> int:
            return 2 * place if place >= 0 else -1

    rounds = read(DataLoader(Twice(range(10)), batch_sampler=Pairs(sampler, 2, False)), 4, "weigh")  # type: ignore[arg-type]
    assert [batch for batch, _ in rounds[2]] == [[4, -1], [12, -1], [0, -1]]
    single = DataLoader(torch.arange(5), batch_size=None, sampler=DistributedSampler(range(5), 1, 0, shuffle=False))  # type: ignore[arg-type]
    assert [[batch for batch, _ in batches] for batches in read(single, 2, "weigh")] == [[0, 2, 4], [1, 3, 0]]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.ones(4), torch.ones(1))] * 8)


def kinds(folder: str) -> Any:
    run, model = trainer("slipstream", folder, max_epochs=1), Net()
    run.fit(model, DataLoader(Stream(), batch_size=4))
    assert [len(batch) for batch in model.seen] == [4, 4]  # an iterable dataset is shared by its author
    weighted = WeightedRandomSampler([1.0] * 16, 16, replacement=False)
    model = Net()
    run = trainer("slipstream", folder, max_epochs=1)
    run.fit(model, DataLoader(data(16).dataset, batch_size=4, sampler=weighted))
    seen = [sample for batch in model.seen for sample in batch]
    model, run = Net(), trainer(SlipstreamStrategy(shard_data=False), folder, max_epochs=1)
    run.fit(model, data(19))
    assert [len(batch) for batch in model.seen] == [4, 4, 2]  # Lightning repeats a sample
    model, run = Net(), trainer("slipstream", folder, reload_dataloaders_every_n_epochs=1)
    model.train_dataloader = lambda: data(17, num_workers=1, persistent_workers=True)
    run.fit(model)
    (loader,) = run.strategy._train_loaders
    assert loader.weight in (0.0, 2.0)  # the last batch has one sample
    return seen


def test_other_loaders(ranks, tmp_path):
    """Streams stay as they are, a sampler of the user draws alike on all ranks, and Lightning can keep the loaders."""
    first, second = ranks(2).run(kinds, str(tmp_path))
    assert sorted(first + second) == [count / 8 for count in range(16)]


# -- checkpoints ----------------------------------------------------------------------------------------------------------


def resumed(folder: str, parallel: str, checkpoint_format: Any) -> None:
    class Dropping(Net):
        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            if checkpoint_format == "slipstream":  # where random states are in it
                batch = torch.nn.functional.dropout(batch[0]) + random.random(), batch[1]
            return super().training_step(batch, number)

    def run(path: str | None = None, **options: Any) -> tuple[Any, Net]:
        strategy = SlipstreamStrategy(parallel, checkpoint_format=checkpoint_format)
        every = ModelCheckpoint(folder, "{step}", every_n_train_steps=7, save_top_k=-1)
        started, model = trainer(strategy, folder, max_epochs=3, callbacks=[every], enable_checkpointing=True), Dropping()
        started.fit(model, data(36, shuffle=True), ckpt_path=path)
        return started, model

    whole, model = run()
    path = f"{folder}/step=7.ckpt"  # in the middle of the second epoch
    assert Path(path).is_dir() == (checkpoint_format == "slipstream")
    if checkpoint_format == "lightning":  # readable without us
        stored = torch.load(path, weights_only=True)
        assert type(stored["state_dict"]["offset"]) is type(stored["optimizer_states"][0]["state"][0]["exp_avg"]) is torch.Tensor
    continued, second = run(path)
    assert second.seen == model.seen[7:]
    assert second.losses == model.losses[7:]
    assert second.weights() == model.weights()
    assert continued.global_step == whole.global_step == 15
    _, third = run(f"{folder}/step=14.ckpt")
    assert third.losses == model.losses[14:]


@pytest.mark.parametrize("checkpoint_format", ["lightning", "slipstream"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_exact_resume(ranks, tmp_path, parallel, checkpoint_format):
    """A run goes on from the middle of an epoch, in either format, as if it had not stopped."""
    ranks(2).run(resumed, str(tmp_path), parallel, checkpoint_format)


def saved(folder: str) -> Any:
    class Save(L.Callback):
        def on_train_batch_end(self, run: Any, model: Any, *details: Any) -> None:
            if run.global_step == 3:
                run.save_checkpoint(f"{folder}/shards")
                run.save_checkpoint(f"{folder}/file.ckpt")
                self.weights = model.weights()

    save, model = Save(), Net()
    trainer("slipstream_fsdp", folder, max_epochs=1, callbacks=[save]).fit(model, data(32))
    return save.weights, model.seen[3:]


def loaded(folder: str, ranks: int, expected: Any) -> Any:
    for strategy, name in (("slipstream", "shards"), ("slipstream_fsdp", "file.ckpt"), ("slipstream", "file.ckpt")):
        run, model = trainer(strategy, folder, ranks=ranks, max_epochs=1), Net()
        run.test(model, data(16), ckpt_path=f"{folder}/{name}", verbose=False)
        assert model.weights() == expected
        run.fit(model, data(32), ckpt_path=f"{folder}/{name}")
        assert run.global_step == {1: 5, 2: 4}[ranks]
    plain = Net.load_from_checkpoint(f"{folder}/file.ckpt", weights_only=False)
    assert plain.weights() == expected
    return model.seen


def test_other_world_sizes(ranks, tmp_path):
    """What two sharded ranks saved is read by one process and by replicas, and the data goes on at the same sample."""
    (weights, first), (_, second) = ranks(2).run(saved, str(tmp_path))
    assert ranks(2).run(loaded, str(tmp_path), 2, weights) == [first, second]
    on_one = loaded(str(tmp_path), 1, weights)
    assert sorted(sum(first + second, [])) == sorted(sum(on_one, []))


def odd_states(folder: str) -> str:
    class Odd(Net):
        def __init__(self, activation: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

    save = ModelCheckpoint(f"{folder}/weights", save_weights_only=True, save_last="link", filename="first")
    strategy = SlipstreamStrategy(checkpoint_format="slipstream")
    run, model = trainer(strategy, folder, max_epochs=1, callbacks=[save], enable_checkpointing=True), Net()
    run.fit(model, data(16))
    assert not any("optimizer" in name for name in os.listdir(f"{folder}/weights/first.ckpt"))
    run.test(Net(), data(16), ckpt_path=f"{folder}/weights/last.ckpt", verbose=False)
    model = Odd(torch.tanh)
    run = trainer("slipstream", folder, max_epochs=1)
    run.fit(model, data(16))
    found = ""
    try:
        run.save_checkpoint(f"{folder}/odd")
    except Exception as error:
        found = str(error)
    Path(folder, "taken.ckpt").mkdir(exist_ok=True)
    try:
        run.save_checkpoint(f"{folder}/taken.ckpt")
    except Exception as error:
        return f"{found} {error}"
    return ""


def test_odd_states(ranks, tmp_path):
    """Weights alone are saved without optimizers; what cannot be stored or written is an error on every rank."""
    for told in ranks(2).run(odd_states, str(tmp_path)):
        assert "['hyper_parameters']['activation']" in told
        assert "taken.ckpt" in told


def callbacks(folder: str) -> None:
    best = ModelCheckpoint(f"{folder}/best", monitor="val_loss", save_top_k=1, save_last=True)
    stop = EarlyStopping("val_loss", patience=1, min_delta=10.0)
    logger = CSVLogger(folder, name="logs")
    strategy = SlipstreamStrategy(checkpoint_format="slipstream")
    run = trainer(strategy, folder, max_epochs=9, enable_checkpointing=True, callbacks=[best, stop], logger=logger, log_every_n_steps=1)
    model = Net()
    run.fit(model, data(32), data(16))
    assert run.current_epoch < 9
    assert (Path(best.best_model_path) / "MANIFEST.json").exists()
    assert (Path(best.best_model_path) / "model.safetensors").exists()
    assert run.test(dataloaders=data(16), ckpt_path="best", verbose=False)[0]["test_loss"] > 0
    assert run.validate(model, data(16), verbose=False)[0]["val_loss"] > 0
    if run.is_global_zero:
        assert "train_loss_step" in Path(logger.log_dir, "metrics.csv").read_text()
        assert len([entry for entry in os.listdir(f"{folder}/best") if not entry.startswith(".")]) == 2


def test_callbacks(ranks, tmp_path):
    """ModelCheckpoint (in our format), early stopping, loggers, `test(ckpt_path="best")` and `validate` work."""
    ranks(2).run(callbacks, str(tmp_path))


# -- Fabric -------------------------------------------------------------------------------------------------------------------


def fabric_loop(strategy: Any, folder: str, precision: Any = None) -> Any:
    import slipstream.integrations.lightning  # noqa: F401 - registers the names, on a rank too

    torch.manual_seed(5)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=precision)
    fabric.launch()
    model = Net()
    module, optimizer = fabric.setup(model.body, torch.optim.AdamW(model.body.parameters(), lr=0.02))
    loader = fabric.setup_dataloaders(data(30, shuffle=True))
    losses = []
    for _ in range(2):
        for number, (inputs, targets) in enumerate(loader):
            with fabric.no_backward_sync(module, enabled=number % 2 == 0):
                loss = torch.nn.functional.mse_loss(module(inputs), targets)
                fabric.backward(loss)
            if number % 2:
                fabric.clip_gradients(module, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
    assert fabric.all_gather(torch.tensor([fabric.global_rank])).tolist() == [[0], [1]]
    assert fabric.broadcast({"rank": fabric.global_rank}, src=1) == {"rank": 1}
    return fabric, module, optimizer, losses


def fabric_runs(folder: str) -> None:
    fabric, module, optimizer, ours = fabric_loop("slipstream", folder)
    assert isinstance(fabric.strategy, SlipstreamFabricStrategy)
    *_, theirs = fabric_loop("ddp", folder)
    assert ours == theirs
    sharded, shards, sharded_optimizer, losses = fabric_loop(SlipstreamFabricStrategy("fsdp"), folder)
    assert losses == pytest.approx(theirs, rel=1e-5)
    for name in ("state", "state.ckpt"):
        state = {"model": shards, "optimizer": sharded_optimizer, "step": 12}
        sharded.save(f"{folder}/{name}", state)
        target: dict[str, Any] = {"model": module, "optimizer": optimizer, "step": 0}
        with torch.no_grad():
            module.module[0].weight.zero_()
        assert fabric.load(f"{folder}/{name}", target) == {}
        assert target["step"] == 12
        assert torch.equal(module.module[0].weight, shards.module[0].weight.full_tensor())
        assert torch.equal(optimizer.optimizer.state_dict()["state"][0]["exp_avg"], _whole(sharded_optimizer, "exp_avg"))
        sharded.load(f"{folder}/{name}", state)
    *_, half = fabric_loop("slipstream", folder, "bf16-mixed")
    assert half[-1] < half[0]


def _whole(optimizer: Any, name: str) -> torch.Tensor:
    return optimizer.optimizer.state_dict()["state"][0][name].full_tensor()


def test_fabric(ranks, tmp_path):
    """Fabric's loop has the losses of Lightning's DDP, bit for bit; shards saved in either format load into replicas."""
    ranks(2).run(fabric_runs, str(tmp_path))


# -- what goes wrong -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SlipstreamStrategy, SlipstreamFabricStrategy])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"find_unused_paramters": True}, "did you mean find_unused_parameters"),
        ({"parallel": "deepspeed"}, "write one of None, 'ddp', 'fsdp'"),
        ({"parallel": "fsdp", "bucket_cap_mb": 5}, "is about replicas"),
        ({"mixed_precision": "bf8"}, "write one of"),
        ({"shard_data": 1}, "write one of True, False"),
        ({"fsdp_plugin": {}}, "FullyShardedDataParallelPlugin"),
    ],
)
def test_bad_options(kind, options, message):
    """Unknown options and wrong values are refused with what to write instead."""
    with pytest.raises((TypeError, ConfigError), match=message):
        kind(**options)


def test_contradictions(monkeypatch):
    """A precision that is given twice, and devices that do not fit the processes that were started, are errors."""
    with pytest.raises(ConfigError, match="contradicts Trainer"):
        trainer(SlipstreamStrategy(mixed_precision="fp16"), ".", ranks=1, precision="bf16-mixed")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"needs 4 processes, and 2 were started: write Trainer\(devices=2\)"):
        trainer("slipstream", ".", ranks=4)
    with pytest.raises(ConfigError, match="needs 1 process"):
        L.Fabric(strategy="slipstream", devices=1, accelerator="cpu")


def test_other_packages():
    """Lightning's copies under other names refuse our strategy, and their message says for which package it is."""
    pytorch_lightning = pytest.importorskip("pytorch_lightning")
    with pytest.raises(ValueError, match="not of pytorch_lightning"):
        pytorch_lightning.Trainer(strategy=SlipstreamStrategy(), accelerator="cpu", logger=False)
    with pytest.raises(ValueError, match="Fabric takes SlipstreamFabricStrategy"):
        L.Fabric(strategy=SlipstreamStrategy(), accelerator="cpu")  # type: ignore[arg-type]


def test_without_lightning():
    """Without the package, the import says what to install; and nothing imports it by itself."""
    program = """
import sys
sys.modules["lightning"] = None
import slipstream
try:
    import slipstream.integrations.lightning
except ImportError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100).stdout
    assert "pip install lightning==" in told


def unused(folder: str) -> str:
    class Unused(Net):
        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return self.body(batch[0]).mean()

    try:
        trainer("slipstream", folder).fit(Unused(), data(16))
    except StateError as error:
        found = str(error)
    trainer("slipstream_ddp_find_unused_parameters_true", folder).fit(Unused(), data(16))
    return found


def test_unused_parameters(ranks, tmp_path):
    """A parameter without a gradient is named, with the option that allows it."""
    for message in ranks(2).run(unused, str(tmp_path)):
        assert "offset got none" in message
        assert "find_unused_parameters=True to the strategy" in message


def missing(folder: str) -> str:
    class Odd(Net):
        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            if self.global_rank == 0 and number == 1:
                self.trainer.strategy.barrier("only here")
            return super().training_step(batch, number)

    try:
        trainer(SlipstreamStrategy(timeout=20.0), folder).fit(Odd(), data(32))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_missing_call(ranks, tmp_path):
    """A collective that one rank makes alone is an error on both, which names what each called."""
    for message in ranks(2).run(missing, str(tmp_path)):
        assert "MismatchError" in message
        assert "barrier" in message


def terminated(folder: str) -> Any:
    class Told(Net):
        def on_train_batch_end(self, *details: Any) -> None:
            if self.global_rank == 1 and self.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    model, run = Told(), trainer("slipstream", folder, max_epochs=400)
    assert callable(run._signal_connector._sigterm_notifier_fn)  # Lightning still has what we replace
    assert callable(run.fit_loop.epoch_loop._broadcast_sigterm_tensor)
    try:
        run.fit(model, data(64))
    except SIGTERMException:
        return len(model.seen), run.received_sigterm
    return None


def test_sigterm(ranks, tmp_path):
    """When one rank is told to end, all of them stop before the same batch, within seconds."""
    first, second = ranks(2).run(terminated, str(tmp_path))
    assert first == second
    assert 2 <= first[0] < 3200
    assert first[1]


def not_ours(folder: str) -> str:
    from slipstream import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.save_state(f"{folder}/plain")
    try:
        trainer("slipstream", folder, ranks=1).fit(Net(), data(8), ckpt_path=f"{folder}/plain")
    except CheckpointError as error:
        return str(error)
    return ""


def test_checkpoint_of_another_run(tmp_path):
    """A checkpoint that no run of Lightning saved is refused with a reason."""
    assert "not of a run of Lightning" in not_ours(str(tmp_path))


# -- the page ---------------------------------------------------------------------------------------------------------------


def run_block(code: str, folder: str) -> None:
    os.chdir(folder)
    exec(compile(code, "script.py", "exec"), {"__name__": "__main__"})


PAGE = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text()


@pytest.mark.parametrize("number", [0, 1])
def test_page(ranks, tmp_path, number):
    """The blocks of docs/lightning.md run on two processes."""
    blocks = re.findall(r"^```python lightning\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    ranks(2).run(run_block, blocks[number], str(tmp_path))


# -- as users start it -----------------------------------------------------------------------------------------------------


SCRIPT = """
import sys
import torch, lightning as L
import slipstream.integrations.lightning
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, number):
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        strategy="slipstream", devices=2, accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    model = Net()
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(24, 2, generator=torch.Generator().manual_seed(1))), batch_size=4))
    trainer.strategy.barrier()
    environment = type(trainer.strategy.cluster_environment).__name__
    print(f"rank {trainer.global_rank} of {trainer.world_size}: {environment} {model.layer.weight.sum().item():.6f}", flush=True)
"""


@pytest.mark.launched
@pytest.mark.parametrize("words", [[], ["-m", "slipstream", "launch", "--cpu", "--num_processes", "2"]], ids=["lightning", "slipstream"])
def test_launched(tmp_path, words):
    """Lightning's own launcher and `slipstream launch` start the same run."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "SLIPSTREAM_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, *words, str(script)], capture_output=True, text=True, timeout=110, env=environ, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = sorted(re.findall(r"rank (\d) of 2: (\w+) (-?\d\.\d{6})", done.stdout))  # lines of two processes may run together
    environment = "TorchElasticEnvironment" if words else "LightningEnvironment"
    assert [entry[:2] for entry in found] == [("0", environment), ("1", environment)], done.stdout
    assert found[0][2] == found[1][2]


def test_precision_of_other_devices() -> None:
    """Mixed precision is that of the device of the strategy; Lightning's plugin says CUDA for every accelerator that it does not know."""
    from lightning.pytorch.plugins import MixedPrecision

    from slipstream.integrations.lightning.precision import replace_precision

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = MixedPrecision("bf16-mixed", device="cuda")
    ours = replace_precision(theirs, None, "cpu")
    with ours.forward_context():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
