"""Batch inference on any number of processes, and what happens when they disagree.

    slipstream launch --cpu --num_processes 2 examples/batch_inference.py

The same file runs as `python examples/batch_inference.py`, on one process.
"""

import torch

from slipstream import PartialState
from slipstream.utils import DistributedOperationException

REVIEWS = [
    "a quiet film that stays with you",
    "two hours I will not get back",
    "the second half saves it",
    "bring a handkerchief",
    "funny, and then it is not",
    "my grandmother walked out",
    "seen it twice already",
]


class Scorer(torch.nn.Module):
    """A stand-in for your model: the mean of one learned number per byte."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.EmbeddingBag(256, 1, mode="mean")

    def forward(self, text: str) -> torch.Tensor:
        return self.weights(torch.tensor([list(text.encode())], device=self.weights.weight.device)).squeeze()


def main() -> None:
    state = PartialState()
    me = state.process_index
    torch.manual_seed(0)  # the same model on every process
    model = Scorer().to(state.device).eval()
    state.print(f"{state.num_processes} process(es), {state.device.type}, backend {state.backend}\n")

    # 1. Share the work. Seven reviews do not divide by two, which is fine.
    with state.split_between_processes(REVIEWS) as mine, torch.inference_mode():
        scores = [model(text) for text in mine]
        done_by = [f"process {me}" for _ in mine]

    # 2. Gather the results: tensors and text, of uneven lengths, in input order.
    scores, done_by = state.gather(torch.stack(scores)), state.gather(done_by)
    for text, score, worker in zip(REVIEWS, scores.tolist(), done_by, strict=True):
        state.print(f"  {score:+.3f}  {worker}  {text}")

    # 3. A mistake, on purpose: each process passes another shape to the same reduce. Without checks this hangs, aborts, or returns garbage.
    state.print("\nNow a mistake: every process calls reduce() with another shape.\n")
    try:
        state.reduce(torch.ones(2 + me))
    except DistributedOperationException as error:
        state.print(f"{type(error).__name__} on every process:\n{error}\n")

    # 4. The process group still works.
    total = state.reduce(torch.tensor(float(len(mine))), reduction="sum")
    state.print(f"And the processes still work together: {total:.0f} reviews were scored by all of them.")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
