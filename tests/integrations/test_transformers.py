"""A head attached to a model of transformers: its calls, what it refuses, and no trace after."""

from __future__ import annotations

import copy
import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from fastrl import OptimizerStep, ParallelGroups, TokenBatch
from fastrl.integrations.transformers import attach_head, detach_head, packing_of, probe
from fastrl.integrations.transformers.output_layer import LogitRule
from tests.helpers.hf_models import VOCAB_SIZE, tiny_config, tiny_model
from tests.helpers.own_logits import (
    gradients,
    own_logprobs,
    own_loss,
    some_batch,
    some_documents,
)

LOSSES: dict[str, Any] = {"policy": {"type": "grpo", "epsilon_low": 0.3, "epsilon_high": 0.4}}
BATCH = some_batch(VOCAB_SIZE)


def _traces(model: nn.Module) -> dict[str, Any]:
    """All that a module and its submodules hold, by identity."""
    return {
        f"{name}.{attribute}": list(value) if isinstance(value, dict) else value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
    }


@pytest.mark.parametrize("training", [True, False])
def test_detaching_leaves_the_model_bit_identical(training: bool) -> None:
    model = tiny_model("llama", attention_dropout=0.5).train(training)
    model.model.layers[0].train(not training)
    before, weights = _traces(model), copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    attach_head(model, LOSSES)
    assert list(model.state_dict()) == list(weights)
    model(batch=BATCH).loss.backward()
    model.zero_grad()
    torch.set_rng_state(random)
    detach_head(model)
    after = _traces(model)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value is after[name] or value == after[name], name
    assert all(value.equal(weights[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="You must specify exactly one of input_ids"):
        model(batch=BATCH)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no head; `attach_head` gives"):
        detach_head(model)


def test_attaching_draws_no_random_number_and_trains_no_mode() -> None:
    model = tiny_model("llama").train()
    random = torch.get_rng_state()
    attach_head(model, LOSSES)
    assert torch.get_rng_state().equal(random)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_other_calls_go_on_as_before(tmp_path: Path) -> None:
    model = tiny_model("llama")
    ids = torch.arange(3, 12)[None]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}

    def calls(folder: str) -> tuple[Tensor, Tensor, Tensor, bytes]:
        model.save_pretrained(tmp_path / folder)
        saved = (tmp_path / folder / "model.safetensors").read_bytes()
        output = model(input_ids=ids, labels=ids)
        return output.logits, output.loss, model.generate(ids, **options), saved

    before = calls("before")
    attach_head(model, LOSSES)
    assert {*inspect.signature(model.forward).parameters} > {"input_ids", "labels", "batch"}
    while_attached = calls("attached")
    detach_head(model)
    for each in (while_attached, calls("after")):
        assert all(a.equal(b) for a, b in zip(before[:3], each[:3], strict=True))
        assert before[3] == each[3]


def test_gradients_decide_whether_a_loss_comes_in_any_mode() -> None:
    model = tiny_model("llama")
    attach_head(model, LOSSES)
    expected = own_logprobs(model, BATCH).detach()
    for training in (True, False):
        model.train(training)
        output = model(batch=BATCH)
        assert output.loss.requires_grad
        assert output.logprobs is None
        with torch.no_grad():
            output = model(batch=BATCH, statistics=("is_argmax",))
        assert output.loss is None
        torch.testing.assert_close(output.logprobs, expected, rtol=0, atol=1e-12)
        assert output.statistics["is_argmax"].shape == expected.shape
        assert model(batch=BATCH, compute_loss=False).loss is None
        with torch.no_grad():
            assert model(batch=BATCH, compute_loss=True).loss is not None


def test_a_head_without_losses_gives_logprobs() -> None:
    model = tiny_model("llama")
    assert attach_head(model, {}).config.losses == {}
    output = model(batch=BATCH)
    torch.testing.assert_close(output.logprobs, own_logprobs(model, BATCH).detach())


def test_options_go_to_the_head_and_losses_change_later() -> None:
    model = tiny_model("llama")
    head = attach_head(model, {}, strategy="recompute", keep={"top_k": 5}, metrics=False)
    assert head.config.strategy == "recompute"
    assert head.config.keep is not None
    head.set_losses(
        {
            "b": type(head.config)
            .model_validate(
                {"hidden_size": 1, "vocab_size": 1, "losses": {"b": {"type": "cross_entropy"}}}
            )
            .losses["b"]
        }
    )
    assert model(batch=BATCH).loss.requires_grad


def test_micro_batches_of_a_step_add_up() -> None:
    model = tiny_model("llama")
    head = attach_head(model, LOSSES)
    expected = own_loss(head, own_logprobs(model, BATCH), BATCH)
    expected.backward()
    by_logits = gradients(model)
    step = OptimizerStep.from_documents(some_documents(VOCAB_SIZE), max_tokens=14)
    assert len(step) > 2
    for batch in step:
        output = model(batch=batch)
        output.loss.backward()
        step.add(output)
    torch.testing.assert_close(step.finish(head.loss_groups)["loss"], expected.detach())
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, by_logits[name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_an_empty_batch_gives_zero(family: str) -> None:
    model = tiny_model(family)
    attach_head(model, {"a": {"type": "cross_entropy"}})
    for length in (0, 4):
        (batch,) = TokenBatch.from_documents([], sequence_length=length).to_kwargs()
        loss = model(batch=batch.replace(num_labels_in_batch=3)).loss
        loss.backward()
        assert loss.item() == 0
        assert all((each == 0).all() for each in gradients(model).values())


def test_a_copy_of_the_model_has_a_head_of_its_own_weights() -> None:
    class Group:
        def __deepcopy__(self, _memo: Any) -> None:
            raise TypeError("a process group cannot be copied")

    group: Any = Group()
    model = tiny_model("llama")
    attach_head(model, LOSSES, groups=ParallelGroups(dp=group))
    before = model(batch=BATCH).loss.detach()
    reference = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    assert reference(batch=BATCH).loss.equal(before)
    assert not model(batch=BATCH).loss.equal(before)
    detach_head(reference)
    assert packing_of(model) == "packed"


def test_a_model_with_a_head_is_not_pickled_as_what_cannot_be_read(tmp_path: Path) -> None:
    model = tiny_model("llama")
    attach_head(model, LOSSES)
    with pytest.raises(TypeError, match=r"A model with a head .* `detach_head` it first"):
        torch.save(model, tmp_path / "model.pt")
    detach_head(model)
    torch.save(model, tmp_path / "model.pt")


def test_the_layout_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fastrl.integrations.transformers"):
        attach_head(tiny_model("opt"), {})
    assert "OPTForCausalLM: documents are padded" in caplog.text


class _AfterLogits(LlamaForCausalLM):
    """A Llama that does something to its logits."""

    rule: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = type(self).rule(output.logits)
        return output


def _model_with(rule: Any) -> Any:
    kind = type("LlamaWithRule", (_AfterLogits,), {"rule": staticmethod(rule)})
    torch.manual_seed(0)
    model: Any = kind(tiny_config("llama")).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


RULES: dict[str, Any] = {
    "scale": lambda z: z * 1.37,
    "cap_after_scale": lambda z: 2.5 * torch.tanh(z * 0.7 / 2.5),
    "scale_after_cap": lambda z: 0.7 * (2.5 * torch.tanh(z / 2.5)),
    "fewer_logits": lambda z: z[..., :90],
    "in_place": lambda z: z.mul_(0.6),
}


@pytest.mark.parametrize("rule", RULES)
def test_scales_caps_and_padding_of_no_known_name_are_found(rule: str) -> None:
    model = _model_with(RULES[rule])
    batch = some_batch(90)
    head = attach_head(model, LOSSES)
    expected = own_logprobs(model, batch)
    expected_loss = own_loss(head, expected, batch)
    output = model(batch=batch, return_logprobs=True)
    torch.testing.assert_close(output.logprobs, expected.detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close(output.loss, expected_loss, rtol=0, atol=1e-9)
    (1.7 * output.loss).backward()
    found = gradients(model)
    (1.7 * expected_loss).backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-9)


UNKNOWN: dict[str, Any] = {
    "shift": lambda z: z + torch.arange(z.shape[-1]) / 50,
    "masked": lambda z: z.index_fill(-1, torch.tensor([5]), -1e30),
    "hardtanh": lambda z: z.clamp(-1, 1),
    "normalised": lambda z: z / z.norm(dim=-1, keepdim=True),
}


@pytest.mark.parametrize("rule", UNKNOWN)
def test_other_functions_of_the_logits_are_refused(rule: str) -> None:
    model = _model_with(UNKNOWN[rule])
    before = _traces(model)
    with pytest.raises(ValueError, match="LlamaWithRule must make softcap"):
        attach_head(model, {})
    assert before.keys() == _traces(model).keys()


def test_hooks_of_the_output_layer_run() -> None:
    model = tiny_model("llama")
    model.lm_head.register_forward_pre_hook(lambda _layer, inputs: (inputs[0].flip(-1),))
    model.lm_head.register_forward_hook(lambda _layer, _inputs, logits: logits * 1.1)
    head = attach_head(model, LOSSES)
    assert head.config.logit_scale == pytest.approx(1.1, rel=1e-12)
    expected = own_loss(head, own_logprobs(model, BATCH), BATCH)
    torch.testing.assert_close(model(batch=BATCH).loss, expected, rtol=0, atol=1e-12)


def test_a_head_that_differs_from_the_logits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(probe, "read_logit_rule", lambda *_: LogitRule(1.001, None, VOCAB_SIZE))
    before = _traces(model)
    with pytest.raises(ValueError, match="LlamaForCausalLM's own logits give, but they differ by"):
        attach_head(model, {})
    assert before.keys() == _traces(model).keys()


def test_a_layer_that_is_not_linear_is_refused() -> None:
    class Normalised(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input / input.norm(dim=-1, keepdim=True))

    model = tiny_model("llama")
    model.lm_head = Normalised(32, VOCAB_SIZE, dtype=torch.float64)
    with pytest.raises(TypeError, match="Normalised that does something else than h W"):
        attach_head(model, {})


def test_models_without_one_output_layer_are_refused() -> None:
    class Twice(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            super().forward(*args, **kwargs)
            return super().forward(*args, **kwargs)

    with pytest.raises(ValueError, match="Twice must call its output layer Linear once, but calls"):
        attach_head(Twice(tiny_config("llama")), {})
    bare = tiny_model("llama").model
    with pytest.raises(ValueError, match=r"LlamaModel.get_output_embeddings\(\) gives None"):
        attach_head(bare, {})
    model = tiny_model("llama")
    model.lm_head.forward = model.lm_head.forward
    with pytest.raises(ValueError, match="output layer Linear must have its own forward"):
        attach_head(model, {})


def test_a_model_that_looks_ahead_is_refused() -> None:
    with pytest.raises(ValueError, match=r"BertLMHeadModel must be causal.*`config.is_decoder`"):
        attach_head(tiny_model("bert"), {})
    attach_head(tiny_model("bert", is_decoder=True), {})


def test_a_model_that_keeps_no_documents_apart_is_refused() -> None:
    class Mixing(LlamaForCausalLM):
        def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
            output = super().forward(input_ids, **kwargs)
            several = input_ids.shape[0] > 1 or "position_ids" in kwargs
            output.logits = output.logits.roll(1, -1) if several else output.logits
            return output

    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"Mixing must keep.*'packed': .*'padded': .* nats"):
        attach_head(Mixing(tiny_config("llama", initializer_range=0.3)).eval(), {})


def test_what_the_call_cannot_take_is_refused() -> None:
    model = tiny_model("llama")
    attach_head(model, LOSSES)
    with pytest.raises(ValueError, match=r"`batch` must come alone.*got \['input_ids'\] too"):
        model(batch=BATCH, input_ids=BATCH.tokens[None])
    with pytest.raises(ValueError, match="positional arguments too"):
        model(BATCH.tokens[None], batch=BATCH)
    tokens = TokenBatch.from_documents(some_documents(VOCAB_SIZE), pad_to_multiple=16)
    with pytest.raises(TypeError, match=r"must be a BatchKwargs, got TokenBatch; `TokenBatch.to_"):
        model(batch=tokens)
    for piece in tokens.to_kwargs(micro_sequences=4):
        with pytest.raises(ValueError, match=r"`batch` must hold whole documents.*`sdp` None"):
            model(batch=piece)
    detach_head(model)
    attach_head(model, LOSSES, packing="padded")
    with pytest.raises(ValueError, match="`max_document_length` of the batch must be known"):
        model(batch=BATCH.replace(max_document_length=None))


def test_what_attaching_cannot_take_is_refused() -> None:
    model = tiny_model("llama")
    some: Any = object()
    for axis in ("tp", "sp", "sdp"):
        with pytest.raises(ValueError, match=rf"`groups` must have `dp` alone, got \['{axis}'\]"):
            attach_head(model, {}, groups=ParallelGroups(**{axis: some}))
    with pytest.raises(ValueError, match=r"\['softcap'\] must not be given: the model says them"):
        attach_head(model, {}, softcap=30.0)
    with pytest.raises(ValueError, match="`packing` must be auto, packed or padded, got 'no'"):
        attach_head(model, {}, packing="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stratgy"):
        attach_head(model, {}, stratgy="auto")
    with torch.device("meta"), pytest.raises(ValueError, match="must have its weights when a head"):
        attach_head(LlamaForCausalLM(tiny_config("llama")), {})
    with pytest.raises(TypeError, match="attach to its `module`"):
        attach_head(nn.DataParallel(model), {})
    with pytest.raises(TypeError, match=r"a model of transformers or a PEFT model, got .*Linear'>"):
        attach_head(nn.Linear(2, 3), {})
    attach_head(model, {})
    with pytest.raises(ValueError, match="has a head already; `detach_head` it first"):
        attach_head(model, {})


def test_a_model_that_takes_no_positions_is_padded() -> None:
    class WithoutPositions(LlamaForCausalLM):
        def forward(
            self, input_ids: Tensor, attention_mask: Any = None, use_cache: Any = None
        ) -> Any:
            return super().forward(input_ids, attention_mask=attention_mask, use_cache=use_cache)

    model = WithoutPositions(tiny_config("llama", initializer_range=0.3)).eval()
    with pytest.raises(ValueError, match=r"it takes no position_ids"):
        attach_head(model, {}, packing="packed")
    attach_head(model, {})
    assert packing_of(model) == "padded"
