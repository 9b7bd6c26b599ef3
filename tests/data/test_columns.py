"""The table of columns: every field of a document and every column of a batch, once."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from fastrl import BatchKwargs, Document
from fastrl.data.columns import (
    ALIASES,
    BATCH_COLUMNS,
    DOCUMENT_COLUMNS,
    FILE_COLUMNS,
    REQUIRABLE,
    SPLIT_COLUMNS,
)
from fastrl.functional import batch

DOCS = Path(__file__).parent.parent.parent / "docs" / "data.md"


def test_every_field_of_a_document_is_a_row_of_the_table() -> None:
    fields = [field.name for field in dataclasses.fields(Document)]
    assert sorted(DOCUMENT_COLUMNS) == sorted(fields)
    names = [*DOCUMENT_COLUMNS, *SPLIT_COLUMNS, *ALIASES.values()]
    assert len(names) == len(set(names)) == len(FILE_COLUMNS)


def test_every_column_of_a_batch_names_its_field_once() -> None:
    declared = re.findall(
        r"^    (\w+): .*?# (?:scalar or )?\[T\]$",
        re.sub(r"field\(\n\s+(.*)\n\s+\)", r"field(\1)", inspect.getsource(BatchKwargs)),
        flags=re.MULTILINE,
    )
    has_metadata = [field.name for field in dataclasses.fields(BatchKwargs) if field.metadata]
    assert [name for name in declared if name != "index"] == has_metadata
    assert set(batch.SOURCES.values()) <= set(DOCUMENT_COLUMNS)
    assert sorted(BATCH_COLUMNS.values()) == sorted(REQUIRABLE)


def test_the_docs_name_every_column_of_files() -> None:
    (text,) = re.findall(r"## Rollout files.*", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert [name for name in FILE_COLUMNS if f"`{name}`" not in text] == []
