"""Evaluations of a tiny local model with lm-eval, on tasks made of local files, on any number of processes.

Start it with `python`, `torchrun` or `accelerate launch`, with CASE_FOLDER set. lm-eval shares requests out where it counts several GPUs;
`SharedModel` says to do the same on CPU processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
from accelerate import PartialState
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from models import run_cases
from trl_cases import qwen2
from words import make_tokenizer, sentence

CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["red", "green", "blue"]
doc_to_target: label
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
GENERATE = """
task: tiny_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["<eos>"], max_gen_toks: 3, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


class SharedModel(HFLM):
    """A model whose requests are shared out to the processes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if hasattr(self, "accelerator"):
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes


def write_tasks(folder: Path) -> None:
    """Write two tasks over eleven questions, a number that does not divide."""
    rows = [{"question": sentence(row, 2 + row % 4), "label": row % 3, "answer": "red"} for row in range(11)]
    data = folder / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "choice.yaml").write_text(CHOICE.format(data=data))
    (folder / "generate.yaml").write_text(GENERATE.format(data=data))


def evaluate(model: type[HFLM], folder: Path) -> dict[str, Any]:
    """Return scores and answers by task; lm-eval gathers them on the main process."""
    state = PartialState(cpu=True)
    with state.main_process_first():
        if state.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            write_tasks(folder)
            qwen2().save_pretrained(folder / "model")
    found = lm_eval.simple_evaluate(
        model=model(pretrained=str(folder / "model"), tokenizer=make_tokenizer(), device="cpu", batch_size=2),
        tasks=["tiny_choice", "tiny_generate"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    if found is None:
        return {}
    ordered = {task: sorted(rows, key=lambda row: row["doc_id"]) for task, rows in found["samples"].items()}
    answers = {task: [row["filtered_resps"] for row in rows] for task, rows in ordered.items()}
    scores = {task: {name: value for name, value in row.items() if isinstance(value, float)} for task, row in found["results"].items()}
    return {"scores": scores, "answers": answers, "processes": state.num_processes}


def shared(folder: str) -> dict[str, Any]:
    """The requests are shared out."""
    return evaluate(SharedModel, Path(folder))


def as_released(folder: str) -> dict[str, Any]:
    """lm-eval as it is: on CPU every process answers all requests."""
    return evaluate(HFLM, Path(folder))


if __name__ == "__main__":
    run_cases({"shared": shared, "as_released": as_released})
