"""Batched inference: each batch is split, its results and inputs are gathered as objects, and the main process writes them."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from slipstream import PartialState
from slipstream.utils import gather_object, set_seed


def get_batches(items: list[Any], batch_size: int, world_size: int) -> list[list[Any]]:
    whole = batch_size * world_size
    return [items[start : start + whole] for start in range(0, len(items) // whole * whole, whole)]


def main(save_dir: str, batch_size: int) -> dict[str, Any]:
    distributed_state = PartialState()
    set_seed(1)
    images = [torch.full((2, 2), float(number)) for number in range(13)]
    if distributed_state.is_main_process:
        os.makedirs(save_dir, exist_ok=True)
    distributed_state.wait_for_everyone()
    count = 0
    for images_raw in get_batches(images, batch_size, distributed_state.num_processes):
        input_images: list[torch.Tensor] = []
        with distributed_state.split_between_processes(images_raw) as mine:
            captions = [f"a picture of {image.sum():.0f}" for image in mine]
            input_images.extend(mine)
        distributed_state.wait_for_everyone()
        captions = gather_object(captions)
        input_images = gather_object(input_images)
        if distributed_state.is_main_process:
            for caption, image in zip(captions, input_images, strict=True):
                count += 1
                with open(os.path.join(save_dir, f"example_{count}.txt"), "w") as file:
                    file.write(f"{caption}: {image.tolist()}")
    distributed_state.wait_for_everyone()
    written = {}
    for name in sorted(os.listdir(save_dir)):
        with open(os.path.join(save_dir, name)) as file:
            written[name] = file.read()
    return {"written": written}


if __name__ == "__main__":
    RESULT = main(sys.argv[1], int(sys.argv[2]))
