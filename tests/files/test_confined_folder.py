"""Files opened inside a folder and nowhere else: by the kernel, and part by part where it cannot."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.errors import CheckpointError
from slipstream.files import paths
from slipstream.files.paths import ConfinedFolder, open_inside

Opened = Callable[..., ConfinedFolder]


@pytest.fixture(params=["kernel", "by parts"])
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    """Makes folders that are closed after the test, with each way of opening."""
    made: list[ConfinedFolder] = []

    def make(path: Path, **options: object) -> ConfinedFolder:
        made.append(ConfinedFolder(path, kernel=request.param == "kernel", **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for folder in made:
        folder.close()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "folder" / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "file").write_text("content")
    (tmp_path / "folder" / "sub" / "deep" / "file").write_text("deep content")
    return tmp_path / "folder"


def test_files_inside_read(place: Path, opened: Opened) -> None:
    """Files inside are read."""
    folder = opened(place)
    assert folder.read("file", 100) == b"content"
    assert folder.read("sub/deep/file", 100) == b"deep content"
    assert folder.size("sub/deep/file") == 12
    assert folder.names() == ["file", "sub/deep/file"]


def test_folder_itself_may_reached_through_link(place: Path, opened: Opened) -> None:
    """The folder itself may be reached through a link."""
    (place.parent / "link").symlink_to(place)
    assert opened(place.parent / "link").read("file", 100) == b"content"


ATTACKS = {
    "a link outside": lambda place: (place / "x").symlink_to(place.parent / "secret"),
    "a relative link outside": lambda place: (place / "x").symlink_to("../secret"),
    "a link inside": lambda place: (place / "x").symlink_to("file"),
    "a link to nothing": lambda place: (place / "x").symlink_to("nothing"),
    "a link to itself": lambda place: (place / "x").symlink_to("x"),
    "a link to a descriptor": lambda place: (place / "x").symlink_to("/proc/self/fd/0"),
    "a folder": lambda place: (place / "x").mkdir(),
    "a pipe": lambda place: os.mkfifo(place / "x"),
    "a device": lambda place: (place / "x").symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_special_files_refused(attack: Callable[[Path], object], place: Path, opened: Opened) -> None:
    """Anything but a regular file is refused at once."""
    attack(place)
    with pytest.raises(CheckpointError) as caught:
        opened(place).open("x")
    assert str(place / "x") in str(caught.value)


def test_socket_refused(place: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket is refused."""
    monkeypatch.chdir(place)  # the name of a socket has to be short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("x")
        with pytest.raises(CheckpointError, match="pipe, a socket"):
            opened(place).open("x")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_device_refused(place: Path, opened: Opened) -> None:
    """A device is refused."""
    try:
        os.mknod(place / "x", 0o600 | 0o020000, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("this sandbox makes no devices")
    with pytest.raises(CheckpointError, match=r"a device|may not be read|pipe"):
        opened(place).open("x")


def test_link_inside_a_name(place: Path, opened: Opened) -> None:
    """A link in the middle of a name is not followed."""
    (place / "way").symlink_to(place / "sub")
    with pytest.raises(CheckpointError, match="links are not followed"):
        opened(place).open("way/deep/file")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "sub/../../secret", "", "a\0b"])
def test_name_leads_outside_not_even_tried(name: str, place: Path, opened: Opened) -> None:
    """A name that leads outside is not even tried."""
    with pytest.raises(CheckpointError, match="names the file"):
        opened(place).open(name)


def test_missing_file_can_told_from_damaged(place: Path, opened: Opened) -> None:
    """A missing file can be told from a damaged one."""
    with pytest.raises(FileNotFoundError) as caught:
        opened(place).open("sub/nothing")
    assert isinstance(caught.value, CheckpointError)
    assert str(caught.value) == f"{place}/sub/nothing is missing."
    with pytest.raises(NotADirectoryError, match="not a folder"):
        opened(place).open("file/below")


def test_folder_none(tmp_path: Path, opened: Opened) -> None:
    """A folder that is none."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError) as caught:
        opened(tmp_path / "file")
    assert isinstance(caught.value, CheckpointError)
    with pytest.raises(FileNotFoundError, match="nothing"):
        opened(tmp_path / "nothing")


def test_folder_replaced_after_opening(place: Path, opened: Opened) -> None:
    """A folder replaced after it was opened makes no difference."""
    folder = opened(place)
    place.rename(place.with_name("moved"))
    place.symlink_to("/etc")
    assert folder.read("file", 100) == b"content"


def test_file_larger_than_announced_not_read(place: Path, opened: Opened) -> None:
    """A file larger than announced is not read."""
    with pytest.raises(CheckpointError, match="7 bytes, more than the 6"):
        opened(place).read("file", 6)


def test_links_named_when_folder_listed(place: Path, opened: Opened) -> None:
    """Links are named when a folder is listed."""
    (place / "sub" / "link").symlink_to("/etc/passwd")
    os.mkfifo(place / "pipe")
    (place / "new\nline").write_text("")
    refused: list[str] = []
    assert opened(place).names(refused) == ["file", "sub/deep/file"]
    assert refused == ["new\nline", "pipe", "sub/link"]
    with pytest.raises(CheckpointError, match="neither a regular file"):
        opened(place).names()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A download cache: a snapshot whose files are links to blobs."""
    root = tmp_path / "models--x"
    (root / "blobs").mkdir(parents=True)
    (root / "blobs" / "0123").write_text("weights")
    snapshot = root / "snapshots" / "main"
    (snapshot / "unet").mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    (snapshot / "unet" / "model.safetensors").symlink_to("../../../blobs/0123")
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "secret").write_text("secret")
    (snapshot / "evil").symlink_to("../../../secret")
    (snapshot / "worse").symlink_to("/etc/passwd")
    return snapshot


def test_links_of_cache_followed_within(cache: Path, opened: Opened) -> None:
    """Links of a cache are followed within it."""
    folder = opened(cache, links_within=cache.parent.parent)
    assert folder.read("model.safetensors", 100) == folder.read("unet/model.safetensors", 100) == b"weights"
    assert folder.read("config.json", 100) == b"{}"
    assert set(folder.names()) >= {"model.safetensors", "config.json"}


@pytest.mark.parametrize("name", ["evil", "worse"])
def test_links_out_of_cache_not(name: str, cache: Path, opened: Opened) -> None:
    """Links out of a cache are not."""
    with pytest.raises(CheckpointError, match="leads outside"):
        opened(cache, links_within=cache.parent.parent).open(name)


def test_folder_outside_cache_refused(cache: Path, tmp_path: Path) -> None:
    """A folder outside the cache is refused."""
    with pytest.raises(CheckpointError, match="not beneath"):
        ConfinedFolder(tmp_path, links_within=cache)


def test_kernel_without_openat2_no_obstacle(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without openat2 is no obstacle."""
    monkeypatch.setattr(paths, "_OPENAT2", 100_000)  # a call that no kernel has
    (place / "x").symlink_to("file")
    with ConfinedFolder(place) as folder:
        assert folder.read("sub/deep/file", 100) == b"deep content"
        with pytest.raises(CheckpointError, match="links are not followed"):
            folder.open("x")


def test_function_for_file(place: Path) -> None:
    """The function for one file."""
    fd = open_inside(place, "sub/deep/file")
    with os.fdopen(fd) as file:
        assert file.read() == "deep content"
        assert not os.get_inheritable(fd)


def test_no_descriptor_left_open(place: Path) -> None:
    """No descriptor is left open."""
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    (place / "x").symlink_to("file")
    before = count()
    for kernel in (True, False):
        with ConfinedFolder(place, kernel=kernel) as folder:
            folder.read("sub/deep/file", 100)
            folder.names([])
            for name in ("x", "sub", "sub/nothing/more"):
                with pytest.raises(CheckpointError):
                    folder.open(name)
    assert count() == before
