"""Rollout files: what is read, what is refused and how, and that nothing half-written remains."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastrl.config.base import UserError
from fastrl.data.advantages import with_group_advantages
from fastrl.data.batch import TokenBatch
from fastrl.data.documents import Document, DocumentError
from fastrl.data.rollout_paths import rollout_files
from fastrl.data.rollouts import RolloutFileError, read_rollouts, write_rollouts

_RECORD: dict[str, Any] = {
    "tokens": [5, 6, 7],
    "prompt_length": 1,
    "logprobs": [-1.0, -0.5],
    "advantage": 0.5,
}
_TRL: dict[str, Any] = {
    "prompt_ids": [5, 6],
    "completion_ids": [7, 8, 9],
    "advantages": 0.5,
    "old_per_token_logps": [-1.0, -0.5, -0.25],
}
_DOCUMENTS = [
    Document([5, 6, 7], prompt_length=1, logprobs=[-1.0, -0.5], advantage=0.5, temperature=0.7),
    Document(
        [1, 2, 3, 4],
        loss_mask=[False, True, False, True],
        logprobs=[0.0, -0.25, 0.0, -2.0],
        ref_logprobs=[0.0, -0.5, 0.0, -2.5],
        rollout_logprobs=[0.0, -0.125, 0.0, -2.0],
        advantage=[0.0, 1.0, 0.0, -1.0],
        model_version=3,
        reward=1.5,
        group_id=7,
        logprobs_temperature=1.0,
    ),
    Document([1, 2], prompt_length=1, logprobs=[-1.0], advantage=0.0, reward=0.25, group_id=8),
    Document([1, 2], loss_mask=[False, True], logprobs=[-1.0], advantage=[2.0], alignment="label"),
]


def _file(folder: Path, *records: dict[str, Any], suffix: str = ".jsonl") -> Path:
    path = folder / f"rollouts{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        pyarrow = pytest.importorskip("pyarrow")
        parquet.write_table(pyarrow.Table.from_pylist(list(records)), path)
    return path


def _refused(path: Path, **options: Any) -> str:
    """The message of the refusal, without the name of the file."""
    with pytest.raises(RolloutFileError) as caught:
        list(read_rollouts(path, **options))
    message = str(caught.value)
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
def test_written_documents_come_back(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rollouts{suffix}"
    assert write_rollouts(path, iter(_DOCUMENTS)) == len(_DOCUMENTS)
    assert list(read_rollouts(path)) == _DOCUMENTS
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_more_than_one_row_group_is_streamed(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rollouts{suffix}"
    documents = [replace(_DOCUMENTS[0], model_version=number) for number in range(1300)]
    assert write_rollouts(path, documents) == 1300
    stream = read_rollouts(path)
    assert isinstance(stream, Iterator)
    assert [document.model_version for document in stream] == list(range(1300))


def test_tensors_are_written_as_numbers(tmp_path: Path) -> None:
    tensors = Document(
        torch.tensor([5, 6, 7]),
        loss_mask=torch.tensor([0, 1, 1]),
        logprobs=torch.tensor([0.0, -0.5, -0.25]),
        advantage=torch.tensor(0.5),
        reward=float("nan"),
        group_id="a",
    )
    for suffix in (".jsonl", ".parquet"):
        write_rollouts(tmp_path / f"r{suffix}", [tensors])
        (document,) = read_rollouts(tmp_path / f"r{suffix}")
        expected = Document(
            [5, 6, 7],
            loss_mask=[False, True, True],
            logprobs=[0.0, -0.5, -0.25],
            advantage=0.5,
            group_id="a",
        )
        assert document == expected


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_trl_columns_are_read(tmp_path: Path, suffix: str) -> None:
    more = {
        "completion_mask": [1, 0, 1],
        "ref_per_token_logps": [-2.0, -2.0, -2.0],
        "sampling_per_token_logps": [-3.0, -3.0, -3.0],
        "prompt": "12 + 7 =",
    }
    (plain,) = read_rollouts(_file(tmp_path, _TRL, suffix=suffix))
    batch = TokenBatch.from_documents([plain])
    assert batch.labels.tolist() == [-100, 7, 8, 9, -100]
    assert batch.columns["old_logprobs"].tolist() == [0.0, -1.0, -0.5, -0.25, 0.0]
    (masked,) = read_rollouts(_file(tmp_path, _TRL | more, suffix=suffix))
    batch = TokenBatch.from_documents([masked])
    assert batch.labels.tolist() == [-100, 7, -100, 9, -100]
    assert batch.columns["old_logprobs"].tolist() == [0.0, -1.0, 0.0, -0.25, 0.0]
    assert batch.columns["ref_logprobs"].tolist() == [0.0, -2.0, 0.0, -2.0, 0.0]
    assert batch.columns["rollout_logprobs"].tolist() == [0.0, -3.0, 0.0, -3.0, 0.0]
    assert batch.columns["advantages"].tolist() == [0.0, 0.5, 0.0, 0.5, 0.0]


def test_trl_advantages_may_be_per_token(tmp_path: Path) -> None:
    for mask in ({}, {"completion_mask": [1, 1, 1]}):
        record = _TRL | {"advantages": [1.0, 2.0, 3.0]} | mask
        (document,) = read_rollouts(_file(tmp_path, record))
        column = TokenBatch.from_documents([document]).columns["advantages"]
        assert column.tolist() == [0.0, 1.0, 2.0, 3.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"old_per_token_logps": [-1.0] * 4}, "must have 3 values, one a completion token, got 4"),
        ({"old_per_token_logps": [-1.0] * 5}, "must have 3 values, one a completion token, got 5"),
        ({"completion_mask": [1, 1, 1, 1]}, "`completion_mask` must have 3 values"),
        ({"completion_mask": [1, 1, 2]}, "must be booleans"),
        ({"advantage": 1.0}, "`advantages` is given twice, also as `advantage`"),
        ({"logprobs": [-1.0]}, "`old_per_token_logps` is given twice, also as `logprobs`"),
        ({"tokens": [1]}, "`tokens` must not be given beside"),
        ({"prompt_ids": None}, "`prompt_ids` is required beside the other half"),
        ({"prompt_mask": [1, 1]}, "`prompt_mask` is not a column of rollout files"),
    ],
)
def test_trl_columns_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    assert message in _refused(_file(tmp_path, _TRL, _TRL | changes))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("length", [4, 6])
def test_a3_other_lengths_are_refused(tmp_path: Path, suffix: str, length: int) -> None:
    record = _RECORD | {"tokens": list(range(8)), "prompt_length": 3, "logprobs": [-1.0] * 5}
    path = _file(tmp_path, record, record | {"logprobs": [-1.0] * length}, suffix=suffix)
    where = "line 2" if suffix == ".jsonl" else "row 2"
    expected = f", {where}: `logprobs` must have 8 (one a token) or 5 (one a completion token) "
    assert _refused(path) == f"{expected}values, got {length}; none are padded or cut"


def test_a3_no_logprobs_only_where_they_are_not_needed(tmp_path: Path) -> None:
    path = _file(tmp_path, _RECORD | {"logprobs": []})
    assert "`logprobs` must have 3" in _refused(path)
    (document,) = read_rollouts(path, require=["advantage"])
    assert document.logprobs is None


def test_a3_a_mask_longer_than_the_tokens_is_refused(tmp_path: Path) -> None:
    path = _file(tmp_path, _RECORD | {"prompt_length": None, "loss_mask": [0, 1, 1, 1]})
    assert ", line 1: `loss_mask` must have 3 values, one a token, got 4" in _refused(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"reward": NaN}', "`reward` must be a finite number, got nan (not JSON)"),
        ('{"reward": Infinity}', "`reward` must be a finite number, got inf (not JSON)"),
        ('{"reward": 1e999}', "`reward` must be a finite number, got inf"),
        ('{"reward": "1.0"}', "`reward` must be a finite number, got '1.0'"),
        ('{"reward": true}', "`reward` must be a finite number, got True"),
        ("", "must be a JSON object, got an empty line"),
        ("[1]", "must be a JSON object, got a value of type list"),
        ('{"tokens": [1, 2.0]}', "`tokens` must be a list of integers, got 2.0 at position 1"),
        ('{"tokens": [1, true]}', "`tokens` must be a list of integers, got True at position 1"),
        ('{"tokens": 1}', "`tokens` must be a list of integers, got 1"),
        ('{"logprobs": [-1, NaN]}', "got nan (not JSON) at position 1"),
        ('{"logprobs": [-1, true]}', "not learned, got True at position 1"),
        ('{"advantage": [1, "2"]}', "a finite number or a list of numbers, got '2' at position 1"),
        (
            '{"tokens": [1, 2], "prompt_length": 1, "logprobs": [0.9], "advantage": 1}',
            "`logprobs` must be log-probabilities, at most 0, got 0.9",
        ),
        (
            '{"prompt_ids": [1], "completion_ids": [2], "old_per_token_logps": [2.5], '
            '"advantages": 1}',
            "`old_per_token_logps` must be log-probabilities, at most 0, got 2.5",
        ),
        ("[" * 100_000, "must be a JSON object: maximum recursion depth exceeded"),
        ('{"group_id": 1.5}', "`group_id` must be an integer or a text, got 1.5"),
        ('{"model_version": 1.0}', "`model_version` must be an integer, got 1.0"),
        ('{"logprobs_temperature": "hot"}', "must be a finite number or 'raw', got 'hot'"),
        ('{"temperature": "raw"}', "`temperature` must be a finite number, got 'raw'"),
        ('{"advantage": 1, "advantage": 2}', "`advantage` is given twice in one object"),
        (
            '{"advantge": 1}',
            "`advantge` is not a column of rollout files; did you mean `advantage`",
        ),
        ('{"score": 1}', "`score` is not a column of rollout files; name it in `ignore`"),
        ('{"tokens": [1, 2], "prompt_length": 1}', "`logprobs` is required, got none"),
        ("{'reward': 1}", "must be a JSON object: "),
    ],
)
def test_a7_bad_lines_name_file_line_and_field(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(f"{json.dumps(_RECORD)}\n{line}\n")
    refusal = _refused(path)
    assert refusal.startswith(", line 2: ")
    assert message in refusal


@pytest.mark.parametrize("field", ["tokens", "prompt_length", "logprobs", "advantage"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a7_missing_and_null_fields_are_refused(tmp_path: Path, field: str, suffix: str) -> None:
    path = _file(tmp_path, _RECORD, _RECORD | {field: None}, suffix=suffix)
    refusal = _refused(path)
    assert refusal.startswith(", line 2: " if suffix == ".jsonl" else ", row 2: ")
    assert f"`{field}`" in refusal
    assert "got n" in refusal  # none, neither
    missing = {name: value for name, value in _RECORD.items() if name != field}
    assert f"`{field}`" in _refused(_file(tmp_path, missing, suffix=suffix))


def test_a7_truncated_last_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    text = json.dumps(_RECORD)
    path.write_text(f"{text}\n{text[:30]}")
    assert _refused(path).startswith(", line 2: must be a JSON object (the last line, without its")
    path.write_text(f"{text}\n{text}")
    assert len(list(read_rollouts(path))) == 2


def test_a7_integers_are_numbers(tmp_path: Path) -> None:
    path = _file(tmp_path, _RECORD | {"logprobs": [-1, 0], "advantage": 1, "temperature": 1})
    batch = TokenBatch.from_documents(list(read_rollouts(path)))
    assert batch.columns["old_logprobs"].tolist() == [-1.0, 0.0, 0.0]
    assert batch.columns["advantages"].tolist() == [1.0, 1.0, 0.0]


def test_a7_nan_in_parquet_is_refused(tmp_path: Path) -> None:
    nan = float("nan")
    path = _file(tmp_path, _RECORD, _RECORD | {"logprobs": [-1.0, nan]}, suffix=".parquet")
    assert _refused(path).startswith(", row 2: `logprobs` must be finite fp32 at every label")
    path = _file(tmp_path, _RECORD, _RECORD | {"advantage": nan}, suffix=".parquet")
    assert _refused(path).startswith(", row 2: `advantage` must be a finite number")


def test_a7_files_are_json(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    nan = float("nan")
    with pytest.raises(DocumentError, match="document 1: `logprobs` must be finite at every token"):
        write_rollouts(path, [_DOCUMENTS[0], Document([1, 2], 1, logprobs=[nan, -1.0])])
    assert list(tmp_path.iterdir()) == []


def test_a1_unscored_completions_come_from_null_rewards(tmp_path: Path) -> None:
    grouped = {name: value for name, value in _RECORD.items() if name != "advantage"}
    records = [grouped | {"group_id": "a", "reward": reward} for reward in (1, None, 0, 0)]
    for suffix in (".jsonl", ".parquet"):
        documents = list(read_rollouts(_file(tmp_path, *records, suffix=suffix)))
        advantages = [d.advantage for d in with_group_advantages(documents, scale="none")]
        third = pytest.approx(-1 / 3)
        assert advantages == [pytest.approx(2 / 3), None, third, third]
    assert "`advantage` is required" in _refused(_file(tmp_path, grouped | {"group_id": "a"}))
    assert "`advantage` is required" in _refused(_file(tmp_path, grouped | {"reward": 1}))


def test_a1_reward_columns_are_summed_or_unscored(tmp_path: Path) -> None:
    grouped = {name: value for name, value in _RECORD.items() if name != "advantage"}
    grouped["group_id"] = 1
    pairs = [(1, 1), (None, 1), (0, None), (None, None)]
    path = _file(tmp_path, *(grouped | {"right": a, "form": b} for a, b in pairs))
    assert "`right` is not a column" in _refused(path)
    documents = list(read_rollouts(path, reward_columns={"right": 1.0, "form": 0.5}))
    assert [document.reward for document in documents] == [1.5, None, None, None]
    assert [document.reward for document in read_rollouts(path, ignore=["right", "form"],
            require=["logprobs"])] == [None] * 4  # fmt: skip
    path = _file(tmp_path, grouped | {"right": 1, "reward": 1})
    assert "`reward` is given although" in _refused(path, reward_columns={"right": 1.0})
    path = _file(tmp_path, grouped | {"right": "yes"})
    assert "`right` must be a finite number" in _refused(path, reward_columns={"right": 1.0})


@pytest.mark.parametrize("declared", ["raw", 1.0])
def test_t2_raw_logprobs_at_another_temperature_are_refused(
    tmp_path: Path, declared: object
) -> None:
    record = {"tokens": [0, 0], "prompt_length": 1, "logprobs": [-0.126928], "advantage": 1.0}
    raw = record | {"temperature": 0.5, "logprobs_temperature": declared}
    assert "must be taken at the temperature 0.5" in _refused(_file(tmp_path, raw))
    (document,) = read_rollouts(_file(tmp_path, raw | {"temperature": 1.0}))
    assert document.logprobs == [-0.126928]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("group", [0, "a"])
def test_a22_an_id_with_two_prompts_is_refused(
    tmp_path: Path, suffix: str, group: int | str
) -> None:
    first = {"tokens": [1, 2, 5, 0], "prompt_length": 2, "logprobs": [-1.0, -1.0]}
    first |= {"group_id": group, "reward": 1.0}
    second = first | {"tokens": [9, 8, 5, 0], "reward": 0.0}
    place = "line" if suffix == ".jsonl" else "row"
    path = _file(tmp_path, first, first, second, suffix=suffix)
    assert _refused(path) == (
        f", {place} 3: `group_id` must be that of answers to one prompt, got {group!r} with "
        f"another prompt than {place} 1; give each prompt an id of its own"
    )
    longer = first | {"prompt_length": 1, "logprobs": [-1.0] * 3}
    assert f", {place} 2: `group_id`" in _refused(_file(tmp_path, first, longer, suffix=suffix))


def test_a22_groups_that_are_not_compared_may_have_several_prompts(tmp_path: Path) -> None:
    first = {"tokens": [1, 2, 5], "logprobs": [0.0, -1.0, -1.0], "group_id": 0}
    second = first | {"tokens": [9, 8, 5]}
    for how in ({"prompt_length": 2, "advantage": 1.0}, {"loss_mask": [0, 1, 1], "reward": 1.0}):
        path = _file(tmp_path, first | how, second | how)
        assert len(list(read_rollouts(path))) == 2
    other = second | {"prompt_length": 2, "reward": 1.0, "group_id": 1}
    path = _file(tmp_path, first | {"prompt_length": 2, "reward": 0.0}, other, other)
    assert len(list(read_rollouts(path))) == 3
    context = first | {"prompt_length": 3, "logprobs": [], "reward": 1.0}
    path = _file(tmp_path, context, context | {"tokens": [1, 2, 6]})
    assert len(list(read_rollouts(path))) == 2


@pytest.mark.parametrize("temperature", [1e300, 1e39, 1001, 9e-4, 1e-45, 1e-300])
def test_rl23_temperatures_of_no_use_in_fp32_are_refused(
    tmp_path: Path, temperature: float
) -> None:
    path = _file(tmp_path, _RECORD, _RECORD | {"temperature": temperature})
    expected = (
        f", line 2: `temperature` must be from 0.001 to 1000, as fp32 allows, got {temperature}"
    )
    assert _refused(path) == expected
    path = _file(tmp_path, *(_RECORD | {"temperature": good} for good in (0.001, 1000)))
    assert len(list(read_rollouts(path))) == 2


def test_rl23_stand_ins_for_log_probabilities_are_refused(tmp_path: Path) -> None:
    for value in (-1e30, -9999.0, -1000.5):
        path = _file(tmp_path, _RECORD | {"logprobs": [-1.0, value]})
        message = f", line 1: `logprobs` must be log-probabilities, at least -1000, got {value:.6g}"
        assert _refused(path).startswith(message)
    path = _file(tmp_path, _TRL | {"ref_per_token_logps": [-1.0, -1e30, -1.0]})
    assert ", line 1: `ref_per_token_logps` must be log-pr" in _refused(path)
    cold = _RECORD | {"temperature": 0.1, "logprobs": [-1.0, -9999.0]}
    masked = {"prompt_length": None, "loss_mask": [0, 0, 1], "logprobs": [0.0, -1e30, -1.0]}
    path = _file(tmp_path, cold, _RECORD | masked, _RECORD | {"logprobs": [-1.0, -1000.0]})
    assert len(list(read_rollouts(path))) == 3


def test_known_text_columns_are_skipped(tmp_path: Path) -> None:
    texts = {"prompt": "1 + 1 =", "completion": "2", "text": "", "id": 5, "metadata": {"a": [1]}}
    path = _file(tmp_path, _RECORD | texts | {"source": "web"})
    assert "`source`" in _refused(path)
    assert len(list(read_rollouts(path, ignore=["source"]))) == 1
    with pytest.raises(ValueError, match=r"must not name \['advantage'\]"):
        read_rollouts(path, ignore=["advantage"])
    with pytest.raises(ValueError, match="`require` must name fields of"):
        read_rollouts(path, require=["advantages"])


def test_files_that_are_none_are_refused_at_once(tmp_path: Path) -> None:
    for name, message in (("a.jsonl", "no such file"), ("a.csv", "must end in .jsonl, ")):
        with pytest.raises(UserError, match=message):
            read_rollouts(tmp_path / name)
    with pytest.raises(UserError, match=r"must end in \.jsonl, \.jsonl\.gz or \.parquet"):
        write_rollouts(tmp_path / "a.csv", [])
    broken = tmp_path / "a.parquet"
    broken.write_bytes(b"not parquet")
    assert "must be a Parquet file" in _refused(broken)
    binary = tmp_path / "a.jsonl"
    binary.write_bytes(b'{"tokens": "\xff"}\n')
    assert ", line 1: must be a JSON object" in _refused(binary)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rollouts{suffix}"
    write_rollouts(path, _DOCUMENTS[:1])
    before = path.read_bytes()
    bad = replace(_DOCUMENTS[0], tokens=[-1, 2, 3])
    with pytest.raises(DocumentError, match="document 1: `tokens`"):
        write_rollouts(path, [_DOCUMENTS[0], bad])
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_parquet_groups_are_of_one_type(tmp_path: Path) -> None:
    documents = [replace(_DOCUMENTS[0], group_id=group) for group in (1, "a")]
    with pytest.raises(DocumentError, match="document 1: `group_id` must be of one type"):
        write_rollouts(tmp_path / "a.parquet", documents)


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _file(tmp_path, _RECORD, suffix=".parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'fastrl\[examples\]'"):
        list(read_rollouts(path))


def test_a_packed_file_is_reproducible_and_its_damage_has_a_place(tmp_path: Path) -> None:
    path, other = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"
    for file in (path, other):
        write_rollouts(file, _DOCUMENTS)
    assert path.read_bytes() == other.read_bytes()
    path.write_bytes(path.read_bytes()[:-12])
    assert re.search(r", after line \d: must be a whole gzip file: ", _refused(path))
    path.write_bytes(b'{"tokens": [1]}')
    assert _refused(path).startswith(", after line 0: must be a whole gzip file: ")


def test_folders_and_patterns_stand_for_their_files(tmp_path: Path) -> None:
    names = ["b/2.jsonl.gz", "b/10.jsonl", "b/.hidden.jsonl", "b/notes.txt", "b/c/3.jsonl"]
    for name in [*names, "[a].jsonl", "a.jsonl"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def files(*paths: str) -> list[str]:
        found = rollout_files([str(tmp_path / path) for path in paths])
        return [str(Path(file).relative_to(tmp_path)) for file in found]

    assert files("b") == ["b/10.jsonl", "b/2.jsonl.gz"]
    assert files("a.jsonl", "b/*.gz", "none.jsonl") == ["a.jsonl", "b/2.jsonl.gz", "none.jsonl"]
    assert files("b/**/*.jsonl") == ["b/10.jsonl", "b/c/3.jsonl"]
    assert files("[a].jsonl") == ["[a].jsonl"]
    with pytest.raises(UserError, match="no rollout files there"):
        files("b/*.csv")
    with pytest.raises(UserError, match="must be meant by one path, but is by "):
        files("b", "b/2*")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_logprobs_may_be_null_where_nothing_is_learned(tmp_path: Path, suffix: str) -> None:
    given = _RECORD | {"logprobs": [None, -1.0, -0.5]}
    masked = _RECORD | {"prompt_length": None, "loss_mask": [0, 0, 1], "logprobs": [None, None, -1]}
    for record, expected in ((given, [0.0, -1.0, -0.5]), (masked, [0.0, 0.0, -1.0])):
        (document,) = read_rollouts(_file(tmp_path, record, suffix=suffix))
        batch = TokenBatch.from_documents([document])
        assert batch.columns["old_logprobs"].tolist() == [*expected[1:], 0.0]
    refused = _refused(_file(tmp_path, masked | {"loss_mask": [0, 1, 1]}, suffix=suffix))
    assert refused.endswith(
        "1: `logprobs` must be finite fp32 at every label, got null for token 1"
    )


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_parts_of_a_rollout_have_prompts_of_their_own(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rollouts{suffix}"
    parts = [
        Document([5, 6], prompt_length=1, reward=1.0, group_id=3, rollout_id="a"),
        Document([7, 8, 9], prompt_length=2, reward=1.0, group_id=3, rollout_id="a"),
    ]
    write_rollouts(path, parts)
    assert list(read_rollouts(path, require=())) == parts
    record = _RECORD | {"rollout_id": 1}
    assert "`rollout_id` needs the `group_id`" in _refused(_file(tmp_path, record, suffix=suffix))
