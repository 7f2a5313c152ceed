"""Distributed inference: prompts are shared out, results are gathered."""

from accelerate import PartialState
from accelerate.utils import gather_object

state = PartialState()
prompts = ["a dog", "a cat", "a bird"]
with state.split_between_processes(prompts, apply_padding=True) as mine:
    outputs = [prompt.title() for prompt in mine]
outputs = gather_object(outputs)[: len(prompts)]
state.print(f"epoch 0 {outputs}")
# started by: accelerate launch acc_inference.py
