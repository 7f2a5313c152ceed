"""Evaluation on any number of processes: equal batches by padding, metrics over every sample once, early stopping, one report.

    slipstream launch --cpu --num_processes 2 examples/evaluate.py
"""

import json
import tempfile
from pathlib import Path

import torch

from slipstream import PartialState
from slipstream.logging import get_logger

logger = get_logger(__name__, log_level="INFO")


def prepare_data(path: Path) -> list[dict[str, object]]:
    """Prepare the data once on the main process, since it is slow in practice; the others read the result."""
    if not path.exists():
        path.write_text(json.dumps([{"text": "x" * length, "label": length % 2} for length in range(1, 12)]))
    rows: list[dict[str, object]] = json.loads(path.read_text())
    return rows


def main() -> None:
    state = PartialState()
    with tempfile.TemporaryDirectory(prefix="slipstream-example-") as own:
        folder = Path(state.broadcast(own))  # that of the main process, on every process
        with state.main_process_first():
            rows = prepare_data(folder / "rows.json")
        state.wait_for_everyone()  # all have read: the folder is deleted next

    # Eleven rows on two processes: six each, one of them repeated. The gather drops the repeated one.
    with state.split_between_processes(rows, apply_padding=True) as share:
        predicted = torch.tensor([len(str(row["text"])) % 2 for row in share])
        labels = torch.tensor([row["label"] for row in share])
        result = state.gather_for_metrics({"predicted": predicted, "labels": labels, "texts": [row["text"] for row in share]})
    assert len(result["texts"]) == len(rows)
    assert result["texts"] == [row["text"] for row in rows]
    accuracy = (result["predicted"] == result["labels"]).double().mean().item()

    # Any process may decide to stop; all of them learn of it.
    if state.is_last_process and accuracy == 1.0:
        state.set_trigger()
    stop = state.check_trigger()

    logger.info("process %d had %d rows", state.process_index, len(share), in_order=True)
    state.print(f"accuracy {accuracy:.2f} over {len(rows)} rows on {state.num_processes} process(es), stop: {stop}")
    assert stop


if __name__ == "__main__":
    main()
