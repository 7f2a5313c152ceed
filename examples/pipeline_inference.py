"""One model over several processes: each holds one stage, and a batch passes through all of them in chunks.

    slipstream launch --cpu --num_processes 2 examples/pipeline_inference.py

The same file runs as `python examples/pipeline_inference.py`, on one process, which then holds the whole model.
"""

import torch

from slipstream import Accelerator, prepare_pippy

ROWS, LENGTH, WORDS, WIDTH = 8, 12, 100, 64


class Layer(torch.nn.Module):
    """One layer of a small transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.feed = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH))
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.feed(self.norms[1](x))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.layers = torch.nn.ModuleList([Layer() for _ in range(4)])
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, -1])


def main() -> None:
    accelerator = Accelerator()
    torch.manual_seed(0)  # the same model on every process
    model = Model().eval()
    total = sum(one.nbytes for one in model.parameters())

    # 1. Split it into as many balanced stages as processes. The example shows how the model will be called.
    example = torch.randint(0, WORDS, (ROWS, LENGTH))
    model = prepare_pippy(model, split_points="auto", example_args=(example,), gather_output=True)
    held = accelerator.gather([sum(one.nbytes for one in model.parameters() if not one.is_meta)])
    for rank, size in enumerate(held):
        accelerator.print(f"process {rank} holds {size / total:.0%} of the weights")

    # 2. Call it as before, on every process, with batches of any size. Without gather_output only the last process has the result.
    for rows in (ROWS, 3, 20):
        scores = model(torch.randint(0, WORDS, (rows, LENGTH)))
        accelerator.print(f"{rows} rows: next words {scores.argmax(-1).tolist()}")

    # 3. Free it.
    model = accelerator.free_memory(model)[0]
    accelerator.print("done")
    accelerator.state.destroy_process_group()


if __name__ == "__main__":
    main()
