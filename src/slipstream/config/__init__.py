"""The options of Slipstream: declared once, read from everywhere, each value with its origin.

    option.py     what an option is, and how a text becomes a value       schema.py     the options themselves, in frozen sections
    sources.py    the environment and files (the only `os.environ`)       files.py      what a file says; relative.py: other tools' files
    resolve.py    constructor > flags > environment > file > default      checks.py     what two options must not say together
    resolved.py   `Config`, the result                                    transport.py  the result on its way to the workers
    names.py      names that are not options                              write.py      files that we write

Nothing here imports torch, click or rich, and PyYAML only when a file is read or written.
"""

from slipstream.config.names import missing_feature, unknown_flag
from slipstream.config.option import Option, Origin, flag_names, negative_flag_names
from slipstream.config.resolve import for_worker, resolve
from slipstream.config.resolved import Config, Unused
from slipstream.config.schema import OPTIONS
from slipstream.errors import ConfigError

__all__ = [
    "OPTIONS",
    "Config",
    "ConfigError",
    "Option",
    "Origin",
    "Unused",
    "flag_names",
    "for_worker",
    "missing_feature",
    "negative_flag_names",
    "resolve",
    "unknown_flag",
]
