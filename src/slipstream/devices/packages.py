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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from slipstream.errors import ConfigError

__all__ = [
    "PACKAGES", "Package", "compare_versions", "deepspeed_required", "import_quietly", "installed", "is_4bit_bnb_available",
    "is_8bit_bnb_available", "is_aim_available", "is_amdsmi_available", "is_bitsandbytes_multi_backend_available", "is_bnb_available",
    "is_boto3_available", "is_clearml_available", "is_comet_ml_available", "is_datasets_available", "is_deepspeed_available",
    "is_dvclive_available", "is_fp8_available", "is_import_timer_available", "is_lomo_available", "is_matplotlib_available",
    "is_megatron_lm_available", "is_mlflow_available", "is_msamp_available", "is_numpy_available", "is_pandas_available",
    "is_peft_available", "is_pippy_available", "is_pynvml_available", "is_pytest_available", "is_rich_available", "is_sagemaker_available",
    "is_schedulefree_available", "is_swanlab_available", "is_tensorboard_available", "is_timm_available", "is_torch_distributed_available",
    "is_torch_version", "is_torchao_available", "is_torchdata_available", "is_torchdata_stateful_dataloader_available",
    "is_torchvision_available", "is_tqdm_available", "is_trackio_available", "is_transformer_engine_available",
    "is_transformer_engine_mxfp8_available", "is_transformers_available", "is_triton_available", "is_wandb_available",
    "is_weights_only_available", "parse_version", "silence_libraries", "torchao_required", "version_of",
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


PACKAGES: dict[str, Package] = {
    "aim": _row("aim", below="4.0"),
    "amdsmi": _row("amdsmi"),
    "bnb": _row("bitsandbytes"),
    "boto3": _row("boto3"),
    "clearml": _row("clearml"),
    "comet_ml": _row("comet_ml", "comet-ml"),
    "datasets": _row("datasets"),
    "deepspeed": _row("deepspeed"),
    "dvclive": _row("dvclive"),
    "import_timer": _row("import_timer", "import-timer"),
    "lomo": _row("lomo_optim", "lomo-optim"),
    "matplotlib": _row("matplotlib"),
    "megatron_lm": _row("megatron.core", "megatron-core"),
    "mlflow": Package(("mlflow",), ("mlflow", "mlflow-skinny")),
    "msamp": _row("msamp", "ms-amp"),
    "numpy": _row("numpy"),
    "pandas": _row("pandas"),
    "peft": _row("peft"),
    "pynvml": Package(("pynvml",), ("nvidia-ml-py", "pynvml")),
    "pytest": _row("pytest"),
    "rich": _row("rich"),
    "sagemaker": _row("sagemaker"),
    "schedulefree": _row("schedulefree"),
    "swanlab": _row("swanlab"),
    "tensorboard": Package(("tensorboard", "tensorboardX"), ("tensorboard", "tensorboardX")),
    "timm": _row("timm"),
    "torchao": _row("torchao", minimum="0.6.1"),
    "torchdata": _row("torchdata"),
    "torchdata_stateful_dataloader": _row("torchdata", minimum="0.8.0"),
    "torchvision": _row("torchvision"),
    "tqdm": _row("tqdm"),
    "trackio": _row("trackio"),
    "transformer_engine": Package(("transformer_engine", "intel_transformer_engine"), ("transformer-engine", "transformer_engine")),
    "transformers": _row("transformers"),
    "triton": _row("triton"),
    "wandb": _row("wandb"),
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
    """A version as a tuple that sorts as PEP 440 says; the local part (`+cpu`) does not count.

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
    """The installed version of a distribution, or None; reads its metadata and imports nothing of it."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def compare_versions(library_or_version: str, operation: str, requirement_version: str) -> bool:
    """Compare the installed version of a library, or a version, with another.

    >>> compare_versions("1.10", ">", "1.9"), compare_versions("numpy", ">=", "1.25")
    (True, True)
    """
    if operation not in _OPERATIONS:
        raise ConfigError(f"{operation!r} is no comparison; write one of {', '.join(_OPERATIONS)}")
    version = library_or_version if _VERSION.fullmatch(library_or_version) else version_of(library_or_version)
    if version is None:
        raise ConfigError(f"{library_or_version!r} is neither a version nor an installed library; install it or write a version")
    return bool(_OPERATIONS[operation](parse_version(version), parse_version(requirement_version)))


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


# --- packages ----------------------------------------------------------------------------------------------------------------


def installed(name: str, minimum: str | None = None) -> bool:
    """Whether the package of this table row is installed, in a version that counts.

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


def _check(name: str) -> Callable[[], bool]:
    def check() -> bool:
        return installed(name)

    check.__name__ = check.__qualname__ = f"is_{name}_available"
    check.__doc__ = f"Whether {' or '.join(PACKAGES[name].imports)} is installed, in a version that counts."
    return check


is_aim_available = _check("aim")
is_amdsmi_available = _check("amdsmi")
is_boto3_available = _check("boto3")
is_clearml_available = _check("clearml")
is_comet_ml_available = _check("comet_ml")
is_datasets_available = _check("datasets")
is_deepspeed_available = _check("deepspeed")
is_dvclive_available = _check("dvclive")
is_import_timer_available = _check("import_timer")
is_lomo_available = _check("lomo")
is_matplotlib_available = _check("matplotlib")
is_megatron_lm_available = _check("megatron_lm")
is_mlflow_available = _check("mlflow")
is_msamp_available = _check("msamp")
is_pandas_available = _check("pandas")
is_peft_available = _check("peft")
is_pynvml_available = _check("pynvml")
is_pytest_available = _check("pytest")
is_rich_available = _check("rich")
is_sagemaker_available = _check("sagemaker")
is_schedulefree_available = _check("schedulefree")
is_swanlab_available = _check("swanlab")
is_tensorboard_available = _check("tensorboard")
is_timm_available = _check("timm")
is_torchao_available = _check("torchao")
is_torchdata_available = _check("torchdata")
is_torchdata_stateful_dataloader_available = _check("torchdata_stateful_dataloader")
is_torchvision_available = _check("torchvision")
is_tqdm_available = _check("tqdm")
is_trackio_available = _check("trackio")
is_transformer_engine_available = _check("transformer_engine")
is_transformers_available = _check("transformers")
is_triton_available = _check("triton")
is_wandb_available = _check("wandb")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Whether numpy is installed, and at least of a version."""
    return installed("numpy", min_version)


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is installed, and at least of a version."""
    return installed("bnb", min_version)


def is_8bit_bnb_available() -> bool:
    """Whether bitsandbytes has 8-bit layers."""
    return is_bnb_available("0.37.2")


def is_4bit_bnb_available() -> bool:
    """Whether bitsandbytes has 4-bit layers."""
    return is_bnb_available("0.39.0")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Whether bitsandbytes runs on more than one family of devices."""
    return is_bnb_available("0.46.0")


def is_transformer_engine_mxfp8_available() -> bool:
    """Whether transformer_engine has the recipe for MXFP8 block scaling."""
    return installed("transformer_engine", "2.1.0")


def is_fp8_available() -> bool:
    """Whether a package that trains in float8 is installed."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def is_pippy_available() -> bool:
    """Whether torch has pipelining of its own."""
    return is_torch_version(">=", "2.4")


def is_weights_only_available() -> bool:
    """Whether torch.load can be held to plain data."""
    return is_torch_version(">=", "2.4")


def is_torch_distributed_available() -> bool:
    """Whether torch was built with torch.distributed. Imports torch."""
    return bool(importlib.import_module("torch.distributed").is_available())


def _required(name: str) -> Callable[[_Function], _Function]:
    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def guarded(*arguments: Any, **options: Any) -> Any:
            if not installed(name):
                remedy = f"pip install {PACKAGES[name].distributions[0]}"
                raise ImportError(f"{function.__qualname__} needs {name}, which is not installed: {remedy}")
            return function(*arguments, **options)

        return guarded  # type: ignore[return-value]

    return decorate


torchao_required = _required("torchao")
"""Decorator: calling the function without torchao is an ImportError that says so."""
deepspeed_required = _required("deepspeed")
"""Decorator: calling the function without deepspeed is an ImportError that says so."""


_RAISED_ELSEWHERE: Final = logging.CRITICAL
_NOISY: Final = (
    ("torchao", logging.WARNING),  # kernels for other hardware
    ("torch.utils._pytree", logging.WARNING),
    ("transformers", logging.WARNING),  # advice on what would be faster
    ("torch._subclasses.fake_tensor", _RAISED_ELSEWHERE),  # errors that are raised too
)


@contextmanager
def silence_libraries() -> Iterator[None]:
    """Within it, what these libraries log up to these levels is not shown, and no warning is.

    >>> with silence_libraries():
    ...     logging.getLogger("torchao").warning("no kernel")
    """
    with ExitStack() as after, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, level in _NOISY:
            logger = logging.getLogger(name)
            for place in (logger, *logger.handlers):  # a logger's filter does not see what those below it log; its handlers do
                refuse = _above_level(level)
                place.addFilter(refuse)
                after.callback(place.removeFilter, refuse)
        yield


def import_quietly(package: str, what: str, remedy: str) -> Any:
    """A package that `what` needs; a ConfigError with the remedy where it is not installed.

    >>> import_quietly("nothing_like_that", "this", "pip install it.")
    Traceback (most recent call last):
    slipstream.errors.ConfigError: this, which is not installed (No module named 'nothing_like_that'): pip install it.
    """
    try:
        with silence_libraries():
            return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{what}, which is not installed ({error}): {remedy}") from None


def _above_level(level: int) -> Any:
    def is_above(record: logging.LogRecord) -> bool:
        return record.levelno > level

    return is_above
