"""Statistics that are, to the bit, a function of a row alone; and what refuses to promise it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fastrl import LanguageModelHead, LanguageModelHeadConfig, ParallelGroups, linear_logprobs
from fastrl.functional.head import deterministic, merge_tree, parts
from fastrl.functional.head.call import CallOptions, HeadOperands
from fastrl.functional.head.checks import check_inputs
from fastrl.functional.head.matmul import matmul
from fastrl.functional.head.merge_tree import MergeTree
from fastrl.functional.head.running import merge_running_statistics
from fastrl.kernels.arguments import LogitTransform
from tests.gpu import bits
from tests.helpers.bf16_heads import grpo_batch
from tests.helpers.bit_layouts import Hashes, Layout, Problem, check_gradients, statistics_of
from tests.helpers.head_cases import CASES, HeadCase

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
# Of several parts, where those of other tests have one: the last one short; one without a logit.
SEVERAL_PARTS = [
    HeadCase("several_parts", vocab_size=1300, temperature="per token", softcap=4.0),
    HeadCase("an_absent_part", vocab_size=700, impossible=tuple(range(256, 512)), spread=3.0),
]


def hashes_of(dtype: torch.dtype, number: int = 10, deterministic: bool = True) -> Hashes:
    """Of random layouts of a batch on the CPU."""
    problem = Problem.draw(6, 9, 24, 1300, dtype=dtype, device="cpu")
    draws, hashes = random.Random(1), Hashes()
    for _ in range(number):
        hashes.add(statistics_of(problem, Layout.draw(problem, draws), deterministic))
    return hashes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_do_not_depend_on_the_layout(dtype: torch.dtype) -> None:
    assert hashes_of(dtype).found == {"same"}


def test_the_key_makes_the_difference() -> None:
    assert len(hashes_of(torch.float32, deterministic=False).found) > 1


@pytest.mark.parametrize("off", [False, True])
def test_the_command_says_how_many_values_there_are(
    off: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bits.json"
    arguments = ["--layouts", "40", "--length", "12", "--problems", "fp32", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["bits", *arguments, *(["--off"] if off else [])])
    code = bits.main()
    report = json.loads(file.read_text())
    (row,) = report["problems"]
    assert (row["layouts"], report["deterministic"]) == (5, not off)
    assert code == (row["values"] != 1) == (row["largest_difference"] > 0)
    assert off or not code


def merged_in_ranks(self: MergeTree, roots: Tensor, entropy: bool) -> Tensor:
    """What a merge without a tree gives: all parts of a rank, then the ranks."""
    padded = torch.cat([roots, torch.full_like(roots[:, :1], -torch.inf)], dim=1)
    by_rank = padded.view(self.size, -1, *padded.shape[1:])
    of_ranks = torch.stack([merge_running_statistics(rank) for rank in by_rank])
    return merge_running_statistics(of_ranks)[:3]


@pytest.mark.parametrize(
    ("place", "name", "replacement"),
    [
        (parts, "matmul_alike", lambda a, b: matmul(a, b.t())),
        (MergeTree, "whole", merged_in_ranks),
    ],
    ids=["products", "tree"],
)
def test_each_part_is_needed(
    place: Any, name: str, replacement: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, replacement)
    assert len(hashes_of(torch.float32, 12).found) > 1


@pytest.mark.parametrize("case", [*CASES, *SEVERAL_PARTS], ids=lambda case: case.name)
def test_values_and_gradients_are_those_of_the_definition(case: HeadCase) -> None:
    tensors = case.tensors()
    found = linear_logprobs(
        tensors.hidden_states, tensors.weight, tensors.labels, entropy=True, deterministic=True,
        chunk_size=4, **tensors.options,  # type: ignore[arg-type]
    )  # fmt: skip
    results = []
    for statistics in (found, tensors.reference()):
        pairs = zip(statistics.vectors(), tensors.upstream(), strict=True)
        loss = torch.stack([(vector * weight).sum() for vector, weight in pairs]).sum()
        gradients = torch.autograd.grad(-1.7 * loss, tensors.inputs)
        results.append([*(vector.detach() for vector in statistics.vectors()), *gradients])
    for result, truth in zip(*results, strict=True):
        torch.testing.assert_close(result, truth, rtol=1e-10, atol=1e-10)


@pytest.fixture
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trees of several steps."""
    caches = (merge_tree._local_slots, merge_tree._whole_slots)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(merge_tree, "MOST_PARTS", 8)
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("num_leaves", [1, 2, 7, 63, 64])
@pytest.mark.usefixtures("_small_steps")
def test_any_number_of_ranks_makes_the_same_tree(num_leaves: int) -> None:
    leaves = torch.randn(num_leaves, 3, 5).abs()
    leaves[:, 0] *= 30
    leaves[0, :, 2] = torch.tensor([-torch.inf, 0.0, 0.0])  # nothing there
    absent = torch.tensor([-torch.inf, 0.0, 0.0])[:, None].expand(9, 3, 5)
    for size in (1, 2, 3, 5, 8):
        each = -(-num_leaves // size)
        tree = MergeTree(256 * each * size, size)
        roots = [
            tree.local_roots(torch.cat([leaves, absent])[first : first + each], 256 * first, True)
            for first in range(0, each * size, each)
        ]
        assert torch.equal(tree.whole(torch.cat(roots), True), by_hand(leaves)), size


def by_hand(leaves: Tensor) -> Tensor:
    """Neighbours 2 i and 2 i + 1, level by level; the last alone where it has no neighbour."""
    nodes: list[Tensor] = list(leaves)
    while len(nodes) > 1:
        pairs = [nodes[i : i + 2] for i in range(0, len(nodes), 2)]
        nodes = [merge_tree._merged(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return nodes[0]


def test_few_roots_travel() -> None:
    assert MergeTree(128512, 2).num_roots == 8  # of 251 leaves each
    assert MergeTree(129024, 8).num_roots == 6  # of 63


@pytest.mark.parametrize("strategy", ["single_pass", "recompute"])
def test_gradients_twice_and_beside_other_rows(strategy: str) -> None:
    batch = grpo_batch(5, 12, 700, device="cpu")
    head = LanguageModelHead(
        LanguageModelHeadConfig.model_validate({
            "hidden_size": 24, "vocab_size": 700, "strategy": strategy, "deterministic": True,
            "losses": {"policy": {"type": "reinforce"}},  # which clips no document
        })
    )  # fmt: skip
    check_gradients(head, torch.randn(batch.num_tokens, 24), batch)


def test_rows_of_no_finite_logit_and_no_rows() -> None:
    hidden, weight = torch.randn(3, 8), torch.randn(300, 8)
    bias = torch.full((300,), -torch.inf)
    labels = torch.tensor([1, 2, 3])
    found = linear_logprobs(hidden, weight, labels, bias=bias, entropy=True, deterministic=True)
    assert (found.logsumexp == -torch.inf).all()
    none = linear_logprobs(hidden, weight, torch.full((3,), -100), deterministic=True)
    assert (none.logprobs == 0).all()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"keep": {"top_k": 5}}, "`keep`"),
        ({"keep": {"recorded": True}}, "`keep`"),
        ({"losses": {"sft": {"type": "cross_entropy", "label_smoothing": 0.1}}}, "`sft`"),
        ({"losses": {"teach": {"type": "distillation"}}}, "`teach`"),
    ],
)
def test_configs_without_the_promise_are_refused(options: dict[str, Any], name: str) -> None:
    sizes = {"hidden_size": 8, "vocab_size": 32}
    LanguageModelHeadConfig.model_validate(sizes | options)
    with pytest.raises(ValidationError, match=f"`deterministic` must not be given with .*{name}"):
        LanguageModelHeadConfig.model_validate(sizes | options | {"deterministic": True})


def test_calls_without_the_promise_are_refused() -> None:
    hidden, weight, labels = torch.randn(3, 8), torch.randn(300, 8), torch.tensor([1, 2, -100])
    with pytest.raises(ValueError, match="`statistics` must not be given with `deterministic`"):
        linear_logprobs(hidden, weight, labels, statistics=["is_argmax"], deterministic=True)
    operands = HeadOperands(torch.randn(3, 10), weight, low_rank_weight=torch.randn(300, 2))
    options = CallOptions(True, None, 2**20, deterministic=True)
    with pytest.raises(ValueError, match="`deterministic` must be False with a LoRA layer"):
        check_inputs(
            operands, labels, transform=LogitTransform(), vocab_size=None, weight_rows=None,
            groups=None, rows=None, options=options,
        )  # fmt: skip


def test_shards_that_cut_a_block_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"hidden_size": 8, "vocab_size": 1000, "deterministic": True}
    monkeypatch.setattr("fastrl.layers.language_model_head.group_size", lambda group: 3)
    monkeypatch.setattr("fastrl.layers.language_model_head.group_rank", lambda group: 0)
    groups = ParallelGroups(tp=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"1000 rows over 3 ranks; pad the weight to 1536 rows"):
        LanguageModelHead(LanguageModelHeadConfig.model_validate(sizes), groups)
    checks = "fastrl.functional.head.checks"
    monkeypatch.setattr(f"{checks}.group_size", lambda group: 1 if group is None else 3)
    monkeypatch.setattr(f"{checks}.group_rank", lambda group: 0)
    operands = (torch.randn(3, 8), torch.randn(334, 8), torch.tensor([1, 2, -100]))
    with pytest.raises(ValueError, match=r"1000 rows over 3 ranks; pad the weight to 1536 rows"):
        linear_logprobs(*operands, weight_rows=1000, groups=groups, deterministic=True)
    sizes["padded_vocab_size"] = 1536
    assert (
        len(LanguageModelHead(LanguageModelHeadConfig.model_validate(sizes), groups).weight) == 512
    )


def test_memory_of_parts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go in chunks, whose bits are those of all rows at once."""
    case = replace(CASES[0], num_tokens=40, vocab_size=700, unlabelled=())
    tensors = case.tensors(torch.float32)
    operands = (tensors.hidden_states, tensors.weight, tensors.labels)
    whole = linear_logprobs(*operands, deterministic=True)
    rows: list[int] = []
    of_tile = parts.tile_parts

    def recorded(label_logits: Tensor, *others: Any, **options: Any) -> Tensor:
        rows.append(len(label_logits))
        return of_tile(label_logits, *others, **options)

    monkeypatch.setattr(deterministic, "tile_parts", recorded)
    monkeypatch.setattr(deterministic, "MAX_PARTIAL_BYTES", 12 * 3 * 10)
    chunked = linear_logprobs(*operands, deterministic=True)
    assert rows == [10] * 4
    assert torch.equal(whole.logprobs, chunked.logprobs)
