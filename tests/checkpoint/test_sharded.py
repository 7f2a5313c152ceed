"""A state that is sharded over ranks: saved by all of them together, and loaded by any number of them, sharded in any way."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from sharding import Average, Shard, by_columns, equal, filled, fully, local, net, not_at_all, prepared, replicated_too, state

from slipstream.big_models.load import load_checkpoint_in_model
from slipstream.checkpoint import remote
from slipstream.checkpoint.locate import open_checkpoint
from slipstream.checkpoint.manifest import MANIFEST, Manifest, ModelEntry, parse_manifest
from slipstream.checkpoint.model_io import merge_weights
from slipstream.checkpoint.writer import open_destination
from slipstream.cli.checkpoint import command
from slipstream.errors import CheckpointError
from slipstream.files.checksum import VerifiedBlockFile, checksums_name
from slipstream.files.disk import Disk, FileEntry
from slipstream.files.object_store import is_url
from slipstream.utils import ProjectConfiguration

Ranks = Any


def expected() -> Any:
    """What one process holds after the update."""
    run = prepared(not_at_all)
    filled(*run)
    return state(*run)


def save(folder: Path, *shards: Shard, **options: Any) -> None:
    for shard in shards:
        run = prepared(shard)
        filled(*run)
        run[0].save_state(folder / shard.__name__, **options)
        assert equal(state(*run), expected()), shard.__name__
        run[0].end_training()


def load(folder: Path, *shards: Shard) -> None:
    """Every checkpoint in a folder, into a model that is sharded in each of these ways."""
    for name in sorted(os.listdir(folder)):
        for shard in shards:
            run = prepared(shard, seed=5)
            run[0].load_state(folder / name)
            model = run[0].unwrap_model(run[1])
            assert model.head.weight is model.embed.weight
            assert equal(state(*run), expected()), (name, shard.__name__)
            filled(*run, seed=2)  # what was loaded can be trained on


# -- any number of ranks ----------------------------------------------------------------------------------------------


def test_two_ranks_to_two_one_four(tmp_path: Path, ranks: Ranks) -> None:
    """What two ranks saved is loaded by two by one and by four."""
    ranks(2).run(save, tmp_path, fully, by_columns)
    ranks(2).run(load, tmp_path, fully, by_columns, not_at_all)
    load(tmp_path, not_at_all)
    ranks(4).run(load, tmp_path, fully, by_columns, replicated_too)


def test_four_ranks_to_two(tmp_path: Path, ranks: Ranks) -> None:
    """What four ranks saved is stored once and loaded by two."""
    ranks(4).run(save, tmp_path, replicated_too)
    held = open_checkpoint(tmp_path / "replicated_too").manifest
    assert [len(model.shards) for model in held.models] == [2]  # of four ranks, two hold the same
    ranks(2).run(load, tmp_path, fully)


def test_whole_to_sharded(tmp_path: Path, ranks: Ranks) -> None:
    """What was not sharded is loaded by ranks that shard."""
    save(tmp_path, not_at_all)
    ranks(2).run(load, tmp_path, fully, by_columns)


# -- what is on the disk ----------------------------------------------------------------------------------------------


def test_files_of_sharded_checkpoint(tmp_path: Path, ranks: Ranks) -> None:
    """The files of a sharded checkpoint."""
    ranks(2).run(save, tmp_path, fully)
    folder = tmp_path / "fully"
    names = {path.name for path in folder.iterdir()}
    kinds = ("safetensors", "blocks")
    own = {f"{base}-rank-0000{rank}-of-00002.{kind}" for base in ("model", "optimizer") for rank in (1, 2) for kind in kinds}
    rest = {MANIFEST, "model-rest.safetensors", "model_extra.json", "optimizer.safetensors", "training.json"}
    assert names == own | rest | {"rank_0.safetensors", "rank_1.safetensors"}
    manifest = parse_manifest((folder / MANIFEST).read_bytes(), MANIFEST)
    assert set(manifest.files) == names - {MANIFEST}
    assert (manifest.strategy, manifest.mesh) == ("sharded", {"dp_shard": 2})
    assert manifest.models[0].aliases == {"head.weight": "embed.weight"}
    assert not any(path.read_bytes().startswith((b"\x80\x04", b"PK")) for path in folder.iterdir())  # neither pickle nor torch.save


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_shards_too(tmp_path: Path, ranks: Ranks) -> None:
    """Torch reads the shards too."""
    pytest.importorskip("safetensors")
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load as torch_load

    ranks(2).run(save, tmp_path, fully)
    weights, _ = expected()
    there = {name: torch.empty_like(tensor) for name, tensor in weights.items() if name != "head.weight"}  # it knows of no tied ones
    torch_load(there, storage_reader=HuggingFaceStorageReader(str(tmp_path / "fully")), no_dist=True)
    assert equal(there, {name: weights[name] for name in there})


def test_shards_merged_into_file(tmp_path: Path, ranks: Ranks) -> None:
    """Shards are merged into one file."""
    from safetensors.torch import load_file

    ranks(2).run(save, tmp_path, by_columns)
    weights, _ = expected()
    merged = load_file(merge_weights(tmp_path / "by_columns", tmp_path / "merged"))
    assert equal(merged, {name: weights[name] for name in merged})
    assert merged.keys() == weights.keys() - {"head.weight"}


def test_shards_loaded_into_plain_model(tmp_path: Path, ranks: Ranks) -> None:
    """Weights in shards are loaded into a model by themselves."""
    ranks(2).run(save, tmp_path, by_columns)
    model = net(5)
    load_checkpoint_in_model(model, tmp_path / "by_columns", strict=True)
    assert equal(dict(model.state_dict()), expected()[0])


def test_commands_look_into_checkpoints_understand_shards(tmp_path: Path, ranks: Ranks) -> None:
    """The commands that look into checkpoints understand shards."""
    ranks(2).run(save, tmp_path, fully)
    save(tmp_path, not_at_all)
    sharded, plain = str(tmp_path / "fully"), str(tmp_path / "not_at_all")

    def said(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(command, list(words))
        return result.exit_code, result.output

    assert said("verify", sharded)[0] == 0
    code, text = said("show", "--tensors", sharded)
    assert (code, "embed.weight" in text, "[5, 7]" in text, "other files" in text) == (0, True, True, False)
    code, text = said("diff", "--json", sharded, plain)
    apart = {load["title"].partition(" (")[0]: [it["place"] for it in load["differences"]] for load in json.loads(text)["sections"]}
    assert (apart["model 0"], apart["optimizer 0"], apart["other files"]) == (["kind"], [], [])  # FSDPNet and Net: whoever held what
    path = tmp_path / "fully" / "optimizer-rank-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    code, text = said("verify", sharded)
    assert (code, path.name in text) == (1, True)


# -- each rank reads its own ------------------------------------------------------------------------------------------


def share_read(folder: Path) -> tuple[int, int]:
    """How many bytes of shards this rank reads in order to load, and how many there are."""
    run = prepared(fully, seed=5, width=400_000)
    read: list[int] = []
    before = VerifiedBlockFile._read_blocks

    def counted(self: VerifiedBlockFile, first: int, last: int, memory: memoryview) -> None:
        had = self.fetched
        before(self, first, last, memory)
        read.append(self.fetched - had)

    VerifiedBlockFile._read_blocks = counted  # type: ignore[method-assign]
    try:
        run[0].load_state(folder)
    finally:
        VerifiedBlockFile._read_blocks = before  # type: ignore[method-assign]
    return sum(read), sum(path.stat().st_size for path in folder.glob("*-rank-*.safetensors"))


def test_rank_reads_what_it_holds(tmp_path: Path, ranks: Ranks) -> None:
    """A rank reads about as much as it holds."""
    def write() -> None:
        run = prepared(fully, width=400_000)
        filled(*run)
        run[0].save_state(tmp_path / "large")

    ranks(2).run(write)
    for world in (2, 4):
        for rank, (read, total) in enumerate(ranks(world).run(share_read, tmp_path / "large")):
            rows = len(torch.empty(5).chunk(world)[rank]) if rank < len(torch.empty(5).chunk(world)) else 0  # of 5, as torch deals them out
            assert read <= total * rows / 5 + 6 * (2 << 20), (world, rank, read, total)


# -- when something goes wrong ----------------------------------------------------------------------------------------


def test_missing_rank_is_named(tmp_path: Path, ranks: Ranks) -> None:
    """A rank that stays away is named and the old checkpoint stays."""
    def one_stays_away() -> str:
        run = prepared(fully, timeout=2)
        run[0].save_state(tmp_path / "first")
        if run[0].process_index == 0:
            try:
                run[0].save_state(tmp_path / "first")
            except Exception as error:
                return str(error)
        return ""

    said = ranks(2).run(one_stays_away)[0]
    assert "save_state" in said
    assert "rank 1" in said
    assert os.listdir(tmp_path) == ["first"]
    open_checkpoint(tmp_path / "first")


class Full(Disk):
    """A disk that is full for one kind of file."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        if self.kind in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super()._pwrite(fd, data, offset)


def test_error_on_any_rank(tmp_path: Path, ranks: Ranks) -> None:
    """An error on any rank is one on all and changes nothing."""
    def fail(rank: int, kind: str, behind: bool) -> tuple[str, bool]:
        run = prepared(fully)
        run[0].save_state(tmp_path / "first")
        filled(*run)
        if run[0].process_index == rank:
            run[0]._saver.disk = Full(kind)
        said = ""
        try:
            run[0].save_state(tmp_path / "first", async_save=behind)
            run[0].load_state(tmp_path / "first")
        except CheckpointError as error:
            said = str(error)
        except Exception as error:
            said = f"told: {error}"
        run[0]._saver.disk = Disk()
        run[0].load_state(tmp_path / "first")
        return said, equal(state(*run), state(*prepared(fully)))

    at_once = [(1, "model-rank", False), (0, "training", False), (0, "MANIFEST", False)]
    for rank, kind, behind in [*at_once, (1, "blocks", True), (0, "MANIFEST", True)]:
        (first, same), (second, too) = ranks(2).run(fail, rank, kind, behind)
        assert "No space" in (first, second)[rank], (rank, kind, behind, first, second)
        assert "No space" in (first, second)[1 - rank], (rank, kind, behind, first, second)
        assert same, (rank, kind)
        assert too, (rank, kind)
        assert os.listdir(tmp_path) == ["first"]


def test_ranks_at_different_steps(tmp_path: Path, ranks: Ranks) -> None:
    """Ranks at different positions of the run do not make one checkpoint."""
    def apart() -> None:
        run = prepared(fully)
        run[2].updates = run[0].process_index
        run[0].save_state(tmp_path / "first")

    outcomes = ranks(2).outcomes(apart)
    assert all("different positions" in outcome.summary for outcome in outcomes)
    assert os.listdir(tmp_path) == []


def test_damage_found_before_changes(tmp_path: Path, ranks: Ranks) -> None:
    """Damage is found by the rank that needs it before anything changes anywhere."""
    ranks(2).run(save, tmp_path, fully)
    path = tmp_path / "fully" / "model-rank-00002-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)

    def try_it() -> tuple[str, bool]:
        run = prepared(fully, seed=5)
        with pytest.raises(Exception, match="is damaged") as caught:
            run[0].load_state(tmp_path / "fully")
        return str(caught.value), equal(state(*run), state(*prepared(fully, seed=5)))

    for said, same in ranks(2).run(try_it):
        assert path.name in said
        assert same


@pytest.mark.parametrize("twist", ["one is not listed", "one is listed in the place of another"])
def test_shards_not_whole_refused(tmp_path: Path, ranks: Ranks, twist: str) -> None:
    """Shards that are not the whole are refused."""
    ranks(2).run(save, tmp_path, fully)
    folder = tmp_path / "fully"
    manifest = parse_manifest((folder / MANIFEST).read_bytes(), MANIFEST)
    files, (model,) = dict(manifest.files), manifest.models
    if twist == "one is not listed":
        model = replace(model, shards=model.shards[:1])
    else:
        for name in (model.shards[0], checksums_name(model.shards[0])):
            other = name.replace("00001-of", "00002-of")
            (folder / other).write_bytes((folder / name).read_bytes())
            files[other] = files[name]
    (folder / MANIFEST).write_bytes(replace(manifest, files=files, models=(model,)).dump())
    run = prepared(not_at_all, seed=5)
    with pytest.raises(CheckpointError, match="cannot be assembled: .* shard"):
        run[0].load_state(folder)
    assert equal(state(*run), state(*prepared(not_at_all, seed=5)))


# -- the rest of a checkpoint -----------------------------------------------------------------------------------------


def test_async_numbered_with_hooks_and_objects(tmp_path: Path, ranks: Ranks) -> None:
    """Numbered behind the training with hooks and objects."""
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)

    def train() -> None:
        run = prepared(fully, project_config=project)
        average = Average(run[1])
        run[0].register_for_checkpointing(average)
        rank = run[0].process_index
        run[0].register_save_state_pre_hook(lambda models, weights, folder: Path(folder, f"of_{rank}.txt").write_text(f"{len(weights)}"))
        for step in range(3):
            filled(*run, seed=step)
            average.update(run[1])
            held = state(*run), local(average.values)
            run[0].save_state(async_save=True)
            filled(*run, seed=9)  # goes on while it is written
            run[0].end_training()
            if step < 2:
                run[0].load_state()
        for value in average.values.values():
            value.zero_()
        run[0].load_state()
        assert equal((state(*run), local(average.values)), held)

    ranks(2).run(train)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_1", "checkpoint_2", "latest"]
    assert (tmp_path / "checkpoints" / "checkpoint_2" / "of_1.txt").read_text() == "1"


def test_damaged_newest_is_passed_over(tmp_path: Path, ranks: Ranks) -> None:
    """The newest whole one is loaded if shards of a newer one are damaged."""
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)

    def train() -> None:
        run = prepared(fully, project_config=project)
        for step in range(2):
            filled(*run, seed=step)
            run[0].save_state()

    ranks(2).run(train)
    path = tmp_path / "checkpoints" / "checkpoint_1" / "optimizer-rank-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")

    def go_on() -> tuple[str, bool]:
        run, other = prepared(fully, seed=5, project_config=project), prepared(fully)
        filled(*other, seed=0)
        return run[0].load_state(), equal(state(*run), state(*other))

    assert ranks(2).run(go_on) == [(str(tmp_path / "checkpoints" / "checkpoint_0"), True)] * 2


def test_unchanged_shards_linked(tmp_path: Path, ranks: Ranks) -> None:
    """Unchanged shards are linked."""
    def twice() -> None:
        run = prepared(fully)
        for name in ("first", "second"):
            filled(*run)
            run[0].save_state(tmp_path / name, dedup=True)

    ranks(2).run(twice)
    linked = {path.name for path in (tmp_path / "second").iterdir() if path.stat().st_nlink > 1}
    assert "model-rank-00001-of-00002-00001-of-00002.safetensors" in linked  # the frozen ones
    assert "model-rank-00001-of-00002-00002-of-00002.safetensors" not in linked
    ranks(2).run(lambda: prepared(fully)[0].load_state(tmp_path / "second"))


# -- a stage that others join -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["{}/first", "memory://joined/first"])
def test_joined_stage_is_committed(tmp_path: Path, where: str) -> None:
    """What another process adds to a stage is committed with it."""
    place = open_destination(where.format(tmp_path), Disk())
    stage = place.begin()
    joined = place.join(stage.ticket)
    entries = {"a.txt": stage.add("a.txt", [b"one"], 3), "b.txt": joined.add("b.txt", [b"two"], 3)}
    with pytest.raises(CheckpointError, match="committed by the process"):
        joined.commit(b"")
    joined.abandon()
    with pytest.raises(CheckpointError, match="this save has ended"):
        joined.add("c.txt", [b""], 0)
    stage.commit(Manifest("1-0123456789abcdef", 1, "now", "us", 2, "sharded", files=entries).dump())
    url = where.format(tmp_path)
    folder = remote.fetch(url, tmp_path / "copy") if is_url(url) else Path(url)
    assert open_checkpoint(folder).manifest.files == entries


def test_unseen_stage_is_an_error(tmp_path: Path) -> None:
    """A process that does not see the stage says so."""
    with pytest.raises(CheckpointError, match="a file system that all of them share"):
        open_destination(str(tmp_path / "first"), Disk()).join(".first.saving-00112233")


# -- the manifest -----------------------------------------------------------------------------------------------------


def manifest_with(change: Callable[[dict[str, FileEntry]], None] = lambda files: None, **shards: Any) -> bytes:
    files = {name: FileEntry(1, "0" * 32) for name in ("a.safetensors", "a.blocks", "b.safetensors", "b.blocks", "optimizer.json")}
    change(files)
    model = ModelEntry("Net", (), shards=shards.get("model", ("a.safetensors",)))
    parts = shards.get("parts", {"optimizer.json": ("b.safetensors",)})
    return Manifest("1-0", 1, "now", "us", 2, "sharded", files=files, models=(model,), optimizers=("optimizer.json",), shards=parts).dump()


def test_manifest_knows_files_of_shards() -> None:
    """A manifest knows files of shards."""
    manifest = parse_manifest(manifest_with(), MANIFEST)
    assert manifest.dump() == manifest_with()
    assert manifest.shard_files() == {"a.safetensors", "b.safetensors"}


@pytest.mark.parametrize(
    "data",
    [
        manifest_with(lambda files: files.pop("a.safetensors")),
        manifest_with(lambda files: files.pop("a.blocks")),
        manifest_with(model=("a.safetensors", "a.safetensors")),
        manifest_with(model=("b.safetensors",)),
        manifest_with(parts={"nothing.json": ("b.safetensors",)}),
        manifest_with(model=(3,)),
    ],
)
def test_manifest_lists_shards_once(data: bytes) -> None:
    """A manifest whose shards are not listed once is refused."""
    with pytest.raises(CheckpointError, match=MANIFEST):
        parse_manifest(data, MANIFEST)
