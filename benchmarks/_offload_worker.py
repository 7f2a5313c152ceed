"""The worker process of `offload.py`: it runs offloaded models on command, and reports the times.

Commands are lines of JSON on standard input, `{"do": "warm", ...}`; replies are lines of JSON on standard output. With `--group` it enters
a control group before it imports anything large. Setup work (building models, emptying caches) is not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import hashlib
import io
import logging
import mmap
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

if "--group" in sys.argv:
    Path(sys.argv[sys.argv.index("--group") + 1], "cgroup.procs").write_text(str(os.getpid()))

import torch
from _offload_models import VOCABULARY, WIDTH, made
from worker_process import serve

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

ROWS = 1
PROMPT = 4
PIECE = 8 << 20
Shape = Sequence[Any]
"""Kind and sizes of a model, as `made` takes them."""


class Worker:
    """The commands: every public method is one; its arguments are those of the command, and its result is the reply."""

    def __init__(self) -> None:
        self._models: dict[str, Any] = {}

    # -- files ----------------------------------------------------------------------------------------------------------------

    def save(self, shape: Shape, path: str, library: str) -> int:
        """Write the weights of a model, with safetensors or with ours; return their bytes."""
        state = made(*shape, empty=False).state_dict()
        if library == "ours":
            from slipstream.utils import save

            save(state, path, safe_serialization=True)
        else:
            from safetensors.torch import save_file

            save_file(state, path)
        os.sync()
        return sum(tensor.nbytes for tensor in state.values())

    def disk(self, path: str) -> float:
        """Return the speed of the disk in bytes per second: direct reads of the whole file, by two threads, as one is not always enough."""
        size = os.path.getsize(path)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        starts, lock = iter(range(0, size, PIECE)), threading.Lock()

        def read(memory: mmap.mmap) -> None:
            while True:
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                os.preadv(fd, [memory], start)

        memories = [mmap.mmap(-1, PIECE) for _ in range(2)]
        for memory in memories:
            memory.write(bytes(PIECE))
        with ThreadPoolExecutor(2) as threads:
            begin = time.perf_counter()
            for done in [threads.submit(read, memory) for memory in memories]:
                done.result()
            taken = time.perf_counter() - begin
        os.close(fd)
        return size / taken

    # -- forwards -------------------------------------------------------------------------------------------------------------

    def open(self, library: str, shape: Shape, path: str, folder: str, limit: int | None = None, name: str = "") -> None:
        """Open a model with its blocks on disk, or (`plain`) in memory."""
        self._models[name or library] = opened(library, shape, path, folder, limit)

    def ready(self, library: str) -> None:
        """Import everything that a library needs, and run small models, so that later growth is that of large ones."""
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            load_tiny(library, folder)
            for shape in (("tower", 1, WIDTH), ("writer", 1)):
                path = f"{folder}/{shape[0]}.safetensors"
                self.save(shape, path, "safetensors")
                self.open(library, shape, path, f"{folder}/{shape[0]}", name="small")
                if shape[0] == "tower":
                    self._models["small"](batch())
                else:
                    self.write("small", 16, 8, 2, lanes=2 if library == "ours" else 0)
        del self._models["small"]
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def park(self, shape: Shape, path: str, folder: str) -> None:
        """Write the folder that Accelerate reads from in advance: it takes more memory than running."""
        park(made(*shape), path, folder)

    def warm(self, names: Sequence[str], rounds: int) -> dict[str, Any]:
        """Time interleaved forwards of all models, and compare their outputs with the first one, bit for bit."""
        from turns import in_turns

        x = batch()
        with torch.inference_mode():
            wanted = self._models[names[0]](x)
            equal = all(torch.equal(self._models[name](x), wanted) for name in names for _ in range(2))
            calls: dict[str, Callable[[int], Any]] = {name: (lambda _, model=self._models[name]: model(x)) for name in names}
            calls[f"{names[0]}, again"] = calls[names[0]]
            times = in_turns(calls, rounds, 1)
        return {"equal": equal, "times": {name: vars(found) for name, found in times.items()}}

    def growth(self, name: str, passes: int = 3) -> tuple[float, str]:
        """Return the growth in bytes while a model runs, file pages included, and its output."""
        model, x = self._models[name], batch()
        with torch.inference_mode():
            release(model)
            with Peak() as peak:
                for _ in range(passes):
                    found = model(x)
        return peak.most, checksum(found)

    def cold(self, name: str, paths: Sequence[str]) -> dict[str, Any]:
        """Time a forward with a cold page cache; also return what was in the cache nevertheless, and what was read."""
        model, x = self._models[name], batch()
        release(model)
        gc.collect()
        for path in paths:
            forget(path)
        share = max(in_cache(path) for path in paths)
        before = from_disk()
        with torch.inference_mode():
            begin = time.perf_counter()
            found = model(x)
            taken = time.perf_counter() - begin
        direct = reads_directly(model)
        return {"seconds": taken, "cached": share, "bytes": from_disk() - before, "output": checksum(found), "direct": direct}

    # -- generation -----------------------------------------------------------------------------------------------------------

    def write(self, name: str, sequences: int, rows: int, count: int, lanes: int = 0) -> dict[str, Any]:
        """Generate tokens for the sequences, `rows` per call; with `lanes`, that many calls side by side."""
        model = self._models[name]
        prompts = torch.randint(VOCABULARY, (64, PROMPT), generator=torch.Generator().manual_seed(0))[:sequences].split(rows)
        with torch.inference_mode():
            begin = time.perf_counter()
            if lanes:
                import slipstream

                calls = slipstream.layer_major(model, lambda prompt: model.write(prompt, count), prompts, lanes=lanes)
            else:
                calls = [model.write(prompt, count) for prompt in prompts]
            taken = time.perf_counter() - begin
        return {"seconds": taken, "tokens": [row for call in calls for row in call]}

    # -- loading --------------------------------------------------------------------------------------------------------------

    def load(
        self, libraries: Sequence[str], shape: Shape, path: str, rounds: int, build: bool = False
    ) -> dict[str, dict[str, list[float]]]:
        """Time loading a file into an empty model, with `build` also making that model, interleaved; wall and CPU time."""
        found: dict[str, dict[str, list[float]]] = {library: {"wall": [], "cpu": []} for library in libraries}
        for library in libraries:
            with tempfile.TemporaryDirectory() as folder:
                load_tiny(library, folder)
        for _ in range(rounds):
            for library in libraries:
                model = None if build else made(*shape)
                gc.collect()
                wall, cpu = time.perf_counter(), time.process_time()
                LOAD[library](model or made(*shape), path)
                found[library]["cpu"].append(time.process_time() - cpu)
                found[library]["wall"].append(time.perf_counter() - wall)
                del model
        return found

    def load_memory(self, library: str, shape: Shape, path: str) -> float:
        """Return the peak growth in bytes while a file is loaded."""
        with tempfile.TemporaryDirectory() as folder:
            load_tiny(library, folder)
        model = made(*shape)
        gc.collect()
        with Peak() as peak:
            LOAD[library](model, path)
        self._models[library] = model
        return peak.most

    def touch(self, library: str) -> tuple[float, str]:
        """Read every weight of the model that was loaded last; return a checksum."""
        begin = time.perf_counter()
        found = checksum(*self._models[library].state_dict().values())
        return time.perf_counter() - begin, found

    def held(self) -> dict[str, float]:
        """Return the memory of this process; of shared pages, its share."""
        return {words[0].rstrip(":"): float(words[1]) * 1024 for words in lines("/proc/self/smaps_rollup") if words[-1] == "kB"}


def opened(library: str, shape: Shape, path: str, folder: str, limit: int | None) -> Any:
    model = made(*shape)
    if library == "plain":
        from safetensors.torch import load_file

        model.load_state_dict({name: tensor.clone() for name, tensor in load_file(path).items()}, assign=True)
        return model
    if library == "ours":
        import slipstream

        return slipstream.load_checkpoint_and_dispatch(model, path, device_map=places(model), limit=limit)
    from accelerate import dispatch_model
    from safetensors.torch import load_file

    if not Path(folder, "index.json").exists():
        park(model, path, folder)
        model = made(*shape)
    weights = {name: tensor.clone() for name, tensor in load_file(path).items() if places(model)[name.partition(".")[0]] == "cpu"}
    model.load_state_dict(weights, strict=False, assign=True)
    return dispatch_model(model, places(model), offload_dir=folder)


def park(model: torch.nn.Module, path: str, folder: str) -> None:
    """Write the offload folder that Accelerate needs."""
    from accelerate import load_checkpoint_and_dispatch

    with contextlib.redirect_stderr(io.StringIO()):  # its bar
        load_checkpoint_and_dispatch(model, path, device_map=places(model), offload_folder=folder)
    os.sync()


def places(model: torch.nn.Module) -> dict[str, str]:
    """Return a device map with the middle on disk."""
    return {name: "disk" if name in ("blocks", "layers") else "cpu" for name, _ in model.named_children()}


def load_plain(model: torch.nn.Module, path: str) -> None:
    from safetensors.torch import load_file

    model.load_state_dict(load_file(path), assign=True)


def load_accelerate(model: torch.nn.Module, path: str) -> None:
    from accelerate import load_checkpoint_and_dispatch

    load_checkpoint_and_dispatch(model, path, device_map={"": "cpu"})


def load_ours(model: torch.nn.Module, path: str) -> None:
    from slipstream import load_checkpoint_and_dispatch

    load_checkpoint_and_dispatch(model, path, device_map={"": "cpu"})


def dispatch_ours(model: torch.nn.Module, path: str) -> None:
    from slipstream import load_checkpoint_and_dispatch

    load_checkpoint_and_dispatch(model, path, device_map=places(model))


LOAD: dict[str, Callable[[torch.nn.Module, str], None]] = {
    "plain": load_plain,
    "accelerate": load_accelerate,
    "ours": load_ours,
    "ours, dispatched": dispatch_ours,
}


def load_tiny(library: str, folder: str) -> None:
    """Load a tiny model first, so that one-time memory does not count for the second load."""
    from safetensors.torch import save_file

    tiny = ("tower", 1, 64)
    save_file(made(*tiny, empty=False).state_dict(), f"{folder}/model.safetensors")
    LOAD[library](made(*tiny), f"{folder}/model.safetensors")


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def checksum(*tensors: torch.Tensor) -> str:
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy())
    return found.hexdigest()


def stores(model: torch.nn.Module) -> list[Any]:
    """Return our weight stores; none for others."""
    if "slipstream" not in sys.modules:
        return []
    from slipstream.big_models.layer_major import find_weight_stores

    return find_weight_stores(model)


def release(model: torch.nn.Module) -> None:
    for store in stores(model):
        store.release()


def reads_directly(model: torch.nn.Module) -> bool:
    return any(store.reads_directly for store in stores(model))


def forget(path: str) -> None:
    """Evict a file from the page cache, unless it is mapped."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def from_disk() -> int:
    """Return the bytes that this process has read from disks."""
    return next(int(words[1]) for words in lines("/proc/self/io") if words[0] == "read_bytes:")


def in_cache(path: str) -> float:
    """Return the share of a file that is in the page cache."""
    size = os.path.getsize(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        pages = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
        held = ctypes.c_char.from_buffer(mapped)
        ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(held)), ctypes.c_size_t(size), pages)
        del held
    return sum(page & 1 for page in pages) / len(pages)


class Peak:
    """Measure the peak memory of this process in the block beyond that before it, file pages included; sampled, and by the kernel."""

    most = 0.0

    def __enter__(self) -> Peak:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
        self._before = status("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        self.most = status("VmHWM") - self._before


def lines(path: str) -> list[list[str]]:
    return [line.split() for line in Path(path).read_text().splitlines()]


def status(name: str) -> float:
    return next(float(words[1]) * 1024 for words in lines("/proc/self/status") if words[0] == f"{name}:")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--group")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    serve(Worker)


if __name__ == "__main__":
    main()
