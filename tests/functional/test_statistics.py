"""Statistics of a row from those of parts of its vocabulary."""

from __future__ import annotations

import math

import pytest
import torch

from fastrl.functional.head.running import (
    LABEL,
    MAX,
    SUM_EXP,
    SUM_SHIFTED,
    finish_statistics,
    merge_running_statistics,
)


def test_a_part_with_a_far_lower_reference_can_hold_the_larger_logits() -> None:
    """The scale between the references, 2^-192, is no fp32 number; what it scales is 2^120."""
    step = 192 * math.log(2)
    low = [0.0, 2.0**120, 2.0**118, -torch.inf]
    high = [step, 2.0**-66, 2.0**-64, 3.0]
    merged = merge_running_statistics(torch.tensor([low, high])[:, :, None])[:, 0]
    assert merged[MAX].item() == pytest.approx(step)
    sums = merged[SUM_EXP].item() / 2.0**-72, merged[SUM_SHIFTED].item() / 2.0**-72
    assert sums == pytest.approx((1 + 2.0**6, 2.0**-2 + 2.0**8 - step), rel=1e-5)
    assert merged[LABEL] == 3
    finished = finish_statistics(merged[:, None], True)
    assert finished.logsumexp.item() == pytest.approx(math.log(2.0**120 + 2.0**126))
