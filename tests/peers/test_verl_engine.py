"""verl's FSDP engine around the head: temperatures of samples, sums of squares, sharded weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.helpers.peer_packages import peer_module
from tests.helpers.ranks import RankPool
from tests.helpers.verl_models import FAMILIES, VOCABULARY, make_model

monkey_patch = peer_module("verl.models.transformers.monkey_patch")
tensordict_utils = peer_module("verl.utils.tensordict_utils")
engines = peer_module("verl.workers.engine.fsdp.transformer_impl")
HeadRequest = peer_module("fastrl.integrations.verl.forward").HeadRequest
peer_module("fastrl.integrations.verl")

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

LENGTHS = (5, 2, 4)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(tmp_path_factory.mktemp("ranks"), timeout=240)
    yield pool
    pool.close()


def make_engine(model: Any) -> Any:
    """An engine without its set-up, which wants a GPU: what the two methods read of it."""
    engine = object.__new__(engines.FSDPEngineWithLMHead)
    engine.module = model
    engine.pad_to_length = False
    engine.use_ulysses_sp = False
    engine._get_packed_pad_size = lambda length: 0
    return engine


def micro_batch(temperature: float | Tensor, **options: Any) -> Any:
    tokens = [torch.randint(3, VOCABULARY, (n,)) for n in LENGTHS]
    positions = [torch.arange(n) for n in LENGTHS]
    tensors = {
        "input_ids": torch.nested.as_nested_tensor(tokens, layout=torch.jagged),
        "position_ids": torch.nested.as_nested_tensor(positions, layout=torch.jagged),
    }
    if isinstance(temperature, Tensor):
        tensors["temperature"] = temperature
    else:
        options["temperature"] = temperature
    return tensordict_utils.get_tensordict(tensors, options)


@pytest.mark.parametrize("temperature", [0.6, torch.tensor([0.5, 1.0, 2.0])], ids=["one", "each"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_the_engine_gives_what_it_gives_of_the_models_logits(
    temperature: float | Tensor, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(FAMILIES[4])  # Gemma 2: a soft cap
    engine = make_engine(model)
    monkeypatch.setattr(engine, "engine_config", _EngineConfig, raising=False)
    monkeypatch.setattr(
        engine, "compute_entropy_from_logits", engines.verl_F.entropy_from_logits, raising=False
    )
    options = {
        "use_remove_padding": packed,
        "calculate_entropy": True,
        "calculate_sum_pi_squared": True,
        "use_fused_kernels": False,
    }
    batch = micro_batch(temperature, **options)
    expected = run(engine, batch)
    monkeypatch.setattr(type(model), "forward", type(model).forward)
    monkey_patch.patch_forward_with_backends(model, True, "torch")
    tensordict_utils.assign_non_tensor(batch, use_fused_kernels=True)
    found = run(engine, batch)
    assert sorted(found) == sorted(expected) == ["entropy", "log_probs", "sum_pi_squared"]
    values: Any
    for name, values in expected.items():
        assert found[name].offsets().tolist() == values.offsets().tolist()
        # verl rounds temperatures to fp32. The label of a document's last slot means nothing: verl
        # rolls over the packed tokens, and its fused forward over each padded row.
        for mine, verls in zip(found[name].unbind(), values.unbind(), strict=True):
            torch.testing.assert_close(
                mine[:-1].double(), verls[:-1].double(), atol=1e-6, rtol=0, msg=name
            )


class _EngineConfig:
    entropy_checkpointing = False
    entropy_from_logits_with_chunking = False


def run(engine: Any, batch: Any) -> dict[str, Any]:
    inputs, outputs = engine.prepare_model_inputs(batch)
    with torch.no_grad():
        output = engine.module(**inputs, use_cache=False)
    found: dict[str, Any] = engine.prepare_model_outputs(output, outputs, batch, None)
    return found


def test_without_a_need_there_is_no_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(FAMILIES[0])
    monkeypatch.setattr(type(model), "forward", type(model).forward)
    monkey_patch.patch_forward_with_backends(model, True, "torch")
    batch = micro_batch(1.0, use_fused_kernels=True)
    inputs, _ = make_engine(model).prepare_model_inputs(batch)
    assert not inputs["temperature"].entropy
    assert model(**inputs, use_cache=False).entropy is None


def _sharded(tied: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Log-probabilities and a norm of gradients on two ranks, sharded and whole."""
    torch.manual_seed(3)
    whole = make_model(FAMILIES[0]).float()
    whole.config.tie_word_embeddings = tied
    if tied:
        whole.lm_head.weight = whole.model.embed_tokens.weight
    tokens = torch.randint(3, VOCABULARY, (2, 6))
    temperature = torch.rand(2, 6) + 0.5
    model_class, forward = type(whole), type(whole).forward  # FSDP changes the instance's class
    try:
        monkey_patch.patch_forward_with_backends(whole, True, "torch")
        arguments = {"input_ids": tokens, "use_cache": False, "return_dict": True}
        expected = whole(**arguments, temperature=HeadRequest(temperature)).log_probs
        expected.square().sum().backward()
        wanted = whole.lm_head.weight.grad.clone()
        whole.zero_grad()
        # As verl's apply_fsdp2: layers, and embedding and output layer where they are not tied.
        policy = MixedPrecisionPolicy(param_dtype=torch.float32, cast_forward_inputs=True)
        for layer in whole.model.layers:
            fully_shard(layer, mp_policy=policy)
        if not tied:
            fully_shard(whole.model.embed_tokens, mp_policy=policy)
            fully_shard(whole.lm_head, mp_policy=policy)
        fully_shard(whole, mp_policy=policy)
        found = whole(**arguments, temperature=HeadRequest(temperature)).log_probs
        found.square().sum().backward()
        grad = whole.lm_head.weight.grad.full_tensor()
        half = _rounded_temperature(whole, arguments, temperature)
    finally:
        model_class.forward = forward
    return expected.detach(), found.detach(), wanted, grad, half


def _rounded_temperature(model: Any, arguments: dict[str, Any], temperature: Tensor) -> float:
    """What mixed precision of 16 bits does to the temperature on its way to the head."""
    seen: list[Tensor] = []
    module: Any = peer_module("fastrl.integrations.verl.forward")
    original = module.linear_logprobs

    def record(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["temperature"])
        return original(*args, **kwargs)

    module.linear_logprobs = record
    try:
        state = model._get_fsdp_state()
        state._mp_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, cast_forward_inputs=True
        )
        with torch.no_grad():
            model(**arguments, temperature=HeadRequest(temperature))
    finally:
        module.linear_logprobs = original
    assert dist.get_world_size() == 2
    return (seen[0] - temperature).abs().max().item()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_head_runs_inside_fsdp2(tied: bool, ranks: RankPool) -> None:
    for expected, found, wanted, grad, error in ranks(_sharded, 2, tied):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(grad, wanted, atol=1e-4, rtol=1e-4)
        assert error == 0  # a tensor among the inputs would be rounded to 16 bits
