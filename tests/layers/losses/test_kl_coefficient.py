"""The KL coefficient that adapts to a target, against its formula."""

from __future__ import annotations

import pytest

from fastrl.config.loss_options import KLConfig
from fastrl.layers.losses.kl import KLCoefficient


def after(kl: float, num_documents: float, *, adapts: bool = True) -> float:
    config = {"coefficient": 0.5, "adaptive": {"target": 0.1, "horizon": 50}}
    if not adapts:
        del config["adaptive"]
    coefficient = KLCoefficient(KLConfig.model_validate(config))
    coefficient.end_step(kl, num_documents)
    return coefficient.value


@pytest.mark.parametrize(
    ("kl", "num_documents", "factor"),
    [
        (0.1, 20, 1.0),
        (0.11, 20, 1 + 0.1 * 20 / 50),
        (0.09, 20, 1 - 0.1 * 20 / 50),
        (7.0, 20, 1 + 0.2 * 20 / 50),
        (0.0, 20, 1 - 0.2 * 20 / 50),
        (7.0, 5000, 1 + 0.2),
        (0.0, 5000, 1 - 0.2),
    ],
)
def test_the_error_and_the_documents_are_bounded(
    kl: float, num_documents: int, factor: float
) -> None:
    assert after(kl, num_documents) == pytest.approx(0.5 * factor, rel=1e-12)


def test_a_fixed_coefficient_stays() -> None:
    assert after(7.0, 20, adapts=False) == 0.5
