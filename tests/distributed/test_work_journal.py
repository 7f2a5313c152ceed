"""A journal survives a crash at any byte, takes in what other processes wrote, and refuses what it was not made for."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from slipstream.distributed.work_queue.journal import (
    JournalHeader,
    ResultJournal,
    check_result,
    finish_journal,
    prepare_journal,
    read_journal,
)
from slipstream.errors import CheckpointError

HEADER = JournalHeader(5, "abc")


def write(path: Path, rank: int, pages: dict[int, Any], run: str = "run") -> None:
    part = ResultJournal(path, run, rank)
    for index, result in pages.items():
        part.add(index, f"item {index}", result)
    part.close()


def begin(path: Path, header: JournalHeader = HEADER) -> dict[int, Any]:
    os.close(prepare_journal(path, header))
    return {page.index: page.result for page in read_journal(path, header)}


def test_an_interrupted_run_is_taken_in(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "results.jsonl"
    assert begin(path) == {}
    write(path, 0, {3: "d", 0: None})
    write(path, 1, {1: {"text": "zwölf \u2028", "scores": [0.1, -1e300, True]}})
    assert begin(path) == {3: "d", 0: None, 1: {"text": "zwölf \u2028", "scores": [0.1, -1e300, True]}}
    assert os.listdir(path.parent) == ["results.jsonl"]
    assert begin(path) == {3: "d", 0: None, 1: {"text": "zwölf \u2028", "scores": [0.1, -1e300, True]}}


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_truncated_line_is_dropped(tmp_path: Path, data: st.DataObject) -> None:
    """A crash in the middle of a line loses that line alone."""
    path = tmp_path / "results.jsonl"
    for file in tmp_path.iterdir():
        file.unlink()
    begin(path)
    write(path, 0, {0: "a", 1: "b\n"})
    torn = tmp_path / "results.jsonl.part-run-0"
    if data.draw(st.booleans(), label="in the journal itself"):
        begin(path)
        torn = path
    whole = torn.read_bytes()
    cut = data.draw(st.integers(0, len(whole)), label="cut")
    torn.write_bytes(whole[:cut])
    found = begin(path)
    complete = whole[:cut].count(b"\n") - (torn == path)
    assert found == dict(list({0: "a", 1: "b\n"}.items())[: max(0, complete)])
    write(path, 1, {4: "e"}, run="next")
    assert begin(path) == {**found, 4: "e"}


def test_final_journal_in_input_order(tmp_path: Path) -> None:
    """The last form has every item once in order with the result that counts."""
    path = tmp_path / "results.jsonl"
    begin(path)
    write(path, 7, {4: "of an earlier run"}, run="earlier")
    lock = prepare_journal(path, HEADER)
    write(path, 0, {1: "b", 0: "a"})
    write(path, 1, {1: "b, by the one who died first", 2: "c"})
    write(path, 2, {3: "d", 2: "c, too late"})
    assert finish_journal(path, HEADER, [0, 1, 1, 2, None], "run", dict.fromkeys(range(5))) == 0
    os.close(lock)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"slipstream": "results", "version": 1, "count": 5, "inputs": "abc"}
    assert [line["index"] for line in lines[1:]] == [0, 1, 2, 3, 4]
    assert [line["result"] for line in lines[1:]] == ["a", "b, by the one who died first", "c", "d", "of an earlier run"]
    assert lines[1]["item"] == "item 0"
    assert os.listdir(tmp_path) == ["results.jsonl"]


@pytest.mark.parametrize("header", [JournalHeader(6, "abc"), JournalHeader(5, "other")])
def test_other_inputs_are_refused(tmp_path: Path, header: JournalHeader) -> None:
    path = tmp_path / "results.jsonl"
    begin(path)
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=r"other inputs: 5 items .* Give checkpoint= another name"):
        begin(path, header)
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["my notes", "my notes\n", '{"a": 1}\n', '{"slipstream":"results","version":2}\n'])
def test_foreign_file_left_alone(tmp_path: Path, text: str) -> None:
    """A file that is no journal stays as it is."""
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        begin(path)
    assert path.read_text() == text


@pytest.mark.parametrize("line", ["nonsense", '{"index":9,"item":null,"result":1}', '{"index":1}', '{"index":true,"item":null,"result":1}'])
def test_damaged_line_named(tmp_path: Path, line: str) -> None:
    """A damaged line in the middle is named."""
    path = tmp_path / "results.jsonl"
    begin(path)
    path.write_text(path.read_text() + line + '\n{"index":0,"item":null,"result":1}\n')
    with pytest.raises(CheckpointError, match=r"results\.jsonl, line 2"):
        begin(path)


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    lock = prepare_journal(path, HEADER)
    with pytest.raises(CheckpointError, match="in use by another run"):
        prepare_journal(path, HEADER)
    os.close(lock)
    begin(path)


def test_lock_waiter_gets_final_file(tmp_path: Path) -> None:
    """Who waits for the lock gets that of the last form."""
    path = tmp_path / "results.jsonl"
    first = prepare_journal(path, HEADER)
    write(path, 0, {index: index for index in range(5)})
    waiting = threading.Thread(target=lambda: second.append(prepare_journal(path, HEADER)))
    second: list[int] = []
    waiting.start()
    time.sleep(0.2)
    finish_journal(path, HEADER, [0] * 5, "run", {})
    os.close(first)
    waiting.join()
    assert os.path.samestat(os.fstat(second[0]), path.stat())
    os.close(second[0])


def test_a_device_or_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/full"), tmp_path / "pipe", tmp_path):
        with pytest.raises(CheckpointError, match="is no regular file"):
            prepare_journal(path, HEADER)


def test_removed_lines_rewritten(tmp_path: Path) -> None:
    """What was removed during the work is written from the results."""
    path = tmp_path / "folder" / "results.jsonl"
    lock = prepare_journal(path, HEADER)
    part = ResultJournal(path, "run", 0)
    part.add(0, "item 0", "a")
    assert not part.lost
    shutil.rmtree(path.parent)
    assert part.lost
    write(path, 1, {1: "b"})
    assert finish_journal(path, HEADER, [0, 1, 0, 0, 0], "run", dict(enumerate("abcde"))) == 4
    part.close()
    os.close(lock)
    assert begin(path) == dict(enumerate("abcde"))
    assert json.loads(path.read_text().splitlines()[2])["item"] == "item 1"


def test_unwritable_place_named(tmp_path: Path) -> None:
    """A place that cannot be written is named with a remedy."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be kept in .*results\.jsonl"):
        prepare_journal(tmp_path / "file" / "results.jsonl", HEADER)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (torch.ones(2), r"item 3 .* result is a Tensor.* \.tolist\(\)"),
        ({"a": [1, (2,)]}, r"result\['a'\]\[1\] is a tuple"),
        ({1: 2}, r"key 1,.* str\("),
        (float("inf"), "result is inf"),
        (b"bytes", "result is a bytes"),
        (["\ud800"], r"item 3 .* result\[0\] has half of a surrogate pair in it.*encode"),
        (json.loads("[" * 900 + "]" * 900), "item 3 .* nested deeper than 99 levels"),
        ({"n": 10**5000}, "thousands of digits"),
    ],
)
def test_non_json_results_refused(result: Any, words: str) -> None:
    """Results that JSON does not give back are refused."""
    with pytest.raises(TypeError, match=words):
        check_result(result, 3, Path("results.jsonl"))
