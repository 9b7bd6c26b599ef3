"""The head as torchtitan's loss, against a plain head and against torchtitan's own losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastrl import Document, HeadOutput, LanguageModelHead, LanguageModelHeadConfig, TokenBatch
from tests.helpers.peer_packages import peer_module

torchtitan_loss = peer_module("torchtitan.components.loss")
torchtitan_rl = peer_module("torchtitan.experiments.rl.losses")
HeadLoss = peer_module("fastrl.integrations.torchtitan").HeadLoss

ROWS, LENGTH, WIDTH, VOCABULARY = 2, 8, 6, 19
# Documents of the rows: tokens that predict, of which the first are the prompt's.
DOCUMENTS = (((5, 2), (3, 1)), ((4, 1), (2, 0)))


class Batch:
    """Two packed rows, the second with padding; a document's tokens and labels are its own."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.hidden = torch.randn(ROWS, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
        self.labels = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
        self.generator_logprobs = -torch.rand(ROWS, LENGTH, dtype=dtype) - 2.5
        self.advantages = torch.zeros(ROWS, LENGTH, dtype=dtype)
        self.loss_mask = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
        self.positions = torch.arange(LENGTH).repeat(ROWS, 1)
        for row, documents in enumerate(DOCUMENTS):
            start = 0
            for number, (length, prompt) in enumerate(documents):
                span = slice(start, start + length)
                self.positions[row, span] = torch.arange(length)
                self.loss_mask[row, start + prompt : start + length] = True
                self.advantages[row, start + prompt : start + length] = (-1.0) ** number * (row + 1)
                start += length
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)

    def inputs(self) -> dict[str, Tensor]:
        return {
            "generator_logprobs": self.generator_logprobs,
            "advantages": self.advantages,
            "loss_mask": self.loss_mask,
        }

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(1.7 * loss, [self.hidden, self.lm_head.weight])


def build(losses: dict[str, Any], lm_head: nn.Module, **options: Any) -> Any:
    loss = HeadLoss.Config(losses=losses, **options).build()
    loss.set_lm_head(lm_head)
    return loss


@pytest.mark.parametrize("chunks", [1, 4])
def test_grpo_is_torchtitans_chunked_grpo(chunks: int) -> None:
    batch = Batch(torch.float32)  # torchtitan's logits are fp32 whatever comes
    batch.generator_logprobs[0, 3] = torch.nan
    config = torchtitan_loss.ChunkedLossWrapper.Config(
        num_chunks=chunks, loss_fn=torchtitan_rl.GRPOLoss.Config(clip_eps=0.1)
    )
    theirs = config.build()
    theirs.set_lm_head(batch.lm_head)
    expected, metrics = theirs(batch.hidden, batch.labels, 9, **batch.inputs())
    expected.backward()
    wanted: Any = (batch.hidden.grad, batch.lm_head.weight.grad)
    ours = build(
        {"policy": {"type": "grpo", "epsilon_low": 0.1, "epsilon_high": 0.1}}, batch.lm_head
    )
    loss, found = ours(batch.hidden, batch.labels, 9, **batch.inputs())
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    for grad, want in zip(batch.gradients(loss), wanted, strict=True):
        torch.testing.assert_close(grad, 1.7 * want, atol=1e-6, rtol=1e-5)
    ratio = metrics["loss/ratio_mean"]
    torch.testing.assert_close(found["loss/policy/ratio"].float(), ratio, atol=1e-6, rtol=0)
    assert all(name.endswith("/max") or "max" not in name for name in found)
    assert "loss/policy/ratio/max" in found


def test_fp32_logits_of_16_bit_weights_are_those_of_castlinear() -> None:
    cast = peer_module("torchtitan.experiments.rl.models.cast_linear").CastLinear
    batch = Batch(torch.bfloat16)
    layer = cast.Config(in_features=WIDTH, out_features=VOCABULARY).build().bfloat16()
    nn.init.normal_(layer.weight)
    inputs = {name: value.float() for name, value in batch.inputs().items()}
    inputs["loss_mask"] = batch.loss_mask
    config = torchtitan_loss.ChunkedLossWrapper.Config(
        num_chunks=1, loss_fn=torchtitan_rl.GRPOLoss.Config()
    )
    theirs = config.build()
    theirs.set_lm_head(layer)
    expected, _ = theirs(batch.hidden, batch.labels, 9, **inputs)
    loss, _ = build({"policy": {"type": "grpo"}}, layer)(batch.hidden, batch.labels, 9, **inputs)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)


def test_a_layer_of_another_forward_is_refused() -> None:
    class Other(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(ValueError, match="got a Other"):
        build({"policy": {"type": "grpo"}}, Other(WIDTH, VOCABULARY))


@pytest.mark.parametrize("kind", ["gspo", "cispo", "vespo"])
def test_documents_are_whole_with_positions(kind: str) -> None:
    batch = Batch()
    ours = build({"policy": {"type": kind}}, batch.lm_head, temperature=0.8)
    loss, _ = ours(batch.hidden, batch.labels, 11, positions=batch.positions, **batch.inputs())
    expected = plain_head(batch, kind, 11)
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=1e-12)
    found, wanted = batch.gradients(loss), batch.gradients(expected)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-9)
    assert wanted[0].abs().max() > 0


def plain_head(batch: Batch, kind: str, count: int) -> Tensor:
    """The head on the documents of the batch, one after the other, from our own preprocessor."""
    documents, hidden = [], []
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for length, prompt in lengths:
            end = start + length
            learnt = slice(start + prompt, end)
            tokens = [0, *batch.labels[row, start:end].tolist()]
            documents.append(
                Document(
                    tokens=tokens,
                    prompt_length=prompt + 1,
                    logprobs=batch.generator_logprobs[row, learnt].tolist(),
                    advantage=float(batch.advantages[row, end - 1]),
                    temperature=0.8,
                )
            )
            hidden += [batch.hidden[row, start:end], torch.zeros(1, WIDTH, dtype=torch.float64)]
            start = end
    (kwargs,) = TokenBatch.from_documents(documents).to_kwargs()
    kwargs = kwargs.replace(
        num_labels_in_batch=count,
        old_logprobs=exact(batch, kwargs.old_logprobs),
    )
    losses: Any = {"policy": {"type": kind, "normalisation": "tokens"}}
    config = LanguageModelHeadConfig(hidden_size=WIDTH, vocab_size=VOCABULARY, losses=losses)
    head = LanguageModelHead(config, groups=None, owns_weight=False)
    weight = batch.lm_head.weight
    output: HeadOutput = head(torch.cat(hidden), kwargs, weight=weight, compute_loss=True)
    assert output.loss is not None
    return output.loss


def exact(batch: Batch, packed: Tensor | None) -> Tensor:
    """The log-probabilities that documents carry, without their rounding to fp32."""
    assert packed is not None
    values = batch.generator_logprobs[batch.loss_mask]
    result = torch.zeros_like(packed, dtype=torch.float64)
    result[packed != 0] = values
    return result


def test_a_loss_of_documents_without_their_bounds_is_refused() -> None:
    batch = Batch()
    ours = build({"first": {"type": "gspo"}, "second": {"type": "grpo"}}, batch.lm_head)
    with pytest.raises(ValueError, match=r"\['first'\] must be given `positions`"):
        ours(batch.hidden, batch.labels, 9, **batch.inputs())


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ({"a": {"type": "gspo", "normalisation": "documents"}}, "must be 'tokens' in torchtitan"),
        ({"a": {"type": "grpo", "kl": {"coefficient": 0.1}}}, r"need \['ref_logprobs'\]"),
    ],
)
def test_what_the_batches_cannot_serve_is_refused(losses: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(losses, Batch().lm_head)


def test_the_layer_is_left_as_it_was_and_validation_needs_no_gradient() -> None:
    batch = Batch()
    ours = build({"policy": {"type": "grpo"}}, batch.lm_head)
    assert isinstance(ours, torchtitan_loss.ChunkedLossWrapper)  # the trainer asks
    with torch.no_grad():
        loss, _ = ours(batch.hidden.detach(), batch.labels, None, **batch.inputs())
    assert not loss.requires_grad
    assert "forward" not in vars(batch.lm_head)
