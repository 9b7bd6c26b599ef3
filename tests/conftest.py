"""Seeds, devices, Triton's interpreter, and poison in uninitialised memory."""

import atexit
import gc
import os
import random
import sys
from collections.abc import Generator, Iterator

import numpy as np
import pytest
import torch

from tests.helpers.forked_workers import fork_workers
from tests.helpers.poison import poison_empty_memory

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    # Triton reads this when it is imported.
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"

# The tensors of the tests are small: a second thread costs more than it gives.
torch.set_num_threads(1)


# Tests of many seconds, which come first so that no worker waits for one at the end.
LONG = ("tests/distributed/", "tests/models/test_compile", "tests/test_no", "tests/test_trl_")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spares the garbage collector what is imported: some million objects that stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # libraries report as leaks what is left at the end


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with long tests, and skips what needs a GPU where there is none."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def _poison() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        poison_empty_memory(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def _forked_workers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux" and not HAS_GPU:  # a fork loses the threads of a GPU's driver
            fork_workers(patch)
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    np.random.seed(0)  # what reads numpy's global state is not ours
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device to test on: the GPU if there is one."""
    return torch.device("cuda" if HAS_GPU else "cpu")
