"""Records as lines of JSON: always one line, always valid, with the rank and without secrets; and only where somebody asked for it."""

from __future__ import annotations

import json
import logging
import logging.config
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from slipstream.config.redaction import HIDDEN, message_redactor
from slipstream.errors import ConfigError
from slipstream.logging import JsonFormatter, get_logger


def record(message: object = "m", *args: object, error: BaseException | None = None, **extra: object) -> logging.LogRecord:
    info = (type(error), error, error.__traceback__) if error is not None else None
    made = logging.LogRecord("train", logging.WARNING, "/src/train.py", 7, message, args, info)
    made.__dict__.update(extra)
    return made


def parsed(log_record: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter().format(log_record)
    assert line.isascii()
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return found


@pytest.fixture
def third_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("third_of_four")
def test_json_line_fields() -> None:
    """A line says when who where and what."""
    made = record("[RANK 2] loss %.1f\nsecond line", 0.5)
    made.created = 86400.25
    assert parsed(made) == {
        "time": "1970-01-02T00:00:00.250000Z",
        "level": "WARNING",
        "logger": "train",
        "rank": 2,
        "world": 4,
        "host": os.uname().nodename,
        "message": "loss 0.5\nsecond line",
        "file": "/src/train.py:7",
    }


def test_an_exception_is_part_of_the_line() -> None:
    try:
        raise ValueError("cause")
    except ValueError as error:
        found = parsed(record(error=error))
    assert found["exception"].startswith("Traceback")
    assert found["exception"].endswith("ValueError: cause")


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_extra_kept_as_json() -> None:
    """What the call added is kept as far as JSON can."""
    extra = {"step": 3, "loss": 0.5, "bad": float("nan"), "good": True, "none": None, "odd": Unprintable(), "api_key": "abc"}
    assert parsed(record("m", **extra))["extra"] == {
        **{"step": 3, "loss": 0.5, "bad": "nan", "good": True, "none": None, "api_key": HIDDEN},
        "odd": "<Unprintable that cannot be printed: RuntimeError>",
    }


@pytest.mark.parametrize(("message", "args"), [("%d", ("x",)), ("%s %s", (1,)), ("none", (1, 2)), (Unprintable(), ())])
def test_bad_format_arguments_not_lost(message: object, args: tuple[object, ...]) -> None:
    """A message that does not fit its arguments is not lost."""
    assert "do not fit" in parsed(record(message, *args))["message"]


@given(st.text())
def test_any_text_is_one_line(text: str) -> None:
    parsed(record("%s", text))


# Secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("logged in with topsecret123", f"logged in with {HIDDEN}"),
        ("to https://me:pass@host/x?a=1&X-Amz-Signature=abc", f"to https://{HIDDEN}@host/x?a=1&X-Amz-Signature={HIDDEN}"),
        ("Authorization: Bearer abc.def", f"Authorization: Bearer {HIDDEN}"),
        ("hf_abcdefgh1234 was used", f"{HIDDEN} was used"),
        ("{'password': 'a b', 'x': 1}", f"{{'password': {HIDDEN}, 'x': 1}}"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", HIDDEN),
    ],
)
def test_secrets_redacted(text: str, shown: str) -> None:
    """Secrets are taken out of messages."""
    assert message_redactor({"MY_API_KEY": "topsecret123", "TOKENIZERS_PARALLELISM": "message"})(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "step 3: tokens_per_second=1234 max_tokens: 512 token=7",
        "missing key: layer.0.weight",
        "commit 0123456789abcdef0123456789abcdef01234567",
        "the bearer of bad news, a message about sk-learn",
    ],
)
def test_harmless_words_not_redacted(text: str) -> None:
    """What only sounds like a secret stays."""
    assert message_redactor({"MY_API_KEY": "topsecret123", "TOKENIZERS_PARALLELISM": "message", "SHORT_KEY": "a"})(text) == text


# Where it is used


@contextmanager
def plain_root() -> Iterator[logging.Logger]:
    """The root without the handlers of pytest, as in a plain script."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield root
    finally:
        root.handlers = handlers


def test_log_format_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The option makes our loggers speak json."""
    monkeypatch.setenv("SLIPSTREAM_LOG_FORMAT", "json")
    with plain_root():
        logger = get_logger("test.json.option")
        logger.warning("seen")
        logger.info("not seen")
        get_logger("test.json.option", "INFO").info("seen too", extra={"step": 1})
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["level"], line["message"]) for line in lines] == [("WARNING", "seen"), ("INFO", "seen too")]
    assert lines[1]["extra"] == {"step": 1}
    assert lines[0]["file"].partition(":")[0] == __file__


class Own(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"own {record.getMessage()}"


def test_only_plain_terminal_handlers_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of the programs handlers only plain ones on the terminal are changed."""
    monkeypatch.setenv("SLIPSTREAM_LOG_FORMAT", "json")
    logger = get_logger("test.json.handlers")
    with plain_root() as root:
        logging.basicConfig(format="plain %(message)s")  # after the logger was made
        own, file = logging.StreamHandler(), logging.FileHandler(tmp_path / "log")
        own.setFormatter(Own())
        for handler in (own, file):
            root.addHandler(handler)
        logger.warning("hello")
        file.close()
    first, second = capsys.readouterr().err.splitlines()
    assert json.loads(first)["message"] == "hello"
    assert (second, (tmp_path / "log").read_text()) == ("own hello", "hello\n")


def test_handlers_unchanged_without_option(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the option handlers stay as they are."""
    with plain_root():
        logging.basicConfig(format="plain %(message)s")
        get_logger("test.json.not").warning("hello")
    assert capsys.readouterr().err == "plain hello\n"


@pytest.mark.parametrize("way", ["()", "class"])
def test_dict_config_names_formatter(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration by dictionary can name it."""
    settings = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": {way: "slipstream.logging.JsonFormatter"}},
        "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "lines"}},
        "loggers": {"test.json.dictionary": {"handlers": ["console"], "propagate": False}},
    }
    logging.config.dictConfig(settings)
    logging.getLogger("test.json.dictionary").warning("hello")
    assert json.loads(capsys.readouterr().err)["message"] == "hello"


def test_a_format_for_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="one form"):
        JsonFormatter("%(message)s")  # type: ignore[arg-type]
