"""`accelerate estimate-memory`: how large a model is in several number formats, without loading its weights.

MODEL is a folder with a config.json, or a name on the hub. `slipstream estimate` counts more: activations, caches, sharded training.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from accelerate.commands.utils import CustomArgumentParser

__all__ = [
    "add_timm_hub_prefix", "check_has_model", "create_ascii_table", "create_empty_model", "estimate_command", "estimate_command_parser",
    "estimate_training_usage", "gather_data", "main", "verify_on_hub",
]

_DTYPES = ["float32", "float16", "int8", "int4"]
_SHRINK = {"float32": 1, "float16": 2, "bfloat16": 2, "fp8": 4, "int8": 4, "int4": 8}


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """Return what the hub knows about a model: "gated" if it needs an account, or the hub is out of reach; "repo" if there is none."""
    from huggingface_hub import model_info
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    # The errors of a connection have the base of the HTTP package that the hub's client is built on, besides OSError in older ones.
    unreachable = tuple(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    try:
        return model_info(repo, token=token)
    except GatedRepoError:
        return "gated"
    except RepositoryNotFoundError:
        return "repo"
    except (OSError, *unreachable):
        return "gated"


def check_has_model(error: BaseException) -> str:
    """Return which library an error of loading comes from: "timm", "transformers", or "unknown"."""
    from accelerate.utils.imports import is_timm_available, is_transformers_available

    if is_timm_available() and isinstance(error, RuntimeError) and "Unknown model" in str(error.args[:1]):
        return "timm"
    if is_transformers_available() and isinstance(error, OSError) and "does not appear to have a file named" in str(error.args[:1]):
        return "transformers"
    return "unknown"


def add_timm_hub_prefix(model_name: str) -> str:
    """Return a model's name as timm wants it: repositories of the hub need `hf-hub:` in front.

    >>> add_timm_hub_prefix("timm/resnet50.a1_in1k"), add_timm_hub_prefix("resnet50")
    ('hf-hub:timm/resnet50.a1_in1k', 'resnet50')
    """
    return f"hf-hub:{model_name}" if "/" in model_name and ":" not in model_name.partition("/")[0] else model_name


def _library(model_name: str, library_name: str | None, access_token: str | None) -> str:
    """Return whose model it is, asking the hub where it is not said; raise if the hub has no such model."""
    if os.path.isdir(model_name):
        return library_name or "transformers"
    info = verify_on_hub(model_name, access_token)
    if info == "gated":
        raise OSError(f"{model_name} is gated on the hub, or the hub cannot be reached. Log in (`hf auth login`), or give a local folder.")
    if info == "repo":
        raise OSError(f"There is no model {model_name} on the hub. If it is private, log in with `hf auth login`.")
    found = library_name or getattr(info, "library_name", None)
    if not found:
        raise ValueError(f"The hub does not say which library {model_name} is for. Give --library_name timm or transformers.")
    return str(found)


def _transformers_model(model_name: str, trust_remote_code: bool, access_token: str | None) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(model_name, trust_remote_code=trust_remote_code, token=access_token)
    custom = getattr(config, "auto_map", None)
    named = next((name for name in custom if name.startswith("AutoModel")), None) if custom else None
    if named is not None:
        return getattr(transformers, named).from_config(config, trust_remote_code=trust_remote_code)
    architectures = getattr(config, "architectures", None) or []
    kind = getattr(transformers, architectures[0], None) if architectures else None
    return kind(config) if kind is not None else transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code)


def create_empty_model(model_name: str, library_name: str | None, trust_remote_code: bool = False, access_token: str | None = None) -> Any:
    """Return a model on the meta device; nothing of its weights is downloaded or allocated."""
    from accelerate.big_modeling import init_empty_weights
    from accelerate.utils.imports import is_timm_available, is_transformers_available

    library = _library(model_name, library_name, access_token)
    if library == "transformers":
        if not is_transformers_available():
            raise ImportError(f"{model_name} needs transformers: pip install transformers")
        print(f"Reading the configuration of {model_name} (transformers) ...")
        with init_empty_weights():
            return _transformers_model(model_name, trust_remote_code, access_token)
    if library == "timm":
        if not is_timm_available():
            raise ImportError(f"{model_name} needs timm: pip install timm")
        import timm

        print(f"Reading the configuration of {model_name} (timm) ...")
        try:
            with init_empty_weights():
                return timm.create_model(add_timm_hub_prefix(model_name), pretrained=False)
        except KeyError as error:  # the file of another library
            raise RuntimeError(f"Tried to load `{model_name}` with `timm` but its configuration has no {error}.") from error
    raise ValueError(f"{model_name} is for {library}; models of transformers and timm can be built without their weights.")


def create_ascii_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], title: str) -> str:
    """Return a table with a title, drawn with lines.

    >>> print(create_ascii_table(["a", "b"], [["1", "2"]], "T"))
    ┌───┐
    │ T │
    ├─┬─┤
    │a│b│
    ├─┼─┤
    │1│2│
    └─┴─┘
    """
    cells = [[str(cell) for cell in row] for row in [headers, *rows]]
    widths = [max(len(row[index]) for row in cells) for index in range(len(headers))]
    widths[-1] += max(0, len(title) + 2 - (sum(widths) + len(widths) - 1)) if len(title) > 1 else 0
    total = sum(widths) + len(widths) - 1

    def line(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * width for width in widths) + right

    drawn = ["│" + "│".join(cell.center(width) for cell, width in zip(row, widths, strict=True)) + "│" for row in cells]
    top = ["┌" + "─" * total + "┐", f"│{title.center(total)}│", line("├", "┬", "┤"), drawn[0], line("├", "┼", "┤")]
    return "\n".join([*top, *drawn[1:], line("└", "┴", "┘")])


def estimate_training_usage(bytes: int, mixed_precision: str, msamp_config: str | None = None) -> dict[str, float]:
    """Return the bytes of weights, gradients, Adam's state and the step, for `bytes` of weights in float32; -1 where it cannot train.

    >>> estimate_training_usage(1000, "float32")["step"]
    4000
    """
    if msamp_config is not None:
        from slipstream.errors import ConfigError

        raise ConfigError("msamp_config: MS-AMP does not run here, so its memory is not estimated.")
    if mixed_precision == "float32":
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes, "step": bytes * 4}
    if mixed_precision in ("float16", "bfloat16", "fp8"):
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes * 3 / 2, "step": bytes * 2}
    return dict.fromkeys(("model", "optimizer", "gradients", "step"), -1)


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """Return for each number format: its name, the bytes of the largest layer, of all weights, and of training."""
    from accelerate.utils.modeling import calculate_maximum_sizes

    try:
        model = create_empty_model(args.model_name, library_name=args.library_name, trust_remote_code=args.trust_remote_code)
    except (RuntimeError, OSError) as error:
        library = check_has_model(error)
        if library != "unknown":
            raise RuntimeError(f"Tried to load `{args.model_name}` with `{library}`, but it is no model of that library.") from error
        raise
    total, largest = calculate_maximum_sizes(model)
    rows = []
    for dtype in args.dtypes:
        shrink = _SHRINK[dtype]
        sizes = (largest[0], total) if shrink == 1 else (largest[0] / shrink, total / shrink)
        rows.append([dtype, *sizes, estimate_training_usage(total, dtype)])
    return rows


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate estimate-memory`."""
    description = "Estimate how much memory a model needs, without loading its weights."
    if subparsers is not None:
        parser = subparsers.add_parser("estimate-memory", description=description)
    else:
        parser = CustomArgumentParser(description=description)
    parser.add_argument("model_name", type=str, help="A local folder with a config.json, or a name on the hub.")
    parser.add_argument("--library_name", type=str, choices=["timm", "transformers"], default=None, help="Whose model it is.")
    parser.add_argument("--dtypes", type=str, nargs="+", default=list(_DTYPES), choices=list(_DTYPES), help="Number formats.")
    parser.add_argument("--trust_remote_code", action="store_true", default=False, help="Run the code that comes with the model.")
    if subparsers is not None:
        parser.set_defaults(func=estimate_command)
    return parser


def estimate_command(args: argparse.Namespace) -> None:
    """Print the table; a model that cannot be built is a ConfigError, which the command prints as a message."""
    from accelerate.utils.other import convert_bytes
    from slipstream.errors import ConfigError

    try:
        data = gather_data(args)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(f"estimate-memory {args.model_name}: {error}") from error
    rows = []
    for dtype, largest, total, training in data:
        needed = max(training.values())
        rows.append([dtype, convert_bytes(largest), convert_bytes(total), "N/A" if needed < 0 else convert_bytes(needed)])
    headers = ["dtype", "Largest Layer", "Total Size", "Training using Adam"]
    print(create_ascii_table(headers, rows, f"Memory Usage for loading `{args.model_name}`"))


def main() -> None:
    """Run the command `accelerate-estimate-memory`."""
    from accelerate.commands.accelerate_cli import run_and_report

    raise SystemExit(run_and_report(estimate_command, estimate_command_parser().parse_args()))


if __name__ == "__main__":
    main()
