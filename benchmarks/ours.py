"""fastrl's head as an implementation beside its peers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases import EPSILON, Case
from benchmarks.peers import ONCE, TWICE, Implementation, Loss
from benchmarks.products import Products
from fastrl.config import GSPOLossConfig
from fastrl.config.losses import LanguageModelHeadConfig
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.language_model_head import LanguageModelHead
from fastrl.layers.losses import build_loss

GRPO = {
    "type": "grpo",
    "epsilon_low": EPSILON,
    "epsilon_high": EPSILON,
    "normalisation": "tokens",
}
GSPO = {"type": "gspo", "epsilon_low": 3e-4, "epsilon_high": 4e-4}


def gspo(case: Case) -> Callable[[Tensor], Tensor]:
    """The GSPO loss of log-probabilities [T], which the head's gradients are held to."""
    loss = build_loss(GSPOLossConfig.model_validate(GSPO))

    def of_logprobs(logprobs: Tensor) -> Tensor:
        return loss(TokenStatistics(logprobs, None, logprobs.detach()), case.batch)

    return of_logprobs


def make_head(
    case: Case, strategy: str, loss: dict[str, Any], metrics: bool, deterministic: bool = False
) -> LanguageModelHead:
    """A head over the case's weight, without a copy."""
    shape = case.shape
    config = LanguageModelHeadConfig.model_validate(
        {
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
            "softcap": shape.softcap,
            "losses": {"policy": loss},
            "strategy": strategy,
            "metrics": metrics,
            "deterministic": deterministic,
        }
    )
    head = LanguageModelHead(config, device="meta", dtype=shape.dtype)
    head.weight = nn.Parameter(case.weight.detach())
    return head


def training(
    strategy: str, config: dict[str, Any], metrics: bool = False, deterministic: bool = False
) -> Callable[[Case], Loss]:
    """Loss and gradients."""

    def build(case: Case) -> Loss:
        head = make_head(case, strategy, config, metrics, deterministic)

        def run(hidden: Tensor, weight: Tensor) -> Tensor:
            # The weight is handed in like a peer's: as it is in autograd's graph.
            head._parameters["weight"] = weight  # type: ignore[assignment]
            loss: Tensor = head(hidden, case.batch).loss
            return loss

        return run

    return build


def evaluation(case: Case, deterministic: bool = False) -> Callable[[], Tensor]:
    """Log-probabilities and entropy, as for an old or a reference policy."""
    head = make_head(case, "auto", GRPO, False, deterministic).eval()
    hidden = case.hidden_states.detach()

    @torch.no_grad()
    def run() -> Tensor:
        logprobs: Tensor = head(hidden, case.batch).logprobs
        return logprobs

    return run


def head(
    name: str,
    strategy: str,
    loss: Callable[[Case], Loss],
    logprobs: Callable[[Case], Callable[[], Tensor]] | None = None,
    **options: Any,
) -> Implementation:
    """The head as a row of the results, with the products of its fused kernels."""
    products = ONCE["active"] if strategy == "single_pass" else TWICE["active"]
    options = {"products": products, "forward_rows": "labelled", **options}
    return Implementation(name, strategy, loss, logprobs, fp32_logits=True, **options)


OURS = (
    head("fastrl", "single_pass", training("single_pass", GRPO), evaluation),
    head("fastrl", "recompute", training("recompute", GRPO)),
    head(
        "fastrl, metrics",
        "single_pass",
        training("single_pass", GRPO, True),
        # Metrics are those of all labelled rows.
        products=(Products("labelled", "f"), Products("active", "hw")),
    ),
    head(
        "fastrl, deterministic",
        "single_pass",
        training("single_pass", GRPO, deterministic=True),
        partial(evaluation, deterministic=True),
    ),
    head("fastrl, deterministic", "recompute", training("recompute", GRPO, deterministic=True)),
    head("fastrl GSPO", "recompute", training("recompute", GSPO), objective="gspo"),
    head("fastrl GSPO", "single_pass", training("single_pass", GSPO), objective="gspo"),
)
