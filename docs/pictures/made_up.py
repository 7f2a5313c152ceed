"""A synthetic run folder: for pictures, tests and measurements of the report.

Curves fall with noise, one rank is slow for a while, data is late for a while, there are checkpoints, a restart and a
NaN. Everything is drawn from one seed, so that the same call writes the same run.
"""

from __future__ import annotations

import json
import math
import random
import struct
import zlib
from pathlib import Path
from typing import Any

STARTED = 1_790_000_000.0
PHASES = ("data", "forward", "backward", "communication", "waiting", "optimizer", "checkpoint", "evaluation", "other")


def make_run(folder: Path, *, steps: int = 3000, ranks: int = 4, seed: int = 0, rate: float = 3e-4, started: float = STARTED) -> Path:
    """Write a run folder and return its path."""
    chance = random.Random(seed)
    (folder / "media").mkdir(parents=True)
    seconds = _ledger(folder, steps, ranks, chance, started)
    _metrics(folder, steps, chance, rate, started, seconds)
    _events(folder, steps, started, seconds)
    _documents(folder, ranks, rate, seed, started, started + steps * seconds)
    return folder


def _metrics(folder: Path, steps: int, chance: random.Random, rate: float, started: float, seconds: float) -> None:
    speed = 1.0 + 700 * rate
    with (folder / "metrics.jsonl").open("w") as file:
        file.write(json.dumps({"run": folder.name, "started": started, "config": {}}) + "\n")
        for step in range(1, steps + 1):
            part = step / steps
            noise = 0.35 * math.exp(-part) * abs(chance.gauss(0, 0.25)) + 0.4 * max(0, chance.gauss(-2.2, 1))
            loss: float | str = 0.31 + 2.1 * math.exp(-7 * part * speed) + noise
            if step == steps * 3 // 5:
                loss = "nan"
            warm = min(1.0, part / 0.05)
            values = {
                "train/loss": loss,
                "train/gradient norm": (0.4 + 2.5 * math.exp(-5 * part)) * math.exp(chance.gauss(0, 0.25)),
                "train/learning rate": rate * warm * (0.5 + 0.5 * math.cos(math.pi * part)),
            }
            if step % max(1, steps // 60) == 0:
                values["evaluation/accuracy"] = 0.93 - 0.75 * math.exp(-5 * part * speed) + chance.gauss(0, 0.006)
                values["evaluation/loss"] = 0.36 + 1.9 * math.exp(-6 * part * speed) + chance.gauss(0, 0.012)
            file.write(json.dumps({"step": step, "time": started + step * seconds, "values": values}) + "\n")
        rows = [["inner", 941, 52], ["outer", 958, 49], ["between", 903, 97]]
        table = {"name": "confusion", "columns": ["class", "right", "wrong"], "rows": rows}
        file.write(json.dumps({"step": steps, "time": started + steps * seconds, "table": table}) + "\n")
        for place, step in enumerate((steps // 3, steps)):
            path = f"media/spiral-{step}.png"
            (folder / path).write_bytes(picture(3.0 + 4 * place))
            file.write(json.dumps({"step": step, "time": started + step * seconds, "images": {"decision boundary": [path]}}) + "\n")


def _ledger(folder: Path, steps: int, ranks: int, chance: random.Random, started: float) -> float:
    """Write the ledger, and return the mean seconds of a step."""
    each = max(1, steps // 300)
    clock, rows = started, []
    for first in range(1, steps + 1, each):
        last = min(first + each - 1, steps)
        part = last / steps
        own = [_own(rank, part, chance) for rank in range(ranks)]
        totals = [sum(one.values()) for one in own]
        slowest = max(totals)
        count = last - first + 1
        exchange = 0.011 + abs(chance.gauss(0, 0.001)) if ranks > 1 else 0.0
        pause = 0.9 if any(first <= save <= last for save in _saves(steps)) else 0.0
        evaluated = 0.35 * each if first // each % 12 == 11 else 0.0
        phases: dict[str, list[float]] = {name: [round(one.get(name, 0.0) * count, 5) for one in own] for name in PHASES}
        phases["waiting"] = [round((slowest - total) * count, 5) for total in totals]
        phases["communication"] = [round(exchange * count, 5)] * ranks
        phases["checkpoint"] = [pause] * ranks
        phases["evaluation"] = [round(evaluated * 0.06, 5)] * ranks
        wall = (slowest + exchange) * count + pause + evaluated * 0.06
        clock += wall
        times = [0] * ranks
        times[totals.index(slowest)] = count
        rows.append(
            {
                "time": round(clock, 3),
                "seconds": round(wall, 4),
                "first": first,
                "last": last,
                "steps": count,
                "samples": 64 * ranks * count,
                "tokens": 64 * 128 * ranks * count,
                "flops": None,
                "phases": phases,
                "slowest": times,
                "memory": {"host": [int(1.1e9 + 2.2e8 * min(1, part * 3) + 4e6 * rank) for rank in range(ranks)], "device": None},
                "mfu": None,
            }
        )
    (folder / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (clock - started) / steps


def _own(rank: int, part: float, chance: random.Random) -> dict[str, float]:
    slow = 1.38 if rank == 2 and 0.45 < part < 0.7 else 1.0
    late = 0.02 if 0.78 < part < 0.88 else 0.0
    return {
        "data": abs(chance.gauss(0.004, 0.0012)) + late * abs(chance.gauss(1, 0.3)),
        "forward": slow * chance.gauss(0.021, 0.0006),
        "backward": slow * chance.gauss(0.043, 0.0011),
        "optimizer": chance.gauss(0.006, 0.0002),
        "other": abs(chance.gauss(0.003, 0.0004)),
    }


def _saves(steps: int) -> list[int]:
    return [steps * one // 5 for one in range(1, 6)]


def _events(folder: Path, steps: int, started: float, seconds: float) -> None:
    def event(kind: str, step: int, text: str, **more: Any) -> dict[str, Any]:
        return {"time": started + step * seconds, "kind": kind, "step": step, "rank": None, "text": text, **more}

    remedy = "Lower the learning rate, or clip gradients: accelerator.clip_grad_norm_(...)."
    found = [event("start", 0, "4 processes on 1 machine")]
    for place, step in enumerate(_saves(steps)):
        found.append(event("checkpoint", step, f"checkpoint_{place}", path=f"checkpoints/checkpoint_{place}", seconds=0.9))
    found += [
        event("restart", steps // 3, "attempt 2 of 4: rank 1 was lost"),
        event("guard", steps * 3 // 5, "The loss is no number.", rank=2, guard="nan", remedy=remedy),
        event(
            "warning",
            steps * 4 // 5,
            "The loader keeps the step waiting for 17 % of the time.",
            remedy="Give it more workers: num_workers=4.",
        ),
        event("end", steps, "finished"),
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in sorted(found, key=lambda one: one["time"])))


def _documents(folder: Path, ranks: int, rate: float, seed: int, started: float, ended: float) -> None:
    info = {
        "format": "slipstream run",
        "version": 1,
        "name": folder.name,
        "project": "spirals",
        "id": f"made-up-{seed}",
        "started": started,
        "ended": ended,
        "state": "finished",
        "command": ["train.py", "--learning_rate", str(rate)],
        "attempts": [
            {"started": started, "world_size": ranks, "hosts": ["ada"]},
            {"started": started + (ended - started) / 3, "world_size": ranks, "hosts": ["ada"]},
        ],
        "git": {"commit": "4f2c9d1a7be0", "branch": "main", "dirty": False},
        "versions": {"slipstream": "0.1.0", "torch": "2.13.0", "python": "3.12.4"},
    }
    options = {
        "num_processes": {"value": ranks, "origin": "from --num_processes"},
        "mixed_precision": {"value": "bf16", "origin": "from the file spirals.yaml"},
        "gradient_accumulation_steps": {"value": 1, "origin": "default"},
        "seed": {"value": seed, "origin": "from the constructor"},
        "timeout": {"value": 600, "origin": "from SLIPSTREAM_TIMEOUT"},
    }
    settings = {"learning_rate": rate, "batch_size": 64, "model": {"width": 512, "layers": 6}, "epochs": 3}
    machine = {"Python": "3.12.4", "torch": "2.13.0", "system": "Linux 6.8, x86_64", "processors": "32", "memory": "126 GiB"}
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "config.json").write_text(json.dumps({"settings": settings, "options": options}))
    (folder / "environment.json").write_text(json.dumps(machine))


def picture(turns: float, size: int = 96) -> bytes:
    """Return two spirals as a PNG."""
    rows = []
    for y in range(size):
        row = bytearray([0])
        for x in range(size):
            right, up = x / size * 2 - 1, y / size * 2 - 1
            wave = math.sin(math.hypot(right, up) * turns * 2 + math.atan2(up, right))
            shade = 1 / (1 + math.exp(-5 * wave))
            row += bytes((int(20 + 210 * shade), int(110 + 20 * shade), int(190 - 150 * shade)))
        rows.append(bytes(row))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"".join(rows), 9)) + chunk(b"IEND", b"")
