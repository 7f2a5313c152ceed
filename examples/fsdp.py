"""Sharded training (FSDP2) on a laptop: every process holds a part of the weights, gradients and optimizer state.

    slipstream launch --cpu --num_processes 2 examples/fsdp.py

The loop is the one of replicas: accumulation, clipping, a schedule, evaluation, a checkpoint. The loss does not depend on the number of
processes. With `--use_fsdp` on the command line the script needs no plugin either.
"""

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator, FullyShardedDataParallelPlugin

WORDS, TOKENS, WIDTH = 64, 16, 32


class Block(torch.nn.Module):
    """Attention and a feed-forward layer: repeated in the model, so it is found and sharded as a unit."""

    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = torch.nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.feed_forward = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, mask):
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.feed_forward(self.norms[1](x))


class LanguageModel(torch.nn.Module):
    """A small transformer whose head is tied to its embedding."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.place = torch.nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(words.shape[1], device=words.device)
        x = self.embed(words) + self.place
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def sentences(count, seed):
    """Return sentences in which a word decides the next one."""
    words = [torch.randint(0, WORDS, (count,), generator=torch.Generator().manual_seed(seed))]
    for _ in range(TOKENS):
        words.append((5 * words[-1] + 3) % WORDS)
    together = torch.stack(words, dim=1)
    return TensorDataset(together[:, :-1], together[:, 1:])


def local_bytes(tensors):
    """Return the bytes that this process holds."""
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2, fsdp_plugin=FullyShardedDataParallelPlugin())
    torch.manual_seed(0)
    model = LanguageModel()
    whole = 4 * local_bytes(model.parameters())  # weights, gradients, and two states of AdamW
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / 10))
    size = 16 // accelerator.num_processes
    train = DataLoader(sentences(480, 1), batch_size=size, shuffle=True)
    test = DataLoader(sentences(60, 2), batch_size=size)
    model, optimizer, scheduler, train, test = accelerator.prepare(model, optimizer, scheduler, train, test)

    for epoch in range(4):
        for words, following in train:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(words).flatten(0, 1), following.flatten())
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                if epoch == 3 and accelerator.sync_gradients:
                    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
                    held = local_bytes([*model.parameters(), *(parameter.grad for parameter in model.parameters()), *states])
                optimizer.zero_grad()

    with torch.no_grad():
        right = torch.cat([accelerator.gather_for_metrics(model(words).argmax(-1) == following) for words, following in test])
    accelerator.print(f"a process holds {held / whole:.2f} of the training state")
    accelerator.print(f"{int(right.sum())} of {right.numel()} words are right")
    accelerator.save_state("checkpoint")  # every process writes its part; any number of processes can load it
    weights = accelerator.get_state_dict(model)  # whole weights under plain names: a call of all processes
    LanguageModel().load_state_dict(weights)
    accelerator.end_training()


if __name__ == "__main__":
    main()
