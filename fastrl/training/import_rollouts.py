"""`fastrl rollouts import`: a rollout file of what another program wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from fastrl.config.base import UserError
from fastrl.config.environment import PretrainedTokenizerConfig
from fastrl.data.documents import Document
from fastrl.data.foreign_rollouts import openai_documents, trl_documents, verl_documents
from fastrl.data.rollout_paths import rollout_files
from fastrl.data.rollouts import read_records, write_rollouts
from fastrl.training.display import print_line
from fastrl.training.tokenizer import build_tokenizer

_TEXT_LACKS = (
    "the source is text: tokens are this tokenizer's, without the special tokens and the end token "
    "that the source leaves out, and there are no log-probabilities"
)
_ANSWERS_LACK = "the source has no rewards: `reward` is null, to be filled in"


def import_rollouts(
    kind: str,
    source: str,
    file: Path,
    *,
    tokenizer: Path | None = None,
    reward: str | None = None,
    temperature: float | None = None,
    processed_logprobs: bool = False,
) -> int:
    """Writes a rollout file, and says what it lacks; the exit code is 0.

    Args:
        kind: "openai", "trl" or "verl".
        source: file, folder or pattern.
        file: to write, which must not exist.
        tokenizer: folder of the model, for the formats that hold text.
        reward: the column of TRL's tables that is taken in place of its advantages.
        temperature: that the requests of openai had; default: 1.
        processed_logprobs: whether their log-probabilities were taken after temperature.

    Raises:
        UserError: an option that is missing or of no effect, a file that is there, or a source that
            cannot be read. Nothing has been written then.
    """
    is_text = kind != "openai"
    if is_text and tokenizer is None:
        raise UserError(f"--tokenizer is required with --from {kind}, which holds text")
    _refuse_without_effect(
        kind,
        {
            "--tokenizer": not is_text and tokenizer is not None,
            "--reward": kind != "trl" and reward is not None,
            "--temperature": is_text and temperature is not None,
            "--processed-logprobs": is_text and processed_logprobs,
        },
    )
    if file.exists():
        raise UserError(f"{file}: exists already; import to a new file")
    failed: list[str] = []
    if tokenizer is not None:
        documents = _of_text(kind, source, tokenizer, reward)
    else:
        temperature = 1.0 if temperature is None else temperature
        taken_at = _logprobs_temperature(temperature, processed_logprobs)
        documents = openai_documents(_records(source), temperature, taken_at, failed)
    groups: set[object] = set()
    number = write_rollouts(file, _noted(documents, groups))
    console = Console()
    print_line(console, f"{file}: {number:,} documents in {len(groups):,} groups")
    if failed:
        print_line(console, f"left out: {len(failed):,} requests without an answer ({failed[0]})")
    print_line(console, _TEXT_LACKS if is_text else _ANSWERS_LACK)
    return 0


def _of_text(kind: str, source: str, tokenizer: Path, reward: str | None) -> Iterator[Document]:
    encode = build_tokenizer(PretrainedTokenizerConfig(), tokenizer).encode
    records = _records(source)
    if kind == "verl":
        return verl_documents(records, encode)
    return trl_documents(records, encode, reward)


def _refuse_without_effect(kind: str, given: dict[str, bool]) -> None:
    for name, has_no_effect in given.items():
        if has_no_effect:
            raise UserError(f"{name} has no effect with --from {kind}; leave it out")


def _logprobs_temperature(temperature: float, processed: bool) -> float:
    """What the log-probabilities were taken at."""
    if temperature == 0:
        raise UserError("--temperature must be above 0, as greedy answers have no ratio, got 0")
    if processed or temperature == 1:
        return temperature
    raise UserError(
        f"--temperature {temperature:g} needs log-probabilities that were taken after temperature, "
        "and servers take them before it unless they are told otherwise; vLLM is by "
        "`--logprobs-mode processed_logprobs`: add --processed-logprobs if yours was, or sample at "
        "temperature 1"
    )


def _records(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in rollout_files([source]):
        for place, record in read_records(Path(path)):
            yield f"{path}, {place}", record


def _noted(documents: Iterator[Document], groups: set[object]) -> Iterator[Document]:
    for document in documents:
        groups.add(document.group_id)
        yield document
