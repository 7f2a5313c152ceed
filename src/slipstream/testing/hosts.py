"""Two hosts on one machine: network namespaces with a cable between them, for tests of launches on several machines.

    with two_hosts() as hosts:
        subprocess.Popen([*hosts.prefix(0), "slipstream", "launch", "--num_machines", "2", "--main_process_ip", hosts.addresses[0], ...])
        hosts.cut(1)

Needs Linux, root, `ip` and `unshare`; `hosts_unavailable` says what is missing. The hosts share all files and differ in name and address.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Hosts", "hosts_unavailable", "two_hosts"]


def hosts_unavailable() -> str | None:
    """Return why there can be no hosts here; None if there can."""
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        return f"network namespaces need root{''.join(f' and `{name}`' for name in missing)}"
    return None


@dataclass(frozen=True)
class Hosts:
    """Two hosts: a name, a namespace and an address each, joined by a cable."""

    names: tuple[str, str]
    addresses: tuple[str, str]
    cables: tuple[str, str]

    def prefix(self, index: int) -> tuple[str, ...]:
        """Return the words that run the command after them on a host, as the same process."""
        rename = f'hostname {self.names[index]}; exec "$@"'
        return ("ip", "netns", "exec", self.names[index], "unshare", "--uts", "sh", "-c", rename, "sh")

    def cut(self, index: int) -> None:
        """Cut the cable at one end."""
        _ip("-n", self.names[index], "link", "set", self.cables[index], "down")

    def mend(self, index: int) -> None:
        """Undo `cut`."""
        _ip("-n", self.names[index], "link", "set", self.cables[index], "up")


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make two hosts, and take them away at the end."""
    tag = secrets.token_hex(3)
    made = Hosts((f"slip-{tag}-a", f"slip-{tag}-b"), ("10.213.0.1", "10.213.0.2"), (f"v{tag}a", f"v{tag}b"))
    try:
        for name in made.names:
            _ip("netns", "add", name)
        _ip("link", "add", made.cables[0], "netns", made.names[0], "type", "veth", "peer", "name", made.cables[1], "netns", made.names[1])
        for name, cable, address in zip(made.names, made.cables, made.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            for device in ("lo", cable):
                _ip("-n", name, "link", "set", device, "up")
        yield made
    finally:
        for name in made.names:  # taking a namespace away takes its end of the cable along
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)
