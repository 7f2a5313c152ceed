"""Secrets never reach a report."""

from __future__ import annotations

import base64
import uuid
from random import Random

import pytest
from hypothesis import given, strategies as st

from slipstream.config.redaction import HIDDEN, message_redactor, redact, redact_text


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "aws_access_key_id", "DB_PASSWORD", "MYSQL_PWD", "SSH_PRIVATE"),
        *("GOOGLE_APPLICATION_CREDENTIALS", "HTTP_COOKIE", "SLACK_WEBHOOK_URL", "SENTRY_DSN", "BASIC_AUTH", "GPG_PASSPHRASE"),
        *("X_SIGNATURE", "GITHUB_PAT"),
    ],
)
def test_secret_name_hidden(name: str) -> None:
    """A variable with a telling name is hidden whatever its value."""
    assert redact(name, "abc") == HIDDEN


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_DEBUG", "INFO"),
        ("CUDA_VISIBLE_DEVICES", "0,1,2,3"),
        ("LD_LIBRARY_PATH", "/usr/lib/x86_64-linux-gnu:/opt/libraries-2.13.0/lib64"),
        ("SLURM_JOB_NODELIST", "gpu-a100-[001-128]"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512"),
        ("MASTER_ADDR", "ip-10-0-12-34.eu-central-1.compute.internal"),
        ("SLIPSTREAM_MIXED_PRECISION", "bf16"),
        ("HTTP_PROXY", "http://proxy.example.org:3128"),
        ("TORCHELASTIC_RUN_ID", "experiment_with_a_long_descriptive_name"),
        ("OMP_PLACES", "{0:4}:8"),
    ],
)
def test_ordinary_values_shown(name: str, value: str) -> None:
    """Ordinary values are shown as they are."""
    assert redact(name, value) == value


def test_empty_secret_shown_empty() -> None:
    """An empty secret is shown as empty."""
    assert redact("HF_TOKEN", "") == ""


def test_service_tokens_hidden() -> None:
    """Tokens as services make them are hidden."""
    random = Random(0)  # the same ones in every run
    for _ in range(1000):
        for data in (random.randbytes(16).hex(), random.randbytes(33)):
            token = data if isinstance(data, str) else base64.b64encode(data).decode()
            shown = redact("SOME_SETTING", token)
            assert not any(token[start : start + 16] in shown for start in range(len(token) - 16)), token


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:pa55@host/path", f"https://{HIDDEN}@host/path"),
        ("postgres://u:p@ss@db:5432/x", f"postgres://{HIDDEN}@db:5432/x"),
        ("https://host/x?token=abc&n=1", f"https://host/x?token={HIDDEN}&n=1"),
        ("https://host/x?X-Amz-Signature=abc", f"https://host/x?X-Amz-Signature={HIDDEN}"),
        ("--api-key abc --debug", f"--api-key {HIDDEN} --debug"),
        ("password: hunter2", f"password: {HIDDEN}"),
        ("Authorization: Bearer abc.def", f"Authorization: {HIDDEN} {HIDDEN}"),
        ("timeout=900,secret='x y'", f"timeout=900,secret={HIDDEN}"),
        ("use ghp_0123456789 now", f"use {HIDDEN} now"),
    ],
)
def test_secrets_inside_text_hidden(text: str, shown: str) -> None:
    """Secrets inside texts are hidden."""
    assert redact_text(text) == shown


@given(st.text(alphabet=st.characters(codec="ascii", exclude_characters="@/ \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f"), min_size=8, max_size=30))
def test_user_info_of_address_hidden(password: str) -> None:
    """Whatever stands before the at sign of an address is hidden."""
    assert f"user:{password}" not in redact_text(f"http://user:{password}@proxy:3128")


def test_device_identifier_hidden() -> None:
    """An identifier of a device is hidden rather than a secret shown."""
    assert redact("SOME_SETTING", uuid.uuid4().hex) == HIDDEN


def test_long_text_cut_safely() -> None:
    """A very long text is cut without showing half a secret."""
    text = "word " * 399 + "Zm9vYmFyMTIzNDU2Nzg5MGFiY2RlZg" * 4000
    shown = redact_text(text)
    assert "Zm9v" not in shown
    assert "121995 characters" in shown


@pytest.mark.parametrize(
    "unit", ["x", "key", "-key", "a-", "a.b://", "a@", "password ", "password='", "bearer ", "?x-amz-", "-----BEGIN ", "sk-", "PRIVATE KEY"]
)
def test_work_is_linear(unit: str) -> None:
    """Where it grew faster, these would take longer than a test may."""
    for start in ("", "a://password="):
        text = start + unit * (200_000 // len(unit)) + " https://me:pass@host"
        assert "me:pass" not in message_redactor({"A_KEY": "xxxxxxxxy"})(text)
    redact_text(unit * (1999 // len(unit)))


def test_long_message_stays_whole() -> None:
    """A message of two million characters stays whole."""
    text = "x" * 1_000_000
    assert message_redactor({})(f"{text} https://me:pass@host {text}") == f"{text} https://{HIDDEN}@host {text}"


def test_structure_with_secret_hidden():
    """Structures that name a secret are hidden whole."""
    for value in ('{"hyperparameters": {"hf_token": "canary"}}', '["--wandb_key", "canary"]', "-----BEGIN PRIVATE KEY-----\ncanary"):
        assert "canary" not in redact("SM_HPS", value)
    assert redact("SM_HPS", '{"epochs": 3}') == '{"epochs": 3}'
