"""`fastrl rollouts import`: what servers and other trainers write becomes a rollout file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastrl.cli import main
from fastrl.config.environment import PretrainedTokenizerConfig
from fastrl.data.documents import Document
from fastrl.data.rollouts import read_rollouts
from fastrl.training.tokenizer import build_tokenizer
from tests.helpers.pretrained import write_pretrained

Imported = Callable[..., list[Document]]


def _write(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


@pytest.fixture
def imported(tmp_path: Path) -> Imported:
    """The documents of an import."""

    def run(*arguments: str) -> list[Document]:
        target = tmp_path / "imported.jsonl"
        target.unlink(missing_ok=True)
        assert main(["rollouts", "import", *arguments, str(target)]) == 0
        return list(read_rollouts(target, require=()))

    return run


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The message of an import that is refused."""

    def run(*arguments: str) -> str:
        target = tmp_path / "refused.jsonl"
        assert main(["rollouts", "import", *arguments, str(target)]) == 2
        assert not target.exists()
        return capsys.readouterr().err

    return run


def _completion(name: str, prompt: list[int], *answers: list[int]) -> dict[str, Any]:
    """A response of vLLM's `/v1/completions` to a request with `return_token_ids`."""
    choices = [
        {
            "index": index,
            "text": "...",
            "logprobs": {"token_logprobs": [-0.25 * (index + 1)] * len(ids), "tokens": []},
            "finish_reason": "stop",
            "token_ids": ids,
            "prompt_token_ids": prompt,
        }
        for index, ids in enumerate(answers)
    ]
    return {"id": name, "object": "text_completion", "choices": choices, "model": "m"}


CHAT = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "prompt_token_ids": [7, 8],
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "..."},
            "logprobs": {"content": [{"token": "a", "logprob": -0.5}]},
            "finish_reason": "stop",
            "token_ids": [9],
        }
    ],
}


def test_answers_of_a_server(
    tmp_path: Path, imported: Imported, capsys: pytest.CaptureFixture[str]
) -> None:
    batch: list[dict[str, Any]] = [
        {"id": "b1", "custom_id": "first", "error": None}
        | {"response": {"status_code": 200, "body": _completion("c9", [1], [2, 3])}},
        {"id": "b2", "custom_id": "second", "response": None, "error": {"code": "expired"}},
        {"id": "b3", "custom_id": "third", "response": {"status_code": 400, "body": {}}},
    ]
    source = _write(
        tmp_path / "answers.jsonl", _completion("c1", [1, 2], [3, 4], [5]), CHAT, *batch
    )
    documents = imported("--from", "openai", source)
    assert [(list(doc.tokens), doc.prompt_length, doc.group_id) for doc in documents] == [
        ([1, 2, 3, 4], 2, "c1/0"),
        ([1, 2, 5], 2, "c1/0"),
        ([7, 8, 9], 2, "chatcmpl-1/0"),
        ([1, 2, 3], 1, "first/0"),
    ]
    assert [doc.logprobs for doc in documents] == [[-0.25] * 2, [-0.5], [-0.5], [-0.25] * 2]
    assert documents[0].rollout_logprobs == documents[0].logprobs
    assert {doc.reward for doc in documents} == {None}
    out = capsys.readouterr().out
    assert "4 documents in 3 groups\n" in out
    assert f"left out: 2 requests without an answer ({source}, line 4)" in out


def test_several_prompts_of_a_request_are_several_groups(
    tmp_path: Path, imported: Imported
) -> None:
    answer = _completion("c1", [1, 2], [3], [4])
    answer["choices"][1]["prompt_token_ids"] = [1, 9]
    documents = imported("--from", "openai", _write(tmp_path / "a.jsonl", answer))
    assert [doc.group_id for doc in documents] == ["c1/0", "c1/1"]


def test_answers_without_what_training_needs_are_refused(
    tmp_path: Path, imported: Imported, refused: Callable[..., str]
) -> None:
    def source(**changes: object) -> str:
        answer = _completion("c1", [1, 2], [3])
        answer["choices"][0] |= changes
        return _write(tmp_path / "a.jsonl", answer)

    def message(*arguments: str, **changes: object) -> str:
        return refused("--from", "openai", *arguments, source(**changes))

    assert "line 1: `prompt_token_ids` and `token_ids` are required" in message(token_ids=None)
    assert "`logprobs` must have 1 values, one a completion token, got 2" in message(
        logprobs={"token_logprobs": [-1.0, -1.0]}
    )
    assert "`logprobs` must be finite fp32 at every label, got null for token 2" in message(
        logprobs={"token_logprobs": [None]}
    )
    assert "needs log-probabilities that were taken after temperature" in message(
        "--temperature", "0.7"
    )
    assert "--temperature must be above 0" in message("--temperature", "0")
    (document,) = imported(
        "--from", "openai", "--temperature", "0.7", "--processed-logprobs", source()
    )
    assert (document.temperature, document.logprobs_temperature) == (0.7, 0.7)
    assert "must be another for another prompt" in refused(
        "--from",
        "openai",
        _write(tmp_path / "b.jsonl", _completion("c", [1], [2]), _completion("c", [3], [2])),
    )


def test_dumps_of_verl(
    tmp_path: Path, imported: Imported, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_pretrained(tmp_path / "model")
    records = [
        {"input": "what is 12 ?", "output": answer, "gts": "12", "score": score, "step": step}
        for step, answer, score in ((1, "12", 1.0), (1, "7", 0.0), (2, "4", 0.0))
    ]
    options = ["--from", "verl", "--tokenizer", str(folder)]
    documents = imported(*options, _write(tmp_path / "1.jsonl", *records))
    assert [(doc.group_id, doc.reward) for doc in documents] == [
        ("1/0", 1.0),
        ("1/0", 0.0),
        ("2/1", 0.0),
    ]
    assert documents[0].logprobs is None
    decode = build_tokenizer(PretrainedTokenizerConfig(), folder).decode
    assert [decode(list(doc.tokens)) for doc in documents[:2]] == [
        "what is 12 ?12",
        "what is 12 ?7",
    ]
    prompt = documents[0].prompt_length
    assert decode(list(documents[0].tokens[prompt:])) == "12"
    assert "there are no log-probabilities" in capsys.readouterr().out


def test_tables_of_trl(tmp_path: Path, imported: Imported, refused: Callable[..., str]) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = write_pretrained(tmp_path / "model")
    options = ["--from", "trl", "--tokenizer", str(folder)]
    table = {
        "step": [3, 3],
        "prompt": ["what is 3 ?"] * 2,
        "completion": ["3", "4"],
        "accuracy": [1.0, float("nan")],
        "advantage": [0.7, -0.7],
    }
    source = tmp_path / "completions_00003.parquet"
    parquet.write_table(pyarrow.table(table), source)
    documents = imported(*options, str(source))
    assert [(doc.advantage, doc.reward) for doc in documents] == [(0.7, None), (-0.7, None)]
    documents = imported(*options, "--reward", "accuracy", str(source))
    assert [(doc.advantage, doc.reward) for doc in documents] == [(None, 1.0), (None, None)]
    assert {doc.group_id for doc in documents} == {"3/0"}
    assert "`right` is required, got a record of step, prompt, " in refused(
        *options, "--reward", "right", str(source)
    )
    table["prompt"] = [[{"role": "user", "content": "what is 3 ?"}]] * 2
    parquet.write_table(pyarrow.table(table), source)
    assert "row 1: `prompt` must be text, got \"[{'role': 'user'" in refused(*options, str(source))


def test_options_of_other_formats_are_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    source = _write(tmp_path / "a.jsonl", CHAT)
    assert "--tokenizer is required with --from verl" in refused("--from", "verl", source)
    folder = str(tmp_path)
    for kind, options in (
        ("openai", ["--tokenizer", folder]),
        ("openai", ["--reward", "x"]),
        ("verl", ["--tokenizer", folder, "--reward", "x"]),
        ("trl", ["--tokenizer", folder, "--temperature", "1"]),
        ("trl", ["--tokenizer", folder, "--processed-logprobs"]),
    ):
        message = refused("--from", kind, *options, source)
        assert f"has no effect with --from {kind}" in message
