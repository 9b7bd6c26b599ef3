"""`fastrl rollouts inspect`: numbers of files, and what of them looks wrong."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from fastrl.cli import main
from fastrl.data.documents import Document
from fastrl.data.histogram import histogram
from fastrl.data.rollouts import write_rollouts

LABELS = "labels a document, of those that have any:"


def _inspected(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["rollouts", "inspect", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def _document(group: int, answer: list[int], reward: float | None, **values: object) -> Document:
    arguments: dict[str, object] = {"logprobs": [-0.5] * len(answer)} | values
    return Document(
        tokens=[3, 4, *answer],
        prompt_length=2,
        reward=reward,
        group_id=group,
        **arguments,  # type: ignore[arg-type]
    )


def test_documents_of_several_files_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rollouts(
        tmp_path / "a.jsonl.gz", [_document(0, [5, 6], 1.0), _document(0, [5, 7, 8], 0.0)]
    )
    sampled = [-2 - math.log(1.25), -2 + math.log(4)]
    write_rollouts(
        tmp_path / "b.jsonl",
        [
            _document(1, [5, 6], 0.5, logprobs=[-2.0, -2.0], rollout_logprobs=sampled),
            _document(1, [6, 6], 0.25),
        ],
    )
    lines = _inspected(capsys, str(tmp_path))
    assert lines == [
        f"{tmp_path / 'a.jsonl.gz'}, {tmp_path / 'b.jsonl'}",
        "4 documents, all with prompt_length, logprobs, temperature, reward, group_id; "
        "1 with rollout_logprobs",
        "tokens: 17, from 4 to 5 a document (median 4)",
        "labels: 9, from 2 to 3 a document (median 2)",
        "rewards: mean 0.4375, from 0 to 1, deviation 0.3698",
        "groups: 2: 2 of 2",
        "ratio logprobs / rollout_logprobs: mean 0.75, from 0.25 to 1.25 over 2 labels; "
        "log-ratio -0.5816",
        "suspicious:",
        "  1 prompts have several group ids: their answers are not compared",
        "  1 labels have a ratio logprobs / rollout_logprobs beyond 1/2 and 2",
        LABELS,
        f"  2 {'#' * 40} 3",
        f"  3 {'#' * 14:40} 1",
        "rewards:",
        *(f"  {value} {'#' * 40} 1" for value in ("   0", "0.25", " 0.5", "   1")),
    ]


def test_what_looks_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = [
        _document(0, [5, 6], 1.0),
        _document(0, [5, 6], 1.0, logprobs=[0.0, 0.0]),
        _document(1, [5], None),
        _document(2, [], 0.0, logprobs=None),
        *(_document(3, [number] * 9, 0.5 * number) for number in (1, 2)),
        Document(tokens=[1, 2, 3], prompt_length=2, logprobs=[-1.0]),
    ]
    path = tmp_path / "a.jsonl"
    write_rollouts(path, documents)
    lines = _inspected(capsys, str(path))
    start, end = (
        lines.index("suspicious:"),
        lines.index(LABELS),
    )
    assert [line.strip() for line in lines[start + 1 : end]] == [
        "1 documents have no label: nothing of them is learned",
        "1 documents with labels have neither an advantage nor a group",
        "1 documents of groups have no reward: they are left out",
        "1 documents have log-probability 0 at every label: are they known?",
        "2 of 4 groups have one rollout: its advantage is 0",
        "1 of 4 groups have equal rewards: their advantages are 0",
        "1 of 4 groups have one and the same completion several times over",
        "1 prompts have several group ids: their answers are not compared",
        "2 documents have the most labels, 9: were they cut off there?",
    ]


def test_parts_of_a_rollout_are_one_of_their_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [_document(0, [5, number], 1.0, rollout_id=number // 2) for number in range(3)]
    path = tmp_path / "a.jsonl"
    write_rollouts(path, [*parts[:2], replace(parts[2], tokens=[9, 9, 5, 2], reward=0.0)])
    lines = _inspected(capsys, str(path))
    assert "groups: 1: 1 of 2" in lines
    assert "suspicious: nothing" in lines


def test_files_without_fault_or_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    write_rollouts(path, [_document(0, [5], 1.0), _document(0, [6], 0.0)])
    assert "suspicious: nothing" in _inspected(capsys, str(path))
    path.write_text("")
    assert _inspected(capsys, str(path)) == [str(path), "no documents"]
    path.write_text('{"tokens": [1, 2], "prompt_length": 1, "acc": 1}\n')
    assert main(["rollouts", "inspect", str(path)]) == 2
    assert "line 1: `acc` is not a column of rollout files" in capsys.readouterr().err
    assert "1 documents, all with " in _inspected(capsys, str(path), "--ignore", "acc")[1]


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ([*range(100)], {"0 to 9": 10, "90 to 99": 10}),
        ([*range(12)], {"0 to 1": 2, "10 to 11": 2}),
        ([number / 100 for number in range(101)], {"0 to 0.1": 10, "0.9 to 1": 11}),
        ([], {}),
    ],
)
def test_a_histogram_counts_each_value_once(values: list[float], counts: dict[str, int]) -> None:
    lines = histogram(values)
    found = {line.split("#")[0].strip(): int(line.split()[-1]) for line in lines}
    assert sum(found.values()) == len(values)
    assert counts.items() <= found.items()


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    """Of documents of 2,000 tokens each, of which a few numbers stay."""
    peaks = []
    for num_documents in (2, 20):
        file = tmp_path / f"{num_documents}{suffix}"
        answer = [*range(5, 2003)]
        write_rollouts(file, (_document(n, answer, 1.0) for n in range(num_documents)))
        tracemalloc.start()
        lines = _inspected(capsys, str(file))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert lines[2].startswith(f"tokens: {2000 * num_documents:,}, from 2,000 to 2,000")
    assert peaks[1] < 1.5 * peaks[0]
