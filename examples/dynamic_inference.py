"""Many prompts of very different lengths: distributed dynamically, stored in a file, and resumed after an interruption.

    slipstream launch --cpu --num_processes 2 examples/dynamic_inference.py

A process that finishes early takes the next batch instead of waiting. `key=len` processes long prompts first and puts prompts of similar
length into one batch, so that little is computed for padding. Every finished prompt is a line in the results file: a run that
is killed, on one process or all of them, resumes from there. Kill one during the work (kill -9): the others finish its prompts.
"""

import tempfile
from pathlib import Path

import torch

from slipstream import PartialState
from slipstream.utils import broadcast_object_list

TEXT = "the sea was calm and nobody on deck had expected the fog to come back before the morning"
PROMPTS = [TEXT[: 3 + number * 37 % len(TEXT)] for number in range(40)]
FOLLOWING = 12


class Writer(torch.nn.Module):
    """A stand-in for your model: reads bytes, and writes the most likely next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(128, 32)
        self.read = torch.nn.GRU(32, 32, batch_first=True)
        self.choose = torch.nn.Linear(32, 26)

    def generate(self, prompts: list[str]) -> list[str]:
        """Return the next characters of each prompt; one forward pass for all of them, padded to the longest."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(list(prompt.encode())) for prompt in prompts], batch_first=True)
        packed = torch.nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        _, state = self.read(packed)
        written = [""] * len(prompts)
        for _ in range(FOLLOWING):
            letters = self.choose(state[-1]).argmax(dim=-1) + ord("a")
            written = [text + chr(letter) for text, letter in zip(written, letters.tolist(), strict=True)]
            _, state = self.read(self.embed(letters[:, None]), state)
        return written


def padding(batches: list[list[str]]) -> float:
    """Return the share of the model's input that is padding."""
    read = sum(len(batch) * max(map(len, batch)) for batch in batches)
    return 1 - sum(len(prompt) for batch in batches for prompt in batch) / read


def main() -> None:
    state = PartialState()
    torch.manual_seed(0)  # the same model on every process
    model = Writer().eval()
    place = tempfile.TemporaryDirectory() if state.is_main_process else None
    folder = broadcast_object_list([place.name if place else None])[0]  # in your script: a path that all processes know
    results = Path(folder) / "results.jsonl"

    # 1. An interrupted run. An exception on one process reaches all of them; a kill has the same effect.
    def interrupted(batch: list[str]) -> list[str]:
        if PROMPTS[4] in batch:
            raise KeyboardInterrupt("as if somebody had pressed Ctrl-C")
        return model.generate(batch)

    try:
        with torch.inference_mode():
            state.map_across_processes(interrupted, PROMPTS, batch_size=4, key=len, checkpoint=results)
    except (KeyboardInterrupt, RuntimeError):
        state.wait_for_everyone()
        state.print("interrupted; what was finished is in the file")

    # 2. The same call resumes, on any number of processes. No prompt is processed twice, and none is lost.
    handed_out: list[list[str]] = []

    def work(batch: list[str]) -> list[str]:
        handed_out.append(batch)
        return model.generate(batch)

    with torch.inference_mode():
        texts = state.map_across_processes(work, PROMPTS, batch_size=4, key=len, checkpoint=results)
    rest = sum(len(batch) for batch in state.gather_object(handed_out))
    assert 0 < rest < len(PROMPTS)
    state.print(f"{len(PROMPTS)} prompts, some of them before and some after the interruption; in the order of the input:")
    for prompt, text in list(zip(PROMPTS, texts, strict=True))[:5]:
        state.print(f"  {prompt[-24:]:>24} -> {text}")

    # 3. What ordering by length saves.
    plain = [PROMPTS[start : start + 4] for start in range(0, len(PROMPTS), 4)]
    by_length = sorted(PROMPTS, key=len)
    grouped = [by_length[start : start + 4] for start in range(0, len(PROMPTS), 4)]
    state.print(f"padding: {padding(plain):.0%} in the order of the input, {padding(grouped):.0%} with key=len")

    # 4. The same as a loop, if a function does not fit.
    with state.split_between_processes(PROMPTS, balance="dynamic", key=len) as items:
        for prompt in items:
            items.done(len(prompt.split()))
    state.print(f"words in all prompts: {sum(items.results())}")
    state.destroy_process_group()
    if place:
        place.cleanup()


if __name__ == "__main__":
    main()
