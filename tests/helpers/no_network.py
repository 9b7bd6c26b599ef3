"""Every command in a process that may reach nothing beyond this machine.

python -m tests.helpers.no_network FOLDER [plant]

Python's own calls are refused and told by an audit hook; for native code the process has no network
at all, where the system permits that. `plant` tries two connections instead, which must be told.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fastrl.environments.fence import leave_network
from tests.helpers.forked_workers import fork_workers

LOOK_UPS = {
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.gethostbyname_ex",
    "socket.getnameinfo",
    "socket.gethostbyaddr",
}
LOCAL = ("127.", "::1", "localhost", "0.0.0.0", "::")
FOUND: list[str] = []


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """The audit hook: notes and refuses what is not local."""
    if event in LOOK_UPS:
        host = arguments[0]
    elif event in ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.bind"):
        address = arguments[1]
        if not isinstance(address, tuple):  # a Unix socket, or none
            return
        host = address[0]
    else:
        return
    if host is None or str(host).startswith(LOCAL) or str(host) == socket.gethostname():
        return
    FOUND.append(f"{event} {host}")
    raise OSError(f"no network here, for {event} {host}")


def run(*arguments: str) -> int:
    """The exit code of a command."""
    from fastrl.cli import main

    return main(arguments)


def run_commands(folder: Path) -> dict[str, int]:
    """The exit codes of all commands, on a new model, a folder's, and a name that is no folder."""
    from tests.helpers.pretrained import write_pretrained
    from tests.helpers.rollout_file import write_rollout_file
    from tests.helpers.runs import write_tiny

    config, rollouts = str(write_tiny(folder)), folder / "rollouts.jsonl"
    write_rollout_file(rollouts)
    pretrained = f"model={{type: pretrained, path: {write_pretrained(folder / 'llama')}}}"
    files = f"{{type: files, paths: ['{rollouts}'], documents_per_step: 4}}"
    short = ["phases.0.steps=1", "phases.1.steps=1"]
    train = ["train", config, *short]
    logs = ["logging.tensorboard=true", "logging.report=true"]
    own = ["tokenizer={type: pretrained}", "environment.prompt='{question}'"]
    runs = {name: str(folder / name) for name in ("sampled", "files", "pretrained", "named")}
    server = "{type: server, urls: ['http://192.0.2.1'], weights: {folder: served}}"
    named = "model={type: pretrained, path: meta-llama/Llama-3.2-1B}"
    return {
        "config check": run("config", "check", config),
        "config check of servers": run("config", "check", config, f"phases.1.rollouts={server}"),
        "estimate": run("estimate", config),
        "train": run(*train, *logs, "--run-dir", runs["sampled"]),
        "eval": run("eval", runs["sampled"]),
        "sample": run("sample", runs["sampled"], "1 + 1 ="),
        "train on files": run(*train, "--run-dir", runs["files"], f"phases.1.rollouts={files}"),
        "train a folder": run(*train, "--run-dir", runs["pretrained"], pretrained, *own),
        "sample a folder": run("sample", runs["pretrained"], "1 + 1 ="),
        "train a name": run(*train, "--run-dir", runs["named"], named, *own),
    }


def attach_a_head() -> None:
    """A head on a model of transformers."""
    from fastrl.integrations.transformers import attach_head
    from tests.helpers.hf_models import tiny_model

    attach_head(tiny_model("llama"), {"policy": {"type": "grpo"}})


if __name__ == "__main__":
    leave_network()
    sys.addaudithook(refuse)
    codes: dict[str, int] = {}
    if sys.argv[2:] == ["plant"]:
        with suppress(OSError):
            socket.create_connection(("example.org", 80), timeout=1)
        with suppress(OSError), socket.socket() as connection:
            connection.settimeout(1)
            connection.connect(("192.0.2.1", 80))
    else:
        fork_workers(pytest.MonkeyPatch())  # which takes the hook along
        codes = run_commands(Path(sys.argv[1]))
        if importlib.util.find_spec("transformers") is not None:
            attach_a_head()
    sys.stdout.write(json.dumps({"codes": codes, "found": FOUND}) + "\n")
