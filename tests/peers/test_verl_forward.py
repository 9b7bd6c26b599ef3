"""verl's fused forward through the head, against the logits that the model itself gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.peer_packages import peer_module
from tests.helpers.verl_models import FAMILIES, VOCABULARY, Family, make_model

monkey_patch = peer_module("verl.models.transformers.monkey_patch")
peer_module("fastrl.integrations.verl")
HeadRequest = peer_module("fastrl.integrations.verl.forward").HeadRequest

# verl and PEFT use names that transformers has replaced.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

ROWS, LENGTH = 3, 7


@dataclass(frozen=True)
class Expected:
    """Of the model's own logits: [B, L] each, and gradients of one function of the first two."""

    logprobs: Tensor
    entropy: Tensor
    sum_squares: Tensor
    gradients: list[Tensor | None]


UPSTREAM = torch.linspace(-1.0, 2.0, ROWS * LENGTH, dtype=torch.float64).view(ROWS, LENGTH)


def gradients(model: nn.Module, logprobs: Tensor, entropy: Tensor) -> list[Tensor | None]:
    value = (UPSTREAM * logprobs).sum() + (UPSTREAM.flip(0) * entropy).sum()
    return list(torch.autograd.grad(value, [p for _, p in trained(model)], allow_unused=True))


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, value) for name, value in model.named_parameters() if value.requires_grad]


def by_own_logits(model: Any, tokens: Tensor, temperature: float | Tensor) -> Expected:
    logits = model(input_ids=tokens, use_cache=False).logits
    if isinstance(temperature, Tensor):
        temperature = temperature[..., None]
    logits = logits.double() / temperature
    logp = logits.log_softmax(-1)
    labels = tokens.roll(-1, dims=-1)
    logprobs = logp.gather(-1, labels[..., None])[..., 0]
    entropy = -(logp.exp() * logp).sum(-1)
    squares = logp.exp().square().sum(-1).detach()
    return Expected(logprobs, entropy, squares, gradients(model, logprobs, entropy))


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """verl's patch for its fused kernels, on a model whose class is restored afterwards."""

    def patch(model: Any) -> Any:
        monkeypatch.setattr(type(model), "forward", type(model).forward)
        # It looks for a class that the installed TRL has no more.
        monkeypatch.setattr(monkey_patch, "is_trl_available", lambda: False)
        monkey_patch.apply_monkey_patch(
            model,
            use_remove_padding=False,
            use_fused_kernels=True,
            fused_kernels_backend="torch",
        )
        return model

    return patch


def assert_same(model: Any, found: Any, request: Any, expected: Expected) -> None:
    torch.testing.assert_close(found.log_probs, expected.logprobs, atol=1e-9, rtol=0)
    torch.testing.assert_close(found.entropy, expected.entropy, atol=1e-9, rtol=0)
    torch.testing.assert_close(request.found, expected.sum_squares, atol=1e-9, rtol=0)
    for (name, _), grad, wanted in zip(
        trained(model),
        gradients(model, found.log_probs, found.entropy),
        expected.gradients,
        strict=True,
    ):
        assert (grad is None) == (wanted is None), name
        if grad is not None:
            torch.testing.assert_close(grad, wanted, atol=1e-9, rtol=1e-9, msg=name)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("per_token", [False, True], ids=["one_temperature", "per_token"])
def test_the_fused_forward_is_that_of_the_models_own_logits(
    family: Family, per_token: bool, patched: Any
) -> None:
    model = make_model(family)
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    temperature = torch.rand(ROWS, LENGTH, dtype=torch.float64) + 0.5 if per_token else 0.7
    expected = by_own_logits(model, tokens, temperature)
    patched(model)
    request = HeadRequest(temperature, sum_squares=True)
    found = model(input_ids=tokens, use_cache=False, return_dict=True, temperature=request)
    assert_same(model, found, request, expected)


def test_adapters_on_the_output_layer_count(patched: Any) -> None:
    peft = pytest.importorskip("peft")
    model = make_model(FAMILIES[0])
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["lm_head", "q_proj"])
    with_adapters = peft.get_peft_model(model, config)
    for name, parameter in with_adapters.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.5)
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    expected = by_own_logits(with_adapters, tokens, 1.0)
    patched(model)
    request = HeadRequest(1.0, sum_squares=True)
    found = with_adapters(input_ids=tokens, use_cache=False, return_dict=True, temperature=request)
    assert_same(with_adapters, found, request, expected)


def test_verls_number_for_a_temperature_works_without_a_request(patched: Any) -> None:
    model = make_model(FAMILIES[0])
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    expected = by_own_logits(model, tokens, 0.7)
    found = patched(model)(input_ids=tokens, use_cache=False, return_dict=True, temperature=0.7)
    torch.testing.assert_close(found.log_probs, expected.logprobs, atol=1e-9, rtol=0)
    torch.testing.assert_close(found.entropy, expected.entropy, atol=1e-9, rtol=0)


def test_the_products_have_autocasts_dtype(patched: Any) -> None:
    model = make_model(FAMILIES[0]).float()
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=tokens, use_cache=False).logits
        found = patched(model)(input_ids=tokens, use_cache=False, return_dict=True)
    assert logits.dtype == torch.bfloat16
    logp = logits.double().log_softmax(-1)
    expected = logp.gather(-1, tokens.roll(-1, dims=-1)[..., None])[..., 0]
    with torch.no_grad():
        exact = model.float()(input_ids=tokens, use_cache=False, return_dict=True).log_probs
    rounding = (found.log_probs - expected).abs().max()
    assert rounding < 0.1
    assert (found.log_probs - exact).abs().max() > 1e-4  # the operands were rounded


def test_a_config_that_changes_the_logits_in_an_unknown_way_is_refused(patched: Any) -> None:
    model = make_model(FAMILIES[0])
    model.config.lm_head_scale = 3.0
    with pytest.raises(ValueError, match=r"lm_head_scale.*use_fused_kernels: false"):
        patched(model)


def test_a_layer_that_is_no_linear_layer_is_refused(patched: Any) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = make_model(FAMILIES[0])
    scaled = Scaled(16, VOCABULARY, bias=False).double()
    model.lm_head = scaled
    with pytest.raises(TypeError, match="Scaled"):
        patched(model)(input_ids=torch.ones(1, 4, dtype=torch.int64), return_dict=True)
    assert "forward" not in vars(scaled)


def test_verls_other_backends_stay_verls(patched: Any) -> None:
    fused = peer_module("verl.utils.experimental.torch_functional").FusedLinearForPPO
    hidden, weight = torch.randn(5, 4), torch.randn(9, 4)
    labels = torch.randint(0, 9, (5,))
    ours, _ = fused(impl_backend="torch").forward(hidden, weight, labels, 0.5)
    expected = (hidden @ weight.t() / 0.5).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    torch.testing.assert_close(ours, expected)
    with pytest.raises(ValueError, match="Unsupported"):
        fused(impl_backend="fastrl")
