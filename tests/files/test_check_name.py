"""Names that may be opened inside a folder, and those that may not."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import given, settings, strategies as st

from slipstream.errors import CheckpointError
from slipstream.files.paths import check_name

GOOD = ["model.safetensors", "unet/model.safetensors", "a/b/c/d/e/f/g/h", "…/ünï", ".hidden", "a b", "..a", "a..", "1:2", "x" * 200]
BAD = {
    "": "is empty",
    "..": "a part '..'",
    ".": "a part '.'",
    "../x": "a part '..'",
    "a/../../x": "a part '..'",
    "/etc/passwd": "absolute",
    "C:/x": "absolute",
    "c:x": "absolute",
    "a//b": "an empty part",
    "a/": "an empty part",
    "a\\b": "backslash",
    "..\\x": "backslash",
    "a\0b": "control character",
    "a\nb": "control character",
    "a\x85b": "control character",
    "x" * 201: "201 bytes",
    "ü" * 101: "202 bytes",
    "a/b/c/d/e/f/g/h/i": "9 parts",
    "\ud800": "not valid Unicode",
}


@pytest.mark.parametrize("name", GOOD)
def test_plain_name_given_back(name: str) -> None:
    """A plain name is given back."""
    assert check_name(name, "MANIFEST.json") == name


@pytest.mark.parametrize(("name", "why"), BAD.items(), ids=ascii)
def test_refusal_says_where(name: str, why: str) -> None:
    """Another one is refused and the error says where it stood."""
    with pytest.raises(CheckpointError) as caught:
        check_name(name, "run/MANIFEST.json")
    assert str(caught.value).startswith("run/MANIFEST.json names the file ")
    assert why in str(caught.value)
    assert "\0" not in str(caught.value)


@pytest.mark.parametrize("name", [None, 3, b"model", ["model"], True])
def test_what_no_text_no_name(name: object) -> None:
    """What is no text is no name."""
    with pytest.raises(CheckpointError, match="is not text but"):
        check_name(name, "index")


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("ab./\\:~\0ü"), max_size=14))
def test_no_accepted_name_leads_outside(name: str) -> None:
    try:
        check_name(name, "index")
    except CheckpointError:
        return
    assert posixpath.normpath(posixpath.join("/root/folder", name)) == f"/root/folder/{name}"
