"""The weight as a tensor or as its module: LoRA, tied embeddings, other dtypes of the products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import peft
import pytest
import torch
from torch import Tensor, nn

from fastrl.functional.head import extra_statistics
from fastrl.functional.head.extra_statistics import StatisticName
from fastrl.functional.linear_logprobs import linear_logprobs
from fastrl.functional.reference.head import logits, token_statistics
from fastrl.functional.statistics import TokenStatistics
from fastrl.parallel import ParallelGroups
from tests.helpers.lora import lora_layer

T, D, V = 11, 6, 23
NAMES: tuple[StatisticName, ...] = ("mean_logit", "sum_squares")


def lora(bias: bool = False, **options: Any) -> Any:
    return lora_layer(nn.Linear(D, V, bias=bias, dtype=torch.float64), **options)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, labels with some -100, temperatures."""
    labels = torch.randint(V, (T,))
    labels[[0, 4]] = -100
    return torch.randn(T, D, dtype=dtype, requires_grad=True), labels, torch.rand(T) + 0.5


def expected(z: Tensor, labels: Tensor) -> list[Tensor]:
    """Log-probability, entropy, log-sum-exp, mean logit, sum of squares, by the definition."""
    mask = labels != -100
    p = torch.softmax(z, 1)
    extra = [torch.where(mask, z.mean(1), 0), torch.where(mask, p.square().sum(1), 0)]
    return [*token_statistics(z, labels), *extra]


def gradients(values: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Of a sum with weights that are not 1."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(len(values), T, dtype=torch.float64, generator=generator)
    total = torch.stack([(v * w).sum() for v, w in zip(values, weights, strict=True)]).sum()
    return list(torch.autograd.grad(total, tensors))


def vectors(statistics: TokenStatistics) -> list[Tensor]:
    return statistics.vectors()


@pytest.mark.parametrize("max_logits_bytes", [2**20, 200])
@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Linear(D, V, bias=False, dtype=torch.float64),
        lambda: nn.Linear(D, V, dtype=torch.float64),
        lambda: lora(),
        lambda: lora(bias=True, lora_bias=True),
        lambda: lora(use_rslora=True),
    ],
    ids=["linear", "bias", "lora", "lora_bias", "rslora"],
)
def test_a_module_is_its_forward(layer: Callable[[], nn.Module], max_logits_bytes: int) -> None:
    module = layer()
    hidden, labels, temperature = inputs()
    found = linear_logprobs(
        hidden, module, labels, temperature=temperature, softcap=4.0, logit_scale=0.7,
        entropy=True, statistics=NAMES, max_logits_bytes=max_logits_bytes,
    )  # fmt: skip
    z = 4 * torch.tanh(0.7 * module(hidden) / 4) / temperature[:, None]
    values = expected(z, labels)
    tensors = [hidden, *(p for p in module.parameters() if p.requires_grad)]
    torch.testing.assert_close(vectors(found), values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        gradients(vectors(found), tensors), gradients(values, tensors), rtol=1e-10, atol=1e-12
    )


def test_b4_lora_on_the_output_layer_is_used_and_trained() -> None:
    """Given the layer; given its weight, the adapter is left out, by nats."""
    layer = lora()
    hidden, labels, _ = inputs()
    truth = token_statistics(layer(hidden), labels)[0]
    without = linear_logprobs(hidden, layer.weight, labels).logprobs
    assert (without - truth).abs().max() > 0.5
    found = linear_logprobs(hidden, layer, labels).logprobs
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-12)
    tensors = [hidden, *(p for p in layer.parameters() if p.requires_grad)]
    assert len(tensors) == 3
    torch.testing.assert_close(gradients([found], tensors), gradients([truth], tensors))


def test_several_adapters_add_up() -> None:
    layer = lora()
    layer.update_layer("second", 2, 1, peft.LoraConfig(r=2, lora_alpha=1))
    nn.init.normal_(layer.lora_B["second"].weight)
    layer.set_adapter(["default", "second"])
    layer.double()
    hidden, labels, _ = inputs()
    truth = token_statistics(layer(hidden), labels)[0]
    torch.testing.assert_close(linear_logprobs(hidden, layer, labels).logprobs, truth)


def test_merged_and_disabled_adapters_are_the_weight_alone() -> None:
    layer = lora()
    hidden, labels, _ = inputs()
    layer.merge()
    truth = token_statistics(layer(hidden), labels)[0]
    torch.testing.assert_close(linear_logprobs(hidden, layer, labels).logprobs, truth)
    layer.unmerge()
    layer.enable_adapters(False)
    truth = token_statistics(layer(hidden), labels)[0]
    torch.testing.assert_close(linear_logprobs(hidden, layer, labels).logprobs, truth)


def test_dropout_of_the_adapter_is_applied() -> None:
    layer = lora(lora_dropout=0.5)
    hidden, labels, _ = inputs()
    torch.manual_seed(3)
    truth = token_statistics(layer(hidden), labels)[0]
    torch.manual_seed(3)
    torch.testing.assert_close(linear_logprobs(hidden, layer, labels).logprobs, truth)


def test_modules_to_save_and_tied_embeddings() -> None:
    layers = [nn.Linear(D, D, dtype=torch.float64), nn.Linear(D, V, dtype=torch.float64)]
    config = peft.LoraConfig(r=3, target_modules=["0"], modules_to_save=["1"])
    model: Any = peft.get_peft_model(cast(Any, nn.Sequential(*layers)), config)
    wrapper = model.base_model.model[1]
    hidden, labels, _ = inputs()
    saved = wrapper.modules_to_save["default"]
    nn.init.normal_(saved.weight)
    truth = token_statistics(wrapper(hidden), labels)[0]
    found = linear_logprobs(hidden, wrapper, labels).logprobs
    torch.testing.assert_close(found, truth)
    torch.autograd.grad(found.sum(), [saved.weight, saved.bias])
    with model.disable_adapter():
        truth = token_statistics(wrapper(hidden), labels)[0]
        torch.testing.assert_close(linear_logprobs(hidden, wrapper, labels).logprobs, truth)
    embedding = nn.Embedding(V, D, dtype=torch.float64)
    truth = token_statistics(logits(hidden, embedding.weight), labels)[0]
    torch.testing.assert_close(linear_logprobs(hidden, embedding, labels).logprobs, truth)


class Doubled(nn.Linear):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return 2 * super().forward(hidden_states)


def hooked() -> nn.Module:
    layer = nn.Linear(D, V, dtype=torch.float64)
    layer.register_forward_hook(lambda module, args, output: 2 * output)
    return layer


def lora_with_hooked_b() -> nn.Module:
    layer: nn.Module = lora()
    b = layer.get_submodule("lora_B.default")
    b.register_forward_hook(lambda module, args, output: -output)
    return layer


def lora_with_a_forward() -> nn.Module:
    layer: nn.Module = lora()
    vars(layer)["forward"] = lambda hidden_states: 2 * hidden_states
    return layer


def other_adapter() -> nn.Module:
    config = peft.IA3Config(target_modules=["0"], feedforward_modules=[])
    model: Any = peft.get_peft_model(cast(Any, nn.Sequential(nn.Linear(D, V))), config)
    layer: nn.Module = model.base_model.model[0]
    return layer


@pytest.mark.parametrize(
    ("layer", "problem"),
    [
        (lambda: lora(use_dora=True), "'default' of the variant Dora"),
        (other_adapter, "is not LoRA"),
        (lambda: Doubled(D, V, dtype=torch.float64), "something else than"),
        (hooked, "hooks"),
        (lora_with_hooked_b, "hooks"),
        (lora_with_a_forward, "a forward of its own"),
        (lambda: nn.Conv1d(D, V, 1), "something else than"),
        (lambda: nn.Linear(D, V, device="meta"), "meta device"),
    ],
)
def test_what_is_not_honoured_is_refused(layer: Callable[[], nn.Module], problem: str) -> None:
    hidden, labels, _ = inputs()
    with pytest.raises(TypeError, match=f"`weight` must be .*{problem}"):
        linear_logprobs(hidden, layer(), labels)
    with pytest.raises(ValueError, match="`bias` must not be given beside a module"):
        linear_logprobs(hidden, nn.Linear(D, V), labels, bias=torch.zeros(V))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunks", [2**20, 300])
def test_compute_dtype_rounds_the_operands_alone(dtype: torch.dtype, chunks: int) -> None:
    """fp32 tensors, 16-bit operands: statistics and gradients are those of rounded operands."""
    layer = nn.Linear(D, V)
    hidden, labels, temperature = inputs(torch.float32)
    found = linear_logprobs(
        hidden, layer.weight, labels, bias=layer.bias, temperature=temperature, entropy=True,
        statistics=NAMES, compute_dtype=dtype, max_logits_bytes=chunks,
    )  # fmt: skip
    assert {value.dtype for value in vectors(found)} == {torch.float32}
    tensors = [hidden, layer.weight, layer.bias]
    rounded = [tensor.detach().to(dtype).double().requires_grad_() for tensor in tensors[:2]]
    bias = layer.bias.detach().double().requires_grad_()
    z = logits(rounded[0], rounded[1], bias=bias, temperature=temperature.double())
    values = expected(z, labels)
    grads = gradients([value.double() for value in vectors(found)], tensors)
    assert [grad.dtype for grad in grads] == [torch.float32] * 3
    torch.testing.assert_close([v.double() for v in vectors(found)], values, rtol=1e-5, atol=1e-5)
    truths = gradients(values, [*rounded, bias])
    for grad, truth in zip(grads, truths, strict=True):
        # dz is rounded to the operands' dtype, the sums are not.
        assert (grad - truth).norm() < 4e-3 * truth.norm()


def test_gradients_are_not_rounded_to_the_compute_dtype() -> None:
    hidden, weight = torch.randn(T, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    labels = torch.randint(V, (T,))
    found = linear_logprobs(hidden, weight, labels, compute_dtype=torch.bfloat16).logprobs.sum()
    for grad in torch.autograd.grad(found, [hidden, weight]):
        assert not torch.equal(grad, grad.bfloat16().float())


def test_padded_hidden_states_and_a_temperature_of_no_dimension() -> None:
    hidden, labels, temperature = inputs()
    weight = torch.randn(V, D, dtype=torch.float64)
    kept = [1, 2, 3, 5, 6, 7, 8, 9]
    hidden, labels, temperature = hidden[kept], labels[kept], temperature[kept]
    flat = linear_logprobs(hidden, weight, labels, temperature=temperature, entropy=True)
    padded = linear_logprobs(
        hidden.view(2, 4, D), weight, labels.view(2, 4), temperature=temperature.view(2, 4),
        entropy=True,
    )  # fmt: skip
    assert padded.logprobs.shape == (2, 4)
    for one, other in zip(vectors(padded), vectors(flat), strict=True):
        torch.testing.assert_close(one.flatten(), other)
    scalar = linear_logprobs(hidden, weight, labels, temperature=torch.tensor(0.7)).logprobs
    number = linear_logprobs(hidden, weight, labels, temperature=0.7).logprobs
    torch.testing.assert_close(scalar, number, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("hidden_states", (torch.zeros(2, D),)), ("weight", [1.0]), ("labels", [1, 2])],
)
def test_other_types_are_refused_by_name(argument: str, value: object) -> None:
    arguments: dict[str, object] = {
        "hidden_states": torch.zeros(2, D),
        "weight": torch.zeros(V, D),
        "labels": torch.zeros(2, dtype=torch.int64),
        argument: value,
    }
    with pytest.raises(TypeError, match=f"`{argument}` must be a tensor, got a "):
        linear_logprobs(**arguments)  # type: ignore[arg-type]


def test_the_statistics_take_no_pass_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, labels, _ = inputs()
    monkeypatch.setattr(extra_statistics, "full_rows", None)
    assert linear_logprobs(hidden, torch.randn(V, D).double(), labels).mean_logit is None
    with pytest.raises(ValueError, match="`statistics` must be among"):
        linear_logprobs(hidden, torch.randn(V, D).double(), labels, statistics=("x",))  # type: ignore[arg-type]


@pytest.mark.parametrize("axis", ["sp", "tp"])
def test_lora_under_a_sharded_head_is_refused(axis: str) -> None:
    hidden, labels, _ = inputs()
    groups = ParallelGroups(**{axis: cast(Any, object())})
    with pytest.raises(ValueError, match="`weight` must not be a LoRA layer under"):
        linear_logprobs(hidden, lora(), labels, groups=groups)
