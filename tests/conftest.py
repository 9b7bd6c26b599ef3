"""Seeds, devices, Triton's interpreter, and poison in uninitialised memory."""

import os
import random
import sys
from collections.abc import Iterator

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none."""
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
