"""The head on every layout of ranks equals the head in one process, in float64.

One item a layout runs all losses in all strategies: starting a call costs more than a case. What
one process gives is compared with the definition here too, so that equality means something.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist

from fastrl.functional.head.call import CallOptions, HeadOperands
from fastrl.functional.head.checks import check_inputs
from fastrl.functional.head.sharding import finish_weight_gradient, rows_with_gradient
from fastrl.functional.reference import head as reference
from fastrl.functional.reference import losses as reference_losses
from fastrl.functional.reference.tokens import Tokens
from fastrl.kernels.arguments import LogitTransform
from fastrl.parallel import ParallelGroups
from tests.helpers.head_runs import FEW_RUNS, LOSSES, RUNS, assert_same_result, runs_on
from tests.helpers.layouts import EIGHT_RANKS, FOUR_RANKS, TWO_RANKS, Ranks
from tests.helpers.ranks import RankPool
from tests.helpers.sharded_head import (
    CASES,
    COLUMNS,
    UPSTREAM,
    HeadRun,
    assemble,
    build_head,
    hidden_states,
    in_float64,
    one_process,
    pack,
    run_on_rank,
)


def strategy_on(layout: Ranks, run: HeadRun) -> str:
    """The strategy that a run takes: it is that of its name, so that all of them are tested."""
    if run.strategy != "auto":
        return run.strategy
    shared = layout.sequence_data > 1 or layout.head_splits_tokens
    return "recompute" if shared and "gspo" in dict(run.losses) else "single_pass"


def run_all(case_name: str, names: tuple[str, ...], layout: Ranks) -> list[object]:
    return [run_on_rank(case_name, RUNS[name], layout) for name in names]


def check(ranks: RankPool, case_name: str, names: Iterable[str], layout: Ranks) -> None:
    names = runs_on(layout, names)
    answers = ranks(run_all, layout.world_size, case_name, names, layout)
    for name, results in zip(names, zip(*answers, strict=True), strict=True):
        whole = assemble(CASES[case_name], RUNS[name], layout, list(results))
        assert_same_result(
            whole, one_process(case_name, RUNS[name]), f"{case_name} {name} {layout}"
        )
        taken = {strategy for result in results for strategy in result.strategies}
        assert taken == {strategy_on(layout, RUNS[name])}, (name, layout)


@pytest.mark.parametrize("layout", [*TWO_RANKS, *FOUR_RANKS], ids=str)
def test_ragged_documents_on_every_layout(ranks: RankPool, layout: Ranks) -> None:
    check(ranks, "ragged", RUNS, layout)


@pytest.mark.parametrize("layout", EIGHT_RANKS, ids=str)
def test_eight_ranks(ranks: RankPool, layout: Ranks) -> None:
    check(ranks, "ragged", FEW_RUNS, layout)


@pytest.mark.parametrize("case_name", [name for name in CASES if name != "ragged"])
@pytest.mark.parametrize(
    "layout",
    [
        Ranks(2, 2, 1, layout="zigzag"),
        Ranks(1, 4, 1),
        Ranks(1, 1, 4),
        Ranks(1, 2, 2, sequence_parallel=True),
        Ranks(1, 2, 2, sequence_parallel=True, vocabulary_parallel=False, layout="zigzag"),
    ],
    ids=str,
)
def test_boundary_cases(ranks: RankPool, case_name: str, layout: Ranks) -> None:
    check(ranks, case_name, FEW_RUNS, layout)


def sum_over_ranks(part: float) -> list[float]:
    """The gradient of a bf16 weight: 256 of each entry on one rank, in turn, `part` on the others.

    In whatever order a backend adds, it comes to some of the 256 early.
    """
    groups = Ranks(1, 1, 4, sequence_parallel=True, vocabulary_parallel=False).groups()
    is_mine = torch.arange(16)[:, None] % 4 == dist.get_rank()
    mine = torch.where(is_mine, 256.0, part).bfloat16()
    total = finish_weight_gradient(mine, torch.bfloat16, ParallelGroups(sp=groups.sp))
    assert total is not None
    return total[:, 0].tolist()


def test_the_gradient_of_a_replicated_weight_is_rounded_once(ranks: RankPool) -> None:
    """In bf16 256 + 1 is 256, and so is adding 1 again."""
    assert ranks(sum_over_ranks, 4, 1.0) == [[260.0] * 16] * 4  # 259, a tie


def active_rows_on_rank() -> list[int]:
    """The rows whose gradient is not 0, where that of row 2 is 0 on rank 0 and hardly more on 1."""
    groups = Ranks(1, 1, 2).groups()
    call = check_inputs(
        HeadOperands(torch.zeros(5, 1), torch.zeros(1, 1)), torch.zeros(5, dtype=torch.int64),
        transform=LogitTransform(), vocab_size=None, weight_rows=None,
        groups=ParallelGroups(tp=groups.tp), rows=None,
        options=CallOptions(False, None, 1, drop_inactive_rows=True),
    )  # fmt: skip
    grad = torch.tensor([0.5, 0.0, 1e-45 * dist.get_rank(), 0.0, -0.5])
    return rows_with_gradient(call, call.rows, grad, None).tolist()


def test_ranks_of_a_vocabulary_drop_the_same_rows(ranks: RankPool) -> None:
    assert ranks(active_rows_on_rank, 2) == [[0, 2, 4]] * 2


@pytest.mark.parametrize("case_name", list(CASES))
@pytest.mark.parametrize("name", LOSSES)
def test_one_process_is_the_definition(case_name: str, name: str) -> None:
    case, loss = CASES[case_name], LOSSES[name]
    run = RUNS[f"{name}-recompute"]
    head = build_head(case, run, None, True)
    numbers = list(range(len(case.documents)))
    batch = pack(case, numbers, run, 1)
    kwargs = in_float64(batch.to_kwargs()[0])
    hidden = hidden_states(case, numbers, kwargs.num_tokens).requires_grad_()
    z = reference.logits(
        hidden, head.weight, bias=head.bias, softcap=5.0, vocab_size=case.vocab_size
    )
    logprobs = reference.token_statistics(z, kwargs.labels)[0]
    vectors = {column: getattr(kwargs, column) for column in COLUMNS}
    tokens = Tokens(
        labels=kwargs.labels,
        document_index=kwargs.document_index,
        logprobs=logprobs,
        **vectors,
    )
    expected = reference_losses.LOSSES[name](tokens, loss.model_dump())
    actual = one_process(case_name, run)
    torch.testing.assert_close(actual.loss, expected.detach(), rtol=1e-9, atol=1e-9)
    if not expected.requires_grad:
        assert not actual.grad_weight.any()
        return
    (expected * UPSTREAM).backward()
    torch.testing.assert_close(actual.grad_weight, head.weight.grad, rtol=1e-9, atol=1e-9)
    assert hidden.grad is not None
    pieces = hidden.grad[: batch.num_tokens].split(batch.document_lengths)
    torch.testing.assert_close(actual.grad_hidden, list(pieces), rtol=1e-9, atol=1e-9)
