"""The socket of the store: ports, addresses, unreachable machines, and the settings of the rendezvous."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.config import resolve
from slipstream.errors import ConfigError
from slipstream.launch.plan import MachineSpec, Target, make_plan
from slipstream.launch.rendezvous import RendezvousTimeouts
from slipstream.launch.store import StoreAddress, connect_store, interface_towards, open_listener, silence_stderr


def test_free_ports_on_loopback():
    """Free ports differ and are on the loopback interface."""
    found = [open_listener("127.0.0.1", None) for _ in range(20)]
    assert len({place.port for _, place in found}) == 20
    assert {listener.getsockname()[0] for listener, _ in found} == {"127.0.0.1"}
    for listener, _ in found:
        listener.close()


def test_port_in_use_named():
    """A port in use is refused by its number."""
    listener, place = open_listener("127.0.0.1", None)
    with listener, pytest.raises(ConfigError, match=rf"Port {place.port} on 127.0.0.1 \(main_process_port\) is already in use"):
        open_listener("127.0.0.1", place.port, "main_process_port")


def unreachable(host: str, port: int) -> str:
    with pytest.raises(ConfigError) as refused:
        connect_store(StoreAddress(host, port), patience=0.3, limit=5, check=lambda: None)
    return str(refused.value)


def test_unreachable_machine_error():
    """A machine that cannot be reached is reported with what was tried."""
    listener, place = open_listener("127.0.0.1", None)
    listener.close()
    message = unreachable("127.0.0.1", place.port)
    assert f"127.0.0.1, port {place.port}" in message
    assert "connection refused" in message
    assert "no address" in unreachable("no-such-host.invalid", 1)


def test_wait_for_listener_interrupted():
    """Waiting for a machine can be broken off."""
    class Enough(Exception):
        pass

    def check():
        raise Enough

    with pytest.raises(Enough):
        connect_store(StoreAddress("127.0.0.1", 1), patience=60, limit=5, check=check)


def test_silence_stderr_hides_only_libraries(capfd):
    """Quietly hides what libraries print and only that."""
    os.write(2, b"before ")
    with silence_stderr():
        os.write(2, b"hidden ")
    os.write(2, b"after")
    assert capfd.readouterr().err == "before after"


def test_interface_towards_address():
    """The interface that leads to an address."""
    assert interface_towards("127.0.0.1") == ("lo" if os.uname().sysname == "Linux" else "lo0")
    assert interface_towards("no-such-host.invalid") is None


def test_loopback_name_binds_all_interfaces(monkeypatch):
    """A name that only means this machine is bound on every interface."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))])
    listener, _ = open_listener("this-host", None)
    with listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def settings(text: str) -> RendezvousTimeouts:
    config = resolve(flags={"cpu": True, "num_processes": 2, "rdzv_conf": text}, environ={})
    return RendezvousTimeouts.read(make_plan(config, Target("script", __file__), {}, MachineSpec()))


def test_rendezvous_settings_checked():
    """Settings of the rendezvous are checked."""
    assert settings("timeout=3,join_timeout=4") == RendezvousTimeouts(timeout=3, join_timeout=4)
    with pytest.raises(ConfigError, match="does not support"):
        settings("time_out=3")
    with pytest.raises(ConfigError, match="not a number of seconds"):
        settings("timeout=soon")


EXIT_FUNCTIONS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>
int __cxa_atexit(void (*function)(void *), void *argument, void *handle) {
    int (*real)(void (*)(void *), void *, void *) = dlsym(RTLD_NEXT, "__cxa_atexit");
    char name[32] = {0};
    prctl(PR_GET_NAME, name);
    if (strncmp(name, "pt_tcpstore", 11) == 0 && write(2, "late\\n", 5) < 0) return 1;
    return real(function, argument, handle);
}
"""
REQUESTS = """
import os, socket, threading, time
from datetime import timedelta
from slipstream.launch.store import open_listener, serve_store
listener, address = open_listener("127.0.0.1", None)
store = serve_store(listener, address)
os.write(2, b"served\\n")
socket.create_connection((address.host, address.port)).close()
other = store.clone()
waiting = threading.Thread(target=lambda: other.get("later"))
waiting.start()
time.sleep(0.2)
for request in (store.set, store.append, lambda key, text: store.compare_set(key, "", text)):
    request("later", "x")
waiting.join()
store.add("count", 1), store.check(["later"]), store.get("later"), store.wait(["later"], timedelta(seconds=5)), store.num_keys()
store.multi_set(["a", "b"], ["1", "2"]), store.multi_get(["a", "b"]), store.delete_key("a")
print("answered", flush=True)
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs a C compiler, and Linux")
def test_server_set_up_before_forks(tmp_path: Path):
    """The thread of the store takes no lock of the C library any more once the store is served: a fork would copy it taken."""
    source, library = tmp_path / "exit_functions.c", tmp_path / "exit_functions.so"
    source.write_text(EXIT_FUNCTIONS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", REQUESTS], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.splitlines()[-1:] == ["answered"], done.stderr
    before, after = done.stderr.split("served")
    assert "late" in before, "the lock is no longer taken in this thread: `_initialize_server` can go"
    assert "late" not in after
