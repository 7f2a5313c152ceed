"""A model larger than its memory limit: it generates text for many prompts, from weights that stay in their files.

    python examples/larger_than_memory.py
    python examples/larger_than_memory.py --layers 48 --width 1024 --memory 500MiB
    slipstream launch --cpu --num_processes 2 examples/larger_than_memory.py

A model is built and saved in several files, like a downloaded one; with --folder it is kept and reused. From
there on the weights are never completely in memory: the skeleton has none, the device map divides them between memory and
disk, and blocks from the disk stay within --memory too. Several processes share the prompts, and the pages of the files.
At the end the texts are compared with those of the plain model, if it fits.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from slipstream import Accelerator, infer_auto_device_map, init_empty_weights, layer_major, load_checkpoint_and_dispatch
from slipstream.utils import compute_module_sizes, convert_bytes, convert_file_size_to_int, get_max_memory, load_checkpoint_in_model

WORDS, LENGTH = 1000, 8


class Layer(torch.nn.Module):
    """One layer of a small transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(width, width // 32, batch_first=True)
        self.feed = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.attention(y, y, y, attn_mask=later, need_weights=False)[0]
        return x + self.feed(self.norms[1](x))


class Model(torch.nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, width)
        self.layers = torch.nn.ModuleList([Layer(width) for _ in range(layers)])
        self.head = torch.nn.Linear(width, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, -1])


def write(model: torch.nn.Module, prompt: torch.Tensor, count: int) -> list[int]:
    """Return the prompt and the `count` most likely words after it."""
    text = prompt.unsqueeze(0)
    for _ in range(count):
        text = torch.cat([text, model(text).argmax(-1, keepdim=True)], dim=1)
    return text[0].tolist()


def mapped(folder: Path) -> int | None:
    """Return the resident bytes of the files in a folder; None if the system does not report them."""
    table = Path("/proc/self/smaps")
    if not table.exists():
        return None
    total, counts = 0, False
    for line in table.read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:  # an address range, and the file mapped there
            counts = str(folder) in line
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def run(accelerator: Accelerator, folder: Path, options: argparse.Namespace) -> None:
    if accelerator.is_main_process and not any(folder.glob("*.safetensors")):
        torch.manual_seed(0)
        accelerator.save_model(Model(options.width, options.layers), folder, max_shard_size=options.shard)
    accelerator.wait_for_everyone()

    # 1. The skeleton: all shapes, no weights.
    with init_empty_weights():
        model = Model(options.width, options.layers).eval()
    total = compute_module_sizes(model)[""]
    memory = convert_file_size_to_int(options.memory) if options.memory else total // 4
    files = len(list(folder.glob("*.safetensors")))
    accelerator.print(f"{convert_bytes(total)} of weights in {files} files, {convert_bytes(memory)} of memory for them")

    # 2. The device map: what stays in memory, and what on disk, with room for the largest layer from disk.
    plan = infer_auto_device_map(model, max_memory={"cpu": memory})
    accelerator.print(f"\n{plan.table()}\n")

    # 3. Loading reads nothing yet.
    model = load_checkpoint_and_dispatch(model, folder, device_map=plan)
    before = mapped(folder)

    # 4. Each layer is read once for all prompts of this process.
    torch.manual_seed(1)
    prompts = torch.randint(0, WORDS, (options.sequences, LENGTH))
    with torch.inference_mode(), accelerator.split_between_processes(list(prompts)) as mine:
        texts = layer_major(model, lambda prompt: write(model, prompt, options.tokens), mine, lanes=options.lanes)
    after = mapped(folder)
    if before is not None and after is not None:
        accelerator.print(f"in memory after loading {convert_bytes(before)}, after {len(texts)} texts {convert_bytes(after)}")
        assert after < 1.1 * memory + 2**20, f"{after} bytes of weights are in memory"

    # 5. The same as the plain model.
    everything = accelerator.gather(texts)
    for number, text in enumerate(everything[:4]):
        accelerator.print(f"text {number}: {' '.join(map(str, text))}")
    if accelerator.is_main_process and total < get_max_memory().get("cpu", 0) // 2:
        with init_empty_weights():
            plain = Model(options.width, options.layers).eval()
        load_checkpoint_in_model(plain, folder)
        with torch.inference_mode():
            assert everything == [write(plain, prompt, options.tokens) for prompt in prompts]
        print(f"{len(everything)} texts are those of the plain model")
    accelerator.wait_for_everyone()


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs a model that is larger than the memory it may take.")
    parser.add_argument("--width", type=int, default=128, help="of the model, a multiple of 32 (128)")
    parser.add_argument("--layers", type=int, default=12, help="how many it has (12)")
    parser.add_argument("--memory", help='bytes of weights in memory, as in "500MiB"; a quarter of the model by default')
    parser.add_argument("--sequences", type=int, default=8, help="how many texts are written (8)")
    parser.add_argument("--tokens", type=int, default=4, help="how many words are added to each (4)")
    parser.add_argument("--lanes", type=int, help="how many texts are written side by side; all by default")
    parser.add_argument("--shard", default="4MB", help="the largest file that the model is saved in (4MB)")
    parser.add_argument("--folder", type=Path, help="where the weights are; without files of weights, they are made there")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    if options.folder is not None:
        run(accelerator, options.folder, options)
    else:
        with tempfile.TemporaryDirectory() as folder:  # all processes use the one of the main process
            run(accelerator, Path(accelerator.state.broadcast(folder)), options)
    accelerator.end_training()


if __name__ == "__main__":
    main()
