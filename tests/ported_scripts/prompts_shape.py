"""Inference over batches of prompts, split with padding; the script removes the padding by hand."""

from __future__ import annotations

from typing import Any

import torch
from tiny import Encoding

from slipstream import PartialState
from slipstream.utils import gather_object


def main() -> dict[str, Any]:
    distributed_state = PartialState()
    prompts = ["I would like to", "hello", "what is going on", "roses are red and", "welcome"]
    formatted_prompts = [prompts[start : start + 2] for start in range(0, len(prompts), 2)]
    tokenized_prompts = [
        Encoding(lengths=torch.tensor([len(prompt) for prompt in batch]), numbers=torch.tensor([prompts.index(text) for text in batch]))
        for batch in formatted_prompts
    ]
    completions_per_process = []
    with distributed_state.split_between_processes(tokenized_prompts, apply_padding=True) as batched_prompts:
        for batch in batched_prompts:
            batch = batch.to(distributed_state.device)
            generated = [f"{prompts[number]} {length}" for number, length in zip(batch["numbers"], batch["lengths"], strict=True)]
            completions_per_process.extend(generated)
    completions_gather = gather_object(completions_per_process)
    completions = completions_gather[: len(prompts)]
    if distributed_state.is_main_process:
        print(completions)
    return {"completions": completions}


if __name__ == "__main__":
    RESULT = main()
