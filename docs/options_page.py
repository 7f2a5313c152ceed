"""The options page of the documentation, generated from the declarations.

`python docs/options_page.py` prints it; a test compares `docs/options.md` with it.
"""

from __future__ import annotations

import sys
from typing import Final

from slipstream.config.names import FEATURES
from slipstream.config.option import Option, flag_names, negative_flag_names
from slipstream.config.schema import OPTIONS, SECTIONS

__all__ = ["options_page"]

_INTRODUCTION: Final = """\
# Options

<!-- Made by `python docs/options_page.py`; change the declarations in src/slipstream/config/schema.py instead. -->

Every option can be given in several places. The strongest one that names it wins:

1. an argument of the call in the script, such as `Accelerator(mixed_precision="bf16")`;
2. a flag of `slipstream launch`, such as `--mixed_precision bf16` (`--mixed-precision` is the same);
3. a variable, such as `SLIPSTREAM_MIXED_PRECISION=bf16` (an empty one counts as not set);
4. a file: that of `--config_file`, else of `SLIPSTREAM_CONFIG_FILE`, else `config.yaml` in `$SLIPSTREAM_HOME`,
   `$XDG_CONFIG_HOME/slipstream` or `~/.config/slipstream`;
5. the default.

`slipstream launch --show` prints every value with the place it came from. A name that is no option is an error that suggests
the nearest one; so are values that cannot be, and options that contradict each other.

A script that is started without the launcher reads variables, and a file only when `SLIPSTREAM_CONFIG_FILE` names it.

A file is YAML (or JSON, when its name ends in `.json`), with one line per option:

```yaml
version: 1
num_processes: 2
mixed_precision: bf16
```

Files of `accelerate config` are read too. Keys with the same meaning are used, keys that have no effect are printed, and keys
that ask for a feature that is not available are errors. `slipstream config update` turns such a file into one of ours.
"""

_FEATURES_INTRODUCTION: Final = """\
## Not available in this version

These names are recognised, as flag, file key or variable, and are an error that says so.

| feature | names |
|---|---|
"""


def options_page() -> str:
    """The whole page as Markdown."""
    return "\n".join([_INTRODUCTION, *(_section(section, declared) for section, declared in SECTIONS.items()), _features()])


def _section(section: str, declared: type) -> str:
    rows = [_row(option) for option in OPTIONS.values() if option.section == section]
    return "\n".join([f"## {section}", "", str(declared.__doc__), "", "| option | default | meaning |", "|---|---|---|", *rows, ""])


def _row(option: Option) -> str:
    flags = [*flag_names(option)[:1], *([option.short] if option.short else []), *negative_flag_names(option)[:1]]
    places = [", ".join(f"`{flag}`" for flag in flags)]
    if option.variable:
        places.append(f"`{option.variable}`")
    places += [f"`{key}:`" for key in option.keys]
    wanted = option.wanted if option.choices or option.minimum is not None or option.above is not None else ""
    meaning = option.help + (f" {wanted[0].upper()}{wanted[1:]}." if wanted else "")
    return f"| {'<br>'.join(places)} | {_default(option)} | {_escaped(meaning)} |"


def _default(option: Option) -> str:
    if option.default is None:
        return "not set"
    if option.is_switch:
        return "yes" if option.default else "no"
    return f"`{option.default:g}`" if isinstance(option.default, float) else f"`{option.default}`" if option.default != "" else "empty"


def _features() -> str:
    rows = [f"| {feature.title} | {', '.join(f'`{name}`' for name in feature.names.split())} |" for feature in FEATURES]
    return _FEATURES_INTRODUCTION + "\n".join(rows) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(options_page())
