"""`model: {type: transformers}`: its steps, adapters, checkpoints and refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaPreTrainedModel

from fastrl.cli import main
from fastrl.config import ConfigError, RunConfig, UserError
from fastrl.data.batch import TokenBatch
from fastrl.data.documents import Document
from fastrl.estimate.report import estimate_run
from fastrl.integrations.transformers import trained
from fastrl.integrations.transformers.folder import ModelFolder, load_folder
from fastrl.integrations.transformers.trained import TransformersModel
from fastrl.training.checkpoint import latest_checkpoint
from fastrl.training.context import RunContext, build_context
from fastrl.training.phases import Phase, StepResult
from tests.helpers.own_logits import Float64
from tests.helpers.runs import begin_phase
from tests.helpers.transformers_runs import run_config, write_folder, write_run

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")

LORA = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
KL = "phases.1.losses={policy: {type: gspo, kl: {coefficient: 0.1}}}"
SHORT = ("phases.0.steps=2", "phases.1.steps=2", "environment.heldout_prompts=4")


def _weights(context: RunContext) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in context.model.module.named_parameters()}


def _steps(
    config: RunConfig,
) -> tuple[list[dict[str, float]], dict[str, Tensor], dict[str, Tensor]]:
    """Metrics of a step of each phase, and the weights before and after."""
    context = build_context(config)
    assert context.environment is not None
    with closing(context.environment):
        before = _weights(context)
        results = [begin_phase(config, index, context).step().metrics for index in (0, 1)]
        return results, before, _weights(context)


def _compute_norms_in_float64(patch: pytest.MonkeyPatch) -> None:
    """Else transformers computes them in fp32, whatever the dtype."""

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with Float64():
                return function(*args, **kwargs)

        return run

    for name in ("backward", "logprobs"):
        patch.setattr(TransformersModel, name, wrapped(getattr(TransformersModel, name)))
    patch.setattr(trained, "_logprobs", wrapped(trained._logprobs))


TOLERANCES = {"float32": (1e-6, 2e-5), "float64": (1e-9, 1e-7)}
"""Of weights, and relative of metrics."""


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_step_is_that_of_the_reference_llama(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "model")
    # Adam divides by the root of a square: rounding is not to decide the sign of an update.
    overrides = [f"dtype={dtype}", KL, "phases.0.max_tokens_per_micro_batch=60"]
    overrides += [f"phases.{index}.optimizer.epsilon=1e-2" for index in (0, 1)]
    expected, before, expected_weights = _steps(run_config(folder, "pretrained", *overrides))
    if dtype == "float64":
        _compute_norms_in_float64(monkeypatch)
    results, _, weights = _steps(run_config(folder, "transformers", *overrides))
    of_weights, of_metrics = TOLERANCES[dtype]
    for found, metrics in zip(results, expected, strict=True):
        assert found == pytest.approx(metrics, rel=of_metrics, abs=of_metrics)
    assert weights.keys() == expected_weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected_weights[name], rtol=0, atol=of_weights)
        assert not weight.equal(before[name])


@pytest.mark.parametrize("family", ["qwen3", "gemma", "gpt2", "opt"])  # `opt` is padded
def test_the_sampler_gives_the_logprobs_of_the_head(tmp_path: Path, family: str) -> None:
    folder = write_folder(tmp_path / "model", family)
    config = run_config(folder, "transformers", "sampler.max_new_tokens=30")
    context = build_context(config, with_environment=False)
    context.generator.manual_seed(1)
    prompts = [[3, 4, 5], [6], [7, 8, 9, 10, 11]]
    for temperature in (0.0, 1.5):
        groups = context.sampler.sample(prompts, num_each=3, temperature=temperature)
        documents = [
            Document(
                tokens=prompt + each.tokens,
                prompt_length=len(prompt),
                temperature=temperature or 1.0,
            )
            for prompt, group in zip(prompts, groups, strict=True)
            for each in group
        ]
        (batch,) = TokenBatch.from_documents(documents).to_kwargs()
        logprobs = context.model.logprobs(batch)[batch.labels >= 0]
        sampled = [number for group in groups for each in group for number in each.logprobs]
        # Not closer: transformers computes norms in fp32.
        assert logprobs.tolist() == pytest.approx(sampled, rel=0, abs=1e-5)
    assert len({len(each.tokens) for group in groups for each in group}) > 1


def test_greedy_text_is_that_of_generate(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "qwen3", torch.float32)
    config = run_config(folder, "transformers", "dtype=float32", "sampler.max_new_tokens=12")
    context = build_context(config, with_environment=False)
    prompts = [[3, 4, 5], [6, 7, 8]]
    groups = context.sampler.sample(prompts, temperature=0.0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, (completion,) in zip(prompts, groups, strict=True):
        ids = torch.tensor([prompt])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
        )
        assert prompt + completion.tokens == found[0].tolist()


def test_adapters_alone_are_trained_and_the_reference_is_the_model_without(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "qwen3")
    config = run_config(folder, "transformers", KL, lora=LORA)
    context = build_context(config)
    assert context.environment is not None
    with closing(context.environment):
        before, phase = _weights(context), begin_phase(config, 1, context)
        assert phase.reference is not None
        supervised = begin_phase(config, 0, context)
        for _ in range(2):  # B, then A as well
            supervised.step()
        (batch,) = TokenBatch.from_documents(
            [Document(tokens=[3, 4, 5, 6], prompt_length=1)]
        ).to_kwargs()
        module: Any = context.model.module
        with module.disable_adapter():
            without = context.model.logprobs(batch)
        assert phase.reference.logprobs(batch).equal(without)
        assert not context.model.logprobs(batch).equal(without)
    for name, weight in _weights(context).items():
        assert weight.equal(before[name]) != ("lora_" in name), name


def test_adapters_follow_from_the_seed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(write_folder(tmp_path / "model"), lora=LORA)
    config = config.model_copy(update={"environment": None})
    drawn = [_weights(build_context(config))]

    def load_and_draw(folder: Path, dtype: torch.dtype) -> Any:
        torch.rand(7)
        return load_folder(folder, dtype)

    monkeypatch.setattr(trained, "load_folder", load_and_draw)
    drawn.append(_weights(build_context(config)))
    for name, weight in drawn[0].items():
        assert weight.equal(drawn[1][name]), name


def _interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second step of the second phase."""
    step = Phase.step

    def interrupted(phase: Phase) -> StepResult:
        if phase.name == "rl" and phase.steps_done == 1:
            raise KeyboardInterrupt
        return step(phase)

    monkeypatch.setattr(Phase, "step", interrupted)


# bf16 as most folders are, whose weights are trained in fp32.
RUNS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16": (torch.bfloat16, {}),
    "lora": (torch.float32, {"lora": LORA | {"dropout": 0.2}}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_is_the_whole_one(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dtype, model = RUNS[name]
    folder = write_folder(tmp_path / "model", "qwen3", dtype)
    config = str(write_run(folder, **model))
    options = [*SHORT, "phases.1.steps=3", "dtype=float32", KL, "checkpoint.every=1"]
    runs = [tmp_path / "whole", tmp_path / "stopped"]
    assert main(["train", config, "--run-dir", str(runs[0]), *options]) == 0
    with monkeypatch.context() as patch:
        _interrupt(patch)
        assert main(["train", config, "--run-dir", str(runs[1]), *options]) == 130
    assert main(["train", config, "--run-dir", str(runs[1]), "--resume", *options]) == 0
    whole, resumed = (latest_checkpoint(run) for run in runs)
    files = sorted(str(file.relative_to(whole)) for file in whole.rglob("*.safetensors"))
    assert len(files) == (4 if name == "bf16" else 3)
    for file in files:
        expected, found = load_file(whole / file), load_file(resumed / file)
        assert expected.keys() == found.keys()
        assert all(found[key].equal(tensor) for key, tensor in expected.items()), file
    capsys.readouterr()
    assert main(["eval", str(runs[0])]) == 0
    assert main(["sample", str(runs[0]), "1 + 2 =", "--temperature", "0"]) == 0
    assert "1 + 2 =" in capsys.readouterr().out
    _check_folder(whole, folder, dtype)


def _check_folder(checkpoint: Path, folder: Path, dtype: torch.dtype) -> None:
    """What others load from a checkpoint is what was trained, in the folder's dtype."""
    names = ["generation_config.json", "tokenizer_config.json", "tokenizer.json"]
    if not (checkpoint / "adapter_config.json").exists():
        names.append("config.json")
    for name in [*names, "chat_template.jinja"]:
        assert (checkpoint / name).read_bytes() == (folder / name).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    assert next(model.parameters()).dtype == dtype
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer("1 + 2 =", add_special_tokens=False)["input_ids"] == [2, 14, 11, 14, 3, 14, 13]
    before = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    ids = torch.tensor([[2, 14, 11]])
    assert not model(ids).logits.equal(before(ids).logits)


def _refused(message: str, folder: Path, *overrides: str, **model: Any) -> None:
    with pytest.raises((UserError, ConfigError)) as caught:
        build_context(
            run_config(folder, "transformers", *overrides, **model), with_environment=False
        )
    assert message in str(caught.value)


def test_layers_that_a_model_does_not_name_are_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaPreTrainedModel, "_no_split_modules", None)
    message = (
        "compile: must be false with a LlamaForCausalLM, which does not say what its layers are"
    )
    _refused(message, write_folder(tmp_path / "model"), "compile=true")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("parallel.sequence_data=2", "`parallel.sequence_data` must be 1"),
        ("parallel.tensor=2", "`parallel.tensor` must be 1"),
        ("parallel.micro_sequences=2", "`parallel.micro_sequences` must be 1"),
        ("phases.1.share_prefixes=true", "`phases.1.share_prefixes` must be false"),
        ("model.head.softcap=3", "`model.head.softcap` must not be given"),
        ("model.head.vocabulary_parallel=false", "`model.head.vocabulary_parallel` must not"),
        ("tokenizer={type: character}", "`tokenizer.type: character` must not be given"),
        ("sampler.max_new_tokens=200", "`max_position_embeddings` of the `model`"),
    ],
)
def test_what_it_has_not_is_refused_by_name(tmp_path: Path, option: str, message: str) -> None:
    folder = write_folder(tmp_path / "model") if "max_new" in option else tmp_path
    if "max_new" not in option:
        _refused(message, folder, option)
        return
    config = run_config(folder, "transformers", option)
    context = build_context(config)
    assert context.environment is not None
    with closing(context.environment), pytest.raises(UserError, match=message):
        begin_phase(config, 1, context)


def test_a_folder_that_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))

    def write(**values: Any) -> None:
        (folder / "config.json").write_text(json.dumps(config | values), encoding="utf-8")

    write(quantization_config={"quant_method": "fp8"})
    _refused("`quantization_config` must not be there", folder)
    write(auto_map={"AutoConfig": "evil.Config"})
    _refused("`auto_map` must not be there", folder)
    write(model_type="unheard_of")
    _refused("transformers cannot load the model", folder)
    write()
    _refused("`model.lora`: Target modules", folder, lora={"target_modules": ["nothing"]})
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: each for name, each in weights.items() if "q_proj" not in name},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    _refused("the weights must be those of LlamaForCausalLM, but there are missing_keys", folder)
    (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    _refused("must hold a whole model, holds adapters", folder)


def test_ids_beyond_the_embedding_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", vocab_size=12)
    _refused("`vocab_size` must be at least the tokenizer's 15, got 12", folder)


def test_a_model_that_cannot_decode_trains_on_files_alone(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "rwkv", torch.float32)
    with pytest.raises(UserError, match=r"RwkvForCausalLM does not; train it on `rollouts` of ty"):
        build_context(run_config(folder), with_environment=False)


def test_bf16_with_fp32_master_weights_follows_fp32(tmp_path: Path) -> None:
    config = str(write_run(write_folder(tmp_path / "model", "qwen3", torch.bfloat16)))
    bf16 = ["parallel.fully_sharded=true", "parallel.compute_dtype=bfloat16"]
    losses = []
    for name, layout in (("fp32", []), ("bf16", bf16)):
        run = tmp_path / name
        options = [*SHORT, "dtype=float32", KL, *layout]
        assert main(["train", config, "--run-dir", str(run), *options]) == 0
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        losses.append([each["loss"] for each in records if "answers/loss" in each])
        masters = load_file(latest_checkpoint(run) / "trainer" / "weights.safetensors")
        assert {each.dtype for each in masters.values()} == {torch.float32}
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1] != losses[0]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2"])  # experts are stored one by one
def test_a_checkpoint_has_the_tensors_of_the_folder(tmp_path: Path, family: str) -> None:
    folder = write_folder(tmp_path / "model", family, torch.float32)
    found = ModelFolder(folder, torch.float32).files(load_folder(folder, torch.float32))
    weights = load_file(folder / "model.safetensors")
    assert found.tensors.keys() == {"model.safetensors"}
    tensors = found.tensors["model.safetensors"]
    assert tensors.keys() == weights.keys()
    assert all(tensors[name].equal(weight) for name, weight in weights.items())


@pytest.mark.parametrize("module", ["trained", "adapters"])
def test_a_missing_package_is_one_message(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, f"fastrl.integrations.transformers.{module}", None)
    folder = write_folder(tmp_path / "model")
    _refused("install it with: pip install 'fastrl[integrations]'", folder, lora=LORA)


def test_estimate_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`estimate` must have a `model` of `type: llama` or"):
        estimate_run(run_config(tmp_path))
