"""Items handed out as processes become free: every result once, in the order of the input, the same on every process."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from slipstream import Accelerator, PartialState
from slipstream.distributed.current import current
from slipstream.errors import CheckpointError, ConfigError, MismatchError, PeerLostError, StateError

SIZES = [1, 2, 3, 4]


class Rows(Dataset[dict[str, Any]]):
    """A dataset that counts what it is asked for."""

    def __init__(self, total: int, word: str = "row") -> None:
        self.total, self.word, self.read = total, word, []

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, position: int) -> dict[str, Any]:
        self.read.append(position)
        return {"id": position, "text": f"{self.word} {position}"}


def square(number: int) -> int:
    return number * number


def squares(numbers: list[int]) -> list[int]:
    return [number * number for number in numbers]


@pytest.mark.parametrize("size", SIZES)
def test_results_equal_single_process_loop(ranks: Any, size: int) -> None:
    """Results are those of a loop on one process."""

    def run() -> Any:
        state = PartialState()
        for count in (0, 1, 3, 57):
            expected = [square(number) for number in range(count)]
            assert state.map_across_processes(square, range(count)) == expected
            assert state.map_across_processes(square, list(range(count)), key=lambda number: number % 5) == expected
            assert state.map_across_processes(squares, (number for number in range(count)), batch_size=4) == expected
            assert state.map_across_processes(squares, np.arange(count), batch_size=7, key=float) == expected
            assert sorted(state.map_across_processes(square, range(count), order=False)) == expected
        rows = Rows(20)
        texts = state.map_across_processes(lambda row: row["text"].upper(), rows)
        assert texts == [f"ROW {position}" for position in range(20)]
        tensors = state.map_across_processes(lambda row: row["x"] * 2, {"x": torch.arange(6.0).reshape(3, 2)})
        assert torch.equal(torch.stack(tensors), torch.arange(6.0).reshape(3, 2) * 2)
        large = state.map_across_processes(lambda number: torch.full((300_000,), float(number)), range(5))
        assert [tensor.mean().item() for tensor in large] == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert Accelerator().map_across_processes(square, [3]) == [9]
        return sorted(rows.read)

    read = ranks(size).run(run)
    assert sorted(position for entry in read for position in entry) == list(range(20)), "only claimed items are read"


@pytest.mark.parametrize("size", SIZES)
def test_gather_orders_loop_results(ranks: Any, size: int) -> None:
    """A loop gets items and gather puts its lists in order."""

    def run() -> Any:
        state = PartialState()
        words = [chr(97 + number % 26) * (number % 7 + 1) for number in range(40)]
        with state.split_between_processes(words, balance="dynamic", key=len) as work:
            mine, where = [], []
            for word in work:
                mine.append(word.upper())
                where += work.indices
                work.done(len(word))
        assert [words[position].upper() for position in where] == mine
        assert state.gather(mine) == [word.upper() for word in words]
        assert state.gather_object(mine) == [word.upper() for word in words]
        assert state.gather(torch.tensor(where, dtype=torch.int64)).tolist() == list(range(40))
        assert work.results() == [len(word) for word in words]
        with Accelerator().split_between_processes(words, balance="dynamic", batch_size=3) as work:
            kept = [word for batch in work for word in batch]
        with pytest.raises(StateError, match=r"no result was told for item 0 \(40 of 40\)"):
            work.results()
        with state.split_between_processes(words) as part:
            assert isinstance(part, list), "the static split is as it was"
        assert state.gather(part) == words
        return kept

    assert sorted(word for rank in ranks(size).run(run) for word in rank) == sorted(chr(97 + n % 26) * (n % 7 + 1) for n in range(40))


def test_one_process_opens_no_group() -> None:
    """One process opens no group and needs no store."""
    state = PartialState()
    assert state.map_across_processes(square, [1, 2, 3]) == [1, 4, 9]
    assert current().store is None
    assert not torch.distributed.is_initialized()


def test_slow_items_do_not_block_others(ranks: Any) -> None:
    """Slow items do not hold up the others."""

    def run() -> Any:
        state = PartialState()

        def work(seconds: float) -> int:
            time.sleep(seconds)
            return state.process_index

        return state.map_across_processes(work, [0.6] + [0.01] * 30)

    by = ranks(3).run(run)[0]
    assert by.count(by[0]) <= 3, "who had the long item has hardly any other"


def test_failure_names_item_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    """A failure on one rank is told on all and names the item."""

    def run(path: str) -> Any:
        state = PartialState()

        def work(number: int) -> int:
            if number == 13:
                raise ValueError("thirteen")
            return number

        try:
            state.map_across_processes(work, range(40), checkpoint=path)
        except Exception as error:
            return type(error).__name__, str(error), getattr(error, "__notes__", []), state.map_across_processes(square, range(5))

    told = ranks(3).run(run, str(tmp_path / "results.jsonl"))
    failed = [entry for entry in told if entry[0] == "ValueError"]
    assert len(failed) == 1
    if sys.version_info >= (3, 11):
        assert "at item 13" in failed[0][2][0]
    for kind, text, _, after in told:
        assert after == [0, 1, 4, 9, 16], "the processes go on together"
        if kind != "ValueError":
            assert kind == "PeerLostError"
            assert "failed at item 13: ValueError: thirteen" in text
    assert [path.name for path in tmp_path.iterdir() if ".part-" in path.name], "what was finished is kept"

    def again(path: str) -> Any:
        done: list[int] = []
        return PartialState().map_across_processes(lambda number: done.append(number) or number, range(40), checkpoint=path), done

    results = ranks(2).run(again, str(tmp_path / "results.jsonl"))
    assert [result for result, _ in results] == [list(range(40))] * 2
    handed = [number for _, done in results for number in done]
    assert 13 in handed
    assert len(handed) == len(set(handed)) < 40
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines[1:]] == list(range(40))
    assert os.listdir(tmp_path) == ["results.jsonl"]


def test_complete_checkpoint_skips_work(ranks: Any, tmp_path: Path) -> None:
    """A complete checkpoint is read and nothing is done again."""

    def run(path: str) -> Any:
        return PartialState().map_across_processes(lambda text: {"upper": text.upper()}, ["a", "b", "c"], checkpoint=Path(path))

    def fail(path: str) -> Any:
        return PartialState().map_across_processes(lambda text: 1 / 0, ["a", "b", "c"], checkpoint=path)

    expected = [{"upper": "A"}, {"upper": "B"}, {"upper": "C"}]
    assert ranks(2).run(run, str(tmp_path / "r.jsonl")) == [expected] * 2
    assert ranks(3).run(fail, str(tmp_path / "r.jsonl")) == [expected] * 3
    assert fail(str(tmp_path / "r.jsonl")) == expected


def test_disagreement_raises_on_all(ranks: Any, tmp_path: Path) -> None:
    """What the processes disagree on is told on all."""

    def run(folder: str) -> Any:
        state = PartialState()
        me = state.process_index

        def told(act: Any) -> str:
            try:
                act()
            except (MismatchError, PeerLostError, ConfigError, CheckpointError, TypeError, ZeroDivisionError) as error:
                return f"{type(error).__name__}: {error}"
            return "nothing"

        def broken() -> Any:
            yield 1
            yield 1 // me

        return (
            told(lambda: state.map_across_processes(square, [1, 2, me])),
            told(lambda: state.map_across_processes(square, range(3 + me))),
            told(lambda: state.map_across_processes(squares, [1, 2], batch_size=2 + me)),
            told(lambda: state.map_across_processes(square, broken())),
            told(lambda: state.map_across_processes(square, [1, 2], key=lambda number: "x" if number == 1 else 1)),
            told(lambda: state.map_across_processes(square, [1, 2], checkpoint=f"{folder}/{'b' * me}.jsonl")),
            told(lambda: state.map_across_processes(square, [1, 2], checkpoint=f"{folder}/file/a.jsonl")),
            state.map_across_processes(square, [1, 2]),
        )

    (tmp_path / "file").write_text("")
    zero, entry = ranks(2).run(run, str(tmp_path))
    assert zero[0].startswith("MismatchError: map_across_processes was given different inputs")
    assert "item 2 is 0 on rank 0 and 1 on rank 1" in entry[0]
    assert "different inputs: 3 items on rank 0, 4 on rank 1" in zero[1]
    assert "different batch_size: 2 on rank 0, 3 on rank 1" in entry[2]
    assert zero[3].startswith("ZeroDivisionError")
    assert entry[3].startswith("PeerLostError"), "a consequence, which the launcher's summary does not take for the cause"
    assert "failed on rank 0: ZeroDivisionError" in entry[3]
    assert "key gave 'x' for item 0" in zero[4]
    assert "item 0" in entry[4]
    assert "different checkpoint" in zero[5]
    assert zero[6].startswith("CheckpointError")
    assert entry[6].startswith("CheckpointError")
    assert zero[7] == entry[7] == [1, 4]


def test_a_dataset_that_has_changed_is_refused(tmp_path: Path) -> None:
    state = PartialState()
    path = tmp_path / "r.jsonl"
    state.map_across_processes(lambda row: row.pop("id"), Rows(12), checkpoint=path)  # what a function does to an item does not count
    rows = Rows(12)
    assert state.map_across_processes(lambda row: row["id"], rows, checkpoint=path) == list(range(12))
    assert len(rows.read) <= 8
    with pytest.raises(CheckpointError, match="item 0 is not what it was"):
        state.map_across_processes(lambda row: row["id"], Rows(12, "other"), checkpoint=path)


def test_mistakes_are_named() -> None:
    state = PartialState()
    with pytest.raises(TypeError, match="map_across_processes was given"):
        state.map_across_processes(len, "hello")
    with pytest.raises(TypeError) as caught:
        state.map_across_processes(square, [[1], 2], key=len)
    if sys.version_info >= (3, 11):
        assert "raised by key, which says what an item costs, for item 1 on rank 0" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match="a batch of 2 items needs 2 results, but the batch of items 0, 1 gave 1"):
        state.map_across_processes(lambda batch: batch[:1], ["a", "b"], batch_size=2)
    with pytest.raises(TypeError, match="needs a list of 2 results, but .* gave a str"):
        state.map_across_processes("".join, ["a", "b"], batch_size=2)
    with pytest.raises(TypeError, match="the result of item 1, a function, cannot be sent"):
        state.map_across_processes(lambda number: (lambda: 1) if number else 0, [0, 1])
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(TypeError, match="the result of item 0, a list, cannot be sent .*: give plain data"):
        state.map_across_processes(lambda item: item, [deep])
    with pytest.raises(ConfigError, match="batch_size=0"):
        state.map_across_processes(squares, [1], batch_size=0)
    with pytest.raises(ConfigError, match='key is for items .* write balance="dynamic"'), state.split_between_processes([1], key=len):
        pass
    with pytest.raises(ConfigError, match="apply_padding"), state.split_between_processes([1], True, balance="dynamic"):
        pass
    with pytest.raises(ConfigError, match="balance='fast'"), state.split_between_processes([1], balance="fast"):  # type: ignore[arg-type]
        pass


def test_mistakes_in_a_loop_are_named(tmp_path: Path) -> None:
    state = PartialState()
    with state.split_between_processes([1, 2], balance="dynamic") as work:
        with pytest.raises(StateError, match="inside of the loop"):
            work.done(1)
        for number in work:
            work.done(number)
            with pytest.raises(StateError, match="twice for item"):
                work.done(number)
        with pytest.raises(StateError, match="begun already"):
            list(work)
    with (
        pytest.raises(StateError, match=r"none was told for item 0: call work\.done"),
        state.split_between_processes([1, 2], balance="dynamic", checkpoint=tmp_path / "r.jsonl") as work,
    ):
        list(work)
    with state.split_between_processes([1, 2], balance="dynamic") as work:
        next(iter(work))
    with pytest.raises(StateError, match="without break or return"):
        work.results()


def test_collective_inside_work_refused(ranks: Any) -> None:
    """A collective inside of the work is refused at once."""

    def run() -> Any:
        state = PartialState()
        told = []
        for inside in (lambda: state.gather(torch.ones(1)), state.wait_for_everyone, lambda: state.map_across_processes(square, [1])):
            try:
                state.map_across_processes(lambda number, inside=inside: inside(), range(5))
            except (StateError, PeerLostError) as error:
                told.append(str(error))
        with state.split_between_processes(range(5), balance="dynamic") as work:
            for _ in work:
                with pytest.raises(StateError, match="was called inside the loop over split_between_processes"):
                    state.wait_for_everyone()
                if state.process_index == 0:
                    break
        state.wait_for_everyone()
        return told

    for told in (*ranks(2).run(run), run()):
        assert "gather at " in told[0]
        assert "wait_for_everyone at " in told[1]
        assert all("was called inside map_across_processes" in text for text in told), told


def test_early_leaver_hands_over_items(ranks: Any) -> None:
    """Who leaves the loop early leaves its items to the others."""

    def run() -> Any:
        state = PartialState()
        with state.split_between_processes(range(12), balance="dynamic") as work:
            for number in work:
                if state.process_index == 1:
                    break
                time.sleep(0.01)
                work.done(number)
        return work.complete and work.results()

    assert ranks(2).run(run) == [list(range(12)), False]


def test_unfinished_items_reported_once(ranks: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Items that nobody worked on are told once."""

    def run() -> Any:
        state = PartialState()
        with state.split_between_processes(range(12), balance="dynamic") as work:
            for number in work:
                work.done(number)
                break
        state.wait_for_everyone()
        with state.split_between_processes(range(3), balance="dynamic"):
            pass

    told = "".join(outcome.output for outcome in ranks(2).outcomes(run))
    run()
    for text, left in ((told, 10), (capsys.readouterr().err, 11)):
        assert text.count(f"nobody has worked on {left} of 12 items") == 1
        assert text.count("nobody has worked on 3 of 3 items") == 1


def test_block_exception_reaches_others(ranks: Any) -> None:
    """An exception in the block reaches the others."""

    def run() -> Any:
        state = PartialState()
        with state.split_between_processes(range(50), balance="dynamic") as work:
            for number in work:
                time.sleep(0.002)
                if state.process_index == 1:
                    raise KeyError(number)

    outcome, other = ranks(2).outcomes(run)
    assert isinstance(outcome.error, PeerLostError)
    assert "rank 1 failed at item" in str(outcome.error)
    assert isinstance(other.error, KeyError)


def test_progress_counts_all_processes(ranks: Any) -> None:
    """The bar counts the items of all processes."""

    def run() -> Any:
        PartialState().map_across_processes(square, range(30), progress=True)

    main, other = ranks(2).outcomes(run)
    assert "30/30" in main.output
    assert other.output == ""
    assert ranks(2).outcomes(lambda: PartialState().map_across_processes(square, [1]))[0].output == "", "and is quiet without a terminal"
