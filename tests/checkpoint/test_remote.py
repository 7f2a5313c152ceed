"""Checkpoints behind a URL: whatever fails, and wherever, one whole checkpoint is there."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import object_store
import pytest
import torch
from object_store import Killed, World

from slipstream.checkpoint import remote
from slipstream.checkpoint.capture import RunFacts, Snapshot, StatePart
from slipstream.checkpoint.manifest import MANIFEST, Manifest, ModelEntry, RankFile, parse_manifest
from slipstream.checkpoint.remote import RemoteTarget, fetch, list_numbered, read_remote_manifest
from slipstream.checkpoint.rotate import RetentionPolicy
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.checksum import digest
from slipstream.files.disk import FileEntry
from slipstream.files.object_store import is_url, local_path

URL = "objects://bucket/runs/first"


@pytest.fixture
def world() -> Iterator[World]:
    with object_store.object_store() as made:
        yield made


@pytest.fixture(autouse=True)
def _empty_memory() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


def contents(step: int) -> dict[str, bytes]:
    """The files of a checkpoint of this step."""
    notes = {f"hook/{step}/notes.txt": b"notes %d" % step}
    return {"model.safetensors": b"weights %d" % step * 50, "optimizer.safetensors": b"state %d" % step, **notes}


def manifest_of(step: int, files: dict[str, FileEntry], metric: float | None = None) -> Manifest:
    model = ModelEntry("Linear", ("model.safetensors",), {"b": "a"})
    named = {"models": (model,), "optimizers": ("optimizer.safetensors",), "training": None, "metric": metric}
    return Manifest(f"{step}-0123456789abcdef", step, "today", "me", 2, "single", files=files, **named)


def save(url: str, step: int, metric: float | None = None) -> Manifest:
    with RemoteTarget(url).begin() as stage:
        files = {name: stage.add(name, [data[:5], data[5:]], len(data)) for name, data in contents(step).items()}
        manifest = manifest_of(step, files, metric)
        stage.commit(manifest.dump())
    return manifest


def check(url: str, into: Path, step: int | None = None) -> int:
    """Fetches, and looks whether all of it is of one save; gives that save's step."""
    folder = fetch(url, into)
    found = parse_manifest((folder / MANIFEST).read_bytes(), MANIFEST)
    expected = contents(found.step)
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {*expected, MANIFEST}
    assert all((folder / name).read_bytes() == data for name, data in expected.items())
    assert found == manifest_of(found.step, {name: FileEntry(len(data), digest(data)) for name, data in expected.items()}, found.metric)
    assert step in (None, found.step)
    return found.step


# -- what can be a target


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("s3://bucket/run", True),
        ("memory://run", True),
        ("simplecache::s3://bucket/run", True),
        ("simplecache::file:///tmp/run", True),
        ("file:///tmp/run", False),
        ("FILE:///tmp/run", False),
        ("local:///tmp/run", False),
        ("runs/first", False),
        ("C://runs", False),
        ("C:\\runs", False),
        ("a::b", False),
        ("", False),
        (Path("/tmp"), False),
    ],
)
def test_what_url(target: object, expected: bool) -> None:
    """What is a URL."""
    assert is_url(target) is expected


def test_file_urls_paths_of_this_machine(tmp_path: Path) -> None:
    """File URLs are paths of this machine."""
    awkward = tmp_path / "my run #1 50%"
    assert local_path(awkward.as_uri()) == str(awkward)
    assert local_path("file://localhost/tmp/run") == "/tmp/run"
    assert local_path("file:/tmp/my%20run") == "/tmp/my run"
    assert local_path("some/run") == "some/run"
    assert local_path("file:run") == "file:run"
    with pytest.raises(ConfigError, match="three slashes"):
        local_path("file://tmp/run")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense://bucket/run", "'nonsense' is not a scheme that fsspec supports"),
        ("zip://inner::file:///tmp/a.zip", "not an archive's"),
        ("memory://", "names no folder"),
        ("oci://bucket/run", "needs a package that is not installed"),
    ],
)
def test_urls_cannot_used_say_why(url: str, message: str) -> None:
    """URLs that cannot be used say why."""
    with pytest.raises(ConfigError, match=message):
        RemoteTarget(url)


# -- there and back


@pytest.mark.parametrize("url", ["memory://runs/first", URL, "simplecache::memory://runs/first", "simplecache::file://{tmp}/deep/run"])
def test_what_saved_fetched_under_own_names(url: str, tmp_path: Path, world: World) -> None:
    """What was saved is fetched under its own names."""
    url = url.format(tmp=tmp_path)
    saved = save(url, 1)
    assert check(url, tmp_path / "got") == 1
    assert read_remote_manifest(url) == saved
    save(url, 2)
    assert check(url, tmp_path / "again") == 2


def test_old_files_removed_foreign_kept(world: World) -> None:
    """The files of the save before are gone and those of others are not."""
    world.objects["bucket/runs/first/README.md"] = b"mine"
    save(URL, 1)
    first = {path for path in world.objects if "data-" in path}
    save(URL, 2)
    second = {path for path in world.objects if "data-" in path}
    assert len(second) == len(contents(2)) + 1
    assert not first & second
    assert world.objects.keys() - second == {"bucket/runs/first/README.md", f"bucket/runs/first/{MANIFEST}"}


def test_checkpoint_copied_by_hand(world: World, tmp_path: Path) -> None:
    """A checkpoint that was copied there by hand is fetched and can be replaced."""
    files = {name: FileEntry(len(data), digest(data)) for name, data in contents(4).items()}
    world.objects.update({f"bucket/runs/first/{name}": data for name, data in contents(4).items()})
    world.objects[f"bucket/runs/first/{MANIFEST}"] = manifest_of(4, files).dump()
    assert check(URL, tmp_path / "got") == 4
    save(URL, 5)
    assert check(URL, tmp_path / "new") == 5
    assert "bucket/runs/first/model.safetensors" not in world.objects


def test_manifest_written_last(world: World) -> None:
    """The manifest is written last and nothing is removed before."""
    save(URL, 1)
    world.calls.clear()
    save(URL, 2)
    written = [place for place, (kind, _) in enumerate(world.calls) if kind == "put"]
    removed = [place for place, (kind, _) in enumerate(world.calls) if kind == "rm"]
    assert world.calls[written[-1]] == ("put", f"bucket/runs/first/{MANIFEST}")
    assert removed
    assert min(removed) > written[-1]


def test_large_files_go_in_pieces(world: World, tmp_path: Path) -> None:
    size = 50 << 20
    data = memoryview(torch.arange(size // 8).numpy()).cast("B")
    with RemoteTarget(URL).begin() as stage:
        entry = stage.add("model.safetensors", [data], size)
        stage.commit(Manifest("1-0123456789abcdef", 1, "today", "me", 1, "single", files={"model.safetensors": entry}).dump())
    assert entry == FileEntry(size, digest(data))
    assert world.largest_upload <= 24 << 20
    assert fetch(URL, tmp_path / "got").joinpath("model.safetensors").read_bytes() == data


def test_hook_files_uploaded_links_refused(world: World, tmp_path: Path) -> None:
    """Files of hooks are uploaded and links are not."""
    (tmp_path / "secret").write_text("not for others")
    with RemoteTarget(URL).begin() as stage:
        folder = stage.folder
        (folder / "sub").mkdir()
        (folder / "sub" / "notes.txt").write_bytes(b"hello")
        (folder / "link").symlink_to(tmp_path / "secret")
        entry = stage.adopt("sub/notes.txt")
        assert entry == FileEntry(5, digest(b"hello"))
        with pytest.raises(CheckpointError, match="link"):
            stage.adopt("link")
        assert not stage.reuse("notes.txt", tmp_path / "secret", entry)
        stage.commit(Manifest("1-0123456789abcdef", 1, "today", "me", 1, "single", files={"sub/notes.txt": entry}).dump())
    assert (fetch(URL, tmp_path / "got") / "sub/notes.txt").read_bytes() == b"hello"
    assert not folder.exists()


def test_names_cannot_lead_elsewhere(world: World, tmp_path: Path) -> None:
    with RemoteTarget(URL).begin() as stage, pytest.raises(CheckpointError, match="plain relative paths"):
        stage.add("../elsewhere", [b"x"], 1)
    save(URL, 1)
    assert all(path.startswith("bucket/runs/first/") for path in world.objects)


def test_save_given_up_leaves_nothing(world: World) -> None:
    """A save that is given up leaves nothing."""
    save(URL, 1)
    before = dict(world.objects)
    with RemoteTarget(URL).begin() as stage:
        stage.add("model.safetensors", [b"x"], 1)
        folder = stage.folder
    assert world.objects == before
    assert not folder.exists()
    with pytest.raises(CheckpointError, match="this save has ended"):
        stage.add("more", [b"x"], 1)


def test_bytes_do_not_announced_number_error(world: World) -> None:
    """Bytes that do not have the announced number are an error."""
    for chunks in ([b"12"], [b"12", b"34"]):
        with RemoteTarget(URL).begin() as stage, pytest.raises(CheckpointError, match="should have 3"):
            stage.add("model.safetensors", chunks, 3)


# -- faults


def outcome(action: Callable[[], object]) -> tuple[str, str]:
    """How a call ended, and what was said."""
    try:
        action()
    except CheckpointError as error:
        return "refused", str(error)
    except Killed:
        return "killed", ""
    return "saved", ""


def _faults() -> list[tuple[str, int]]:
    with object_store.object_store() as world:
        save(URL, 1)
        world.calls.clear()
        save(URL, 2)
        count = len(world.calls)
    assert count >= 15
    return [(how, place) for how in ("before", "after", "torn", "killed") for place in range(count)]


def test_whatever_call_fails_whole_checkpoint(tmp_path: Path) -> None:
    """Every call of a save over an existing checkpoint, failing before and after it was carried out, torn, and as the last one of all."""
    outcomes = set()
    for number, (how, place) in enumerate(_faults()):
        with object_store.object_store() as world:
            save(URL, 1)
            world.calls.clear()
            world.fail_at, world.how, world.late = place, how, 4
            ended, message = outcome(lambda: save(URL, 2))
            assert ended != "refused" or "objects://bucket/runs/first" in message
            world.revive()
            there = check(URL, tmp_path / str(number))
            assert there in ((2,) if ended == "saved" else (1, 2))
            save(URL, 3)  # and it goes on from there
            assert check(URL, tmp_path / f"{number}-next") == 3
            outcomes.add((how, ended, there))
    assert {("before", "refused", 1), ("before", "saved", 2), ("after", "saved", 2), ("torn", "refused", 2)} <= outcomes
    assert {("killed", "killed", 1), ("killed", "killed", 2)} <= outcomes


def test_first_save_fails_leaves_no_checkpoint(world: World, tmp_path: Path) -> None:
    """A first save that fails leaves no checkpoint."""
    world.fail_at = 5
    with pytest.raises(CheckpointError):
        save(URL, 1)
    world.revive()
    assert world.objects == {}
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at objects://bucket/runs/first: it has no MANIFEST\.json"):
        fetch(URL, tmp_path / "got")


def test_credentials_never_shown(world: World, tmp_path: Path) -> None:
    """Credentials are never shown."""
    url = "objects://user:secret@bucket/run"
    world.fail_at = 1
    with pytest.raises(CheckpointError, match=r"objects://\*\*\*@bucket/run") as caught:
        save(url, 1)
    assert "secret" not in "".join(traceback.format_exception(caught.value))
    world.revive()
    save(url, 1)
    world.objects = {path: b"damaged" for path in world.objects}
    with pytest.raises(CheckpointError) as caught:
        fetch(url, tmp_path / "got")
    assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_files_of_dead_saves_removed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of saves that died long ago are removed."""
    now = time.time_ns()
    for age in (30 * 24 * 3600, 3600):
        monkeypatch.setattr(time, "time_ns", lambda age=age: now - age * 10**9)
        RemoteTarget(URL).begin().add("model.safetensors", [b"x"], 1)
    monkeypatch.setattr(time, "time_ns", lambda: now)
    save(URL, 1)
    folders = {path.split("/")[3] for path in world.objects if "data-" in path}
    assert len(folders) == 2  # its own, and that of a save that may still be under way


# -- what a store may hold instead


def tampered(world: World, change: object) -> None:
    save(URL, 1)
    change(world.objects)  # type: ignore[operator]


def _truncate(objects: dict[str, bytes]) -> None:
    name = next(path for path in objects if path.endswith("model.safetensors"))
    objects[name] = objects[name][:-1]


def _lengthen(objects: dict[str, bytes]) -> None:
    name = next(path for path in objects if path.endswith("model.safetensors"))
    objects[name] += b"x"


def _alter(objects: dict[str, bytes]) -> None:
    name = next(path for path in objects if path.endswith("model.safetensors"))
    objects[name] = b"x" * len(objects[name])


def _lose(objects: dict[str, bytes]) -> None:
    objects.pop(next(path for path in objects if path.endswith("optimizer.safetensors")))


@pytest.mark.parametrize("change", [_truncate, _lengthen, _alter, _lose])
def test_damaged_file_named(world: World, tmp_path: Path, change: object) -> None:
    """A damaged file is named."""
    tampered(world, change)
    with pytest.raises(CheckpointError, match=r"objects://bucket/runs/first.*(model|optimizer)\.safetensors"):
        fetch(URL, tmp_path / "got")
    assert not (tmp_path / "got" / MANIFEST).exists()


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "a/../../outside", "..", "a\\b"])
def test_names_in_manifest_cannot_lead_outside(world: World, tmp_path: Path, name: str) -> None:
    """Names in a manifest cannot lead outside."""
    body = manifest_of(1, {name: FileEntry(1, digest(b"x"))}).dump()
    world.objects[f"bucket/runs/first/{MANIFEST}"] = body
    with pytest.raises(CheckpointError):
        fetch(URL, tmp_path / "a" / "b")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_fetch_needs_empty_folder(world: World, tmp_path: Path) -> None:
    """A folder with something in it is not fetched into."""
    save(URL, 1)
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        fetch(URL, tmp_path)


def test_what_replaced_while_fetched_fetched_anew(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is replaced while it is fetched is fetched anew."""
    save(URL, 1)
    real = remote._download_file

    def replaced(*arguments: object) -> None:
        monkeypatch.setattr(remote, "_download_file", real)
        save(URL, 2)
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(remote, "_download_file", replaced)
    assert check(URL, tmp_path / "got") == 2


# -- ranks, numbers and rotation


def snapshot(rank: int, step: int) -> Snapshot:
    own = StatePart(f"rank_{rank}", {"rank": rank}, {"torch": torch.arange(5, dtype=torch.uint8)})
    facts = RunFacts(stamp=f"{step}-0123456789abcdef", step=step, world=2, strategy="ddp")
    return Snapshot(facts=facts, models=(), optimizers=(), training=None, objects=(), own=own)


@pytest.mark.parametrize("first", ["rank", "checkpoint"])
def test_what_other_ranks_add_fetched_with(world: World, tmp_path: Path, first: str) -> None:
    """What other ranks add is fetched with it."""
    for step in (1, 2):
        if first == "rank":
            RemoteTarget(URL).add_rank_file(snapshot(1, step))
        save(URL, step)
        if first == "checkpoint":
            RemoteTarget(URL).add_rank_file(snapshot(1, step))
    found = [RankFile.of(name) for name in os.listdir(fetch(URL, tmp_path / "got"))]
    assert [(entry.rank, entry.stamp) for entry in found if entry] == [(1, "2-0123456789abcdef")]
    if first == "rank":  # the one of the save before is gone
        assert sum("rank_1" in path for path in world.objects) == 1


def test_damaged_file_of_rank_refused(world: World, tmp_path: Path) -> None:
    """A damaged file of a rank is refused."""
    save(URL, 1)
    RemoteTarget(URL).add_rank_file(snapshot(1, 1))
    name = next(path for path in world.objects if "rank_1" in path)
    world.objects[name] = world.objects[name][:-1] + b"x"
    with pytest.raises(CheckpointError, match="rank_1"):
        fetch(URL, tmp_path / "got")


def test_numbers_listed_in_order(world: World) -> None:
    """Numbers are listed in their order."""
    for number in (10, 9, 2):
        save(f"objects://bucket/runs/checkpoint_{number}", number)
    world.objects["bucket/runs/checkpoint_09/x"] = world.objects["bucket/runs/notes/x"] = b""
    assert list_numbered("objects://bucket/runs/") == [(number, f"objects://bucket/runs/checkpoint_{number}") for number in (2, 9, 10)]
    assert list_numbered("objects://bucket/elsewhere") == []
    remote.write_latest("objects://bucket/runs", "checkpoint_10")
    assert world.objects["bucket/runs/latest"] == b"checkpoint_10\n"


def test_rotation_keeps_newest_and_best(world: World) -> None:
    """Rotation keeps the newest and the best."""
    urls = [f"objects://bucket/runs/checkpoint_{number}" for number in range(5)]
    for number, metric in enumerate((0.5, 0.1, 0.4, 0.3, 0.2)):
        save(urls[number], number, metric)
    RemoteTarget(urls[0]).add_rank_file(snapshot(1, 0))
    world.objects["bucket/runs/checkpoint_7/mine"] = b"no checkpoint"
    assert remote.rotate("objects://bucket/runs", RetentionPolicy(total_limit=2, keep_best=1), newest=urls[4]) == [urls[0], urls[2]]
    assert [number for number, _ in list_numbered("objects://bucket/runs")] == [1, 3, 4, 7]
    assert remote.rotate("objects://bucket/runs", RetentionPolicy(), newest=urls[4]) == []


def test_nothing_rotated_before_newest(world: World) -> None:
    """Nothing is rotated before the newest is there."""
    save("objects://bucket/runs/checkpoint_0", 0)
    assert remote.rotate("objects://bucket/runs", RetentionPolicy(total_limit=1), newest="objects://bucket/runs/checkpoint_1") == []


def test_removal_interrupted_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    """A removal that is interrupted leaves no half checkpoint."""
    old, new = "objects://bucket/runs/checkpoint_0", "objects://bucket/runs/checkpoint_1"
    seen = set()
    for place in range(30):
        with object_store.object_store() as world:
            for number, url in enumerate((old, new)):
                save(url, number)
            world.calls.clear()
            world.fail_at, world.how = place, "killed"
            ended, _ = outcome(lambda: remote.rotate("objects://bucket/runs", RetentionPolicy(total_limit=1), newest=new))
            world.revive()
            assert check(new, tmp_path / f"{place}-new") == 1
            left, message = outcome(lambda place=place: check(old, tmp_path / f"{place}-old", step=0))  # type: ignore[misc]
            assert left == "saved" or "there is no checkpoint at" in message
            seen.add((ended, left))
    assert seen == {("killed", "saved"), ("killed", "refused"), ("saved", "refused")}
