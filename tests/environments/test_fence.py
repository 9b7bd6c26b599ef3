"""Each layer of the fence by itself, in a process of its own."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

# The layer that is tested stays, and the others are taken away.
PROGRAM = """
import ctypes, os, socket, subprocess, sys
from fastrl.environments import fence

layer, folder, port = sys.argv[1:]
if layer != "audit hook":
    sys.addaudithook = lambda hook: None
if layer != "landlock":
    fence._restrict_by_landlock = lambda: None
if layer == "limits":
    fence.limit_memory(1)
if layer == "landlock" and ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) < 1:
    sys.exit("this kernel has no Landlock")
if layer == "network":
    before = os.readlink("/proc/self/ns/net")
    fence.leave_network()
    if os.readlink("/proc/self/ns/net") == before:
        sys.exit("namespaces are not permitted here")
fence.raise_fence()
file, new = folder + "/file", folder + "/new"

def written():
    with open(new, "w") as target:
        target.write("text")

refused = []
for name, attempt in {
    "read": lambda: open(file).read(),
    "import": lambda: __import__("wave"),
    "write": written,
    "truncate": lambda: os.truncate(file, 0),
    "make": lambda: os.mkdir(new + "1"),
    "link": lambda: os.symlink(file, new + "2"),
    "rename": lambda: os.rename(file, new + "3"),
    "remove": lambda: os.remove(folder + "/other"),
    "relative": lambda: os.open("new", os.O_CREAT),
    "run": lambda: subprocess.run(["/bin/true"]),
    "signal": lambda: os.kill(os.getppid(), 0),
    "connect": lambda: socket.create_connection(("127.0.0.1", int(port)), 5),
    "allocate": lambda: bytes(2**31),
}.items():
    try:
        attempt()
    except (OSError, MemoryError):
        refused.append(name)
os.write(1, repr(refused).encode())
"""

FILES = {"write", "truncate", "make", "link", "rename", "remove"}


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has the audit hook and limits alone")
@pytest.mark.parametrize(
    ("layer", "refused"),
    [
        ("landlock", FILES | {"run", "connect"}),
        ("audit hook", FILES | {"run", "signal", "connect"}),
        ("limits", {"write", "allocate"}),
        ("network", {"connect"}),
    ],
)
def test_each_layer_refuses_its_part(tmp_path: Path, layer: str, refused: set[str]) -> None:
    for name in ("file", "other"):
        (tmp_path / name).write_text("text", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = [layer, str(tmp_path), str(server.getsockname()[1])]
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=60
        )
    if done.stderr.endswith("here\n") or done.stderr.endswith("Landlock\n"):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    found = set(ast.literal_eval(done.stdout))
    # The folder that is there no longer, and the bound on files, are part of each.
    assert refused | {"relative", "write"} <= found
    assert found <= refused | {"relative", "write", "run", "signal"}  # unprivileged: no processes
    if refused >= FILES:
        assert (tmp_path / "file").read_text(encoding="utf-8") == "text"
        assert sorted(os.listdir(tmp_path)) == ["file", "other"]
