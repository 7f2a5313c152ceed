"""Keep secrets out of reports and logs: by the name of a variable, by the form of its value, and by the user part of a URL.

Reports are public, so too much is hidden rather than too little; log messages hide only what is certainly a secret (`message_redactor`),
because "tokens=4096" and a commit hash are their content. Nothing here reads the environment. Every pattern begins with something rare (a
word, "://"), so that the time grows linearly with the length of the text.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["HIDDEN", "message_redactor", "redact", "redact_text", "redact_values"]

HIDDEN: Final = "[redacted]"
_LONGEST: Final = 2000

_WORDS: Final = (
    r"key|token(?!iz)|secret|passw|passphrase|pwd|cred|cookie|signature|private|bearer|jwt|webhook|certificate|"
    r"(?<![A-Za-z])(?:auth|authorization|sig|dsn|pat|pin|salt|otp|session)(?![A-Za-z])"
)
_SECRET_NAME: Final = re.compile(_WORDS, re.IGNORECASE)
_USER_INFORMATION: Final = re.compile(r"://(?<=[A-Za-z0-9+.\-]://)[^\s/@]*(?:@[^\s/@]*)*@")
_SHOWN_ADDRESS: Final = f"://{HIDDEN}@"
_ASSIGNMENT: Final = re.compile(
    rf"(?P<name>-[\w.\-]{{0,40}}(?:{_WORDS})[\w.\-]{{0,40}}[\s=:]|(?:{_WORDS})[\w.\-]*\s*[=:])(?P<space>\s*)(?:\"[^\"]*\"|'[^']*'|[^\s&]+)",
    re.IGNORECASE,
)
_SCHEME_WORD: Final = re.compile(r"\b(?P<word>bearer|basic|token)\s+[^\s,;\"']+", re.IGNORECASE)
_KNOWN_TOKEN: Final = re.compile(
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|pk-|xox[a-z]-|AKIA|ASIA|AIza|ya29\.|eyJ|nvapi-|r8_|dckr_pat_|pypi-|npm_|SG\.)[\w.\-]{6,}"
)
_LONG: Final = re.compile(r"[A-Za-z0-9_\-]{20,}")
_BASE64: Final = re.compile(r"(?<![\w/.~\-])(?=[^\s]*[+/=])[A-Za-z0-9+/_\-]{24,}={0,2}(?![\w/.])")

_CERTAIN_NAME: Final = re.compile(r"(?:^|_)(?:\w*KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)$", re.IGNORECASE)
_SHORTEST: Final = 8
"""Characters that the value of a variable must have to be looked for in messages."""
_PRIVATE_KEY: Final = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_CERTAIN_ASSIGNMENT: Final = re.compile(
    r"(?P<name>(?:passw(?:or)?d|passphrase|secret|api[_-]?key|access[_-]?key|secret[_-]?key|(?:auth|access|refresh)[_-]?token|"
    r"authorization)[\"']?\s*[=:]\s*(?:bearer\s+|basic\s+)?)(?:\"[^\"]*\"|'[^']*'|[^\s&,;}]+)|"
    r"(?P<query>[?&](?:x-amz-[\w\-]+|sig|signature|token|key)=)[^\s&]+|(?P<scheme>\bbearer\s+)[\w.\-+/=]{16,}",
    re.IGNORECASE,
)


def message_redactor(environ: Mapping[str, str]) -> Callable[[str], str]:
    """A function that takes out of a message what is certainly a secret: known forms, and the values of these secret variables.

    >>> shown = message_redactor({"WANDB_API_KEY": "0123abcd0123"})
    >>> shown("key 0123abcd0123 at s3://me:pass@store, password=x, 4096 tokens, token=7")
    'key [redacted] at s3://[redacted]@store, password=[redacted], 4096 tokens, token=7'
    """
    values = {value for name, value in environ.items() if len(value) >= _SHORTEST and _CERTAIN_NAME.search(name)}
    known = re.compile("|".join(re.escape(value) for value in sorted(values, key=len, reverse=True)) or r"(?!)")

    def shown(text: str) -> str:
        text = known.sub(HIDDEN, _PRIVATE_KEY.sub(HIDDEN, text))
        text = _USER_INFORMATION.sub(_SHOWN_ADDRESS, text)
        text = _CERTAIN_ASSIGNMENT.sub(lambda match: f"{match['name'] or match['query'] or match['scheme']}{HIDDEN}", text)
        return _KNOWN_TOKEN.sub(lambda match: HIDDEN if any(map(str.isdigit, match[0])) else match[0], text)

    return shown


def redact(name: str, value: str) -> str:
    """Return the value of a variable with secrets hidden.

    >>> redact("WANDB_API_KEY", "abc"), redact("NCCL_DEBUG", "INFO"), redact("HTTPS_PROXY", "http://me:secret@proxy:3128")
    ('[redacted]', 'INFO', 'http://[redacted]@proxy:3128')
    """
    if value and (_SECRET_NAME.search(name) or _holds_secrets(value)):
        return HIDDEN
    return redact_text(value)


def redact_values(name: str, value: Any) -> Any:
    """Return nested settings with secrets hidden, judged by their names and values.

    >>> redact_values("config", {"lr": 0.1, "hub": {"token": "abc", "tokenizer": "mine"}, "sizes": [1, 2]})
    {'lr': 0.1, 'hub': {'token': '[redacted]', 'tokenizer': 'mine'}, 'sizes': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {key: redact_values(f"{name}.{key}", entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [redact_values(name, entry) for entry in value]
    return redact(name, value) if isinstance(value, str) else value


def _holds_secrets(value: str) -> bool:
    """Return whether a structure (JSON, a list of arguments, a key file) names a secret and is hidden whole."""
    return "PRIVATE KEY" in value or (value.lstrip()[:1] in ("{", "[") and _SECRET_NAME.search(value) is not None)


def redact_text(text: str) -> str:
    """Return a text with secrets hidden.

    >>> redact_text("endpoint=node0:29400,password=abc")
    'endpoint=node0:29400,password=[redacted]'
    """
    if len(text) > _LONGEST:  # a cut may go through a secret, so the word it goes through is left out as well
        kept = text[:_LONGEST]
        words = [] if kept[-1].isspace() else kept.split()[-1:]
        text = kept[: len(kept) - sum(map(len, words))] + f"[{len(text)} characters]"
    shown = _USER_INFORMATION.sub(_SHOWN_ADDRESS, text)
    shown = _SCHEME_WORD.sub(lambda match: f"{match['word']} {HIDDEN}", shown)
    shown = _ASSIGNMENT.sub(lambda match: f"{match['name']}{match['space']}{HIDDEN}", shown)
    shown = _KNOWN_TOKEN.sub(HIDDEN, shown)
    shown = _BASE64.sub(_hide_random, shown)
    return _LONG.sub(_hide_random, shown)


def _hide_random(match: re.Match[str]) -> str:
    return HIDDEN if _looks_random(match[0]) else match[0]


def _looks_random(word: str) -> bool:
    """Return whether a word is long hexadecimal, or changes between letters and digits too often for a name."""
    if re.fullmatch(r"(?=.*\d)(?=.*[a-f])[0-9a-f]{24,}|(?=.*\d)(?=.*[A-F])[0-9A-F]{24,}", word):
        return True
    if word.startswith("/") and _entropy(word) < 4.6:  # a path
        return False
    kinds = [_kind(character) for character in word]
    changes = sum(kind != other for kind, other in zip(kinds, kinds[1:], strict=False))
    return len(set(kinds) - {"other"}) >= 2 and changes >= 0.3 * len(word) and _entropy(word) >= 3.2


def _kind(character: str) -> str:
    if character.isdigit():
        return "digit"
    if character.isalpha():
        return "upper" if character.isupper() else "lower"
    return "other"


def _entropy(word: str) -> float:
    """Return the bits per character."""
    counts = Counter(word).values()
    return -sum(count / len(word) * math.log2(count / len(word)) for count in counts)
