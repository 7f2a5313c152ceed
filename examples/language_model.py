"""A language model weighted by tokens: every token counts the same, in every process, batch and sentence.

    slipstream launch --cpu --num_processes 2 examples/language_model.py

Sentences have different lengths, so batches hold different numbers of tokens. A mean over each batch, averaged over batches and
processes, would count the tokens of short sentences more; and with another number of processes it would be another mean.
`backward(loss_sum, weight=tokens)` takes the sum instead. The printed losses are those of one process and one big batch.
"""

import torch
from torch.utils.data import DataLoader

from slipstream import Accelerator
from slipstream.utils import set_seed

SENTENCES = [
    "the cat sat on the mat",
    "the dog sat on the log",
    "a cat",
    "the log is not a mat, and the cat is not a dog",
    "dogs sit",
    "on the mat sat the cat that sat on the log",
    "no",
    "the dog is a dog",
    "the cat and the dog sat, and that is that",
]
PADDING = 0


def pad(sentences: list[str]) -> torch.Tensor:
    """Return the bytes of the sentences, one row each; every row begins with byte 1 and ends with byte 2."""
    rows = [torch.tensor([1, *sentence.encode(), 2]) for sentence in sentences]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)


class NextByte(torch.nn.Module):
    """Predict the next byte with a small recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(128, 16)
        self.memory = torch.nn.GRU(16, 32, batch_first=True)
        self.head = torch.nn.Linear(32, 128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.memory(self.embedding(tokens))[0])


def main() -> None:
    accelerator = Accelerator(effective_batch_size=4)
    set_seed(0)
    model = NextByte().double()  # so that the printed digits are the same everywhere
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(SENTENCES, batch_size=1, shuffle=True, collate_fn=pad)  # one sentence fits: four processes, or four steps
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    first = last = 0.0
    for epoch in range(12):
        total, count = 0.0, 0
        for tokens in loader:
            with accelerator.accumulate(model):
                inputs, targets = tokens[:, :-1], tokens[:, 1:]
                scores = model(inputs).flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(scores, targets.flatten(), ignore_index=PADDING, reduction="sum")
                tokens_here = (targets != PADDING).sum()
                accelerator.backward(loss, weight=tokens_here)  # the sum, and how many tokens are in it
                optimizer.step()
                optimizer.zero_grad()
            # For the report: one value per sample, gathered without repeated samples.
            sums = accelerator.gather_for_metrics(torch.stack([loss.detach(), tokens_here.double()]).reshape(1, 2))
            total += sums[:, 0].sum().item()
            count += int(sums[:, 1].sum())
        last = total / count
        first = first or last
        accelerator.print(f"epoch {epoch:2d}  loss per token {last:.6f}  over {count} tokens")
    assert count == sum(len(sentence) + 1 for sentence in SENTENCES)
    assert last < first / 2
    accelerator.end_training()


if __name__ == "__main__":
    main()
