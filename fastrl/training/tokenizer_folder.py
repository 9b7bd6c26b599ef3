"""What a Hugging Face folder says of its text: tokenizer.json, and the tokens that end a text.

The end tokens stand in up to four files. `generate` and vLLM stop at those of
generation_config.json (without one, config.json's) and at the tokenizer's own end token; so does
the sampler here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastrl.config.base import UserError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
GENERATION_CONFIG_FILE = "generation_config.json"
MODEL_CONFIG_FILE = "config.json"

# What goes with a tokenizer, and so with a checkpoint of a model that came with it.
COPIED_FILES = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    GENERATION_CONFIG_FILE,
    "added_tokens.json",
    "chat_template.jinja",
)

CHARACTERS_END = "<|end_of_text|>"
"""The text of the end token in the file of a character tokenizer."""


def read_folder(folder: Path) -> dict[str, bytes]:
    """The files of `COPIED_FILES` that a folder has, by name.

    Raises:
        UserError: it is no folder, or has no tokenizer.json.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: must be the folder of a model, there is no such folder")
    files = {name: folder / name for name in COPIED_FILES if (folder / name).is_file()}
    if TOKENIZER_FILE not in files:
        raise UserError(
            f"{folder}: must hold a {TOKENIZER_FILE}, the model's own tokenizer, found none; "
            "transformers writes it by `AutoTokenizer.from_pretrained(...).save_pretrained(...)`, "
            "and another one is given by `tokenizer: {type: file, path: ..., end_token: ...}`"
        )
    return {name: path.read_bytes() for name, path in files.items()}


def end_tokens_of(folder: Path, ids: Mapping[str, int]) -> tuple[int, ...]:
    """The ids of the tokens that end a text, without repetition; the one to write comes first.

    Args:
        folder: of the model.
        ids: of all tokens of its tokenizer.

    Raises:
        UserError: the folder names none, one that the tokenizer lacks, or a file is malformed.
    """
    found: list[int] = []
    for name in (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE):
        token = _read(folder / name).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if text is None:
            continue
        if not isinstance(text, str) or text not in ids:
            raise UserError(
                f"{folder / name}: `eos_token` must be a token of {TOKENIZER_FILE}, got {text!r}"
            )
        found.append(ids[text])
    for name in (GENERATION_CONFIG_FILE, MODEL_CONFIG_FILE):
        value = _read(folder / name).get("eos_token_id")
        if value is None:
            continue
        numbers = value if isinstance(value, list) else [value]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise UserError(
                f"{folder / name}: `eos_token_id` must be an id or a list of ids, got {value!r}"
            )
        found += numbers
        break
    if not found:
        raise UserError(
            f"{folder}: one of its files must name the token that ends a text, as `eos_token` in "
            f"{TOKENIZER_CONFIG_FILE} or {SPECIAL_TOKENS_FILE}, or as `eos_token_id` in "
            f"{GENERATION_CONFIG_FILE} or {MODEL_CONFIG_FILE}, but none does; add it there, or "
            "give `tokenizer.end_tokens`"
        )
    return tuple(dict.fromkeys(found))


def _read(file: Path) -> dict[str, Any]:
    """The values of a JSON file; none where there is no such file."""
    return _parsed(file.read_bytes(), str(file)) if file.is_file() else {}


def _parsed(content: bytes, source: str) -> dict[str, Any]:
    """The values of a JSON file, called `source` in messages."""
    try:
        values = json.loads(content.decode("utf-8"))
    except ValueError as error:
        raise UserError(f"{source}: must be JSON in UTF-8: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{source}: must be a JSON object, got a {type(values).__name__}")
    return values


def with_end_tokens(
    files: Mapping[str, bytes], texts: Sequence[str], ids: Sequence[int]
) -> dict[str, bytes]:
    """The files of a folder whose tokens that end a text are these, the one to write first."""

    def changed(name: str, **values: object) -> bytes:
        return _json(_parsed(files.get(name, b"{}"), name) | values)

    result = dict(files)
    kind = {} if TOKENIZER_CONFIG_FILE in files else {"tokenizer_class": "PreTrainedTokenizerFast"}
    result[TOKENIZER_CONFIG_FILE] = changed(TOKENIZER_CONFIG_FILE, eos_token=texts[0], **kind)
    if SPECIAL_TOKENS_FILE in files:
        result[SPECIAL_TOKENS_FILE] = changed(SPECIAL_TOKENS_FILE, eos_token=texts[0])
    result[GENERATION_CONFIG_FILE] = changed(GENERATION_CONFIG_FILE, eos_token_id=[*ids])
    return result


def character_tokenizer_json(characters: Sequence[str]) -> bytes:
    """A tokenizer.json with one token a character, in order from id 1 on, and the end token 0."""
    end = {"id": 0, "content": CHARACTERS_END, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    vocabulary = {CHARACTERS_END: 0} | {text: number for number, text in enumerate(characters, 1)}
    one_each = {"Regex": r"[\s\S]"}
    return _json(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [end | flags],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Split",
                "pattern": one_each,
                "behavior": "Isolated",
                "invert": False,
            },
            "post_processor": None,
            "decoder": {"type": "Fuse"},
            # An unknown token that is no token: other characters are refused.
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
        }
    )


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
