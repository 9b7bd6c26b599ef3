"""Draft heads' loss: against what Megatron-core's own model makes of the same hidden states.

It has no function of the loss alone: `GPTModel._postprocess` runs on a stand-in for the model that
has an output layer, and is given the hidden states of all depths.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import Document, DraftHeads, LanguageModelHead, LanguageModelHeadConfig, OptimizerStep
from fastrl.config import DraftConfig
from tests.helpers.peer_packages import peer_module

gpt_model = peer_module("megatron.core.models.gpt.gpt_model")

ROWS, LENGTH, WIDTH, VOCABULARY, DEPTH, FACTOR = 3, 8, 5, 17, 2, 0.3
PROMPTS = (2, 5, 1)


def of_megatron(states: list[Tensor], weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """[B, S] losses of the next tokens; their backward also runs that of the draft losses."""

    def token_losses(labels: Tensor, logits: Tensor) -> Tensor:
        logp = logits.transpose(0, 1).log_softmax(-1)
        return -logp.gather(-1, labels[..., None])[..., 0]

    config = SimpleNamespace(
        mtp_num_layers=DEPTH,
        mtp_loss_scaling_factor=FACTOR,
        calculate_per_token_loss=False,
        config_logger_dir="",
    )
    model: Any = SimpleNamespace(
        config=config,
        share_embeddings_and_output_weights=False,
        mtp=lambda **_: torch.cat([each.transpose(0, 1) for each in states]),
        embedding=None,
        post_process=True,
        training=False,
        cp_group=None,
        output_layer=lambda hidden, **_: (hidden @ weight.t(), None),
        compute_language_model_loss=token_losses,
    )
    own: Tensor = gpt_model.GPTModel._postprocess(
        model,
        states[0].transpose(0, 1),
        *[None] * 2,
        labels,
        *[None] * 3,
        mtp_in_postprocess=True,
        loss_mask=mask,
    )
    return own


@pytest.mark.parametrize("upstream", [1.0, 0.4])
def test_gradients_are_those_of_megatrons_losses(upstream: float) -> None:
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH))
    documents = [
        Document(row, prompt_length=prompt) for row, prompt in zip(tokens, PROMPTS, strict=True)
    ]
    states = [
        torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
        for _ in range(DEPTH + 1)
    ]
    config = LanguageModelHeadConfig.model_validate(
        {
            "hidden_size": WIDTH,
            "vocab_size": VOCABULARY,
            "losses": {"supervised": {"type": "cross_entropy"}},
        }
    )
    loss = {"type": "cross_entropy", "weight": FACTOR}
    drafts_config = DraftConfig.model_validate({"depth": DEPTH, "loss": loss})
    heads = DraftHeads(LanguageModelHead(config, dtype=torch.float64), drafts_config)
    weight = heads.head.weight
    with torch.no_grad():
        weight.normal_()
    step = OptimizerStep.from_documents(documents, max_tokens=ROWS * LENGTH)
    ((batch, *drafts),) = zip(step, step.draft(1), step.draft(2), strict=True)
    flat = [each.flatten(0, 1) for each in states]
    output = heads(flat[0], batch, list(zip(flat[1:], drafts, strict=True)))
    found = torch.autograd.grad(upstream * output.loss, [*states, weight])

    labels = batch.labels.view(ROWS, LENGTH)
    mask = (labels != -100).double()
    own = of_megatron(states, weight, labels.clamp(min=0), mask)
    scaler = gpt_model.MTPLossAutoScaler
    scaler.set_loss_scale(torch.tensor(upstream, dtype=torch.float64))  # as its schedule does
    try:
        loss_of_megatron = upstream * (mask * own).sum() / mask.sum()
        wanted = torch.autograd.grad(loss_of_megatron, [*states, weight])
    finally:
        scaler.set_loss_scale(torch.tensor(1.0))
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)
    assert all(grad.abs().max() > 0 for grad in found)
