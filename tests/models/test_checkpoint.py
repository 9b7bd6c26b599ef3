"""Hugging Face folders: both directions, both spellings, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastrl import Document, Llama, TokenBatch
from fastrl.config import HeadOptions, UserError
from fastrl.models import checkpoint
from fastrl.models.checkpoint import load_llama, load_weights, read_llama_config, save_llama
from tests.helpers.model_cases import (
    LLAMA3_ROPE,
    PARITY_CASES,
    VOCAB_SIZE,
    Case,
    packed,
    random_documents,
    randomised,
    tiny_config,
)

LLAMA3_SCALING = {"rope_type": "llama3"} | {
    key: value for key, value in LLAMA3_ROPE.items() if key not in ("type", "theta")
}


def edit_config(folder: Path, **values: Any) -> None:
    """Sets keys of config.json; None removes them."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | values
    kept = {key: value for key, value in config.items() if value is not None}
    file.write_text(json.dumps(kept))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def label_logprobs(llama: Llama, tokens: list[int]) -> Tensor:
    (kwargs,) = TokenBatch.from_documents([Document(tokens=tokens, prompt_length=1)]).to_kwargs()
    logprobs: Tensor = llama.eval()(kwargs, return_logprobs=True).logprobs
    return logprobs[:-1].detach()


def dense_logprobs(llama: Llama, weight: Tensor, tokens: list[int]) -> Tensor:
    """Log-probabilities of the tokens under a product with a given head."""
    hidden_states = llama.hidden_states(*packed([torch.tensor(tokens)])).detach()
    logprobs = (hidden_states @ weight.t()).log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0]


@pytest.mark.parametrize("shard_bytes", [10**9, 4000])
@pytest.mark.parametrize("case", PARITY_CASES, ids=lambda case: case.name)
@torch.no_grad()
def test_saved_folder_loads_in_transformers_and_back(
    case: Case, shard_bytes: int, tmp_path: Path
) -> None:
    llama = randomised(Llama(case.config()))
    save_llama(llama, tmp_path / "ours", max_shard_bytes=shard_bytes)
    assert ((tmp_path / "ours/model.safetensors").exists()) == (shard_bytes == 10**9)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(theirs).__name__ == f"{case.config().architecture.title()}ForCausalLM"
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard_bytes)
    (document,) = random_documents([200])
    expected = theirs(document[None]).logits[0]
    for folder in ("ours", "theirs"):
        loaded = load_llama(tmp_path / folder)
        for name, parameter in llama.named_parameters():
            assert torch.equal(loaded.get_parameter(name), parameter)
        hidden_states = loaded.hidden_states(*packed([document]))
        logits = hidden_states @ loaded.lm_head.weight.t()
        torch.testing.assert_close(logits, expected, rtol=0, atol=5e-5)
        if folder == "ours":
            assert loaded.config == llama.config.model_copy(update={"head": HeadOptions()})


@pytest.mark.parametrize("case", "abcde")
def test_j1_the_weights_decide_whether_the_head_is_tied(case: str, tmp_path: Path) -> None:
    folder, tokens = tmp_path / "model", [4, 8, 15, 16, 23]
    save_llama(Llama(tiny_config(tie_word_embeddings=case in "abc")), folder)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    head = embedding if case in "ab" else torch.randn_like(embedding)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop("lm_head.weight", None)
        if case in "bcd":
            tensors["lm_head.weight"] = head.clone()

    edit_tensors(folder, change)
    if case == "e":
        with pytest.raises(UserError, match=r"no tensor `lm_head\.weight`, which `tie_word_embedd"):
            load_llama(folder)
        with pytest.raises(UserError, match=r"missing `lm_head\.weight`"):
            load_weights(Llama(tiny_config()), folder)
        return
    if case == "c":
        with pytest.warns(UserWarning, match="built untied"):
            llama = load_llama(folder)
        with pytest.raises(UserError, match="differs from the embedding, but the model's head is"):
            load_weights(Llama(tiny_config(tie_word_embeddings=True)), folder)
    else:
        llama = load_llama(folder)
    assert (llama.lm_head.weight is llama.model.embed_tokens.weight) == (case in "ab")
    assert llama.config.tie_word_embeddings == (case in "ab")
    expected = dense_logprobs(llama, head, tokens)
    torch.testing.assert_close(label_logprobs(llama, tokens), expected, rtol=0, atol=1e-5)


SPELLINGS: dict[str, dict[str, Any]] = {
    "old": {"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING, "rope_parameters": None},
    "oldest": {
        "rope_theta": 500000.0,
        "rope_scaling": {k: v for k, v in LLAMA3_SCALING.items() if k != "rope_type"}
        | {"type": "llama3"},
        "rope_parameters": None,
    },
    "new": {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": 500000.0} | LLAMA3_SCALING,
    },
    "old_unscaled": {"rope_theta": 500000.0, "rope_scaling": None, "rope_parameters": None},
    "new_unscaled": {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    },
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@torch.no_grad()
def test_j3_rotary_scaling_is_that_of_transformers(spelling: str, tmp_path: Path) -> None:
    # One wide layer without much else: its attention reaches 8000 tokens back.
    config = tiny_config(num_hidden_layers=1, num_attention_heads=2, head_dim=16)
    save_llama(Llama(config), tmp_path / "model")
    edit_config(tmp_path / "model", **SPELLINGS[spelling])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ours = load_llama(tmp_path / "model")
    assert ours.config.rope.theta == 500000.0
    assert ours.config.rope.type == ("default" if "unscaled" in spelling else "llama3")
    (document,) = random_documents([8001])
    rows = torch.tensor([0, 1000, 8000])
    expected = theirs(document[None]).logits[0, rows].log_softmax(-1)
    hidden_states = ours.hidden_states(*packed([document]))[rows]
    logprobs = (hidden_states @ ours.lm_head.weight.t()).log_softmax(-1)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)


REFUSED_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "rope_type": ({"rope_parameters": {"rope_type": "longrope"}}, "got 'longrope'"),
    "yarn_keys": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}},
        "rope type 'yarn' takes factor and, if it is to differ, original_max.*, got factor, mscale",
    ),
    "rope_number": (
        {"rope_parameters": None, "rope_scaling": 2.0},
        "`rope_scaling` must be an object",
    ),
    "old_rope_type": (
        {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope type must be one of 'default', 'llama3', 'yarn', got 'dynamic'",
    ),
    "rope_incomplete": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        "rope type 'llama3' takes factor, low_freq_factor, high_freq_factor, original_max",
    ),
    "rope_part": ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` must be 1.0, got 0.5"),
    "activation": ({"hidden_act": "gelu"}, "`hidden_act` must be 'silu', got 'gelu'"),
    "architecture": (
        {"model_type": "gemma2"},
        "`model_type` must be one of 'llama', 'mistral', 'qwen2', 'qwen3', got 'gemma2'",
    ),
    "window": ({"sliding_window": 8}, "`sliding_window` must be None in a Llama, got 8"),
    "window_of_some_layers": (
        {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 1},
        "all layers must have the sliding window, or none, got 1 of 2 with it",
    ),
    "dropout": ({"attention_dropout": 0.1}, "`attention_dropout` must be 0, got 0.1"),
    "quantised": ({"quantization_config": {"bits": 4}}, "`quantization_config` must be None"),
    "sizes": ({"num_key_value_heads": 3}, "must be a multiple of `num_key_value_heads` 3"),
    "text": ({"hidden_size": "wide"}, r"config\.json: .*hidden_size"),
}


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_j3_what_is_not_supported_is_refused_by_name(name: str, tmp_path: Path) -> None:
    save_llama(Llama(tiny_config()), tmp_path / "model")
    values, message = REFUSED_CONFIGS[name]
    edit_config(tmp_path / "model", **values)
    with pytest.raises(UserError, match=message):
        read_llama_config(tmp_path / "model")


WINDOWS: dict[str, tuple[dict[str, Any], int | None]] = {
    "mistral": ({"model_type": "mistral", "sliding_window": 8}, 8),
    "mistral_default": ({"model_type": "mistral", "sliding_window": None}, 4096),
    "qwen3_unused": ({"model_type": "qwen3", "sliding_window": 8}, None),
    "qwen3_no_layer": (
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8},
        None,
    ),
    "qwen3_layers": (
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8}
        | {"layer_types": ["sliding_attention"] * 2},
        8,
    ),
    "qwen3_all": (
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8}
        | {"max_window_layers": 0},
        8,
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
@torch.no_grad()
def test_a_sliding_window_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    values, window = WINDOWS[name]
    folder = tmp_path / "model"
    save_llama(Llama(tiny_config(architecture=values["model_type"])), folder)
    edit_config(folder, **({"max_window_layers": None} | values))
    ours = load_llama(folder).eval()
    assert ours.config.sliding_window == window
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    # Up to the window the two are the same; beyond it theirs is another function, ours an error.
    for length in (8, 9):
        tokens = random_documents([length])[0].tolist()
        expected = theirs(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        expected = expected.gather(1, torch.tensor(tokens)[1:, None])[:, 0]
        if length == 9 and window == 8:
            with pytest.raises(ValueError, match="must have at most `sliding_window` 8 tokens, go"):
                label_logprobs(ours, tokens)
            with pytest.raises(ValueError, match="must have at most `sliding_window` 8 tokens, go"):
                ours.prefill([tokens[:5]], 4)
        else:
            found = label_logprobs(ours, tokens)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
            ours.prefill([tokens[:5]], length - 5)


def test_a_batch_that_does_not_know_its_lengths_is_refused_with_a_window() -> None:
    llama = Llama(tiny_config(architecture="mistral", sliding_window=8))
    (kwargs,) = TokenBatch.from_documents([Document(tokens=[1, 2], prompt_length=1)]).to_kwargs()
    with pytest.raises(ValueError, match="`max_document_length` of the batch must be known"):
        llama(kwargs.replace(max_document_length=None))


def test_head_options_survive_a_folder(tmp_path: Path) -> None:
    config = tiny_config(head={"softcap": 5.0, "logit_scale": 0.5, "bias": True})
    llama = randomised(Llama(config))
    save_llama(llama, tmp_path / "model")
    given = HeadOptions.model_validate({"chunk_size": 7, "softcap": 9.0})
    loaded = load_llama(tmp_path / "model", head=given)
    assert loaded.config.head == config.head.model_copy(update={"chunk_size": 7})
    tokens = [4, 8, 15, 16, 23]
    assert torch.equal(label_logprobs(loaded, tokens), label_logprobs(llama, tokens))


def test_dtypes(tmp_path: Path) -> None:
    save_llama(Llama(tiny_config(), dtype=torch.bfloat16), tmp_path / "model")
    assert json.loads((tmp_path / "model/config.json").read_text())["dtype"] == "bfloat16"
    assert load_llama(tmp_path / "model").model.norm.weight.dtype == torch.float32
    exact = load_llama(tmp_path / "model", dtype=torch.float64)
    assert exact.lm_head.weight.dtype == torch.float64


def test_tensors_that_do_not_fit_are_one_error(tmp_path: Path) -> None:
    save_llama(Llama(tiny_config()), tmp_path / "model")

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["model.norm.weight"] = torch.zeros(25)
        tensors["model.layers.0.input_layernorm.weight"] = torch.ones(24, dtype=torch.int8)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # of old files

    edit_tensors(tmp_path / "model", change)
    llama = Llama(tiny_config())
    before = [parameter.clone() for parameter in llama.parameters()]
    with pytest.raises(UserError) as error:
        load_weights(llama, tmp_path / "model")
    assert str(error.value).split("\n")[1:] == [
        "  missing `model.layers.1.mlp.up_proj.weight`",
        "  unexpected `model.layers.2.mlp.up_proj.weight`",
        "  `model.layers.0.input_layernorm.weight` must be of F64, F32, F16, BF16, got I8",
        "  `model.norm.weight` must have shape [24], got [25]",
    ]
    assert all(torch.equal(a, b) for a, b in zip(before, llama.parameters(), strict=True))


def test_broken_folders_are_one_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json: cannot be read: No such file"):
        load_llama(tmp_path / "nowhere")
    folder = tmp_path / "model"
    save_llama(Llama(tiny_config()), folder, max_shard_bytes=4000)
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    shard = folder / index["weight_map"]["model.norm.weight"]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:100])
    with pytest.raises(UserError, match=f"{shard.name}: must be a safetensors file"):
        load_llama(folder)
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard.name}: no such file"):
        load_llama(folder)
    shard.write_bytes(whole)
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    index_file.write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"`model\.norm\.weight` must be in model-00001"):
        load_llama(folder)
    index_file.unlink()
    with pytest.raises(UserError, match=r"must hold model\.safetensors or model\.safetensors\.ind"):
        load_llama(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: must be JSON in UTF-8"):
        load_llama(folder)


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama = Llama(tiny_config())

    def fail(llama: Llama, files: dict[str, str]) -> None:
        assert (tmp_path / "deep/model.tmp/model.safetensors").exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "json_files", fail)
        with pytest.raises(KeyboardInterrupt):
            save_llama(llama, tmp_path / "deep/model")
    assert list((tmp_path / "deep").iterdir()) == []
    (tmp_path / "deep/model.tmp").mkdir()  # of a killed run
    (tmp_path / "deep/model.tmp/rest").touch()
    save_llama(llama, tmp_path / "deep/model")
    names = sorted(file.name for file in (tmp_path / "deep").rglob("*"))
    assert names == ["config.json", "model", "model.safetensors"]
    with pytest.raises(UserError, match="exists already; save to a new folder"):
        save_llama(llama, tmp_path / "deep/model")


def test_vocab_size_of_the_file_is_that_of_the_rows(tmp_path: Path) -> None:
    save_llama(Llama(tiny_config(padded_vocab_size=32)), tmp_path / "model")
    config = read_llama_config(tmp_path / "model")
    assert (VOCAB_SIZE, config.vocab_size, config.padded_vocab_size) == (29, 32, None)


@pytest.mark.parametrize("name", ["../other.safetensors", "/other.safetensors", "..", "", 3])
def test_rl10_an_index_names_files_of_its_folder(tmp_path: Path, name: Any) -> None:
    folder = tmp_path / "llama"
    save_llama(Llama(tiny_config()), folder, max_shard_bytes=1)
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text(encoding="utf-8"))
    values["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(UserError, match="must name files of its folder, names "):
        load_llama(folder)
