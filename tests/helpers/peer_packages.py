"""Modules of verl, torchtitan and Megatron-core, from the folder that tests/peers/install makes."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

_REASON = (
    "{} is not installed; `bash tests/peers/install DIR`, then put DIR on PYTHONPATH"
    " (tests/peers/install says why beside the environment)"
)
# Its `__init__` imports vLLM, which its losses do not need.
_TORCHTITAN_RL = "torchtitan.experiments.rl"


def peer_module(name: str) -> ModuleType:
    """The module `name` of a peer, imported without its warnings; skips where it is missing."""
    package = name.split(".")[0]
    if find_spec(package) is None:
        pytest.skip(_REASON.format(package), allow_module_level=True)
    if name.startswith(_TORCHTITAN_RL) and _TORCHTITAN_RL not in sys.modules:
        (folder,) = import_module("torchtitan").__path__
        without_init = ModuleType(_TORCHTITAN_RL)
        without_init.__path__ = [str(Path(folder, "experiments", "rl"))]
        sys.modules[_TORCHTITAN_RL] = without_init
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(name)
