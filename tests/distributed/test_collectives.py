"""Every rank of a group issues the same collectives in the same order, whatever its data."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fastrl.config import GSPOLossConfig
from fastrl.parallel import ParallelGroups, device_mesh
from tests.helpers.collectives import Collective, CollectiveRecord, assert_same_order
from tests.helpers.head_runs import FEW_RUNS, RUNS
from tests.helpers.layouts import Ranks
from tests.helpers.ranks import RankError, RankPool
from tests.helpers.sharded_head import CASES, HeadRun, run_on_rank

LAYOUTS = [
    Ranks(2, 2, 1, layout="zigzag"),
    Ranks(1, 1, 4),
    Ranks(1, 2, 2, sequence_parallel=True),
    Ranks(1, 2, 2, sequence_parallel=True, vocabulary_parallel=False),
    Ranks(2, 1, 2, vocabulary_parallel=False),
]


def record(case_name: str, runs: tuple[HeadRun, ...], layout: Ranks) -> list[Collective]:
    layout.groups()
    recorded = CollectiveRecord()
    with recorded:
        for run in runs:
            run_on_rank(case_name, run, layout)
    return recorded.calls


def record_cases(layout: Ranks) -> list[list[Collective]]:
    runs = tuple(RUNS[name] for name in FEW_RUNS)
    return [record(case_name, runs, layout) for case_name in CASES]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_order_of_collectives_is_that_of_the_group(ranks: RankPool, layout: Ranks) -> None:
    answers = ranks(record_cases, layout.world_size, layout)
    for calls in zip(*answers, strict=True):
        assert_same_order(list(calls))


def test_another_order_is_found() -> None:
    first = Collective("all_reduce", (0, 1), 3, "torch.float32")
    second = first._replace(num_elements=4)
    assert_same_order([[first, second], [first, second]])
    for other in ([second, first], [first], [first, second, second]):
        with pytest.raises(AssertionError, match=r"group \(0, 1\): rank 1 issued"):
            assert_same_order([[first, second], other])


def test_collectives_of_a_step_are_those_of_the_design(ranks: RankPool) -> None:
    """One a forward and one a backward for the vocabulary, one each for documents."""
    run = HeadRun((("gspo", GSPOLossConfig()),), metrics=False, bias=False)
    layout = Ranks(1, 2, 2, sequence_parallel=True)
    case = CASES["ragged"]
    calls = ranks(record, 4, "ragged", (run,), layout)[0]
    over_tensor = [call for call in calls if call.ranks == (0, 1)]
    over_sequence = [call for call in calls if call.ranks == (0, 2)]
    assert len(over_tensor) + len(over_sequence) == len(calls)
    assert [call.name for call in over_tensor] == [
        "all_gather",  # hidden states
        "all_gather",  # statistics of all rows
        "all_gather",  # hidden states again: the backward keeps this rank's slice only
        "reduce_scatter",  # their gradient
    ]
    documents = 2 * (len(case.documents) + 1)
    assert over_sequence == [Collective("all_reduce", (0, 2), documents, "torch.float64")] * 2


def _mismatch(sizes: dict[str, int]) -> str:
    with CollectiveRecord() as recorded, pytest.raises(ValueError, match="ranks") as error:
        device_mesh(**sizes, device_type="cpu")
    assert not recorded.calls
    return str(error.value)


def test_a_wrong_world_size_is_the_same_error_on_every_rank(ranks: RankPool) -> None:
    messages = ranks(_mismatch, 2, {"data": 2, "sequence_data": 2, "tensor": 3})
    assert messages[0] == messages[1]
    assert "number of ranks, 2, got data 2 x sequence_data 2 x tensor 3 = 12" in messages[0]


def _axes(sequence_parallel: bool) -> list[list[int] | None]:
    mesh = device_mesh(data=2, tensor=2, device_type="cpu")
    groups = ParallelGroups.from_mesh(mesh, sequence_parallel=sequence_parallel)
    return [
        None if group is None else dist.get_process_group_ranks(group)
        for group in (groups.tp, groups.sp, groups.sdp, groups.dp)
    ]


def test_groups_of_a_mesh(ranks: RankPool) -> None:
    assert ranks(_axes, 4, True)[1] == [[0, 1], [0, 1], None, [1, 3]]
    assert ranks(_axes, 4, False)[2] == [[2, 3], None, None, [0, 2]]


def _unknown_axis() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    ParallelGroups.from_mesh(mesh)


def test_an_unknown_axis_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"`mesh` must have axes out of .* got \['model'\]"):
        ranks(_unknown_axis, 2)
