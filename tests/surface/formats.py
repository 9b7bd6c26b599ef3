"""What files hold: the keys of a YAML config, and the columns of rollout files.

Read off behaviour: the schema that `fastrl config schema` prints, files that `write_rollouts`
writes, and what `read_rollouts` makes of records or says against them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyarrow import parquet

from fastrl import Document
from fastrl.data.rollouts import read_rollouts, write_rollouts

Schema = dict[str, Any]

_WORDS = ("title", "description")
_NESTED = ("$defs", "$ref", "additionalProperties", "items", "oneOf", "prefixItems", "properties")


def config_keys(schema: Schema) -> dict[str, str]:
    """Each key path of a schema with type, bounds and default.

    A path ends in `:` for a mapping as a whole, goes on with `|x` for what `type: x` brings, `.*`
    for any key, `[]` for the items of a list. A part is written where it comes first; elsewhere a
    line names that place. Names of classes do not enter.
    """
    return dict(_keys("", schema, schema.get("$defs", {}), {}))


def _keys(
    path: str, node: Schema, parts: dict[str, Schema], seen: dict[str, str]
) -> Iterator[tuple[str, str]]:
    own = {key: value for key, value in node.items() if key not in (*_WORDS, *_NESTED)}
    options = [*node.get("oneOf", ()), *node.get("anyOf", ())]
    nested = [option for option in options if "$ref" in json.dumps(option)]
    if nested:
        own.pop("anyOf", None)
        own["or"] = [option for option in options if option not in nested]
    if "discriminator" in own:
        own["discriminator"] = node["discriminator"]["propertyName"]
    extra = node.get("additionalProperties")
    if isinstance(extra, bool):
        own["additionalProperties"] = extra
    if own:
        yield f"{path}:" if "properties" in node else path, json.dumps(own, sort_keys=True)
    dot = "." if path else ""
    children = [(f"{path}{dot}{key}", child) for key, child in node.get("properties", {}).items()]
    children += [(f"{path}[{i}]", child) for i, child in enumerate(node.get("prefixItems", ()))]
    if "items" in node:
        children.append((f"{path}[]", node["items"]))
    if isinstance(extra, dict):
        children.append((f"{path}.*", extra))
    children += [(path + _tag(option, parts), option) for option in nested]
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        if name in seen:
            yield f"{path}:", f"as {seen[name]}"
        else:
            seen[name] = f"{path}:"
            children.append((path, parts[name]))
    for child_path, child in children:
        yield from _keys(child_path, child, parts, seen)


def _tag(option: Schema, parts: dict[str, Schema]) -> str:
    """The `type` that a YAML file gives to choose this option."""
    part = parts.get(option.get("$ref", "").rpartition("/")[2], {})
    const = part.get("properties", {}).get("type", {}).get("const")
    return "" if const is None else f"|{const}"


def schema_digest(schema: Schema) -> str:
    """SHA-256 of a schema with every part in its place, without names, titles, descriptions."""
    text = json.dumps(_bare(schema, schema.get("$defs", {})), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _bare(node: Any, parts: dict[str, Schema]) -> Any:
    if isinstance(node, list):
        return [_bare(item, parts) for item in node]
    if not isinstance(node, dict):
        return node
    result = {
        # A property may be named `title`; a title itself is a text.
        key: sorted(value) if key == "mapping" else _bare(value, parts)
        for key, value in node.items()
        if key not in ("$defs", "$ref") and not (key in _WORDS and isinstance(value, str))
    }
    if "$ref" in node:
        result["part"] = _bare(parts[node["$ref"].rpartition("/")[2]], parts)
    return result


PLAIN = Document(
    [5, 6, 7],
    prompt_length=1,
    logprobs=[-1.0, -0.5],
    ref_logprobs=[-1.5, -0.75],
    rollout_logprobs=[-1.25, -0.5],
    advantage=0.5,
    temperature=0.5,
    model_version=3,
    reward=1.5,
    group_id=7,
    logprobs_temperature=0.5,
    kept_tokens=[[6, 8], [7]],
)
MASKED = Document(
    [1, 2, 3],
    loss_mask=[False, True, True],
    logprobs=[-1.0, -0.5],
    advantage=[1.0, 2.0],
    group_id="a",
    alignment="label",
)
_COLUMNS = (
    *(field.name for field in dataclasses.fields(Document)),
    *("prompt_ids", "completion_ids", "completion_mask", "advantages"),
    *("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"),
)
_IGNORED = ("prompt", "completion", "text", "id", "metadata", "score")
_REQUIRABLE = (
    *("logprobs", "ref_logprobs", "rollout_logprobs", "advantage", "model_version"),
    "reward",
)
_RECORDS: dict[str, Schema] = {
    "own names": {"tokens": [5, 6, 7], "prompt_length": 1, "logprobs": [-1, -2], "advantage": 1},
    "aliases": {
        "prompt_ids": [5, 6],
        "completion_ids": [7, 8],
        "advantages": 0.5,
        "old_per_token_logps": [-1.0, -2.0],
        "ref_per_token_logps": [-3.0, -4.0],
        "sampling_per_token_logps": [-5.0, -6.0],
    },
    "masked aliases": {
        "prompt_ids": [5, 6],
        "completion_ids": [7, 8],
        "completion_mask": [1, 0],
        "advantages": [0.5, 1.5],
        "old_per_token_logps": [-1.0, -2.0],
        "kept_tokens": [[7], [8, 9]],
    },
    "raw": {"tokens": [5, 6], "prompt_length": 1, "logprobs_temperature": "raw"},
    "reward columns": {"tokens": [5, 6], "prompt_length": 1, "form": 1, "right": 2, "note": ""},
}


def rollout_files(folder: Path) -> dict[str, Any]:
    """What is written, what is read, and what is said against the rest."""
    first = next(iter(_RECORDS.values()))
    return {
        "written JSONL": [_written(folder, document) for document in (PLAIN, MASKED)],
        "written Parquet": [_schema(folder, document) for document in (PLAIN, MASKED)],
        "read": {name: _read(folder, record) for name, record in _RECORDS.items()},
        "kinds": {name: _read(folder, {name: {}}) for name in _COLUMNS},
        "ignored": {name: _read(folder, {**first, name: {}}) for name in _IGNORED},
        "required": {
            name: _read(folder, {"tokens": [5, 6], "prompt_length": 1}, require=[name])
            for name in _REQUIRABLE
        },
    }


def _written(folder: Path, document: Document) -> dict[str, str]:
    path = folder / "rollouts.jsonl"
    write_rollouts(path, [document])
    record = json.loads(path.read_text(encoding="utf-8"))
    return {name: json.dumps(value) for name, value in record.items()}


def _schema(folder: Path, document: Document) -> dict[str, str]:
    path = folder / "rollouts.parquet"
    write_rollouts(path, [document])
    return {field.name: str(field.type) for field in parquet.read_schema(path)}


def _read(folder: Path, record: Schema, require: list[str] | None = None) -> list[str]:
    """The fields of the record's document that are not the default, or the refusal."""
    path = folder / "record.jsonl"
    path.write_text(json.dumps(record), encoding="utf-8")
    has_rewards = "right" in record
    try:
        (document,) = read_rollouts(
            path,
            require=require or [],
            ignore=["note"] if has_rewards else (),
            reward_columns={"right": 1.0, "form": 0.5} if has_rewards else None,
        )
    except ValueError as error:
        return [str(error).removeprefix(f"{path}, ")]
    return [
        f"{field.name} = {value!r}"
        for field in dataclasses.fields(document)
        if (value := getattr(document, field.name)) != field.default
    ]
