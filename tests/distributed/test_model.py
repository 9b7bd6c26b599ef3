"""Training on every layout of ranks equals training in one process: losses, gradients, weights."""

from __future__ import annotations

import pytest
import torch

from fastrl import LlamaConfig
from fastrl.config import load_config
from fastrl.models.llama import Llama
from fastrl.models.parallelize import parallelize_llama
from tests.helpers.ranks import RankPool, rank_mesh
from tests.helpers.same_training import assert_same_training, in_one_process, train_in_one_process
from tests.helpers.sharded_training import CONFIGS, VARIANTS, train

CONFIG_NAMES = ["llama_grpo", "llama_gspo"]


@pytest.mark.parametrize("config_name", CONFIG_NAMES)
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "simple"])
def test_three_steps_equal_those_of_one_process(
    ranks: RankPool, config_name: str, name: str
) -> None:
    variant = VARIANTS[name]
    actual = ranks(train, variant.ranks.world_size, config_name, variant)[0]
    assert_same_training(
        variant, actual, train_in_one_process(config_name, in_one_process(variant))
    )


@pytest.mark.parametrize("config_name", CONFIG_NAMES)
def test_the_case_has_something_to_compare(config_name: str) -> None:
    """Clipped and unclipped ratios, gradients in every parameter, weights that move."""
    training = train_in_one_process(config_name, VARIANTS["simple"])
    assert 0.05 < training.metrics[0]["policy/clip_fraction"] < 0.9
    for grads in training.grads:
        assert all(grad.norm() > 1e-4 for grad in grads.values())
    assert all(torch.isfinite(weight).all() for weight in training.weights.values())


SPLITS = {
    # A rank has ceil(size / 4) rows: none is left for the last one of 3, the last two of 2.
    "vocab_size=3": "`vocab_size` must leave each of the 4 ranks of the tensor axis a row",
    "vocab_size=2": "`vocab_size` must leave each of the 4 ranks of the tensor axis a row",
    "vocab_size=9": "`vocab_size` must leave each of the 4 ranks of the tensor axis a row",
    "num_attention_heads=6": "`num_key_value_heads` must be a multiple of the tensor axis, 4, got",
    "num_key_value_heads=2": "`num_key_value_heads` must be a multiple of the tensor axis, 4, got",
    "intermediate_size=30": "`intermediate_size` must be a multiple of the tensor axis, 4, got 30",
}
FOUR_HEADS = ["num_attention_heads=4", "num_key_value_heads=4", "head_dim=8"]
UNTIED = "tie_word_embeddings=false"
WHOLE = ["tie_word_embeddings=true", "head.vocabulary_parallel=false"]


def errors_of_splits() -> dict[str, str]:
    """On a rank: what is said about each split, before any collective."""
    answers = {}
    for override in SPLITS:
        changes = [*FOUR_HEADS, UNTIED, override]
        if override == "num_attention_heads=6":
            changes.append("num_key_value_heads=6")
        config = load_config(LlamaConfig, CONFIGS / "llama_grpo.yaml", changes)
        with pytest.raises(ValueError, match="must") as caught:
            parallelize_llama(Llama(config, device="meta"), rank_mesh(1, 1, 4))
        answers[override] = str(caught.value)
    # What each rank has whole needs no rows for each.
    config = load_config(LlamaConfig, CONFIGS / "llama_grpo.yaml", [*FOUR_HEADS, *WHOLE])
    config = config.model_copy(update={"vocab_size": 3})
    parallelize_llama(Llama(config, device="meta"), rank_mesh(1, 1, 4))
    return answers


def test_z23_a_split_that_leaves_a_rank_without_a_part_is_one_error_on_all(ranks: RankPool) -> None:
    answers = ranks(errors_of_splits, 4)
    assert all(answer == answers[0] for answer in answers)
    for override, message in SPLITS.items():
        assert answers[0][override].startswith(message)
