"""A guest's weight on a GPU: LoRA and other dtypes of the products, on the fused kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fastrl import kernels, linear_logprobs
from fastrl.functional.reference.head import logits
from tests.helpers.lora import lora_layer
from tests.helpers.tile_cases import relative_error

pytestmark = pytest.mark.gpu

T, D, V = 300, 256, 5003


def case() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [T, D], labels, upstream gradients."""
    labels = torch.randint(V, (T,), device="cuda")
    labels[::5] = -100
    hidden = torch.randn(T, D, device="cuda").requires_grad_()
    return hidden, labels, torch.randn(T, device="cuda")


def truth(z: Tensor, labels: Tensor, upstream: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Log-probabilities of float64 logits, and gradients."""
    mask = labels != -100
    chosen = z.log_softmax(1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    logprobs = torch.where(mask, chosen, 0)
    return [logprobs, *torch.autograd.grad((logprobs * upstream).sum(), inputs)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("budget", [2**31, 2**20], ids=["whole", "tiles"])
def test_compute_dtype_of_fp32_tensors(dtype: torch.dtype, budget: int) -> None:
    hidden, labels, upstream = case()
    weight = (torch.randn(V, D, device="cuda") / 16).requires_grad_()
    found = linear_logprobs(
        hidden, weight, labels, compute_dtype=dtype, max_logits_bytes=budget
    ).logprobs
    grads = torch.autograd.grad((found * upstream).sum(), [hidden, weight])
    assert [grad.dtype for grad in grads] == [torch.float32] * 2
    rounded = [tensor.detach().to(dtype).double().requires_grad_() for tensor in (hidden, weight)]
    expected = truth(logits(*rounded), labels, upstream.double(), rounded)
    torch.testing.assert_close(found.double(), expected[0], rtol=1e-5, atol=2e-5)
    for grad, true in zip(grads, expected[1:], strict=True):
        assert relative_error(grad.double(), true) < 4e-3
        assert not torch.equal(grad, grad.to(dtype).float())


@pytest.mark.parametrize("rank", [8, 3])
@pytest.mark.parametrize("budget", [2**31, 2**20], ids=["whole", "tiles"])
def test_lora_is_the_sum_of_both_products(rank: int, budget: int) -> None:
    hidden, labels, upstream = case()
    base = nn.Linear(D, V, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    layer = lora_layer(base, r=rank)
    hidden = hidden.detach().bfloat16().requires_grad_()
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    low_rank = nn.functional.linear(hidden, a) * layer.scaling["default"]
    joined = torch.cat([hidden, low_rank], 1)
    assert kernels.can_run_fused(joined, torch.cat([base.weight, b], 1)) == (rank == 8)
    found = linear_logprobs(hidden, layer, labels, max_logits_bytes=budget).logprobs
    grads = torch.autograd.grad((found * upstream).sum(), [hidden, a, b])
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, a, b)]
    product = wide[0] @ wide[1].T * layer.scaling["default"] @ wide[2].T
    z = wide[0] @ base.weight.double().T + product
    expected = truth(z, labels, upstream.double(), wide)
    assert relative_error(found.double(), expected[0]) < 4e-3
    for grad, true in zip(grads, expected[1:], strict=True):
        assert relative_error(grad.double(), true) < 1.5e-2
