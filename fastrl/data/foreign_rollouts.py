"""Documents of what other programs write of their rollouts.

Here: the answers of an OpenAI-compatible server, and the tables of text of TRL and verl. Their
packages are not needed. Every document goes through the checks of `rollout_records.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from math import isnan
from typing import Any

from fastrl.data.documents import Document
from fastrl.data.rollout_records import FieldError, RecordReader
from fastrl.data.rollouts import RolloutFileError

Records = Iterable[tuple[str, Mapping[str, Any]]]
"""Records, each with its file and line or row."""

Encode = Callable[[str], list[int]]


def openai_documents(
    records: Records, temperature: float, logprobs_temperature: float, failed: list[str]
) -> Iterator[Document]:
    """The documents of answers that carry token ids, as vLLM gives them.

    Args:
        records: a response of `/v1/completions` or `/v1/chat/completions` each, or a line of the
            output of OpenAI's Batch API (`vllm run-batch`) with such a response.
        temperature: that the requests had.
        logprobs_temperature: that the log-probabilities were taken at.
        failed: gets the places of requests without an answer.
    """
    prompts: dict[str, str] = {}
    for where, record in records:
        answer, name = record, record.get("id")
        if "choices" not in record and ("response" in record or "error" in record):
            response = record.get("response") or {}
            name, answer = record.get("custom_id"), response.get("body") or {}
            if record.get("error") or response.get("status_code", 200) != 200:
                failed.append(where)
                continue
        choices = answer.get("choices")
        if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
            raise RolloutFileError(f"{where}: `choices` must be a list of objects, got {choices!r}")
        ids: dict[str, str] = {}
        for choice in choices:
            prompt = _token_ids(choice.get("prompt_token_ids", answer.get("prompt_token_ids")))
            completion = _token_ids(choice.get("token_ids"))
            if prompt is None or completion is None:
                raise RolloutFileError(
                    f"{where}: `prompt_token_ids` and `token_ids` are required, got text alone, "
                    "whose tokens another tokenizer may give otherwise; let the requests have "
                    "`return_token_ids: true` (vLLM)"
                )
            group = ids.setdefault(repr(prompt), f"{name or where}/{len(ids)}")
            if prompts.setdefault(group, repr(prompt)) != repr(prompt):
                raise RolloutFileError(
                    f"{where}: `custom_id` (or `id`) must be another for another prompt, got "
                    f"{name!r} twice"
                )
            yield _document(
                where,
                prompt_ids=prompt,
                completion_ids=completion,
                logprobs=_logprobs(choice),
                rollout_logprobs=_logprobs(choice),
                temperature=temperature,
                logprobs_temperature=logprobs_temperature,
                group_id=group,
                reward=None,
            )


def trl_documents(records: Records, encode: Encode, reward: str | None) -> Iterator[Document]:
    """The documents of TRL's tables of completions.

    Args:
        records: with `step`, `prompt`, `completion`, `advantage` and a column a reward function.
        encode: from text to ids.
        reward: the column to take in place of `advantage`.
    """
    for where, record, group in _grouped(records, "prompt"):
        values = {"advantage": _given(where, record, "advantage")} if reward is None else {}
        if reward is not None:
            values = {"reward": _score(_given(where, record, reward))}
        yield _of_text(where, record, ("prompt", "completion"), encode, group_id=group, **values)


def verl_documents(records: Records, encode: Encode) -> Iterator[Document]:
    """The documents of verl's dumps: `input`, `output`, `score` and `step`."""
    for where, record, group in _grouped(records, "input"):
        score = _score(_given(where, record, "score"))
        yield _of_text(where, record, ("input", "output"), encode, group_id=group, reward=score)


def _grouped(records: Records, prompt: str) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Each record with an id of its prompt in its step."""
    groups: dict[Hashable, str] = {}
    for where, record in records:
        step = _given(where, record, "step")
        key = (step, repr(record.get(prompt)))
        yield where, record, groups.setdefault(key, f"{step}/{len(groups)}")


def _of_text(
    where: str, record: Mapping[str, Any], columns: tuple[str, str], encode: Encode, **values: Any
) -> Document:
    texts = []
    for column in columns:
        text = _given(where, record, column)
        if not isinstance(text, str):
            raise RolloutFileError(
                f"{where}: `{column}` must be text, got {str(text)[:60]!r}; which tokens messages "
                "become is a matter of the chat template that was used: write the templated text"
            )
        texts.append(text)
    prompt, completion = map(encode, texts)
    return _document(where, prompt_ids=prompt, completion_ids=completion, **values)


def _given(where: str, record: Mapping[str, Any], column: str) -> Any:
    if column not in record:
        names = ", ".join(record)
        raise RolloutFileError(f"{where}: `{column}` is required, got a record of {names}")
    return record[column]


def _score(value: Any) -> Any:
    """A reward; NaN is how tables of floats write that there is none."""
    return None if isinstance(value, float) and isnan(value) else value


def _document(where: str, **record: Any) -> Document:
    try:
        return RecordReader(require=()).document(record)
    except FieldError as error:
        raise RolloutFileError(f"{where}: {error}") from None


def _token_ids(value: Any) -> list[int] | None:
    return value if isinstance(value, list) else None


def _logprobs(choice: Mapping[str, Any]) -> list[Any] | None:
    """Of the sampled tokens, as completions and as chat completions have them."""
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return None
    content = logprobs.get("content")
    if isinstance(content, list):
        return [item.get("logprob") if isinstance(item, dict) else None for item in content]
    values = logprobs.get("token_logprobs")
    return values if isinstance(values, list) else None
