"""Rollout files, JSONL (also gzipped) and Parquet: read as a stream, written whole or not at all.

The columns are listed in docs/data.md; how a record becomes a document is in `rollout_records.py`.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from fastrl.config.base import UserError
from fastrl.data.columns import ALIASES, DOCUMENT_COLUMNS, ENTRY_FIELDS, REQUIRABLE
from fastrl.data.documents import Document, DocumentError, Integers
from fastrl.data.prompt_groups import GroupId
from fastrl.data.rollout_records import BareConstant, FieldError, RecordReader, record_of

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
"""Of the names of rollout files."""

_IDS = ("group_id", "rollout_id")
_NUMBER_OR_NUMBERS = [
    name for name, each in DOCUMENT_COLUMNS.items() if each.kinds == ["number", "numbers"]
]
_ROWS_AT_A_TIME = 512


class RolloutFileError(UserError):
    """A rollout file that cannot be read; the message names file, line or row, and field."""


def read_rollouts(
    path: str | Path,
    *,
    require: Collection[str] = ("logprobs", "advantage"),
    ignore: Collection[str] = (),
    reward_columns: Mapping[str, float] | None = None,
) -> Iterator[Document]:
    """Documents of a rollout file, one record at a time.

    A null value is an absent one. Every record is checked whole when it is reached. Documents whose
    advantage is that of their reward in their group must have the prompt of their group.

    Args:
        path: `.jsonl`, `.jsonl.gz` or `.parquet` (needs pyarrow).
        require: fields that every record must have, out of "logprobs", "ref_logprobs",
            "rollout_logprobs", "advantage", "model_version". "advantage" is also met by a
            `group_id` with a `reward`, null for unscored: see `advantages.with_group_advantages`.
        ignore: columns beside the known ones that are skipped; others are refused.
        reward_columns: name -> weight of columns whose weighted sum is the reward. A document that
            one of them does not score is unscored.

    Raises:
        RolloutFileError: (a UserError) naming the file, the line or row (from 1), the field, what
            is expected and what was found.
    """
    path = Path(path)
    reader = RecordReader(require, ignore, reward_columns or {})
    return _documents(path, reader, read_records(path, reader.columns_to_read))


def read_records(
    path: Path, columns_to_read: Callable[[Collection[str]], list[str]] = list
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a JSONL or Parquet file one by one, each with its line or row.

    Args:
        path: its name ends in one of `SUFFIXES`.
        columns_to_read: those of a Parquet file's that are wanted; default: all.

    Raises:
        RolloutFileError: there is no such file, or it is no such file.
    """
    suffix = rollout_suffix(path)
    if not path.is_file():
        raise RolloutFileError(f"{path}: no such file")
    if suffix == ".parquet":
        return _read_parquet(path, columns_to_read)
    return _read_jsonl(path)


def rollout_suffix(path: Path) -> str:
    """The one of `SUFFIXES` that a file's name ends in.

    Raises:
        RolloutFileError: none.
    """
    for suffix in SUFFIXES:
        if path.name.endswith(suffix):
            return suffix
    raise RolloutFileError(f"{path}: must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")


def write_rollouts(path: str | Path, documents: Iterable[Document]) -> int:
    """Writes documents to a rollout file and returns their number.

    The file appears under its name when it is complete; until then, and after an error, whatever
    was there before stays.

    Args:
        path: `.jsonl`, `.jsonl.gz` or `.parquet` (needs pyarrow, and `group_id` of one type).
        documents: any iterable; only a part is in memory at a time.

    Raises:
        DocumentError: (a ValueError) for a document that no batch would accept, or with a value
            that is not finite.
    """
    path = Path(path)
    write = {".jsonl": _write_jsonl, ".jsonl.gz": _write_gzip, ".parquet": _write_parquet}[
        rollout_suffix(path)
    ]
    records = (record_of(number, document) for number, document in enumerate(documents))
    with _replaced_when_done(path) as temporary:
        return write(temporary, records)


def check_same_columns(named: Sequence[tuple[str, Document]]) -> None:
    """Refuses a column that some documents with labels have and others lack.

    What micro-batches and ranks compute, and so their collectives, follows from their columns.
    Advantages may come from rewards instead, and documents without `kept_tokens` are over the whole
    vocabulary. Documents without labels are not trained on.

    Args:
        named: documents of one or several files, and the place of each for the message.
    """
    labelled = [(where, document) for where, document in named if document.has_labels]
    for field in (*REQUIRABLE, *ENTRY_FIELDS):
        if field in ("advantage", "kept_tokens"):
            continue
        lacks = [where for where, document in labelled if getattr(document, field) is None]
        if lacks and len(lacks) < len(labelled):
            has = next(where for where, doc in labelled if getattr(doc, field) is not None)
            raise UserError(
                f"{lacks[0]}: `{field}` is required, as {has} has it, got none; give it to all "
                "documents or to none"
            )


def check_any_learned(
    paths: Iterable[str], documents: Iterable[Document], *, needs_advantages: bool = True
) -> None:
    """Refuses files of which no document has a label, and an advantage or what gives one.

    Args:
        paths: of the files, for the message.
        documents: of all of them.
        needs_advantages: whether any loss reads advantages.
    """
    labelled = [document for document in documents if document.has_labels]
    if labelled and not needs_advantages:
        return
    if any(document.advantage is not None or document.is_scored for document in labelled):
        return
    advantage = " and an `advantage` or a `reward` that is not null" if needs_advantages else ""
    raise UserError(
        f"{', '.join(paths)}: at least one document must have a label (a completion token to be "
        f"learned){advantage}, got none; nothing would be trained"
    )


def _documents(
    path: Path, reader: RecordReader, records: Iterable[tuple[str, Mapping[str, Any]]]
) -> Iterator[Document]:
    """The documents of records, each with its place in the file."""
    prompts: dict[GroupId | None, tuple[str, Integers]] = {}
    for place, record in records:
        try:
            document = reader.document(record)
        except FieldError as error:
            raise RolloutFileError(f"{path}, {place}: {error}") from None
        # Where the prompt ends is not known of a `loss_mask`, nor of a document without labels.
        # Parts of a rollout have contexts of their own.
        is_whole = document.group_id is not None and document.rollout_id is None
        is_compared = is_whole and document.advantage is None
        if is_compared and document.has_labels and document.prompt_length is not None:
            prompt = document.tokens[: document.prompt_length]
            first, other = prompts.setdefault(document.group_id, (place, prompt))
            if prompt != other:
                raise RolloutFileError(
                    f"{path}, {place}: `group_id` must be that of answers to one prompt, got "
                    f"{document.group_id!r} with another prompt than {first}; give each prompt an "
                    "id of its own"
                )
        yield document


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    is_packed = rollout_suffix(path) == ".jsonl.gz"
    number = 0
    try:
        with gzip.open(path) if is_packed else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield f"line {number}", _parsed(f"{path}, line {number}", line)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        where = f"{path}, after line {number}"
        raise RolloutFileError(f"{where}: must be a whole gzip file: {error}") from None


def _parsed(where: str, line: bytes) -> dict[str, Any]:
    """The JSON object of a line."""
    if not line.strip():
        raise RolloutFileError(f"{where}: must be a JSON object, got an empty line")
    try:
        record = json.loads(line, parse_constant=BareConstant, object_pairs_hook=_without_doubles)
    except FieldError as error:
        raise RolloutFileError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or brackets without end
        cut = "" if line.endswith(b"\n") else " (the last line, without its end: cut off?)"
        raise RolloutFileError(f"{where}: must be a JSON object{cut}: {error}") from None
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise RolloutFileError(f"{where}: must be a JSON object, got a value of type {kind}")
    return record


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise FieldError(double, "is given twice in one object")
    return record


def _read_parquet(
    path: Path, columns_to_read: Callable[[Collection[str]], list[str]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    pyarrow, parquet = _pyarrow(path)
    try:
        with parquet.ParquetFile(path) as file:
            columns = columns_to_read(file.schema_arrow.names)
            row = 0
            for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME, columns=columns):
                for record in batch.to_pylist():
                    row += 1
                    if isinstance(record.get("rewards"), list):  # a map's pairs
                        record["rewards"] = dict(record["rewards"])
                    yield f"row {row}", record
    except FieldError as error:
        raise RolloutFileError(f"{path}: {error}") from None
    except pyarrow.ArrowException as error:
        raise RolloutFileError(f"{path}: must be a Parquet file: {error}") from None


def _write_jsonl(path: Path, records: Iterator[dict[str, Any]]) -> int:
    with path.open("wb") as file:
        return _write_lines(file, records)


def _write_gzip(path: Path, records: Iterator[dict[str, Any]]) -> int:
    # Neither name nor time, so that the same documents give the same file.
    with path.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
        return _write_lines(packed, records)


def _write_lines(file: IO[bytes] | gzip.GzipFile, records: Iterator[dict[str, Any]]) -> int:
    count = 0
    for record in records:
        file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        count += 1
    return count


def _write_parquet(path: Path, records: Iterator[dict[str, Any]]) -> int:
    pyarrow, parquet = _pyarrow(path)
    first = list(islice(records, _ROWS_AT_A_TIME))
    id_types: dict[str, type] = {}
    for name in _IDS:
        ids = [record[name] for record in first if name in record]
        id_types[name] = int if ids and isinstance(ids[0], int) else str
    schema = _schema(pyarrow, id_types)
    count = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        records = chain(first, records)
        while rows := list(islice(records, _ROWS_AT_A_TIME)):
            for number, row in enumerate(rows, start=count):
                if "rewards" in row:
                    row["rewards"] = list(row["rewards"].items())
                for name in _NUMBER_OR_NUMBERS:
                    if isinstance(row.get(name), list):
                        row[ALIASES[name]] = row.pop(name)
                for name, id_type in id_types.items():
                    if not isinstance(row.get(name), id_type | None):
                        problem = f"must be of one type in a Parquet file, got {row[name]!r}"
                        raise DocumentError(number, name, problem)
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
            count += len(rows)
    return count


def _schema(pyarrow: Any, id_types: Mapping[str, type]) -> Any:
    """The columns of a file; lists of a field that may also be a number go into its alias."""
    floats = pyarrow.list_(pyarrow.float32())  # the precision that a batch keeps
    types = {
        "integer": pyarrow.int64(),
        "number": pyarrow.float64(),
        "text": pyarrow.string(),
        "integers": pyarrow.list_(pyarrow.int64()),
        "booleans": pyarrow.list_(pyarrow.bool_()),
        "numbers": floats,
        "logprobs": floats,
        "lists": pyarrow.list_(pyarrow.list_(pyarrow.int64())),
        "mapping": pyarrow.map_(pyarrow.string(), pyarrow.float64()),
        "logprob_lists": pyarrow.list_(floats),
    }
    schema = {}
    for name, column in DOCUMENT_COLUMNS.items():
        schema[name] = types[column.kinds[0]]
        if name in _NUMBER_OR_NUMBERS:
            schema[ALIASES[name]] = floats
    for name, id_type in id_types.items():
        schema[name] = types["integer" if id_type is int else "text"]
    return pyarrow.schema(schema)


def _pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        problem = "Parquet needs pyarrow; install it with: pip install 'fastrl[examples]'"
        raise UserError(f"{path}: {problem}") from error
    return pyarrow, pyarrow.parquet


@contextmanager
def _replaced_when_done(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to it at the end and removed after an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
