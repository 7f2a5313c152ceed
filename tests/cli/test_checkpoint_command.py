"""`slipstream checkpoint`: what it says of checkpoints that are whole, damaged, different, or none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import specimens
from slipstream.checkpoint.manifest import MANIFEST, Manifest, parse_manifest
from slipstream.cli.checkpoint_diff import TensorDifference, compare_tensors
from slipstream.cli.main import main
from slipstream.files.checksum import digest
from slipstream.observability.report.text_charts import escape_control

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process: exit code, output, errors."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = main(["checkpoint", *map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def data(run: Run) -> Callable[..., Any]:
    """The same with --json, read back."""

    def call(name: str, *arguments: str | Path) -> Any:
        return json.loads(run(name, "--json", *arguments)[1])

    return call


def rewrite(folder: Path, **changes: Any) -> None:
    """Another manifest for a checkpoint, with a checksum that fits."""
    found = parse_manifest((folder / MANIFEST).read_bytes(), "")
    (folder / MANIFEST).write_bytes(Manifest(**{**vars(found), **changes}).dump())


# -- ls -----------------------------------------------------------------------------------------------------------------


def test_ls_sorts_by_number(tmp_path: Path, run: Run, data: Any) -> None:
    """Checkpoints are listed by number with what is known of them."""
    specimens.numbered(tmp_path, 2, 9, 10, metric=0.25)
    code, out, _ = run("ls", tmp_path)
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines[2:]] == ["checkpoint_2", "checkpoint_9", "checkpoint_10"]
    assert "latest" in lines[4]
    assert "latest" not in lines[3]
    assert "0.25" in lines[2]
    assert "ago" in lines[2]
    assert "sizes fit" in lines[2]
    found = data("ls", tmp_path)[0]
    assert found["latest"] == "checkpoint_10"
    size = sum(entry.size for entry in parse_manifest((tmp_path / "checkpoint_9" / MANIFEST).read_bytes(), "").files.values())
    assert {**found["checkpoints"][1], "created": "", "path": ""} == {
        "name": "checkpoint_9", "path": "", "step": 9, "created": "", "size": size, "processes": 2, "ranks": [0, 1], "metric": 0.25,
        "whole": True, "verified": False, "problems": [], "latest": False, "note": "",
    }  # fmt: skip


def test_checkpoint_can_listed(tmp_path: Path, data: Any) -> None:
    """One checkpoint can be listed."""
    specimens.save(tmp_path / "first")
    assert [entry["name"] for entry in data("ls", tmp_path / "first")[0]["checkpoints"]] == ["first"]


def test_ls_sizes_and_verify(tmp_path: Path, data: Any) -> None:
    """A file that is short is seen without reading and one that is damaged by reading."""
    specimens.numbered(tmp_path, 1, 2)
    short, flipped = tmp_path / "checkpoint_1" / "model.safetensors", tmp_path / "checkpoint_2" / "model.safetensors"
    os.truncate(short, short.stat().st_size - 1)
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\xff")
    quick, full = data("ls", tmp_path)[0]["checkpoints"], data("ls", "--verify", tmp_path)[0]["checkpoints"]
    assert [entry["whole"] for entry in quick] == [False, True]
    assert [entry["whole"] for entry in full] == [False, False]
    assert str(short) in quick[0]["problems"][0]
    assert str(flipped) in full[1]["problems"][0]


def test_ranks_not_in_said(tmp_path: Path, run: Run) -> None:
    """Ranks that are not in it are said."""
    specimens.save(tmp_path / "first", late=False)
    assert "the random state of 1 process is not in it" in run("ls", tmp_path)[1]


def test_ls_leftovers_and_live_saves(tmp_path: Path, run: Run) -> None:
    """What dead saves left is listed and a living one is told apart."""
    specimens.numbered(tmp_path, 1, 2)
    for number in (1, 2):
        (tmp_path / f".checkpoint_{number}.saving-0123456{number}").mkdir()
        (tmp_path / f".checkpoint_{number}.saving-0123456{number}" / "model.safetensors").write_bytes(bytes(2048))
    (tmp_path / ".checkpoint_1.lock").write_text(f"{2**22 + 1} {os.uname().nodename}\n")  # larger than any process id of Linux
    (tmp_path / ".checkpoint_2.lock").write_text(f"{os.getpid()} {os.uname().nodename}\n")
    lines = [line for line in run("ls", tmp_path)[1].splitlines() if "saving-" in line]
    assert "did not finish" in lines[0]
    assert "2.0 KB" in lines[0]
    assert f"being saved by process {os.getpid()} on " in lines[1]


def test_ls_unclaimed_rank_files(tmp_path: Path, data: Any) -> None:
    """Files of ranks that no checkpoint waits for are listed."""
    specimens.numbered(tmp_path, 1, 2)
    (late,) = (path for path in (tmp_path / "checkpoint_1").iterdir() if path.name.startswith("rank_1."))
    late.rename(tmp_path / f".checkpoint_2.{late.name}")  # beside another number, as a rank may count otherwise
    lost = tmp_path / f".checkpoint_1.{late.name.replace(specimens.stamp_of(1), specimens.stamp_of(9))}"
    half = tmp_path / ".checkpoint_1.rank-01234567-0123456789abcdef"
    for path in (lost, half):
        path.write_bytes(b"")
    found = data("ls", tmp_path)[0]
    assert {entry["name"] for entry in found["leftovers"]} == {lost.name, half.name}
    assert [entry["ranks"] for entry in found["checkpoints"]] == [[0, 1], [0, 1]]


def test_ls_recovered_checkpoint(tmp_path: Path, data: Any) -> None:
    """A checkpoint that a crash took from its place is listed by its name."""
    specimens.numbered(tmp_path, 1, 2)
    (tmp_path / "checkpoint_2").rename(tmp_path / ".checkpoint_2.was-01234567")
    found = data("ls", tmp_path)[0]["checkpoints"]
    assert [entry["name"] for entry in found] == ["checkpoint_1", "checkpoint_2"]
    assert ".checkpoint_2.was-01234567" in found[1]["note"]
    assert found[1]["whole"]


def test_folders_no_checkpoints_named_with_reason(tmp_path: Path, data: Any) -> None:
    """Folders that are no checkpoints are named with the reason."""
    specimens.numbered(tmp_path, 1, 2)
    (tmp_path / "plots").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "random_states_0.pkl").write_bytes(b"")
    (tmp_path / "checkpoint_2" / MANIFEST).write_bytes(b"{}")
    found = {entry["name"]: entry["why"] for entry in data("ls", tmp_path)[0]["others"]}
    assert sorted(found) == ["checkpoint_2", "other", "plots"]
    assert "not the manifest of a Slipstream checkpoint" in found["checkpoint_2"]
    assert "Accelerate" in found["other"]
    assert "it contains nothing" in found["plots"]


def test_latest_names_nothing_said(tmp_path: Path, run: Run) -> None:
    """Latest that names nothing is said."""
    specimens.numbered(tmp_path, 1)
    (tmp_path / "latest").write_text("checkpoint_7\n")
    assert "`latest` says checkpoint_7, and there is no such checkpoint" in run("ls", tmp_path)[1]
    assert run("verify", tmp_path)[0] == 1


# -- verify -------------------------------------------------------------------------------------------------------------


def test_whole_checkpoints_verify(tmp_path: Path, run: Run) -> None:
    specimens.numbered(tmp_path, 1, 2, shard=100, note="hello")
    code, out, err = run("verify", tmp_path)
    assert (code, err) == (0, "")
    assert [line.split(": ")[1][:5] for line in out.splitlines()] == ["whole", "whole"]


BROKEN: dict[str, tuple[str, Callable[[Path], object]]] = {
    "flipped": ("optimizer.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\xee")),
    "missing": ("training.json", os.unlink),
    "longer": ("model_extra.json", lambda path: path.write_bytes(path.read_bytes() + b" ")),
    "link": ("custom_checkpoint_0.safetensors", lambda path: (path.rename(path.parent.parent / "moved"), path.symlink_to("../moved"))),
    "pipe": ("notes/note.txt", lambda path: (path.unlink(), os.mkfifo(path))),
    "folder": ("model-00002-of-00002.safetensors", lambda path: (path.unlink(), path.mkdir())),
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_problem_line_names_file(name: str, tmp_path: Path, run: Run) -> None:
    """Every problem is a line that names the file."""
    specimens.save(tmp_path / "first", shard=100, note="hello")
    file, damage = BROKEN[name]
    damage(tmp_path / "first" / file)
    code, out, err = run("verify", tmp_path / "first")
    assert code == 1
    assert [line.startswith(f"{tmp_path / 'first' / file} ") for line in out.splitlines()] == [True]
    assert err == "1 problem.\n"


def test_verify_late_rank_file(tmp_path: Path, run: Run) -> None:
    """The file of a rank that came later is verified too."""
    specimens.save(tmp_path / "first")
    (file,) = (path for path in (tmp_path / "first").iterdir() if path.name.startswith("rank_1."))
    file.write_bytes(file.read_bytes()[:-1] + b"\xee")
    code, out, _ = run("verify", tmp_path / "first")
    assert code == 1
    assert out.startswith(f"{file} is damaged")


def test_verify_misplaced_states(tmp_path: Path, run: Run) -> None:
    """States that do not belong there are found though every checksum fits."""
    for number, changes in enumerate(
        [
            {"models": lambda found: (type(found.models[0])("Net", found.models[0].files, {"a": "b"}),)},
            {"models": lambda found: (type(found.models[0])("Net", found.models[0].files, {"small": "embed.weight"}),)},
            {"stamp": lambda found: specimens.stamp_of(9)},
            {"ranks": lambda found: {1: found.ranks[0]}},
            {"training": lambda found: "model.safetensors"},
        ]
    ):
        folder = tmp_path / str(number)
        found = specimens.save(folder, late=False)
        rewrite(folder, **{name: make(found) for name, make in changes.items()})
        assert run("verify", folder)[0] == 1, changes


def test_verify_numbered_folder_without_manifest(tmp_path: Path, run: Run) -> None:
    """A numbered folder without a manifest is a problem and another folder is not."""
    specimens.numbered(tmp_path, 1)
    (tmp_path / "plots").mkdir()
    assert run("verify", tmp_path)[0] == 0
    (tmp_path / "checkpoint_2").mkdir()
    code, out, _ = run("verify", tmp_path)
    assert code == 1
    assert out.startswith(f"{tmp_path / 'checkpoint_2'} is not a checkpoint")


def test_verify_folder_without_checkpoints(tmp_path: Path, run: Run) -> None:
    """A folder in which nothing was verified is not taken for a whole one."""
    specimens.numbered(tmp_path / "runs", 1)
    (tmp_path / "other" / "plots").mkdir(parents=True)
    code, out, err = run("verify", tmp_path / "runs", tmp_path / "other")
    assert (code, out) == (2, "")
    assert f"There is no checkpoint in {tmp_path / 'other'}" in err


def test_folder_of_project_stands_for_checkpoints(tmp_path: Path, run: Run, data: Any) -> None:
    """The folder of a project stands for its checkpoints."""
    specimens.numbered(tmp_path / "checkpoints", 1)
    (tmp_path / "logs").mkdir()
    assert [entry["name"] for entry in data("ls", tmp_path)[0]["checkpoints"]] == ["checkpoint_1"]
    assert run("verify", tmp_path) == run("verify", tmp_path / "checkpoints")
    assert f"such as {tmp_path / 'checkpoints' / 'checkpoint_1'}" in run("show", tmp_path)[2]


# -- show ---------------------------------------------------------------------------------------------------------------


def test_show_tells_what_in(tmp_path: Path, run: Run, data: Any) -> None:
    """Show tells what is in it."""
    specimens.save(tmp_path / "first", 3, note="hello", metric=0.5)
    code, out, _ = run("show", tmp_path / "first")
    assert code == 0
    for words in (
        "step 3", "effective_batch              8", "mixed_precision              no", "seed                         7",
        "model 0 (Net): 2 tensors, 30 parameters (BF16, F32), 108 bytes", "head.weight is tied to embed.weight",
        "optimizer 0 (AdamW): 4 tensors", "learning rate 0.01", "loaders[0]  dataset 'Rows'", "custom_checkpoint_0", "seen, mean",
        "of rank 0, 1", "notes/note.txt",
    ):  # fmt: skip
        assert words in out
    assert "embed.weight" not in out.replace("tied to embed.weight", "")
    found = data("show", "--tensors", tmp_path / "first")
    assert found["models"][0]["tensor_list"][0] == {
        "name": "embed.weight", "dtype": "F32", "shape": [6, 4], "file": "model.safetensors",
    }  # fmt: skip
    assert found["receipt"] == specimens.RECEIPT
    assert found["ranks_missing"] == 0
    assert "F32      [6, 4]               embed.weight" in run("show", "--tensors", tmp_path / "first")[1]


def test_show_tells_rest_when_file_missing(tmp_path: Path, run: Run) -> None:
    """Show tells the rest when a file is missing."""
    specimens.save(tmp_path / "first")
    (tmp_path / "first" / "model.safetensors").unlink()
    code, out, _ = run("show", tmp_path / "first")
    assert code == 1
    assert f"{tmp_path / 'first' / 'model.safetensors'} is missing" in out
    assert "optimizer 0 (AdamW): 4 tensors" in out


# -- diff ---------------------------------------------------------------------------------------------------------------


def test_diff_equal_across_time_and_shards(tmp_path: Path, run: Run, data: Any) -> None:
    """Two saves of one state are equal whatever their time and shards."""
    specimens.save(tmp_path / "one", 3)
    specimens.save(tmp_path / "two", 3, shard=100)
    rewrite(tmp_path / "two", created="2020-01-01T00:00:00+00:00")
    code, out, _ = run("diff", tmp_path / "one", tmp_path / "two")
    assert (code, out) == (0, "The checkpoints are equal: 2 tensors, and every state.\n")
    assert data("diff", tmp_path / "one", tmp_path / "two")["equal"] is True


def test_differences_found_where(tmp_path: Path, data: Any) -> None:
    """Differences are found where they are."""
    weight = torch.zeros(4, 3)
    changed = weight.clone()
    changed[1, 2] = -0.5
    receipt = {"seed": 8}
    specimens.save(tmp_path / "one", 3, tensors={"w": weight, "a": torch.ones(2), "s": torch.ones(2), "d": torch.ones(2)})
    specimens.save(
        tmp_path / "two", 3, lr=0.02, receipt=receipt, note="x", late=False,
        tensors={"w": changed, "b": torch.ones(2), "s": torch.ones(3), "d": torch.ones(2).double()},
    )  # fmt: skip
    found = data("diff", tmp_path / "one", tmp_path / "two")
    assert found["equal"] is False
    sections = {entry["title"]: {apart["place"]: apart for apart in entry["differences"]} for entry in found["sections"]}
    assert sections["receipt"]["seed"] == {"place": "seed", "one": "7", "other": "8"}
    weights = sections["model 0 (Net)"]
    assert sorted(weights) == ["a", "b", "d", "s", "w"]
    assert (weights["a"]["other"], weights["b"]["one"]) == (None, None)
    assert (weights["s"]["one"], weights["s"]["other"]) == ("F32 [2]", "F32 [3]")
    assert (weights["d"]["one"], weights["d"]["other"]) == ("F32 [2]", "F64 [2]")
    assert weights["w"] == {
        "place": "w", "one": "F32 [4, 3]", "other": "F32 [4, 3]", "changed": 1 / 12, "largest_difference": 0.5, "nan": False,
    }  # fmt: skip
    assert sections["optimizer 0"] == {"param_groups[0].lr": {"place": "param_groups[0].lr", "one": "0.01", "other": "0.02"}}
    assert list(sections["rank 1"]) == ["file"]
    assert list(sections["other files"]) == ["notes/note.txt"]
    assert sections["training"] == {}


def test_states_compared_by_places_users_know(tmp_path: Path, data: Any) -> None:
    """States are compared by the places that users know."""
    specimens.save(tmp_path / "one", 3)
    specimens.save(tmp_path / "two", 4, seed=3)
    found = data("diff", tmp_path / "one", tmp_path / "two")
    places = {entry["title"]: [apart["place"] for apart in entry["differences"]] for entry in found["sections"] if entry["differences"]}
    assert places == {
        "facts": ["step"],
        "optimizer 0": ["state[0].step", "state[1].step"],
        "training": ["schedulers[0].last_epoch", "loaders[0].samples", "optimizers[0].updates"],
    }


def test_diff_cuts_long_lists(tmp_path: Path, run: Run) -> None:
    """Long lists of differences are cut unless all are wanted."""
    specimens.save(tmp_path / "one", 3, tensors={f"t{number}": torch.zeros(1) for number in range(50)})
    specimens.save(tmp_path / "two", 3, tensors={f"t{number}": torch.ones(1) for number in range(50)})
    short, long = (run("diff", *words, tmp_path / "one", tmp_path / "two")[1] for words in ([], ["--all"]))
    assert "... and 30 more differences (--all shows them)" in short
    assert len(short.splitlines()) == 23
    assert len(long.splitlines()) == 52


def test_checkpoint_cannot_read_exit_code_2(tmp_path: Path, run: Run) -> None:
    """A checkpoint that cannot be read is exit code 2."""
    specimens.save(tmp_path / "one", 3)
    specimens.save(tmp_path / "two", 4)
    (tmp_path / "two" / "model.safetensors").write_bytes(b"junk")
    code, out, err = run("diff", tmp_path / "one", tmp_path / "two")
    assert (code, out) == (2, "")
    assert str(tmp_path / "two" / "model.safetensors") in err


def test_diff_memory(tmp_path: Path, run: Run) -> None:
    """Comparing takes little memory whatever the size of a tensor."""
    large = torch.zeros(24 << 20, dtype=torch.uint8)
    specimens.save(tmp_path / "one", 3, tensors={"large": large})
    large[-1] = 3
    specimens.save(tmp_path / "two", 3, tensors={"large": large})
    tracemalloc.start()
    try:
        code, out, _ = run("diff", tmp_path / "one", tmp_path / "two")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert code == 1
    assert "largest difference 3" in out
    assert peak < 24 << 20


ELEMENTS: dict[str, tuple[torch.dtype, list[float], list[float], float | None]] = {
    "F64": (torch.float64, [1.0, 2.0], [1.0, 2.25], 0.25),
    "F32": (torch.float32, [1.0, float("inf")], [3.5, float("inf")], 2.5),
    "F16": (torch.float16, [1.0, -2.0], [1.0, 2.0], 4.0),
    "BF16": (torch.bfloat16, [1.0, -2.0], [1.5, -2.0], 0.5),
    "C64": (torch.complex64, [3 + 4j, 0], [0, 0], 5.0),  # type: ignore[list-item]
    "I64": (torch.int64, [2**62, 1], [-(2**62), 1], 2.0**63),
    "I8": (torch.int8, [127, 0], [-128, 0], 255.0),
    "U8": (torch.uint8, [0, 7], [255, 7], 255.0),
    "BOOL": (torch.bool, [True, False], [False, False], 1.0),
    "F8_E4M3": (torch.float8_e4m3fn, [1.0, 2.0], [1.0, 3.0], None),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_type_of_elements_compared(name: str) -> None:
    """Every type of elements is compared."""
    dtype, entry, other, largest = ELEMENTS[name]
    pieces = [[bytes(torch.tensor(values, dtype=dtype).view(torch.uint8).numpy())] for values in (entry, other)]
    assert compare_tensors(name, *pieces) == TensorDifference(2, 1, largest)


def test_nan_change_no_number_describes() -> None:
    """NaN is a change that no number describes."""
    entry, other = (numpy.float32(values).tobytes() for values in ([1, 2, numpy.nan], [numpy.nan, 2.5, numpy.nan]))
    assert compare_tensors("F32", [entry], [other]) == TensorDifference(3, 2, 0.5, special=True)


# -- what is given wrongly ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ls", "verify", "show", "diff"])
def test_wrong_places(name: str, tmp_path: Path, run: Run) -> None:
    """Wrong places are refused with what to give instead."""
    specimens.save(tmp_path / "first")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "optimizer.bin").write_bytes(b"")
    second = [tmp_path / "first"] if name == "diff" else []
    for place, words in [
        (tmp_path / "frist", f"There is no folder {tmp_path / 'frist'}.\nIn {tmp_path} there are first, foreign."),
        (tmp_path / "first" / MANIFEST, f"is a file, and a checkpoint is a folder.\nGive the folder that it is in: {tmp_path / 'first'}"),
        (tmp_path / "no" / "such", "There is no folder"),
    ]:
        code, out, err = run(name, place, *second)
        assert (code, out) == (2, "")
        assert words in err
    code, out, err = run(name, foreign, *second)
    assert code == {"ls": 0, "verify": 1, "show": 1, "diff": 2}[name]
    assert "is a checkpoint of Accelerate" in out + err


@pytest.mark.parametrize("name", ["verify", "show", "diff"])
def test_folder_without_checkpoints_refused(name: str, tmp_path: Path, run: Run) -> None:
    """A folder without checkpoints is refused."""
    specimens.save(tmp_path / "first")
    (tmp_path / "empty").mkdir()
    code, out, err = run(name, tmp_path / "empty", *([tmp_path / "first"] if name == "diff" else []))
    assert (code, out) == (2, "")
    assert "Give a folder that save_state made" in err


@pytest.mark.parametrize("name", ["show", "diff"])
def test_folder_around_checkpoints(name: str, tmp_path: Path, run: Run) -> None:
    """A folder around checkpoints is refused with the name of one."""
    specimens.numbered(tmp_path / "runs", 1, 2)
    code, _, err = run(name, tmp_path / "runs", *([tmp_path / "runs" / "checkpoint_1"] if name == "diff" else []))
    assert code == 2
    assert f"such as {tmp_path / 'runs' / 'checkpoint_2'}" in err


def test_folder_may_not_read_refused(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that may not be read is refused."""
    specimens.save(tmp_path / "first")

    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)  # the superuser, who may run the tests, may read everything
    code, _, err = run("show", tmp_path / "first")
    assert code == 2
    assert "cannot be read: Permission denied" in err


def test_same_folder_twice_said(tmp_path: Path, run: Run) -> None:
    """The same folder twice is said."""
    specimens.save(tmp_path / "first")
    (tmp_path / "link").symlink_to(tmp_path / "first")
    for name in ("ls", "verify"):
        code, out, err = run(name, tmp_path / "first", tmp_path / "link")
        assert code == 0
        assert "link was given twice, and is read once" in err
        assert out.count("step") == 1
    code, _, err = run("diff", tmp_path / "first", f"{tmp_path}/./first/")
    assert code == 2
    assert "are the same folder" in err


def test_texts_from_files_move_no_cursor(tmp_path: Path, run: Run) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J"
    specimens.save(tmp_path / "one", 3, tensors={f"w{evil}": torch.ones(2)}, receipt={f"r{evil}": evil})
    specimens.save(tmp_path / "two", 4, tensors={f"v{evil}": torch.ones(2)})
    rewrite(tmp_path / "one", written_by=evil, strategy=evil, created=evil)
    (tmp_path / f"three{evil}").mkdir()
    (tmp_path / "four").mkdir()
    (tmp_path / "four" / MANIFEST).write_bytes(json.dumps({"format": "slipstream-checkpoint", "version": evil}).encode())
    said = ""
    for words in (["ls", tmp_path], ["show", "--tensors", tmp_path / "one"], ["diff", "--all", tmp_path / "one", tmp_path / "two"],
                  ["verify", tmp_path], ["show", tmp_path / "four"], ["show", tmp_path / f"three{evil}"]):  # fmt: skip
        _, out, err = run(*words)
        said += out + err
    assert "owned" in said
    assert not set(said) & {"\x1b", "\x07"}


def test_printable_keeps_what_can_printed() -> None:
    """Printable keeps what can be printed."""
    assert escape_control("zwölf 界 \u202e\x00") == "zwölf 界 \\u202e\\x00"


# -- around it ----------------------------------------------------------------------------------------------------------


def test_url_read_through_copy(tmp_path: Path, run: Run, data: Any) -> None:
    """A URL is read through a copy."""
    import fsspec

    specimens.save(tmp_path / "first", 3)
    specimens.save(tmp_path / "second", 4)
    store = fsspec.filesystem("memory")
    try:
        for name in ("first", "second"):
            store.put(f"{tmp_path}/{name}", f"/runs/{name}", recursive=True)
        store.put(f"{tmp_path}/second", "/many/checkpoint_4", recursive=True)
        assert data("ls", "memory://many")[0]["checkpoints"][0]["whole"] is None
        assert data("ls", "--verify", "memory://many")[0]["checkpoints"][0]["whole"] is True
        assert run("verify", "memory://runs/first")[0] == 0
        assert "model 0 (Net)" in run("show", "memory://runs/first")[1]
        assert run("diff", "memory://runs/first", tmp_path / "first")[0] == 0
        assert run("diff", "memory://runs/first", "memory://runs/second")[0] == 1
        store.pipe("/runs/first/model.safetensors", b"junk")
        assert run("verify", "memory://runs/first")[0] == 1
        assert run("show", "memory://nothing/here")[0] == 2
        assert run("show", "nosuchscheme://bucket/run")[0] == 2
    finally:
        store.rm("/", recursive=True)


def test_file_url_folder(tmp_path: Path, run: Run) -> None:
    """A file URL is a folder."""
    specimens.save(tmp_path / "first", 3)
    assert run("verify", f"file://{tmp_path}/first")[0] == 0


def test_help_examples(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Help has examples."""
    for name in ("ls", "verify", "show", "diff"):
        code, out, _ = run(name, "--help")
        assert code == 0
        assert f"slipstream checkpoint {name} " in out
    main(["--help"])
    assert "checkpoint" in capsys.readouterr().out


def test_none_of_commands_imports_torch(tmp_path: Path) -> None:
    """None of the commands imports torch."""
    specimens.numbered(tmp_path, 1, 2)
    shutil.copytree(tmp_path / "checkpoint_1", tmp_path / "copy")
    code = (
        "import sys\n"
        "from slipstream.cli.main import main\n"
        "folder = sys.argv[1]\n"
        "assert main(['checkpoint', 'ls', '--verify', folder]) == 0\n"
        "assert main(['checkpoint', 'verify', folder]) == 0\n"
        "assert main(['checkpoint', 'show', '--tensors', folder + '/checkpoint_1']) == 0\n"
        "assert 'numpy' not in sys.modules\n"
        "assert main(['checkpoint', 'diff', folder + '/checkpoint_1', folder + '/checkpoint_2']) == 1\n"
        "assert main(['checkpoint', 'diff', folder + '/checkpoint_1', folder + '/copy']) == 0\n"
        "import fsspec\n"
        "fsspec.filesystem('memory').put(folder + '/copy', '/copy', recursive=True)\n"
        "assert main(['checkpoint', 'verify', 'memory://copy']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_listed_checksums(tmp_path: Path) -> None:
    """What the other tests stand on: the specimens are what their manifests say."""
    manifest = specimens.save(tmp_path / "first", note="hello")
    assert all(digest((tmp_path / "first" / name).read_bytes()) == entry.checksum for name, entry in manifest.files.items())
