"""Lists of records: `gather` joins them entry by entry, whatever the records hold; lists of nothing but tensors are structure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from record_types import Answer, Pair
from torch.utils.data import DataLoader

from slipstream import Accelerator, PartialState
from slipstream.errors import MismatchError
from slipstream.utils import DataLoaderConfiguration, broadcast, gather

RECORDS: dict[str, Any] = {
    "dict": lambda number: {"prompt": str(number), "embedding": torch.full((2,), number)},
    "tensor without dimensions": lambda number: {"prompt": str(number), "embedding": torch.tensor(number)},
    "tensors of different shapes": lambda number: {"prompt": str(number), "embedding": torch.full((number, 1 + number % 2), number)},
    "array": lambda number: {"prompt": str(number), "embedding": torch.full((2,), number).numpy()},
    "nested": lambda number: {"prompt": str(number), "layers": [{"embedding": torch.full((2,), number)}, None]},
    "number": lambda number: {"prompt": number, "embedding": torch.full((2,), number)},
    "tuple": lambda number: (str(number), torch.full((2,), number)),
    "list": lambda number: [str(number), torch.full((2,), number)],
    "named tuple": lambda number: Pair(str(number), torch.full((2,), number)),
    "dataclass": lambda number: Answer(str(number), torch.full((2,), number)),
    "text alone": lambda number: {"prompt": str(number)},
}


def plain(value: Any) -> Any:
    """Something that can be compared."""
    if isinstance(value, Answer):
        return ["Answer", value.prompt, value.embedding.tolist()]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(plain, value)]
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_concatenated(ranks: Any, world: int, kind: str) -> None:
    """The records of all ranks, one after the other: also of uneven lists, of none on some rank, and inside of other data."""
    make = RECORDS[kind]

    def run() -> Any:
        state = PartialState()
        found = []
        for count in (1, 2, 5):
            with state.split_between_processes(list(range(count))) as mine:  # uneven, and empty on some rank
                records = [make(number) for number in mine]
            inside = state.gather({"records": records, "rows": torch.tensor(mine, dtype=torch.long)})
            assert inside["rows"].tolist() == list(range(count))
            ways = [state.gather(records), inside["records"], gather(records), state.gather_object(records)]
            found.append([plain(way) for way in ways])
        return found

    expected = [[plain([make(number) for number in range(count)])] * 4 for count in (1, 2, 5)]
    for found in ranks(world).run(run):
        assert found == expected


def test_only_there(ranks: Any) -> None:
    """With `dst`, on that rank alone."""

    def run() -> Any:
        state = PartialState()
        gathered = state.gather([RECORDS["dict"](state.process_index)], dst=1)
        return None if gathered is None else plain(gathered)

    assert ranks(2).run(run) == [None, plain([RECORDS["dict"](0), RECORDS["dict"](1)])]


def test_structure(ranks: Any) -> None:
    """Lists with tensors among their entries, lists of nothing but tensors, dicts and tuples are joined leaf by leaf."""

    def run() -> Any:
        state = PartialState()
        row, me = torch.tensor([state.process_index]), state.process_index
        return plain(
            [
                state.gather([row, row + 2]),
                state.gather([{"logits": row}, {"logits": row + 2}]),
                state.gather([(row, row + 2)]),
                state.gather([row, ("a", "b")]),
                state.gather({"prompt": f"{me}", "embedding": row}),
                state.gather((f"{me}", row)),
            ]
        )

    both, more = [0, 1], [2, 3]
    expected = [
        "list",
        ["list", both, more],
        ["list", {"logits": both}, {"logits": more}],
        ["list", ["tuple", both, more]],
        ["list", both, ["tuple", "a", "b", "a", "b"]],
        {"prompt": ["list", "0", "1"], "embedding": both},
        ["tuple", ["list", "0", "1"], both],
    ]
    assert ranks(2).run(run) == [expected] * 2


@pytest.mark.parametrize(
    "lists",
    [
        ([{"row": torch.ones(1)}] * 2, [{"row": torch.ones(1)}]),
        ([{"row": torch.ones(1)}], []),
        ([{"row": torch.ones(1)}], [{"row": torch.ones(1), "text": "a"}]),
        ([torch.ones(2, 3)], [torch.ones(2, 4)]),
    ],
    ids=["lengths", "empty", "records against tensors", "shapes"],
)
def test_what_does_not_fit(ranks: Any, lists: tuple[Any, Any]) -> None:
    """Lists of tensors that are not alike are an error on every rank that names `gather_object`, which takes them."""

    def run() -> Any:
        state = PartialState()
        mine = lists[state.process_index]
        with pytest.raises(MismatchError, match="gather_object joins lists of any length"):
            state.gather(mine)
        return len(state.gather_object(mine))

    assert ranks(2).run(run) == [sum(map(len, lists))] * 2


def test_devices(ranks: Any) -> None:
    """Tensors of records travel through host memory and arrive on the kind of device where they were, also on a rank that had none."""

    def run() -> Any:
        from slipstream.distributed import codec

        original, codec._CPU = codec._CPU, "elsewhere"
        try:
            state = PartialState()
            records = [{"prompt": "a", "embedding": torch.ones(2, requires_grad=True)}] if state.is_main_process else []
            packed = codec.pack_object(records)
            (record,) = state.gather(records)
            return packed[1], record["embedding"].device.type, record["embedding"].requires_grad
        finally:
            codec._CPU = original

    assert ranks(2).run(run) == [(["cpu"], "cpu", False), (None, "cpu", False)]


def test_broadcast(ranks: Any) -> None:
    """The records of one rank on all of them, whatever the others have."""

    def run() -> Any:
        state = PartialState()
        mine = [RECORDS["dict"](number) for number in range(3 * state.process_index)]
        found = [plain(broadcast(mine, from_process=1)), plain(broadcast((1, 2) if state.process_index else (1,), from_process=1))]
        return [*found, plain(broadcast({"texts": ["a"] * state.process_index}, from_process=1))]

    assert ranks(2).run(run) == [[plain([RECORDS["dict"](number) for number in range(3)]), ["tuple", 1, 2], {"texts": ["list", "a"]}]] * 2


@pytest.mark.parametrize(("even", "world"), [(True, 2), (False, 2), (False, 3)])
def test_metrics(ranks: Any, even: bool, world: int) -> None:
    """`gather_for_metrics` leaves out records of repeated samples, inside of the loop and after it."""

    def run() -> Any:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even))
        loader = accelerator.prepare(DataLoader(range(7), batch_size=2))
        inside = [
            int(record["prompt"])
            for batch in loader
            for record in accelerator.gather_for_metrics({"records": [RECORDS["dict"](int(number)) for number in batch]})["records"]
        ]
        kept = [RECORDS["dict"](int(number)) for batch in loader for number in batch]
        after = accelerator.gather_for_metrics(kept)
        with accelerator.split_between_processes(list(range(4)), apply_padding=True) as mine:
            padded = accelerator.gather_for_metrics([RECORDS["dict"](number) for number in mine])
        return inside, [int(record["prompt"]) for record in after], [record["embedding"].tolist() for record in padded]

    assert ranks(world).run(run) == [(list(range(7)), list(range(7)), [[number] * 2 for number in range(4)])] * world
