"""Which packages are installed, in which version, found without importing them; and imports of noisy packages with their logging
silenced.

`PACKAGES` is the table behind the `is_..._available` functions. `compare_versions` follows PEP 440. `import_quietly` imports a package
and raises a `ConfigError` with the remedy if it is missing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeVar

from slipstream.errors import ConfigError, SlipstreamError

__all__ = [
    "PACKAGES", "Package", "TORCH_OF", "compare_versions", "deepspeed_required", "import_quietly", "installed", "is_4bit_bnb_available",
    "is_8bit_bnb_available", "is_bitsandbytes_multi_backend_available", "is_bnb_available", "is_fp8_available", "is_numpy_available",
    "is_pippy_available", "is_torch_distributed_available", "is_torch_version", "is_transformer_engine_mxfp8_available",
    "is_weights_only_available", "parse_version", "require_torch", "silence_libraries", "torchao_required", "version_of",
]


_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Package:
    """How one package is found: any of the import names will do."""

    imports: tuple[str, ...]
    distributions: tuple[str, ...]
    minimum: str | None = None
    below: str | None = None


def _row(name: str, distribution: str | None = None, minimum: str | None = None, below: str | None = None) -> Package:
    return Package((name,), (distribution or name,), minimum, below)


_SAME_NAME: Final = (
    "amdsmi", "boto3", "clearml", "datasets", "deepspeed", "dvclive", "matplotlib", "numpy", "pandas", "peft", "pytest", "rich",
    "sagemaker", "schedulefree", "swanlab", "timm", "torchdata", "torchvision", "tqdm", "trackio", "transformers", "triton", "wandb",
)
"""Packages whose row, import and distribution have one name."""

PACKAGES: dict[str, Package] = {
    **{name: _row(name) for name in _SAME_NAME},
    "aim": _row("aim", below="4.0"),
    "bnb": _row("bitsandbytes"),
    "comet_ml": _row("comet_ml", "comet-ml"),
    "import_timer": _row("import_timer", "import-timer"),
    "lomo": _row("lomo_optim", "lomo-optim"),
    "megatron_lm": _row("megatron.core", "megatron-core"),
    "mlflow": Package(("mlflow",), ("mlflow", "mlflow-skinny")),
    "msamp": _row("msamp", "ms-amp"),
    "pynvml": Package(("pynvml",), ("nvidia-ml-py", "pynvml")),
    "tensorboard": Package(("tensorboard", "tensorboardX"), ("tensorboard", "tensorboardX")),
    "torchao": _row("torchao", minimum="0.6.1"),
    "torchdata_stateful_dataloader": _row("torchdata", minimum="0.8.0"),
    "transformer_engine": Package(("transformer_engine", "intel_transformer_engine"), ("transformer-engine", "transformer_engine")),
}


# --- versions ----------------------------------------------------------------------------------------------------------------

_VERSION = re.compile(
    r"v?(?:(?P<epoch>\d+)!)?(?P<release>\d+(?:\.\d+)*)"
    r"(?:[-_.]?(?P<pre>alpha|beta|preview|pre|rc|a|b|c)[-_.]?(?P<pre_number>\d*))?"
    r"(?P<post>(?:-(?P<post_bare>\d+))|(?:[-_.]?(?:post|rev|r)[-_.]?(?P<post_number>\d*)))?"
    r"(?P<dev>[-_.]?dev[-_.]?(?P<dev_number>\d*))?"
    r"(?:\+(?P<local>[a-z0-9]+(?:[-_.][a-z0-9]+)*))?",
    re.IGNORECASE,
)
_PRE = {"a": 0, "alpha": 0, "b": 1, "beta": 1, "c": 2, "rc": 2, "pre": 2, "preview": 2}
_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def parse_version(text: str) -> tuple[Any, ...]:
    """Return a version as a tuple that sorts as PEP 440 says, without the local part (`+cpu`).

    >>> parse_version("2.13.0+cpu") == parse_version("2.13") > parse_version("2.13.0rc1") > parse_version("2.13.dev4")
    True
    """
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a version; write one like 2.8 or 2.8.0")
    release = tuple(int(part) for part in match["release"].split("."))
    while release and release[-1] == 0:
        release = release[:-1]
    pre = (_PRE[match["pre"].lower()], int(match["pre_number"] or 0)) if match["pre"] else None
    post = -1 if match["post"] is None else int(match["post_bare"] or match["post_number"] or 0)
    dev = int(match["dev_number"] or 0) if match["dev"] else None
    # A development version without more comes before the first alpha; a plain release after every candidate.
    before = pre if pre is not None else ((-1, 0) if dev is not None and post < 0 else (3, 0))
    return int(match["epoch"] or 0), release, before, post, (0, dev) if dev is not None else (1, 0)


def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None; reads its metadata and imports nothing."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def compare_versions(library_or_version: Any, operation: str, requirement_version: Any) -> bool:
    """Compare the installed version of a library, or a version (a text, or a Version of packaging), with another.

    >>> compare_versions("1.10", ">", "1.9"), compare_versions("numpy", ">=", "1.25")
    (True, True)
    """
    if operation not in _OPERATIONS:
        raise ConfigError(f"{operation!r} is not a comparison; write one of {', '.join(_OPERATIONS)}")
    given = str(library_or_version)
    version = given if _VERSION.fullmatch(given) else version_of(given)
    if version is None:
        raise ConfigError(f"{given!r} is neither a version nor an installed library; install it or write a version")
    return bool(_OPERATIONS[operation](parse_version(version), parse_version(str(requirement_version))))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare torch's release with a version; a nightly build counts as the release it leads to. Imports no torch.

    >>> is_torch_version(">=", "2.8")
    True
    """
    found = version_of("torch")
    if found is None:
        raise ConfigError("torch is not installed; install it first")
    match = _VERSION.fullmatch(found)
    return compare_versions(match["release"] if match else found, operation, version)


TORCH_OF: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "Sharded training (FSDP)": ("2.13", "Train with replicas instead: leave out use_fsdp, fsdp_plugin and dp_shard_size."),
        "The stand-in device": ("2.13", "Test on the CPU instead: ranks(2, device='cpu'), or --cpu."),
    }
)
"""What needs a later torch than the rest of this package: the earliest version with the parts that it uses, and what to do without it."""


def require_torch(feature: str, error: type[SlipstreamError] = ConfigError) -> None:
    """Raise if the installed torch is too old for a feature of `TORCH_OF`; everything else runs on torch 2.8."""
    version, instead = TORCH_OF[feature]
    if not is_torch_version(">=", version):
        raise error(f"{feature} needs torch {version} or later, and torch {version_of('torch')} is installed.\n{instead}")


# --- packages ----------------------------------------------------------------------------------------------------------------


def installed(name: str, minimum: str | None = None) -> bool:
    """Return whether the package of a row is installed, in a version that counts.

    >>> installed("numpy"), installed("numpy", minimum="999")
    (True, False)
    """
    row = PACKAGES[name]
    if not any(_has_spec(module) for module in row.imports):
        return False
    lowest = minimum or row.minimum
    if lowest is None and row.below is None:
        return True
    version = next((found for found in map(version_of, row.distributions) if found is not None), None)
    if version is None:
        return False
    return (lowest is None or compare_versions(version, ">=", lowest)) and (row.below is None or compare_versions(version, "<", row.below))


def _has_spec(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the package above it is not there
        return False
    except ValueError:  # a module put in place by hand, without a spec
        return True
    # A folder of that name on the path has a spec too, but nothing to import.
    return spec is not None and spec.origin is not None


def __getattr__(name: str) -> Callable[[], bool]:
    """Return `is_<row>_available` for a row of `PACKAGES`, made on first use."""
    row = name.removeprefix("is_").removesuffix("_available")
    if name != f"is_{row}_available" or row not in PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def check() -> bool:
        return installed(row)

    check.__name__ = check.__qualname__ = name
    check.__doc__ = f"Return whether {' or '.join(PACKAGES[row].imports)} is installed, in a version that counts."
    globals()[name] = check
    return check


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return whether numpy is installed, and at least of a version."""
    return installed("numpy", min_version)


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed, and at least of a version."""
    return installed("bnb", min_version)


def is_8bit_bnb_available() -> bool:
    """Return whether bitsandbytes has 8-bit layers."""
    return is_bnb_available("0.37.2")


def is_4bit_bnb_available() -> bool:
    """Return whether bitsandbytes has 4-bit layers."""
    return is_bnb_available("0.39.0")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether bitsandbytes runs on more than one family of devices."""
    return is_bnb_available("0.46.0")


def is_transformer_engine_mxfp8_available() -> bool:
    """Return whether transformer_engine has the recipe for MXFP8 block scaling."""
    return installed("transformer_engine", "2.1.0")


def is_fp8_available() -> bool:
    """Return whether a package that trains in float8 is installed."""
    return any(map(installed, ("msamp", "transformer_engine", "torchao")))


def is_pippy_available() -> bool:
    """Return whether torch has pipelining of its own."""
    return is_torch_version(">=", "2.4")


def is_weights_only_available() -> bool:
    """Return whether torch.load can be held to plain data."""
    return is_torch_version(">=", "2.4")


def is_torch_distributed_available() -> bool:
    """Return whether torch was built with torch.distributed. Imports torch."""
    return bool(importlib.import_module("torch.distributed").is_available())


def _required(name: str) -> Callable[[_Function], _Function]:
    def decorate(func: _Function) -> _Function:
        @functools.wraps(func)
        def guarded(*arguments: Any, **options: Any) -> Any:
            if not installed(name):
                remedy = f"pip install {PACKAGES[name].distributions[0]}"
                raise ImportError(f"{func.__qualname__} needs {name}, which is not installed: {remedy}")
            return func(*arguments, **options)

        return guarded  # type: ignore[return-value]

    return decorate


torchao_required = _required("torchao")
"""Decorator: the function raises an ImportError if torchao is not installed."""
deepspeed_required = _required("deepspeed")
"""Decorator: the function raises an ImportError if deepspeed is not installed."""


_RAISED_ELSEWHERE: Final = logging.CRITICAL
_NOISY: Final = (
    ("torchao", logging.WARNING),  # kernels for other hardware
    ("torch.utils._pytree", logging.WARNING),
    ("transformers", logging.WARNING),  # advice on what would be faster
    ("torch._subclasses.fake_tensor", _RAISED_ELSEWHERE),  # errors that are raised too
)


@contextmanager
def silence_libraries() -> Iterator[None]:
    """Hide warnings, and what noisy libraries log, in the block.

    >>> with silence_libraries():
    ...     logging.getLogger("torchao").warning("no kernel")
    """
    with ExitStack() as after, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, level in _NOISY:
            logger = logging.getLogger(name)
            for place in (logger, *logger.handlers):  # a logger's filter does not see what those below it log; its handlers do
                is_above = functools.partial(_is_above, level)
                place.addFilter(is_above)
                after.callback(place.removeFilter, is_above)
        yield


def import_quietly(package: str, what: str, remedy: str) -> Any:
    """Import a package that `what` needs; raise a ConfigError with the remedy if it is not installed.

    >>> import_quietly("nothing_like_that", "this", "pip install it.")
    Traceback (most recent call last):
    slipstream.errors.ConfigError: this, which is not installed (No module named 'nothing_like_that'): pip install it.
    """
    try:
        with silence_libraries():
            return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{what}, which is not installed ({error}): {remedy}") from None


def _is_above(level: int, record: logging.LogRecord) -> bool:
    return record.levelno > level
