"""Checkpoints of sharded runs through the public API: resharding between strategies, what each rank reads and holds, and absent ranks."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent.parent / "strategies"))
import shared_store
from fsdp_runs import Run, differences
from safetensors.torch import load_file
from sharded_training import net
from torch_memory import peak_bytes

from slipstream import load_checkpoint_and_dispatch, load_checkpoint_in_model
from slipstream.checkpoint.locate import open_checkpoint
from slipstream.checkpoint.manifest import MANIFEST, read_manifest
from slipstream.checkpoint.model_io import merge_weights
from slipstream.checkpoint.sharded import WholeTensorFile
from slipstream.cli.checkpoint import command
from slipstream.files.checksum import VerifiedBlockFile
from slipstream.files.disk import Disk
from slipstream.utils import ProjectConfiguration

Ranks = Any
FULL = {"state_dict_type": "FULL_STATE_DICT"}


# -- any strategy and world size to any other -------------------------------------------------------------------------

KINDS = ("single 1", "ddp 2", "ddp 3", "fsdp 1", "fsdp 2", "fsdp 3", "fsdp 4", "hsdp 4")
# Batches of an update, whether they have weights, how many batches were trained before the save, and from where to where.
TABLE = {
    "closed": (1, False, 2, ["single 1 hsdp 4", "ddp 3 fsdp 2", "fsdp 2 single 1", "fsdp 3 ddp 2", "fsdp 4 fsdp 3", "hsdp 4 fsdp 2"]),
    "open": (3, False, 2, ["single 1 fsdp 3", "ddp 2 fsdp 2", "fsdp 2 ddp 3", "fsdp 3 hsdp 4", "fsdp 2 fsdp 2", "hsdp 4 single 1"]),
    "weighted": (3, True, 2, ["ddp 2 fsdp 3", "fsdp 2 fsdp 4", "fsdp 3 single 1", "fsdp 2 ddp 2", "hsdp 4 hsdp 4", "hsdp 4 fsdp 3"]),
    "begun": (3, True, 4, ["fsdp 2 fsdp 3", "single 1 fsdp 2"]),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TABLE)
def test_reshard(ranks: Ranks, tmp_path: Path, rounds: Callable[..., int], name: str) -> None:
    """Weights and optimizer state are those that were saved, and the next updates those of a run without interruption."""
    steps, weighted, at, chosen = TABLE[name]
    pairs = [pair.rsplit(" ", 2) for pair in chosen]
    if rounds(ci=0, soak=1):
        pairs = [[source, *target.split()] for source in KINDS for target in KINDS]

    def save(kind: str) -> Any:
        run = Run(kind, steps=steps, weighted=weighted)
        run.train(at)
        run.accelerator.save_state(tmp_path / f"{kind} {run.accelerator.num_processes}")
        saved = run.state()
        run.train(6 - at)
        return {"saved": saved, "later": run.state()}

    def load(kind: str, folder: str) -> Any:
        run = Run(kind, steps=steps, weighted=weighted, seed=5)
        run.accelerator.load_state(tmp_path / folder)
        loaded = run.state()
        run.train(6 - at)
        return {"saved": loaded, "later": run.state()}

    expected = ranks(1).run(save, "single")[0]
    for source in sorted({source for source, _, _ in pairs} - {"single 1"}):
        kind, world = source.split()
        for found in ranks(int(world)).run(save, kind):
            assert not differences(found, expected, 1e-5), source
    for source, kind, world in pairs:
        for found in ranks(int(world)).run(load, kind, source):
            assert not differences(found, expected, 1e-5), (source, kind, world)


def test_mesh_in_manifest(ranks: Ranks, tmp_path: Path) -> None:
    """The manifest has the axes of the mesh, with their sizes."""
    ranks(4).run(lambda: Run("hsdp").accelerator.save_state(tmp_path / "hsdp"))
    ranks(3).run(lambda: Run("fsdp").accelerator.save_state(tmp_path / "fsdp"))
    hybrid, plain = (read_manifest(tmp_path / name) for name in ("hsdp", "fsdp"))
    assert (hybrid.strategy, hybrid.mesh, plain.mesh) == ("fsdp", {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 3})
    assert len(hybrid.models[0].shards) == 2  # each part is stored once


def test_async_and_deduplicated(ranks: Ranks, tmp_path: Path) -> None:
    """Async saves hold the state at the call; unchanged files are linked."""

    def save() -> Any:
        run = Run("fsdp")
        run.train(2)
        run.accelerator.save_state(tmp_path / "first", async_save=True)
        state = run.state()
        run.train(1)
        run.accelerator.save_state(tmp_path / "second", dedup=True)
        run.accelerator.save_state(tmp_path / "third", dedup=True)
        return state

    def load() -> Any:
        run = Run("fsdp", seed=5)
        run.accelerator.load_state(tmp_path / "third")
        run.accelerator.load_state(tmp_path / "first")
        return run.state()

    expected = ranks(2).run(save)[0]
    for found in ranks(3).run(load):
        assert not differences(found, expected)
    linked = {path.name for path in (tmp_path / "third").iterdir() if path.stat().st_nlink > 1}
    assert "model-rank-00001-of-00002.safetensors" in linked


# -- whole weights ----------------------------------------------------------------------------------------------------


def test_full_state_dict(ranks: Ranks, tmp_path: Path) -> None:
    """FULL_STATE_DICT writes weights as one whole file, and shards of the rest; it loads like any other."""

    def save() -> Any:
        run = Run("fsdp", plugin=FULL, steps=3)
        run.train(2)
        run.accelerator.save_state(tmp_path / "one")
        run.accelerator.save_state(tmp_path / "cut", max_shard_size=600, dedup=True)
        return run.state()

    def load(name: str) -> Any:
        run = Run("fsdp", seed=5, steps=3)
        run.accelerator.load_state(tmp_path / name)
        return run.state()

    expected = ranks(3).run(save)[0]
    weights = load_file(tmp_path / "one" / "model.safetensors")
    assert expected["weights"].keys() - weights.keys() == {"head.weight"}
    assert not differences(weights, {name: expected["weights"][name] for name in weights}, 0.0)
    assert read_manifest(tmp_path / "one").models[0].shards == ()
    assert len(read_manifest(tmp_path / "cut").models[0].files) > 3
    for name in ("one", "cut"):
        for found in ranks(2).run(load, name):
            assert not differences(found, expected)


def test_save_model(ranks: Ranks, tmp_path: Path) -> None:
    """The main process writes whole weights under plain names, as one file, in several, or by torch.save."""

    def save(kind: str) -> Any:
        run = Run(kind, plugin={"auto_wrap_policy": "no_wrap", "reshard_after_forward": False})
        run.train(1)
        run.model(torch.zeros(1, 5, dtype=torch.int64, device=run.accelerator.device))  # parameters stay gathered after it
        run.accelerator.save_model(run.model, tmp_path / "one")
        run.accelerator.save_model(run.model, tmp_path / "cut", max_shard_size=600)
        run.accelerator.save_model(run.model, tmp_path / "torch", safe_serialization=False)
        return run.state()["weights"]

    for kind, world in (("fsdp", 3), ("hsdp", 4)):
        expected = ranks(world).run(save, kind)[0]
        assert os.listdir(tmp_path / "one") == ["model.safetensors"]
        assert "model.safetensors.index.json" in os.listdir(tmp_path / "cut")
        for name in ("one", "cut", "torch"):
            model = net(5)
            load_checkpoint_in_model(model, tmp_path / name, strict=True)
            assert not differences(dict(model.state_dict()), expected, 0.0), (kind, name)


def test_failing_save_model_is_known_to_all(ranks: Ranks, tmp_path: Path) -> None:
    """An error of the main process, before or between the tensors, is one on every rank; afterwards all go on."""
    (tmp_path / "file").write_text("")

    class Full(Disk):
        """A disk that is full after some bytes."""

        def _pwrite(self, fd: int, data: Any, offset: int) -> int:
            if offset:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super()._pwrite(fd, data[:100], offset)

    def save() -> list[str]:
        run, said = Run("fsdp"), []
        for where, disk in (("file", Disk()), ("folder", Full())):
            run.accelerator._saver.disk = disk
            try:
                run.accelerator.save_model(run.model, tmp_path / where)
            except Exception as error:
                said.append(str(error))
        run.accelerator._saver.disk = Disk()
        run.accelerator.save_model(run.model, tmp_path / "folder")
        return said

    for said in ranks(2).run(save):
        assert "is a file" in said[0]
        assert "No space" in said[1]
    assert os.listdir(tmp_path / "folder") == ["model.safetensors"]


def test_other_readers(ranks: Ranks, tmp_path: Path) -> None:
    """merge-weights, load_checkpoint_in_model and _and_dispatch, and the commands read checkpoints of sharded runs."""

    def save() -> Any:
        run = Run("fsdp", steps=2)
        run.train(1)
        run.accelerator.save_state(tmp_path / "first")
        run.train(2)
        run.accelerator.save_state(tmp_path / "second")
        return run.state()["weights"]

    def load(folder: str) -> Any:
        run = Run("fsdp", seed=5)
        load_checkpoint_in_model(run.accelerator.unwrap_model(run.model), tmp_path / folder, strict=True)
        return run.state()["weights"]

    expected = ranks(2).run(save)[0]
    merged = load_file(merge_weights(tmp_path / "second", tmp_path / "merged"))
    assert not differences(merged, {name: expected[name] for name in merged}, 0.0)
    with torch.device("meta"):
        empty = net()
    dispatched = load_checkpoint_and_dispatch(empty, tmp_path / "second", device_map={"": "cpu"})
    assert not differences({name: value for name, value in dispatched.state_dict().items()}, expected, 0.0)
    for folder in ("second", "merged"):
        for found in ranks(3).run(load, folder):
            assert not differences(found, expected, 0.0)
    for words in (["ls", str(tmp_path)], ["verify", str(tmp_path / "second")], ["show", "--tensors", str(tmp_path / "second")]):
        result = CliRunner().invoke(command, words)
        assert result.exit_code == 0, result.output
    result = CliRunner().invoke(command, ["diff", "--json", str(tmp_path / "first"), str(tmp_path / "second")])
    titles = [section["title"] for section in json.loads(result.output)["sections"] if section["differences"]]
    assert any("model" in title for title in titles)
    path = next((tmp_path / "second").glob("model-rank-00002*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    result = CliRunner().invoke(command, ["verify", str(tmp_path / "second")])
    assert (result.exit_code, path.name in result.output) == (1, True)


# -- what a rank reads and holds --------------------------------------------------------------------------------------


WIDTH, DEPTH = 1200, 3
BLOCK = 4 * WIDTH * WIDTH
WEIGHTS = DEPTH * BLOCK
"""Bytes; with the two moments of AdamW, a checkpoint has three times as many."""


def layers(seed: int = 0) -> torch.nn.Sequential:
    """Some 17 MB in three blocks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def large_run(kind: str, seed: int = 0, plugin: dict[str, Any] | None = None, **options: Any) -> Run:
    policy = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"], **(plugin or {})}
    run = Run(kind, model=layers(seed), plugin=policy, **options)
    for parameter in run.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return run


def count_reads(call: Callable[[], Any]) -> int:
    """Bytes of weights and optimizer state that a call reads."""
    counts = [0]
    blocks, whole = VerifiedBlockFile._read_blocks, WholeTensorFile.read

    def read_blocks(self: VerifiedBlockFile, first: int, last: int, memory: memoryview) -> None:
        counts[0] += len(memory)
        blocks(self, first, last, memory)

    def read(self: WholeTensorFile, name: str, box: Any) -> torch.Tensor:
        found = whole(self, name, box)
        counts[0] += found.nbytes
        return found

    VerifiedBlockFile._read_blocks, WholeTensorFile.read = read_blocks, read  # type: ignore[method-assign]
    try:
        call()
    finally:
        VerifiedBlockFile._read_blocks, WholeTensorFile.read = blocks, whole  # type: ignore[method-assign]
    return counts[0]


@pytest.mark.parametrize("source", ["fsdp 2", "ddp 2"])
def test_rank_reads_its_share(ranks: Ranks, tmp_path: Path, source: str) -> None:
    """A rank reads about as many bytes as it holds, and holds no more while it loads than its share and a block."""
    kind, world = source.split()
    ranks(int(world)).run(lambda: large_run(kind).accelerator.save_state(tmp_path / "first"))

    def load() -> tuple[int, int]:
        run = large_run("fsdp", seed=5)
        read = count_reads(lambda: run.accelerator.load_state(tmp_path / "first"))
        return read, peak_bytes(lambda: run.accelerator.load_state(tmp_path / "first"))

    for count in (2, 4):
        share = 3 * WEIGHTS / count
        other = 0 if source == f"fsdp {count}" or kind == "ddp" else 2 * 3 * DEPTH  # mebibytes, which are verified as a whole
        for read, peak in ranks(count).run(load):
            assert share <= read < 1.01 * share + (other << 20) + (2 << 20), (count, read / share)
            assert peak < share + BLOCK, (count, peak / share)


def test_rank_reads_its_share_of_url(ranks: Ranks, tmp_path: Path) -> None:
    """Of a checkpoint behind a URL, a rank fetches the bytes that it holds; a damaged shard there makes all take the older one."""
    project = ProjectConfiguration("shared://run", automatic_checkpoint_naming=True)

    def save() -> None:
        shared_store.register(tmp_path)
        run = large_run("fsdp", project_config=project)
        run.accelerator.save_state()
        run.accelerator.save_state(async_save=True)
        run.accelerator._saver.settle()

    def load() -> tuple[int, str]:
        shared_store.register(tmp_path)
        run = large_run("fsdp", seed=5, project_config=project)
        read = shared_store.count_bytes(lambda: run.accelerator.load_state("shared://run/checkpoints/checkpoint_1"))
        return read, run.accelerator.load_state()

    ranks(2).run(save)
    for read, taken in ranks(4).run(load):
        assert read < 3 * WEIGHTS / 4 + (2 * 3 * DEPTH << 20) + (1 << 20)
        assert taken.endswith("checkpoint_1")
    path = next((tmp_path / "run" / "checkpoints" / "checkpoint_1").glob("data-*/model-rank-00002*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)

    def load_older() -> str:
        shared_store.register(tmp_path)
        return large_run("fsdp", seed=5, project_config=project).accelerator.load_state()

    assert all(taken.endswith("checkpoint_0") for taken in ranks(2).run(load_older))


def test_main_process_holds_one_tensor(ranks: Ranks, tmp_path: Path) -> None:
    """While whole weights are written, no rank holds more than its shard and one tensor."""

    def save() -> list[int]:
        run = large_run("fsdp", plugin=FULL)
        largest = max(parameter.nbytes for parameter in run.model.parameters())
        save_model = peak_bytes(lambda: run.accelerator.save_model(run.model, tmp_path / "weights"))
        save_state = peak_bytes(lambda: run.accelerator.save_state(tmp_path / "state"))
        return [save_model, save_state, largest]

    for save_model, save_state, largest in ranks(4).run(save):
        assert save_model < 1.1 * largest
        assert save_state < 1.1 * largest


# -- when something goes wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["save_state", "get_state_dict", "save_model", "load_state"])
@pytest.mark.parametrize("world", [2, 3])
def test_absent_rank_is_named(ranks: Ranks, tmp_path: Path, call: str, world: int) -> None:
    """When a rank stays away, every caller raises within the timeout, and the error names it."""

    def run() -> str:
        run = Run("fsdp", timeout=2)
        accelerator = run.accelerator
        accelerator.save_state(tmp_path / "first")
        if accelerator.process_index == 1:
            return ""
        calls = {
            "save_state": lambda: accelerator.save_state(tmp_path / "second"),
            "get_state_dict": lambda: accelerator.get_state_dict(run.model),
            "save_model": lambda: accelerator.save_model(run.model, tmp_path / "weights"),
            "load_state": lambda: accelerator.load_state(tmp_path / "first"),
        }
        with pytest.raises(Exception, match="rank 1") as caught:
            calls[call]()
        return str(caught.value)

    for rank, said in enumerate(ranks(world).run(run)):
        assert (rank == 1) == (said == ""), said
        assert rank == 1 or call in said or "weights of" in said
    assert {path.name for path in tmp_path.iterdir()} <= {"first", "weights"}
    assert not (tmp_path / "weights").exists() or not os.listdir(tmp_path / "weights")
    open_checkpoint(tmp_path / "first")


def test_hook_that_fails_on_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    """A hook that raises on one rank in the middle of an update is an error on every rank, and no wait."""

    def run() -> str:
        run = Run("fsdp", steps=3)
        run.train(2)

        def hook(models: Any, weights: Any, folder: str) -> None:
            if run.accelerator.process_index == 1:
                raise ValueError("no disk for me")

        handle = run.accelerator.register_save_state_pre_hook(hook)
        with pytest.raises(Exception, match="no disk for me") as caught:
            run.accelerator.save_state(tmp_path / "first")
        handle.remove()
        run.train(1)
        run.accelerator.save_state(tmp_path / "first")
        return str(caught.value)

    ranks(2).run(run)
    assert os.listdir(tmp_path) == ["first"]


@pytest.mark.parametrize("part", ["model", "optimizer", "training"])
def test_damaged_shard(ranks: Ranks, tmp_path: Path, part: str) -> None:
    """A damaged shard is an error that leaves the state of every rank as it was; of numbered checkpoints the older one is taken."""
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)

    def save() -> Any:
        run = Run("fsdp", steps=3, project_config=project)
        states = []
        for _ in range(2):
            run.train(2)
            run.accelerator.save_state()
            states.append(run.state())
        return states[0]

    older = ranks(2).run(save)[0]
    newest = tmp_path / "checkpoints" / "checkpoint_1"
    path = next(newest.glob(f"{part}-rank-00002*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")

    def load() -> Any:
        run = Run("fsdp", steps=3, seed=5, project_config=project)
        run.train(1)
        before, windows = run.state(), run.accelerator._components.stepper.loop_state()
        with pytest.raises(Exception, match="is damaged"):
            run.accelerator.load_state(newest)
        assert not differences(run.state(), before, 0.0)
        assert run.accelerator._components.stepper.loop_state() == windows
        assert run.accelerator.load_state() == str(newest.parent / "checkpoint_0")
        assert not differences(run.state(), older, 0.0)
        run.train(1)
        return True

    assert ranks(3).run(load) == [True] * 3
    assert (newest / MANIFEST).exists()
