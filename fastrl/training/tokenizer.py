"""Text to tokens and back: one token a character, or a file of Hugging Face's `tokenizers`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from fastrl.config.base import UserError
from fastrl.config.environment import CharacterTokenizerConfig, FileTokenizerConfig, TokenizerConfig


class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Attributes:
        vocab_size: number of token ids, the end token included.
        end_token: id of the token that ends a text.
    """

    vocab_size: int
    end_token: int

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end token.

        Raises:
            UserError: the text has a character without a token.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids, without end tokens; ids above the vocabulary are allowed."""
        ...


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of a config.

    Raises:
        UserError: a tokenizer file that cannot be read, or lacks the end token.
    """
    match config:
        case CharacterTokenizerConfig():
            return CharacterTokenizer(config)
        case FileTokenizerConfig():
            return FileTokenizer(config)


class CharacterTokenizer:
    """One token a character; the end of a text is token 0.

    Ids above the alphabet, which a model with a larger vocabulary can sample, decode to U+FFFD.
    """

    def __init__(self, config: CharacterTokenizerConfig) -> None:
        self._characters = dict(enumerate(config.characters, 1))
        self._ids = {character: number for number, character in enumerate(config.characters, 1)}
        self.vocab_size = len(config.characters) + 1
        self.end_token = 0

    def encode(self, text: str) -> list[int]:
        unknown = sorted(set(text) - self._ids.keys())
        if unknown:
            raise UserError(
                f"`tokenizer.characters` must hold every character of every text, but has no "
                f"{', '.join(map(repr, unknown))} of {text!r}"
            )
        return [self._ids[character] for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        kept = (token for token in tokens if token != self.end_token)
        return "".join(self._characters.get(token, "\ufffd") for token in kept)


class FileTokenizer:
    """A tokenizer.json, without special tokens added to a text."""

    def __init__(self, config: FileTokenizerConfig) -> None:
        self._tokenizer = _read_tokenizer(config.path)
        self.vocab_size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        end_token = self._tokenizer.token_to_id(config.end_token)
        if end_token is None:
            raise UserError(
                f"`tokenizer.end_token` must be a token of {config.path}, got {config.end_token!r}"
            )
        self.end_token = int(end_token)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        kept = [token for token in tokens if token != self.end_token]
        return str(self._tokenizer.decode(kept, skip_special_tokens=True))


def _read_tokenizer(path: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            "`tokenizer.type: file` needs the tokenizers package; install it with: "
            "pip install 'fastrl[examples]'"
        ) from error
    if not Path(path).is_file():
        raise UserError(f"`tokenizer.path`: no such file: {path}")
    text = Path(path).read_bytes()
    try:
        return tokenizers.Tokenizer.from_buffer(text)
    except Exception as error:  # the package raises nothing more specific
        raise UserError(f"{path}: must be a tokenizer.json: {error}") from error
