"""Load a saved model by a device map with weights on the disk, generate, and print the seconds of both and the tokens.

    _dropin_offload_worker.py FOLDER OFFLOAD_FOLDER DEVICE_MAP TOKENS [PROFILE]

DEVICE_MAP is JSON; "plain" loads the whole model into memory. A first load of another, tiny model is not timed: it imports what both need.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")


def main(folder: str, offload_folder: str, device_map: str, tokens: int, profile: str | None) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    prompt = torch.arange(1, 9)[None]

    def load(name: str) -> tuple[float, float, list[int]]:
        options = {} if device_map == "plain" else {"device_map": json.loads(device_map), "offload_folder": offload_folder}
        begin = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(Path(folder, name), **options).eval()
        loaded = time.perf_counter()
        with torch.no_grad():
            found = model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return loaded - begin, time.perf_counter() - loaded, found[0].tolist()

    load("warm-up")
    if profile:
        import cProfile

        profiler = cProfile.Profile()
        profiler.enable()
    seconds, generating, found = load("model")
    if profile:
        profiler.disable()
        profiler.dump_stats(profile)
    print("RESULT " + json.dumps({"load": seconds, "generate": generating, "both": seconds + generating, "tokens": found}))


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), sys.argv[5] if len(sys.argv) > 5 else None)  # type: ignore[call-arg]
