"""Kernels run on the GPU if there is one, and in Triton's interpreter elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastrl.kernels import can_run_fused


@pytest.fixture(autouse=True)
def _default_device(device: torch.device) -> Iterator[None]:
    with device:
        yield


@pytest.fixture
def _fused(device: torch.device) -> None:
    """Skips on a GPU that the products with epilogues are not for."""
    operand = torch.zeros(8, 8, dtype=torch.float16, device=device)
    if operand.is_cuda and not can_run_fused(operand, operand):
        pytest.skip("not on this GPU")
