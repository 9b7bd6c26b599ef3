"""Workers are processes of their own, as in a run."""

import subprocess

import pytest

from fastrl.environments import worker_process


@pytest.fixture(autouse=True)
def _own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "subprocess", subprocess)
