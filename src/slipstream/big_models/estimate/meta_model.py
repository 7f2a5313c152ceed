"""Build a model on the meta device and run it on fake tensors to measure activations.

The model comes from an entry point in Python, a transformers config or a hub name. The figures are what eager PyTorch allocates on a CPU,
without the scratch memory inside operators. Measuring takes seconds for models of any size and leaves the model unchanged. Code that a
config brings along runs only if the user allows it; an error in user code names the line. The network is used only for a hub name, and
only after a quick test that the hub can be reached.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from urllib.parse import urlsplit

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from slipstream.big_models.empty_weights import init_empty_weights
from slipstream.big_models.estimate.tensors import EstimatedTensor, EstimatedTensors, find_repeated_blocks
from slipstream.checkpoint.tensor_bytes import DTYPES
from slipstream.config.names import nearest
from slipstream.devices.packages import import_quietly, silence_libraries
from slipstream.devices.table import CPU
from slipstream.distributed.call_site import is_package_frame
from slipstream.distributed.progress_bar import waiting
from slipstream.errors import ConfigError, SlipstreamError

__all__ = [
    "MeasuredMemory", "ModelInputs", "from_config", "from_entry_point", "from_hub", "list_tensors", "measure", "plain_transformers_paths",
]


@dataclass(frozen=True)
class ModelInputs:
    """The arguments of a model; only shapes and dtypes matter."""

    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] | None = None
    labels: Mapping[str, Any] | None = None
    """Passed only in training, so that the model computes a loss."""
    cached: Mapping[str, Any] | None = None
    """Passed only in inference, so that the model returns its KV cache."""


@dataclass(frozen=True)
class MeasuredMemory:
    """Bytes beside weights and gradients."""

    kept: int
    """Bytes alive after the forward pass: what autograd keeps for the backward pass, and the outputs."""
    peak: int
    """The peak of live bytes."""
    cache: int = 0
    """Keys and values of the tokens seen; not tensor_ of `peak`."""


def measure(
    model: torch.nn.Module,
    inputs: ModelInputs,
    *,
    dtype: torch.dtype,
    autocast: bool = False,
    training: bool = True,
    checkpointing: bool = False,
) -> MeasuredMemory:
    """Return the memory of a step with weights of `dtype`; with `autocast`, float32 weights and computation in `dtype`.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32, device="meta"), torch.nn.ReLU(), torch.nn.Linear(32, 4, device="meta"))
    >>> measure(model, ModelInputs((torch.empty(16, 8, device="meta"),)), dtype=torch.float32).kept == 4 * 16 * (8 + 32 + 4) + 4
    True
    """
    # torch internals: fake tensors and dispatch modes have no public home yet. Tried on torch 2.13; test_estimates.py compares with real
    # runs. It can go when torch exports them.
    fake, live = FakeTensorMode(allow_non_fake_inputs=True), _LiveBytes()
    kept_dtype = torch.float32 if autocast else dtype
    casting = torch.autocast(CPU.type, dtype=dtype) if autocast else contextlib.nullcontext()
    with (
        _fake_weights(model, fake, kept_dtype, live, training=training),
        _activation_checkpointing(model, checkpointing and training),
        fake,
        live,
    ):
        chosen = {**(inputs.keywords or {}), **((inputs.labels if training else inputs.cached) or {})}
        arguments, keywords = tree_map(_fake_inputs(kept_dtype), (inputs.arguments, chosen))
        with casting, torch.set_grad_enabled(training):
            outputs = model(*arguments, **keywords)
            target = _loss(outputs) if training else None
        kept = live.now
        cache = 0 if training else _cache_of(outputs)
        if target is not None and target.requires_grad:
            target.backward()  # type: ignore[no-untyped-call]
        peak = live.peak
        del outputs, target, arguments, keywords, chosen
    return MeasuredMemory(kept - cache, peak - cache, cache)


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live tensors that operators allocated."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: dict[int, int] = {}

    def exclude(self, tensor: torch.Tensor) -> None:
        """Do not count this tensor: it is a weight."""
        self._known[tensor.untyped_storage()._cdata] = 0

    def forget(self, tensor: torch.Tensor) -> None:
        """Stop counting this tensor: it has become a gradient."""
        key = tensor.untyped_storage()._cdata
        self.now -= self._known.get(key, 0)
        self._known[key] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        made = _run_operator(func, args, kwargs or {})
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, key).atexit = False

    def _release(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)


def _run_operator(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator; `_grouped_mm` in bfloat16, as its shape rule rejects other dtypes that the operator itself accepts."""
    if func is not torch.ops.aten._grouped_mm.default or args[0].dtype is torch.bfloat16:
        return func(*args, **kwargs)

    def convert(value: Any) -> Any:
        return value.to(torch.bfloat16) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    converted_args, converted_kwargs = tree_map(convert, (args, kwargs))
    return func(*converted_args, **converted_kwargs).to(args[0].dtype)


@contextmanager
def _fake_weights(model: torch.nn.Module, fake: FakeTensorMode, dtype: torch.dtype, live: _LiveBytes, *, training: bool) -> Iterator[None]:
    """Replace the tensors of the model with fake ones and set its training mode inside the block; restore both afterwards."""
    made: dict[int, torch.Tensor] = {}
    before: list[tuple[dict[str, Any], str, Any]] = []
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = training
            places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
            for place in places:
                for name, tensor in list(place.items()):
                    if isinstance(tensor, torch.Tensor):
                        before.append((place, name, tensor))
                        if id(tensor) not in made:
                            cast = place is places[0] or (place is places[1] and name not in module._non_persistent_buffers_set)
                            made[id(tensor)] = _fake_like(tensor, fake, dtype if cast else tensor.dtype, live)
                        place[name] = made[id(tensor)]
        yield
    finally:
        for place, name, tensor in before:
            place[name] = tensor
        for module, mode in modes.items():
            module.training = mode


def _fake_like(tensor: torch.Tensor, fake: FakeTensorMode, dtype: torch.dtype, live: _LiveBytes) -> torch.Tensor:
    with fake:
        empty = torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device=CPU.type)
    if isinstance(tensor, torch.nn.Parameter):
        empty = torch.nn.Parameter(empty, tensor.requires_grad)
        if tensor.requires_grad:
            empty.register_post_accumulate_grad_hook(lambda parameter: live.forget(parameter.grad))  # type: ignore[no-untyped-call]
    live.exclude(empty)
    return empty


def _fake_inputs(dtype: torch.dtype) -> Callable[[Any], Any]:
    """Return a function that makes fake inputs in the dtype of the weights."""

    def like(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty(value.shape, dtype=dtype if value.is_floating_point() else value.dtype, device=CPU.type)

    return like


def _loss(outputs: Any) -> torch.Tensor | None:
    """Return the tensor to differentiate: the model's own loss, or the mean of its first output that has a gradient."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    found = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return found[0].mean() if found else None


def _cache_of(outputs: Any) -> int:
    """Return the bytes of keys and values in the output of a transformers model."""
    names = ("past_key_values", "cache_params")
    tensors = [tensor for name in names for tensor in _tensors_in(getattr(outputs, name, None))]
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _tensors_in(held: Any, depth: int = 5) -> Iterator[torch.Tensor]:
    """Yield the tensors in a cache, which may be nested: two caches, of layers, of tensors."""
    if isinstance(held, torch.Tensor):
        yield held
    elif depth:
        if isinstance(held, (list, tuple)):
            inner: Iterable[Any] = held
        else:
            inner = held.values() if isinstance(held, Mapping) else getattr(held, "__dict__", {}).values()
        for value in inner:
            yield from _tensors_in(value, depth - 1)


@contextmanager
def _activation_checkpointing(model: torch.nn.Module, wanted: bool) -> Iterator[None]:
    """Run the repeated blocks of the model under activation checkpointing, as most trainers do it."""
    if not wanted:
        yield
        return
    blocks = [model.get_submodule(name) for name in find_repeated_blocks(name for name, _ in model.named_modules() if name)]
    try:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        yield
    finally:
        for block in blocks:
            vars(block).pop("forward", None)


_CONNECT_TIMEOUT: Final = 5.0
"""Seconds after which a network that does not answer counts as offline."""

_Built = tuple[torch.nn.Module, ModelInputs | None]


# --- tensors of a model -------------------------------------------------------------------------------------------------------------


def list_tensors(model: torch.nn.Module) -> EstimatedTensors:
    """Return the parameters and buffers of a model, tied ones once.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 3))
    >>> [(tensor.name, tensor.linear) for tensor in list_tensors(model).tensors][:2]
    [('0.weight', True), ('0.bias', False)]
    """
    whole = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [name for name, module in model.named_modules() if type(module).__name__ in whole]
    linear = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Linear)}
    head = _output_head(model)
    outside = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding) or module is head}
    tensors = [
        EstimatedTensor(
            name,
            tuple(tensor.shape),
            DTYPES.get(tensor.dtype, "U8"),
            trainable=tensor.requires_grad and isinstance(tensor, torch.nn.Parameter),
            linear=id(tensor) in linear - outside,
            layer=next((block for block in blocks if name.startswith(f"{block}.")), None),
        )
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    frozen = sum(tensor.count for tensor in tensors if not tensor.trainable and tensor.floating)
    trained = sum(tensor.count for tensor in tensors if tensor.trainable)
    note = f"{frozen:,} of {frozen + trained:,} numbers are frozen: gradients and optimizer are counted for the others."
    return EstimatedTensors(
        tensors, (note,) if frozen and trained and any(not parameter.requires_grad for parameter in model.parameters()) else ()
    )


def _output_head(model: torch.nn.Module) -> Any:
    """Return the output head, which is not quantized."""
    given = getattr(model, "get_output_embeddings", None)
    found = given() if callable(given) else None
    if found is None:
        found = next((module for module in reversed(list(model.modules())) if isinstance(module, torch.nn.Linear)), None)
    return found if isinstance(getattr(found, "weight", None), torch.Tensor) else None


# --- entry points -------------------------------------------------------------------------------------------------------------------


def from_entry_point(given: str, batch_size: int, sequence_length: int | None) -> _Built:
    """Build the model of `package.module:name` or `file.py:name` (a function, a class or a model) on the meta device."""
    place, _, name = given.rpartition(":")
    found: Any = _import_module(place, given)
    for word in name.split("."):
        if not hasattr(found, word):
            names = _list_buildable(found)
            hint = f"Did you mean {near[0]}? " if (near := nearest(word, names)) else ""
            raise ConfigError(
                f"{given}: there is no {word} in {place}.\n{hint}Functions, classes and models in it: {', '.join(names[:8]) or 'none'}."
            )
        found = getattr(found, word)
    if not isinstance(found, torch.nn.Module):
        if not callable(found):
            raise ConfigError(f"{given} is a {type(found).__name__}, which cannot be called.\nName a function that returns a model.")
        found = _call_entry_point(found, given, {"batch_size": batch_size, "sequence_length": sequence_length or 1})
    model, inputs = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"{given} returned a {type(model).__name__}, not a model.\n"
            "Return a torch.nn.Module, or a pair of one and its inputs (a dict of keywords, a tuple, or a tensor)."
        )
    if lazy := [name for name, parameter in (*model.named_parameters(), *model.named_buffers()) if is_lazy(parameter)]:
        raise ConfigError(
            f"{given} has lazy modules: {lazy[0]} has no size before the model has seen data.\n"
            "Build it with its sizes (Linear instead of LazyLinear), or run one batch through it before returning it."
        )
    return model, _as_inputs(inputs) if inputs is not None else _guessed_inputs(model, batch_size, sequence_length)


def _list_buildable(found: Any) -> list[str]:
    """Return the names in a module or a class that could be an entry point, without imported ones."""
    public = {name: value for name, value in vars(found).items() if not name.startswith("_")}
    if not isinstance(found, ModuleType):
        return list(public)
    home = found.__name__
    return [name for name, value in public.items() if isinstance(value, torch.nn.Module) or (callable(value) and value.__module__ == home)]


def _call_entry_point(function: Callable[..., Any], given: str, known: Mapping[str, Any]) -> Any:
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        names = {}  # type: ignore[assignment]
    keywords = {name: value for name, value in known.items() if name in names}
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if needed := [name.name for name in names.values() if name.kind in kinds and name.default is name.empty and name.name not in keywords]:
        raise ConfigError(
            f"{given} needs {', '.join(needed)}, but it is called with {' and '.join(known)} only, if it accepts them.\n"
            "Give the others default values, or name a function that needs no others."
        )
    try:
        with waiting(f"calling {given}"):
            return _build_on_meta(lambda: function(**keywords))
    except SystemExit as error:
        raise SlipstreamError(f"{given} ended with sys.exit({error.code!r}){_user_line(error)}.\nLet it return a model.") from error
    except Exception as error:
        raise ConfigError(
            f"{given} raised {_describe_error(error)}.\nIt is called on the meta device, with {keywords or 'no arguments'}."
        ) from error


def _build_on_meta(make: Callable[[], Any]) -> Any:
    """Call a function on the meta device; if it needs values of buffers, with only parameters on the meta device."""
    try:
        with torch.device("meta"):
            return make()
    except (RuntimeError, NotImplementedError):
        with init_empty_weights():
            return make()


def _import_module(place: str, given: str) -> ModuleType:
    path = Path(place).expanduser()
    if place.endswith(".py") and not path.is_file():
        raise ConfigError(f"{given}: there is no file {place}.\nWrite path/to/file.py:function, or package.module:function.")
    try:
        with waiting(f"importing {place}"), _importable(str(path.resolve().parent) if path.is_file() else str(Path.cwd())):
            if not path.is_file():
                return importlib.import_module(place)
            spec = importlib.util.spec_from_file_location(path.stem, path)
            if spec is None or spec.loader is None:
                raise ConfigError(f"{given}: {place} is not a Python file.\nWrite path/to/file.py:function.")
            module = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(spec.name, module)  # where dataclasses look for it
            spec.loader.exec_module(module)
            return module
    except ModuleNotFoundError as error:
        if path.is_file() or not f"{place}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{given}: {place} cannot be imported: it needs {error.name}, which is not installed{_user_line(error)}.\n"
                "Install it, or run this where it can be imported."
            ) from error
        raise ConfigError(f"{given}: {error}.\nWrite package.module:function as it is imported here, or a path ending in .py.") from error
    except (Exception, SystemExit) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{given}: {place} cannot be imported: {_describe_error(error)}.") from error


@contextmanager
def _importable(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _describe_error(error: BaseException) -> str:
    """Return the type and message of an error, and the line of the user's code that raised it."""
    lines = str(error.msg if isinstance(error, SyntaxError) else error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.') if lines else 'without a message'}{_user_line(error)}"


def _user_line(error: BaseException) -> str:
    """Return the last line of the user's own files in a traceback; "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" (at {error.filename}:{error.lineno})"
    library = os.path.dirname(os.__file__) + os.sep
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", library)) and "site-packages" not in frame.filename and not is_package_frame(frame.filename)
    ]
    return f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""


# --- inputs of a model --------------------------------------------------------------------------------------------------------------


def _as_inputs(inputs: Any) -> ModelInputs:
    if isinstance(inputs, Mapping):
        return ModelInputs(keywords=dict(inputs))
    return ModelInputs(tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,))


def _guessed_inputs(model: torch.nn.Module, batch_size: int, sequence_length: int | None) -> ModelInputs | None:
    """Return tokens for a model that begins with an embedding, rows for one that begins with a linear layer; else None."""
    if hasattr(model, "main_input_name") and hasattr(model, "config"):
        return _inputs_for_transformers(model, batch_size, sequence_length or 1)
    first = next(
        (module for module in model.modules() if next(module.children(), None) is None and next(module.parameters(), None) is not None),
        None,
    )
    if isinstance(first, torch.nn.Embedding):
        return ModelInputs((torch.empty(batch_size, sequence_length or 1, dtype=torch.long, device="meta"),))
    if isinstance(first, torch.nn.Linear):
        shape = (batch_size, first.in_features) if sequence_length is None else (batch_size, sequence_length, first.in_features)
        return ModelInputs((torch.empty(shape, device="meta"),))
    return None


def _inputs_for_transformers(model: Any, batch_size: int, sequence_length: int) -> ModelInputs | None:
    parameters = inspect.signature(model.forward).parameters
    cached: dict[str, Any] | None = {"use_cache": True} if "use_cache" in parameters else None
    if model.main_input_name == "pixel_values":
        size, channels = getattr(model.config, "image_size", None), getattr(model.config, "num_channels", 3)
        if not isinstance(size, int):
            return None
        return ModelInputs(keywords={"pixel_values": torch.empty(batch_size, channels, size, size, device="meta")})
    if model.main_input_name != "input_ids":
        return None
    tokens = torch.empty(batch_size, sequence_length, dtype=torch.long, device="meta")
    training: dict[str, Any] = {"use_cache": False} if cached else {}
    if "labels" in parameters and type(model).__name__.endswith(("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration")):
        training["labels"] = tokens
    keywords = {"input_ids": tokens}
    if "decoder_input_ids" in parameters and "labels" not in training:
        keywords["decoder_input_ids"] = tokens
    elif "decoder_input_ids" in parameters:
        cached = {**(cached or {}), "decoder_input_ids": tokens}
    return ModelInputs((), keywords, training, cached)


# --- transformers -------------------------------------------------------------------------------------------------------------------


def from_config(config: Mapping[str, Any], path: Path, batch_size: int, sequence_length: int, *, trust_remote_code: bool) -> _Built:
    """Build the model of a transformers config; `path` is the file, or the folder around it."""
    _check_remote_code(config, str(path), trust_remote_code)
    if "model_type" not in config:
        library = "diffusers" if "_class_name" in config else "another library"
        raise ConfigError(
            f"{path} has no model_type, so it is not a transformers config, but one of {library}.\n"
            "Give a Python entry point that builds the model: package.module:function."
        )
    transformers = _transformers(str(path))
    try:
        with silence_libraries(), waiting(f"building the model of {path} (this can take a while)"):
            read = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=trust_remote_code)
            model = _build_from_config(transformers, read, trust_remote_code)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{path}: transformers {transformers.__version__} cannot build a model of the type {config['model_type']!r} from this config: "
            f"{_describe_error(error)}.{_suspicious_fields(config)}"
        ) from error
    return model, _guessed_inputs(model, batch_size, sequence_length)


def _suspicious_fields(config: Mapping[str, Any]) -> str:
    """Return the fields of a config that may have caused the error."""
    words = ("size", "heads", "layers", "dim", "positions", "embeddings")
    sizes = {name: value for name, value in config.items() if name.rpartition("_")[2] in words and value is not None}
    odd = [f"{name} is {value!r}" for name, value in sizes.items() if not isinstance(value, int) or value <= 0]
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not odd and isinstance(hidden, int) and isinstance(heads, int) and hidden % heads:
        odd = [f"hidden_size, {hidden}, is not a multiple of num_attention_heads, {heads}"]
    return f"\nIn it {', '.join(odd)}." if odd else ""


def _check_remote_code(config: Mapping[str, Any], where: str, allowed: bool) -> None:
    """Raise if a config brings code along and the user has not allowed it."""
    if config.get("auto_map") and not allowed:
        raise ConfigError(
            f"{where} asks for code that comes with the model ({', '.join(map(str, dict(config['auto_map']).values()))}).\n"
            "If you trust it, add --trust-remote-code."
        )


def _build_from_config(transformers: Any, config: Any, trust_remote_code: bool) -> torch.nn.Module:
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # measure the unquantized model: kernels for packed weights need their hardware
    names = list(getattr(config, "architectures", None) or ())
    kind = getattr(transformers, names[0], None) if names else None
    foreign = [name for name in (getattr(config, "auto_map", None) or {}) if name.startswith("AutoModel")]

    def make() -> Any:
        if foreign:
            return getattr(transformers, foreign[0]).from_config(config, trust_remote_code=trust_remote_code)
        return transformers.AutoModel.from_config(config) if kind is None else kind._from_config(config)

    return _build_on_meta(make)  # type: ignore[no-any-return]


def _transformers(where: str) -> Any:
    return import_quietly("transformers", f"{where}: models of transformers are built by transformers", "pip install transformers")


def from_hub(name: str, batch_size: int, sequence_length: int | None, environ: Mapping[str, str], *, trust_remote_code: bool) -> _Built:
    """Build the model of that name on the hub, from the local cache or over the network."""
    transformers = _transformers(name)
    missing = f"There is no file, folder or entry point {name!r} here; as the name of a model on the hub it"
    try:
        config = _fetched(transformers, name, trust_remote_code, local_files_only=True)
    except OSError:
        if environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise ConfigError(f"{missing} is not in the cache, and HF_HUB_OFFLINE forbids using the network.") from None
        if not _hub_reachable(environ):
            raise ConfigError(f"{missing} is not in the cache, and the hub cannot be reached: this machine is offline.") from None
        try:
            config = _fetched(transformers, name, trust_remote_code, local_files_only=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{missing} cannot be fetched: {str(error).strip().splitlines()[0]}") from error
    _check_remote_code(vars(config), name, trust_remote_code)
    try:
        with silence_libraries(), waiting(f"building the model {name} (this can take a while)"):
            model = _build_from_config(transformers, config, trust_remote_code)
    except Exception as error:
        raise ConfigError(f"{name}: transformers {transformers.__version__} cannot build it: {_describe_error(error)}.") from error
    return model, _guessed_inputs(model, batch_size, sequence_length)


def _fetched(transformers: Any, name: str, trust_remote_code: bool, *, local_files_only: bool) -> Any:
    with silence_libraries():
        return transformers.AutoConfig.from_pretrained(name, local_files_only=local_files_only, trust_remote_code=trust_remote_code)


def _hub_reachable(environ: Mapping[str, str]) -> bool:
    """Return whether the hub, or its proxy, accepts a connection within seconds; a DNS lookup may take longer to fail."""
    constants = importlib.import_module("huggingface_hub.constants")
    proxies = [environ[name] for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY") if environ.get(name)]
    target = urlsplit(proxies[0] if proxies else constants.ENDPOINT)
    port = target.port or (443 if target.scheme == "https" else 80)
    answers: list[bool] = []

    def connect() -> None:
        with contextlib.suppress(OSError):
            socket.create_connection((target.hostname, port), timeout=_CONNECT_TIMEOUT).close()
            answers.append(True)

    asking = threading.Thread(target=connect, daemon=True)
    asking.start()
    asking.join(_CONNECT_TIMEOUT)
    return bool(answers)


@contextmanager
def plain_transformers_paths() -> Iterator[None]:
    """Make transformers assume one sequence per row inside the block.

    It reads the values of positions to detect packed sequences, which fake tensors do not have, and would then create masks that a real
    run does not have.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    before = getattr(masking, "find_packed_sequence_indices", None)
    try:
        if before is not None:
            masking.find_packed_sequence_indices = lambda position_ids: None
        with silence_libraries():
            yield
    finally:
        if before is not None:
            masking.find_packed_sequence_indices = before
