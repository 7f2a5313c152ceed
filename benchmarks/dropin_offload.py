"""transformers' `from_pretrained(device_map=...)` and `generate` with weights on the disk: the drop-in against Accelerate 1.15.

    python benchmarks/dropin_offload.py [--accelerate FOLDER] [--rounds 5] [--tokens 64] [--only MODEL] [--json FILE]

Run it with the interpreter of an environment that has transformers and the drop-in (`make test-ecosystem` makes `.venv-ecosystem`).
Accelerate 1.15 is put in front of the path from a folder of its own, which is filled if it does not exist. The two alternate, each time in
a new process with one thread; files are in the page cache. All layers of a GPT-2 are on the disk, embeddings and head in memory. Goals:
load and generate of a tiny one together at most 0.3 x, and the same tokens. The larger is for information, as is the same model whole in
memory, by transformers alone: no offload can be faster, and of a large model it is most of the time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dropin_trainer import ORIGINAL, environment_with, provide_accelerate
from figures import HERE, Figure, best_of, options, report

GOALS = {"tiny GPT-2": 0.3}
OURS, THEIRS, PLAIN = "drop-in", "Accelerate", "in memory"
MODELS = {
    "tiny GPT-2": {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 128},
    "GPT-2 of 340 MB": {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 2000},
}


def write_model(folder: Path, sizes: dict[str, int]) -> dict[str, str]:
    """Write a GPT-2 with random weights; return a device map with its layers on the disk."""
    code = (
        "import sys, json, torch; from transformers import GPT2Config, GPT2LMHeadModel; torch.manual_seed(0); "
        "c = GPT2Config(n_positions=256, bos_token_id=0, eos_token_id=0, pad_token_id=0, **json.loads(sys.argv[2])); "
        "GPT2LMHeadModel(c).save_pretrained(sys.argv[1])"
    )
    words = [sys.executable, "-c", code, str(folder), json.dumps(sizes)]
    subprocess.run(words, check=True, env=environment_with(None), capture_output=True)
    layers = {f"transformer.h.{number}": "disk" for number in range(sizes["n_layer"])}
    return {**dict.fromkeys(("transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head"), "cpu"), **layers}


def run(who: str, folder: Path, device_map: dict[str, str], tokens: int, accelerate: Path, profile: str = "") -> dict[str, Any]:
    """Run one process and return its times."""
    environment = environment_with(accelerate if who == THEIRS else None)
    with tempfile.TemporaryDirectory(dir=folder) as offload_folder:
        where = "plain" if who == PLAIN else json.dumps(device_map)
        words = [sys.executable, str(HERE / "_dropin_offload_worker.py"), str(folder), offload_folder, where, str(tokens)]
        ended = subprocess.run([*words, *filter(None, [profile])], env=environment, capture_output=True, text=True, timeout=600)
    found = [line for line in ended.stdout.splitlines() if "RESULT " in line]
    if ended.returncode or not found:
        raise SystemExit(f"{' '.join(words)} ended with exit code {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    result: dict[str, Any] = json.loads(found[0].partition("RESULT ")[2])
    return result


def compare(name: str, rounds: int, tokens: int, accelerate: Path, profile: str = "") -> list[Figure]:
    """Return the figures of a model: the best of interleaved rounds."""
    results: dict[str, list[dict[str, Any]]] = {OURS: [], THEIRS: [], PLAIN: []}
    with tempfile.TemporaryDirectory(dir=HERE) as made:
        folder = Path(made)
        write_model(folder / "warm-up", MODELS[name])
        device_map = write_model(folder / "model", MODELS[name])
        for number in range(rounds):
            order = [OURS, THEIRS, PLAIN]
            for who in order[number % 3 :] + order[: number % 3]:
                results[who].append(run(who, folder, device_map, tokens, accelerate))
        if profile:
            run(OURS, folder, device_map, tokens, accelerate, profile)
    found = []
    parts = {"both": "load and generate", "load": "load", "generate": f"generate {tokens} tokens"}
    for key, what in parts.items():
        ours, theirs, plain = ([result[key] for result in results[who]] for who in (OURS, THEIRS, PLAIN))
        goal = GOALS.get(name) if key == "both" else None
        found.append(best_of(f"{name}: {what}", "s", ours, theirs, THEIRS, goal, f"in memory {min(plain):.3g} s"))
    texts = {tuple(result["tokens"]) for who in results for result in results[who]}
    found.append(Figure(f"{name}: different texts", len(texts) - 1, "", goal=0.0))
    return found


def measure(quick: bool) -> list[Figure]:
    """Return the figures of both models; quickly, of the tiny one."""
    provide_accelerate()
    return [figure for name in list(MODELS)[: 1 if quick else None] for figure in compare(name, 5, 64, ORIGINAL)]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--accelerate", type=Path, default=ORIGINAL, help="the folder with Accelerate 1.15")
    parser.add_argument("--only", choices=MODELS, help="only this model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--profile", default="", help="write a profile of a further run of the drop-in to this file")
    given = parser.parse_args()
    provide_accelerate(given.accelerate)
    found = [
        figure
        for name in ([given.only] if given.only else MODELS)
        for figure in compare(name, given.rounds, given.tokens, given.accelerate, given.profile)
    ]
    report("dropin offload", found, given)


if __name__ == "__main__":
    main()
