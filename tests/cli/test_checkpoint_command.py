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
from slipstream.cli.text_format import escape_control
from slipstream.files.checksum import digest

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


def test_checkpoints_are_listed_by_number_with_what_is_known_of_them(tmp_path: Path, run: Run, data: Any) -> None:
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


def test_one_checkpoint_can_be_listed(tmp_path: Path, data: Any) -> None:
    specimens.save(tmp_path / "first")
    assert [entry["name"] for entry in data("ls", tmp_path / "first")[0]["checkpoints"]] == ["first"]


def test_a_file_that_is_short_is_seen_without_reading_and_one_that_is_damaged_by_reading(tmp_path: Path, data: Any) -> None:
    specimens.numbered(tmp_path, 1, 2)
    short, flipped = tmp_path / "checkpoint_1" / "model.safetensors", tmp_path / "checkpoint_2" / "model.safetensors"
    os.truncate(short, short.stat().st_size - 1)
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\xff")
    quick, full = data("ls", tmp_path)[0]["checkpoints"], data("ls", "--verify", tmp_path)[0]["checkpoints"]
    assert [entry["whole"] for entry in quick] == [False, True]
    assert [entry["whole"] for entry in full] == [False, False]
    assert str(short) in quick[0]["problems"][0]
    assert str(flipped) in full[1]["problems"][0]


def test_ranks_that_are_not_in_it_are_said(tmp_path: Path, run: Run) -> None:
    specimens.save(tmp_path / "first", late=False)
    assert "the random state of 1 process is not in it" in run("ls", tmp_path)[1]


def test_what_dead_saves_left_is_listed_and_a_living_one_is_told_apart(tmp_path: Path, run: Run) -> None:
    specimens.numbered(tmp_path, 1, 2)
    for number in (1, 2):
        (tmp_path / f".checkpoint_{number}.saving-0123456{number}").mkdir()
        (tmp_path / f".checkpoint_{number}.saving-0123456{number}" / "model.safetensors").write_bytes(bytes(2048))
    (tmp_path / ".checkpoint_1.lock").write_text(f"{2**22 + 1} {os.uname().nodename}\n")  # larger than any process id of Linux
    (tmp_path / ".checkpoint_2.lock").write_text(f"{os.getpid()} {os.uname().nodename}\n")
    lines = [line for line in run("ls", tmp_path)[1].splitlines() if "saving-" in line]
    assert "did not come to its end" in lines[0]
    assert "2.0 KB" in lines[0]
    assert f"being saved by process {os.getpid()} on " in lines[1]


def test_files_of_ranks_that_no_checkpoint_waits_for_are_listed(tmp_path: Path, data: Any) -> None:
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


def test_a_checkpoint_that_a_crash_took_from_its_place_is_listed_by_its_name(tmp_path: Path, data: Any) -> None:
    specimens.numbered(tmp_path, 1, 2)
    (tmp_path / "checkpoint_2").rename(tmp_path / ".checkpoint_2.was-01234567")
    found = data("ls", tmp_path)[0]["checkpoints"]
    assert [entry["name"] for entry in found] == ["checkpoint_1", "checkpoint_2"]
    assert ".checkpoint_2.was-01234567" in found[1]["note"]
    assert found[1]["whole"]


def test_folders_that_are_no_checkpoints_are_named_with_the_reason(tmp_path: Path, data: Any) -> None:
    specimens.numbered(tmp_path, 1, 2)
    (tmp_path / "plots").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "random_states_0.pkl").write_bytes(b"")
    (tmp_path / "checkpoint_2" / MANIFEST).write_bytes(b"{}")
    found = {entry["name"]: entry["why"] for entry in data("ls", tmp_path)[0]["others"]}
    assert sorted(found) == ["checkpoint_2", "other", "plots"]
    assert "no manifest of a Slipstream checkpoint" in found["checkpoint_2"]
    assert "Accelerate" in found["other"]
    assert "it holds nothing" in found["plots"]


def test_latest_that_names_nothing_is_said(tmp_path: Path, run: Run) -> None:
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
def test_every_problem_is_a_line_that_names_the_file(name: str, tmp_path: Path, run: Run) -> None:
    specimens.save(tmp_path / "first", shard=100, note="hello")
    file, damage = BROKEN[name]
    damage(tmp_path / "first" / file)
    code, out, err = run("verify", tmp_path / "first")
    assert code == 1
    assert [line.startswith(f"{tmp_path / 'first' / file} ") for line in out.splitlines()] == [True]
    assert err == "1 problem.\n"


def test_the_file_of_a_rank_that_came_later_is_verified_too(tmp_path: Path, run: Run) -> None:
    specimens.save(tmp_path / "first")
    (file,) = (path for path in (tmp_path / "first").iterdir() if path.name.startswith("rank_1."))
    file.write_bytes(file.read_bytes()[:-1] + b"\xee")
    code, out, _ = run("verify", tmp_path / "first")
    assert code == 1
    assert out.startswith(f"{file} is damaged")


def test_states_that_do_not_belong_there_are_found_though_every_checksum_fits(tmp_path: Path, run: Run) -> None:
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


def test_a_numbered_folder_without_a_manifest_is_a_problem_and_another_folder_is_not(tmp_path: Path, run: Run) -> None:
    specimens.numbered(tmp_path, 1)
    (tmp_path / "plots").mkdir()
    assert run("verify", tmp_path)[0] == 0
    (tmp_path / "checkpoint_2").mkdir()
    code, out, _ = run("verify", tmp_path)
    assert code == 1
    assert out.startswith(f"{tmp_path / 'checkpoint_2'} is no checkpoint")


def test_a_folder_in_which_nothing_was_verified_is_not_taken_for_a_whole_one(tmp_path: Path, run: Run) -> None:
    specimens.numbered(tmp_path / "runs", 1)
    (tmp_path / "other" / "plots").mkdir(parents=True)
    code, out, err = run("verify", tmp_path / "runs", tmp_path / "other")
    assert (code, out) == (2, "")
    assert f"There is no checkpoint in {tmp_path / 'other'}" in err


def test_the_folder_of_a_project_stands_for_its_checkpoints(tmp_path: Path, run: Run, data: Any) -> None:
    specimens.numbered(tmp_path / "checkpoints", 1)
    (tmp_path / "logs").mkdir()
    assert [entry["name"] for entry in data("ls", tmp_path)[0]["checkpoints"]] == ["checkpoint_1"]
    assert run("verify", tmp_path) == run("verify", tmp_path / "checkpoints")
    assert f"such as {tmp_path / 'checkpoints' / 'checkpoint_1'}" in run("show", tmp_path)[2]


# -- show ---------------------------------------------------------------------------------------------------------------


def test_show_tells_what_is_in_it(tmp_path: Path, run: Run, data: Any) -> None:
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


def test_show_tells_the_rest_when_a_file_is_missing(tmp_path: Path, run: Run) -> None:
    specimens.save(tmp_path / "first")
    (tmp_path / "first" / "model.safetensors").unlink()
    code, out, _ = run("show", tmp_path / "first")
    assert code == 1
    assert f"{tmp_path / 'first' / 'model.safetensors'} is missing" in out
    assert "optimizer 0 (AdamW): 4 tensors" in out


# -- diff ---------------------------------------------------------------------------------------------------------------


def test_two_saves_of_one_state_are_equal_whatever_their_time_and_shards(tmp_path: Path, run: Run, data: Any) -> None:
    specimens.save(tmp_path / "one", 3)
    specimens.save(tmp_path / "two", 3, shard=100)
    rewrite(tmp_path / "two", created="2020-01-01T00:00:00+00:00")
    code, out, _ = run("diff", tmp_path / "one", tmp_path / "two")
    assert (code, out) == (0, "The checkpoints are equal: 2 tensors, and every state.\n")
    assert data("diff", tmp_path / "one", tmp_path / "two")["equal"] is True


def test_differences_are_found_where_they_are(tmp_path: Path, data: Any) -> None:
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


def test_states_are_compared_by_the_places_that_users_know(tmp_path: Path, data: Any) -> None:
    specimens.save(tmp_path / "one", 3)
    specimens.save(tmp_path / "two", 4, seed=3)
    found = data("diff", tmp_path / "one", tmp_path / "two")
    places = {entry["title"]: [apart["place"] for apart in entry["differences"]] for entry in found["sections"] if entry["differences"]}
    assert places == {
        "facts": ["step"],
        "optimizer 0": ["state[0].step", "state[1].step"],
        "training": ["schedulers[0].last_epoch", "loaders[0].samples", "optimizers[0].updates"],
    }


def test_long_lists_of_differences_are_cut_unless_all_are_wanted(tmp_path: Path, run: Run) -> None:
    specimens.save(tmp_path / "one", 3, tensors={f"t{number}": torch.zeros(1) for number in range(50)})
    specimens.save(tmp_path / "two", 3, tensors={f"t{number}": torch.ones(1) for number in range(50)})
    short, long = (run("diff", *words, tmp_path / "one", tmp_path / "two")[1] for words in ([], ["--all"]))
    assert "... and 30 more differences (--all shows them)" in short
    assert len(short.splitlines()) == 23
    assert len(long.splitlines()) == 52


def test_a_checkpoint_that_cannot_be_read_is_exit_code_2(tmp_path: Path, run: Run) -> None:
    specimens.save(tmp_path / "one", 3)
    specimens.save(tmp_path / "two", 4)
    (tmp_path / "two" / "model.safetensors").write_bytes(b"junk")
    code, out, err = run("diff", tmp_path / "one", tmp_path / "two")
    assert (code, out) == (2, "")
    assert str(tmp_path / "two" / "model.safetensors") in err


def test_comparing_takes_little_memory_whatever_the_size_of_a_tensor(tmp_path: Path, run: Run) -> None:
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
def test_every_type_of_elements_is_compared(name: str) -> None:
    dtype, entry, other, largest = ELEMENTS[name]
    pieces = [[bytes(torch.tensor(values, dtype=dtype).view(torch.uint8).numpy())] for values in (entry, other)]
    assert compare_tensors(name, *pieces) == TensorDifference(2, 1, largest)


def test_nan_is_a_change_that_no_number_describes() -> None:
    entry, other = (numpy.float32(values).tobytes() for values in ([1, 2, numpy.nan], [numpy.nan, 2.5, numpy.nan]))
    assert compare_tensors("F32", [entry], [other]) == TensorDifference(3, 2, 0.5, special=True)


# -- what is given wrongly ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ls", "verify", "show", "diff"])
def test_wrong_places_are_refused_with_what_to_give_instead(name: str, tmp_path: Path, run: Run) -> None:
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
def test_a_folder_without_checkpoints_is_refused(name: str, tmp_path: Path, run: Run) -> None:
    specimens.save(tmp_path / "first")
    (tmp_path / "empty").mkdir()
    code, out, err = run(name, tmp_path / "empty", *([tmp_path / "first"] if name == "diff" else []))
    assert (code, out) == (2, "")
    assert "Give a folder that save_state made" in err


@pytest.mark.parametrize("name", ["show", "diff"])
def test_a_folder_around_checkpoints_is_refused_with_the_name_of_one(name: str, tmp_path: Path, run: Run) -> None:
    specimens.numbered(tmp_path / "runs", 1, 2)
    code, _, err = run(name, tmp_path / "runs", *([tmp_path / "runs" / "checkpoint_1"] if name == "diff" else []))
    assert code == 2
    assert f"such as {tmp_path / 'runs' / 'checkpoint_2'}" in err


def test_a_folder_that_may_not_be_read_is_refused(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    specimens.save(tmp_path / "first")

    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)  # the superuser, who may run the tests, may read everything
    code, _, err = run("show", tmp_path / "first")
    assert code == 2
    assert "cannot be read: Permission denied" in err


def test_the_same_folder_twice_is_said(tmp_path: Path, run: Run) -> None:
    specimens.save(tmp_path / "first")
    (tmp_path / "link").symlink_to(tmp_path / "first")
    for name in ("ls", "verify"):
        code, out, err = run(name, tmp_path / "first", tmp_path / "link")
        assert code == 0
        assert "link was given twice, and is looked at once" in err
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


def test_printable_keeps_what_can_be_printed() -> None:
    assert escape_control("zwölf 界 \u202e\x00") == "zwölf 界 \\u202e\\x00"


# -- around it ----------------------------------------------------------------------------------------------------------


def test_a_url_is_read_through_a_copy(tmp_path: Path, run: Run, data: Any) -> None:
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


def test_a_file_url_is_a_folder(tmp_path: Path, run: Run) -> None:
    specimens.save(tmp_path / "first", 3)
    assert run("verify", f"file://{tmp_path}/first")[0] == 0


def test_help_has_examples(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ls", "verify", "show", "diff"):
        code, out, _ = run(name, "--help")
        assert code == 0
        assert f"slipstream checkpoint {name} " in out
    main(["--help"])
    assert "checkpoint" in capsys.readouterr().out


def test_none_of_the_commands_imports_torch(tmp_path: Path) -> None:
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


def test_checksums_of_listed_files_are_those_of_their_bytes(tmp_path: Path) -> None:
    """What the other tests stand on: the specimens are what their manifests say."""
    manifest = specimens.save(tmp_path / "first", note="hello")
    assert all(digest((tmp_path / "first" / name).read_bytes()) == entry.checksum for name, entry in manifest.files.items())
