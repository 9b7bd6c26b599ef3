"""A head in a model that PEFT, autocast, checkpointing, torch.compile or accelerate work on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastrl import BatchKwargs, Document, OptimizerStep, TokenBatch
from fastrl.integrations.transformers import attach_head, detach_head, packing_of
from fastrl.integrations.transformers.layout import model_inputs
from tests.helpers.hf_models import VOCAB_SIZE, tiny_model
from tests.helpers.own_logits import (
    Float64,
    gradients,
    own_logprobs,
    own_loss,
    some_batch,
    some_documents,
)

# PEFT and checkpointing by the older of two names.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")

LOSSES: dict[str, Any] = {"policy": {"type": "grpo", "epsilon_low": 0.3, "epsilon_high": 0.4}}
BATCH = some_batch(VOCAB_SIZE)


def _by_logits(model: Any, head: Any) -> tuple[Tensor, dict[str, Tensor]]:
    expected = own_loss(head, own_logprobs(model, BATCH), BATCH)
    (1.7 * expected).backward()
    return expected, gradients(model)


def _assert_gives(model: Any, expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    output = model(batch=BATCH)
    torch.testing.assert_close(output.loss, expected[0], rtol=0, atol=1e-10)
    (1.7 * output.loss).backward()
    found = gradients(model)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-10, msg=name)


def _assert_equals_own_logits(model: Any, head: Any) -> None:
    _assert_gives(model, _by_logits(model, head))


def _lora(model: Any, **options: Any) -> Any:
    config = LoraConfig(r=3, lora_alpha=5, task_type=TaskType.CAUSAL_LM, **options)
    adapted: Any = get_peft_model(model, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return adapted


LORA: dict[str, dict[str, Any]] = {
    "body": {"target_modules": ["q_proj", "v_proj"]},
    "body_and_head": {"target_modules": ["q_proj", "lm_head"]},
    "whole_head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("attached_first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("where", LORA)
def test_lora_of_body_and_head(where: str, attached_first: bool) -> None:
    model = tiny_model("llama")
    if attached_first:
        head = attach_head(model, LOSSES)
        adapted = _lora(model, **LORA[where])
    else:
        adapted = _lora(model, **LORA[where])
        head = attach_head(adapted, LOSSES)
    _assert_equals_own_logits(adapted, head)
    with adapted.disable_adapter(), torch.no_grad():
        reference = adapted(batch=BATCH).logprobs
        expected = own_logprobs(adapted, BATCH)
    torch.testing.assert_close(reference, expected, rtol=0, atol=1e-12)
    adapted.merge_and_unload()
    torch.testing.assert_close(
        model(batch=BATCH).loss, own_loss(head, own_logprobs(model, BATCH), BATCH)
    )
    detach_head(model)
    assert "forward" not in vars(model)


def test_adapters_that_are_no_lora_are_refused() -> None:
    adapted = _lora(tiny_model("llama"), use_dora=True, target_modules=["lm_head"])
    with pytest.raises(TypeError, match="variant Dora"):
        attach_head(adapted, LOSSES)
    prompt = PromptTuningConfig(num_virtual_tokens=2, task_type=TaskType.CAUSAL_LM)
    virtual = get_peft_model(tiny_model("llama", dtype=torch.float32), prompt)
    with pytest.raises(ValueError, match=r"must not have prompt learning, got .*\['default'\]"):
        attach_head(virtual, LOSSES)


def test_autocast_runs_the_products_in_its_dtype() -> None:
    """Within bf16's error of the logits under autocast, and nearer than them to float64."""
    model = tiny_model("llama", initializer_range=0.4)
    truth = own_logprobs(model, BATCH).detach()
    model.float()
    batch = some_batch(VOCAB_SIZE, torch.float32)
    head = attach_head(model, LOSSES)
    operands = []
    forward = head.forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        operands.append(kwargs["compute_dtype"])
        return forward(*args, **kwargs)

    head.forward = spy
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch=batch, return_logprobs=True)
        own = own_logprobs(model, batch)
    output.loss.backward()
    found = gradients(model)
    assert operands == [torch.bfloat16]
    labelled = batch.labels >= 0
    of_head, of_logits = (
        (each.double() - truth)[labelled].square().mean().sqrt()
        for each in (output.logprobs, own.detach())
    )
    assert of_head < of_logits
    assert (output.logprobs - own)[labelled].abs().max() < 8 * 2**-8 * own.abs().max()
    own_loss(head, own, batch).backward()
    for name, gradient in gradients(model).items():
        assert gradient.dtype == found[name].dtype == torch.float32
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error < 0.1, (name, error)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "opt"])
def test_the_layout_is_found_under_autocast(family: str) -> None:
    model = tiny_model(family, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        attach_head(model, {})
    assert packing_of(model) == ("padded" if family == "opt" else "packed")


def test_gradient_checkpointing() -> None:
    model = tiny_model("llama")
    head = attach_head(model, LOSSES)
    model.gradient_checkpointing_enable()
    model.train()
    calls: list[str] = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append("norm"))
    model(batch=BATCH).loss.backward()
    assert len(calls) == 2
    model.zero_grad()
    _assert_equals_own_logits(model, head)


@pytest.mark.parametrize(
    "attached_first", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["before", "after"]
)
def test_a_compiled_body(attached_first: bool) -> None:
    runs: list[int] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append(1)
            return graph(*args)

        return run

    model = tiny_model("llama", num_hidden_layers=1)
    expected = _by_logits(model, attach_head(model, LOSSES))
    if not attached_first:
        detach_head(model)
    model.model.compile(backend=backend, dynamic=True)
    if not attached_first:
        attach_head(model, LOSSES)
    runs.clear()
    _assert_gives(model, expected)
    assert runs


def test_a_compiled_model() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    expected = _by_logits(model, attach_head(model, LOSSES))
    model.compile(backend="eager", dynamic=True)
    _assert_gives(model, expected)


@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize("family", ["mixtral", "jetmoe", "qwen3_moe"])
@pytest.mark.usefixtures("float64")
def test_auxiliary_losses_are_added_by_the_share_of_labels(family: str, packing: Any) -> None:
    model = tiny_model(family, output_router_logits=True)
    config = model.config
    coefficient = config.aux_loss_coef if family == "jetmoe" else config.router_aux_loss_coef
    head = attach_head(model, {"a": {"type": "cross_entropy"}}, packing=packing)
    step = OptimizerStep.from_documents(some_documents(VOCAB_SIZE), max_tokens=14)
    total = torch.zeros((), dtype=torch.float64)
    mean = torch.zeros((), dtype=torch.float64)
    for batch in step:
        logprobs = own_logprobs(model, batch)
        total = total - logprobs.sum() / batch.num_labels_in_batch
        with torch.enable_grad():
            own = model(**model_inputs(batch, packing), use_cache=False).aux_loss
        mean = mean + own * int((batch.labels >= 0).sum()) / batch.num_labels_in_batch
    (1.7 * (total + coefficient * mean)).backward()
    by_logits = gradients(model)
    for batch in step:
        output = model(batch=batch)
        (1.7 * output.loss).backward()
        step.add(output)
    metrics = step.finish(head.loss_groups)
    torch.testing.assert_close(metrics["aux_loss"].double(), mean.detach(), rtol=0, atol=1e-6)
    expected = (total + coefficient * mean).detach()
    torch.testing.assert_close(metrics["loss"].double(), expected, rtol=0, atol=1e-9)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, by_logits[name], rtol=0, atol=1e-9, msg=name)
    assert by_logits[next(name for name in by_logits if "gate" in name or "router" in name)].any()


def test_a_step_without_labels_has_no_auxiliary_loss() -> None:
    model = tiny_model("mixtral", output_router_logits=True)
    attach_head(model, {"a": {"type": "cross_entropy"}})
    (batch,) = TokenBatch.from_documents([Document(tokens=[3, 4], prompt_length=2)]).to_kwargs()
    for count in (0, torch.tensor(0)):
        output = model(batch=batch.replace(num_labels_in_batch=count))
        assert output.loss.item() == output.metrics["aux_loss"].item() == 0


def test_a_head_goes_into_what_accelerate_has_prepared() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    forward = model.forward
    attach_head(prepared, LOSSES)
    batch = some_batch(VOCAB_SIZE, torch.float32)
    found = prepared(batch=batch).loss
    detach_head(prepared)
    assert model.forward == forward
    attach_head(prepared, LOSSES)
    assert prepared(batch=batch).loss.equal(found)


def test_accelerate_prepares_a_model_with_a_head() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    head = attach_head(model, LOSSES)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(model)
    batch = some_batch(VOCAB_SIZE, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = own_loss(head, own_logprobs(model, batch), batch)
    output = prepared(batch=batch)
    accelerator.backward(output.loss)
    assert abs(output.loss - expected) < 0.03
    with pytest.raises(ValueError, match="undo what wrapped it since"):
        detach_head(model)
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert unwrapped(batch=batch).loss.dtype == torch.float32
    detach_head(unwrapped)
    assert unwrapped is model


@pytest.fixture
def float64() -> Iterator[None]:
    with Float64():
        yield


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_no_logits_exist(family: str) -> None:
    model = tiny_model(family, vocab_size=2048)
    batch: BatchKwargs = some_batch(2048)
    attach_head(model, LOSSES, chunk_size=8)
    assert packing_of(model) == ("packed" if family == "llama" else "padded")
    with _Largest() as largest:
        model(batch=batch).loss.backward()
    # Parameters are [2048, 32].
    assert largest.elements <= 2048 * 32 < batch.num_tokens * 2048
