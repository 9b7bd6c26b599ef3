"""Checkpoints of sharded models: whole files of which no rank had more than its part."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.ranks import RankPool
from tests.helpers.saved_shards import (
    LAYOUTS,
    OPTIMIZER,
    REFERENCE,
    WEIGHTS,
    Whole,
    fail_on_rank,
    read,
    save,
)

NAME = "supervised-000003"


def assert_same(actual: Whole, expected: Whole) -> None:
    assert actual.keys() == expected.keys()
    for file, tensors in expected.items():
        torch.testing.assert_close(actual[file], tensors, rtol=0, atol=0)


def files_of(checkpoint: Path) -> Whole:
    return {name: load_file(checkpoint / name) for name in (WEIGHTS, OPTIMIZER, REFERENCE)}


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_shards_make_whole_files_and_come_back_on_other_layouts(
    ranks: RankPool, tmp_path: Path, layout: str
) -> None:
    size, tied = LAYOUTS[layout].num_processes, layout in ("fsdp2", "tp2")
    results = ranks(save, size, tmp_path, layout, tied)
    checkpoint = tmp_path / "checkpoints" / NAME
    expected = results[0][0]
    assert_same(files_of(checkpoint), expected)
    written = [count for _, count in results]
    total = sum(tensor.nbytes for named in expected.values() for tensor in named.values())
    assert sum(written) == total  # of replicas one
    assert max(written) < (0.7 if size == 2 else 0.5) * total
    assert (tmp_path / "checkpoints" / "latest").read_text(encoding="utf-8") == f"{NAME}\n"

    # The files are the same, so of each kind those of one layout are read by all others.
    others = ("fsdp2_tp2", "tp2", "fsdp2") if layout in ("fsdp4", "fsdp2") else ()
    for other in (*others, "one"):
        run = tmp_path / other
        run.mkdir()
        arguments = (checkpoint, other, tied, run)
        size = LAYOUTS[other].num_processes
        results_read = ranks(read, size, *arguments) if size > 1 else [read(*arguments)]
        for whole, num_read, num_held in results_read:
            assert_same(whole, expected)
            assert num_read == num_held
        checkpoint = run / "checkpoints" / NAME
        assert_same(files_of(checkpoint), expected)


def test_the_files_do_not_depend_on_who_wrote_them(ranks: RankPool, tmp_path: Path) -> None:
    made = {}
    for layout, mode in (("fsdp4", "true"), ("fsdp2", "true"), ("fsdp2", "false"), ("tp2", "true")):
        run = tmp_path / f"{layout}-{mode}"
        run.mkdir()
        size = LAYOUTS[layout].num_processes
        ranks(save, size, run, layout, False, f"checkpoint.asynchronous={mode}")
        folder = run / "checkpoints" / NAME
        files = (path for path in folder.rglob("*") if path.is_file())
        made[run.name] = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    first, *others = made.values()
    assert len(first) == 7
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("rank", "error"), [(0, errno.ENOSPC), (1, errno.ENOSPC), (1, errno.ENOENT)]
)
def test_a_rank_that_cannot_write_ends_all_with_its_message(
    ranks: RankPool, tmp_path: Path, rank: int, error: int
) -> None:
    first, second = ranks(fail_on_rank, 2, tmp_path, "fsdp2", rank, error)
    assert first == second
    assert first.startswith(f"{tmp_path}/checkpoints/{NAME}: the checkpoint cannot be written: ")
    assert ("on a file system that all ranks share" in first) == (error == errno.ENOENT)
    assert list((tmp_path / "checkpoints").iterdir()) == []
