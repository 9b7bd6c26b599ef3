"""The source of the documents of rollout files, read and checked before the run begins."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fastrl.config.advantages import AdvantageConfig
from fastrl.config.base import UserError
from fastrl.config.rollouts import FileRolloutsConfig
from fastrl.data.columns import BATCH_COLUMNS, TOKEN_NUMBERS
from fastrl.data.documents import Document
from fastrl.data.prompt_groups import group_over_files
from fastrl.data.rollout_paths import rollout_files
from fastrl.data.rollouts import check_any_learned, check_same_columns, read_rollouts
from fastrl.training.advantages import RewardKL, with_advantages
from fastrl.training.order import ShuffledItems
from fastrl.training.rollouts import Rollouts, RolloutSource, to_rollouts


class RolloutFiles:
    """The documents of rollout files; phases that read a file in the same way share it.

    Args:
        vocab_size: of the model; ids must be below it.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._read: dict[Hashable, list[Document]] = {}
        self._digests: dict[str, str] = {}

    def digest(self, path: str) -> str:
        """SHA-256 of the content of a file whose documents were read."""
        return self._digests[path]

    def documents(
        self, path: str, require: tuple[str, ...], config: FileRolloutsConfig
    ) -> list[Document]:
        """The documents of a file, the same objects for the same arguments.

        Args:
            path: of the file.
            require: fields that every document must have.
            config: the columns that make the reward and those that are not read.

        Raises:
            UserError: a file that cannot be read or lacks something, an id outside of the
                vocabulary.
        """
        key = (path, require, config.ignore, tuple(config.reward_columns.items()))
        if key not in self._read:
            records = read_rollouts(
                path, require=require, ignore=config.ignore, reward_columns=config.reward_columns
            )
            if path not in self._digests:
                with open(path, "rb") as file:  # first, so that a change meanwhile is one
                    self._digests[path] = hashlib.file_digest(file, "sha256").hexdigest()
            self._read[key] = documents = []
            for document in records:
                documents.append(_packed(document))
                ids = {"tokens": document.tokens}
                if document.teacher_ids is not None:
                    lists = (each for each in document.teacher_ids if len(each))
                    ids["teacher_ids"] = [max(each) for each in lists]
                for name, values in ids.items():
                    if len(values) and (largest := max(values)) >= self._vocab_size:
                        raise UserError(
                            f"{path}, document {len(documents)}: `{name}` must be ids below the "
                            f"vocabulary size {self._vocab_size}, got {largest}"
                        )
        return self._read[key]


def _packed(document: Document) -> Document:
    """The document with arrays in place of lists, an eighth of their memory.

    Groups come in random order, so documents are held. Numbers are the fp32 of a batch.
    """
    values: dict[str, Any] = {"tokens": np.asarray(document.tokens, np.int64)}
    if document.loss_mask is not None:
        values["loss_mask"] = np.asarray(document.loss_mask, np.bool_)
    for name in TOKEN_NUMBERS:
        if isinstance(given := getattr(document, name), list):
            values[name] = np.asarray(given, np.float32)
    return replace(document, **values)


class FileRollouts(RolloutSource):
    """Rollouts from files, whole groups in random order.

    Args:
        config: files and documents a step.
        advantage: from rewards to advantages, where a document has none of its own.
        columns: of the batch that the losses and the head need; the files must have them.
        files: those of the run that were read.
        seed: of the order of groups.

    Raises:
        UserError: as `RolloutFiles.documents`; no documents, or a column that only some have.
    """

    uses_weights = False

    def __init__(
        self,
        config: FileRolloutsConfig,
        advantage: AdvantageConfig,
        columns: Collection[str],
        files: RolloutFiles,
        seed: str,
    ) -> None:
        self._config = config
        self._advantage = advantage
        read: list[list[Document]] = []
        named: list[tuple[str, Document]] = []
        require = tuple(field for column, field in BATCH_COLUMNS.items() if column in columns)
        uses_logprobs = advantage.kl_in_reward is not None or advantage.baseline == "optimal_token"
        if uses_logprobs and "logprobs" not in require:
            require = (*require, "logprobs")
        paths = rollout_files(config.paths)
        meant: dict[str, list[str]] = {}
        for file, path in paths.items():
            meant.setdefault(path, []).append(file)
        for path in paths:
            documents = files.documents(path, require, config)
            read.append(documents)
            for number, document in enumerate(documents, start=1):
                named.append((f"{path}, document {number}", document))
        if not named:
            raise UserError(f"{', '.join(paths)}: no documents")
        options = {
            "kept_tokens": "`model.head.keep.recorded: true`",
            "teacher_ids": "a `distillation` loss that is `recorded`",
        }
        for field, option in options.items():
            name = "teacher_tokens" if field == "teacher_ids" else field
            lacks = [where for where, document in named if getattr(document, field) is None]
            # Documents without a sampling set may stand beside those with one.
            is_enough = field == "kept_tokens" and len(lacks) < len(named)
            if name in columns and lacks and not is_enough:
                raise UserError(f"{lacks[0]}: `{field}` is required with {option}, got none")
        _check_baseline(named, advantage)
        check_same_columns(named)
        self._needs_advantages = "advantages" in columns
        check_any_learned(
            tuple(paths),
            (document for _, document in named),
            needs_advantages=self._needs_advantages,
        )
        if all(document.advantage is not None for _, document in named):
            _check_no_changes(advantage, paths)
        self.items = ShuffledItems(group_over_files(read), seed)
        self.longest = max(len(document.tokens) for _, document in named)
        # Of a folder or pattern, which files it means.
        self.digests: Mapping[str, str] = {path: files.digest(path) for path in paths} | {
            path: hashlib.sha256("\0".join(found).encode()).hexdigest()
            for path, found in meant.items()
            if found != [path]
        }

    def next(self, reward_kl: RewardKL | None = None) -> Rollouts:
        """As many groups as make up the documents of the step."""
        documents: list[Document] = []
        number = 0
        while len(documents) < self._config.documents_per_step:
            (group,) = self.items.take(1)
            documents += [replace(document, group_id=number) for document in group]
            number += 1
        if not self._needs_advantages:
            labelled = [replace(each, advantage=None) for each in documents if each.has_labels]
            return Rollouts(labelled, {}, [])
        given = [document for document in documents if document.advantage is not None]
        rewarded = [document for document in documents if document.advantage is None]
        sums = self._advantage.aggregation == "sum_then_normalise"
        relative, metrics = with_advantages(
            rewarded,
            self._advantage,
            reward_kl=reward_kl,
            reward_weights=None if sums else self._config.reward_columns,
        )
        return to_rollouts([*given, *relative], self._advantage, metrics, [])


def _check_baseline(named: Iterable[tuple[str, Document]], advantage: AdvantageConfig) -> None:
    """Refuses documents whose reward gets an advantage and that lack what its baseline needs."""
    needs = {"greedy": "greedy_reward", "optimal_token": "sum_squares"}.get(advantage.baseline)
    if needs is None:
        return
    for where, document in named:
        may_be_scored = document.is_scored or document.rollout_id is not None
        is_compared = document.advantage is None and may_be_scored and document.has_labels
        if is_compared and getattr(document, needs) is None:
            raise UserError(
                f"{where}: `{needs}` is required with `advantage.baseline: {advantage.baseline}`,"
                " got none"
            )


def _check_no_changes(advantage: AdvantageConfig, paths: Iterable[str]) -> None:
    """Refuses what is done to rewards where no advantage is taken of one."""
    allowed = {"zero_variance", "baseline", "scale"}
    given = advantage.model_dump(exclude_defaults=True, exclude=allowed)
    if given:
        raise UserError(
            f"{', '.join(f'`advantage.{name}`' for name in given)} must not be given, as all "
            f"documents of {', '.join(paths)} have advantages of their own, which it does not"
            " change"
        )
