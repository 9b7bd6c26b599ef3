"""Text to tokens and back: one token a character, or a tokenizer.json of Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fastrl.config.base import UserError
from fastrl.config.environment import (
    CharacterTokenizerConfig,
    FileTokenizerConfig,
    PretrainedTokenizerConfig,
    TokenizerConfig,
)
from fastrl.training.tokenizer_folder import (
    CHARACTERS_END,
    TOKENIZER_FILE,
    character_tokenizer_json,
    end_tokens_of,
    read_folder,
    with_end_tokens,
)


class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Attributes:
        vocab_size: of a model for it: the largest id + 1.
        end_tokens: ids of the tokens that end a text; the first is written after one.
        files: the content of the files that give the tokenizer to a model's folder, by name.
    """

    vocab_size: int
    end_tokens: tuple[int, ...]
    files: Mapping[str, bytes]

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end token.

        Raises:
            UserError: the text has something that no token stands for.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids, without end tokens; ids above the vocabulary are allowed."""
        ...


def build_tokenizer(config: TokenizerConfig, folder: Path | None = None) -> Tokenizer:
    """The tokenizer of a config.

    Args:
        config: of the tokenizer.
        folder: of the model, which `type: pretrained` reads; a checkpoint has the same files.

    Raises:
        UserError: files that cannot be read, or that lack a tokenizer or an end token.
    """
    match config:
        case CharacterTokenizerConfig():
            return CharacterTokenizer(config)
        case FileTokenizerConfig():
            return _of_file(config)
        case PretrainedTokenizerConfig():
            assert folder is not None
            return _of_folder(config, folder)


class CharacterTokenizer:
    """One token a character; the end of a text is token 0.

    Ids above the alphabet, which a model with a larger vocabulary can sample, decode to U+FFFD.
    """

    def __init__(self, config: CharacterTokenizerConfig) -> None:
        self._characters = dict(enumerate(config.characters, 1))
        self._ids = {character: number for number, character in enumerate(config.characters, 1)}
        self.vocab_size = len(config.characters) + 1
        self.end_tokens: tuple[int, ...] = (0,)
        files = {TOKENIZER_FILE: character_tokenizer_json(config.characters)}
        self.files: Mapping[str, bytes] = with_end_tokens(files, [CHARACTERS_END], self.end_tokens)

    def encode(self, text: str) -> list[int]:
        unknown = sorted(set(text) - self._ids.keys())
        if unknown:
            raise UserError(
                f"`tokenizer.characters` must hold every character of every text, but has no "
                f"{', '.join(map(repr, unknown))} of {text!r}"
            )
        return [self._ids[character] for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        kept = (token for token in tokens if token not in self.end_tokens)
        return "".join(self._characters.get(token, "\ufffd") for token in kept)


class FileTokenizer:
    """A tokenizer.json, without special tokens added to a text.

    Its `truncation` and `padding` are left out, as transformers does: a text has all its tokens
    and no others.

    Args:
        tokenizer: of the `tokenizers` package.
        end_tokens: ids.
        files: as `Tokenizer.files`.
        source: what messages call it.
    """

    def __init__(
        self, tokenizer: Any, end_tokens: tuple[int, ...], files: Mapping[str, bytes], source: str
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._source = source
        self.vocab_size = 1 + max(_ids(tokenizer).values())
        self.end_tokens = end_tokens
        self.files = files

    def encode(self, text: str) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        except Exception as error:  # the package raises nothing more specific
            raise UserError(f"{self._source}: has no tokens for {text!r}: {error}") from error

    def decode(self, tokens: Sequence[int]) -> str:
        kept = [token for token in tokens if token not in self.end_tokens]
        return str(self._tokenizer.decode(kept, skip_special_tokens=True))


def _of_file(config: FileTokenizerConfig) -> FileTokenizer:
    if not Path(config.path).is_file():
        raise UserError(f"`tokenizer.path`: no such file: {config.path}")
    files = {TOKENIZER_FILE: Path(config.path).read_bytes()}
    tokenizer = _parsed(files[TOKENIZER_FILE], config.path, "file")
    texts = (config.end_token,)
    ids = _ids_of(tokenizer, texts, "`tokenizer.end_token`", config.path)
    return FileTokenizer(tokenizer, ids, with_end_tokens(files, texts, ids), config.path)


def _of_folder(config: PretrainedTokenizerConfig, folder: Path) -> FileTokenizer:
    files = read_folder(folder)
    source = str(folder / TOKENIZER_FILE)
    tokenizer = _parsed(files[TOKENIZER_FILE], source, "pretrained")
    if config.end_tokens is None:
        return FileTokenizer(tokenizer, end_tokens_of(folder, _ids(tokenizer)), files, source)
    ids = _ids_of(tokenizer, config.end_tokens, "`tokenizer.end_tokens`", source)
    return FileTokenizer(tokenizer, ids, with_end_tokens(files, config.end_tokens, ids), source)


def _parsed(content: bytes, source: str, kind: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            f"`tokenizer.type: {kind}` needs the tokenizers package; install it with: "
            "pip install 'fastrl[examples]'"
        ) from error
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises nothing more specific
        raise UserError(f"{source}: must be a tokenizer.json: {error}") from error


def _ids(tokenizer: Any) -> dict[str, int]:
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return ids


def _ids_of(tokenizer: Any, texts: Sequence[str], key: str, source: str) -> tuple[int, ...]:
    ids = _ids(tokenizer)
    for text in texts:
        if text not in ids:
            raise UserError(f"{key} must be a token of {source}, got {text!r}")
    return tuple(ids[text] for text in texts)
