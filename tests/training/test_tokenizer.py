"""Both tokenizers: text to ids and back, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fastrl.config import RunConfig, UserError, parse_config
from fastrl.config.environment import PretrainedTokenizerConfig
from fastrl.training.tokenizer import Tokenizer, build_tokenizer
from tests.helpers.pretrained import bpe_tokenizer_json


def _tokenizer(**values: Any) -> Tokenizer:
    phases = [{"type": "rl", "steps": 1, "losses": {"policy": {"type": "grpo"}}}]
    environment = {"type": "reasoning_gym", "task": "chain_sum"}
    run = {"environment": environment, "phases": phases, "tokenizer": values}
    return build_tokenizer(parse_config(RunConfig, run).tokenizer)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(bpe_tokenizer_json(), encoding="utf-8")
    return path


def test_a_character_is_a_token() -> None:
    tokenizer = _tokenizer(type="character", characters="ba +")
    assert tokenizer.vocab_size == 5
    assert tokenizer.end_tokens == (0,)
    assert tokenizer.encode("a + b") == [2, 3, 4, 3, 1]
    assert tokenizer.decode([2, 3, 4, 3, 1, 0]) == "a + b"


def test_ids_of_a_larger_vocabulary_are_text_that_nobody_writes() -> None:
    tokenizer = _tokenizer(type="character", characters="ba")
    assert tokenizer.decode([2, 3, 1, 40, 0]) == "a\ufffdb\ufffd"


def test_the_file_of_an_alphabet_is_the_same_tokenizer() -> None:
    import tokenizers

    alphabet = _tokenizer(type="character", characters='ba\n {"\u00e9')
    file = tokenizers.Tokenizer.from_buffer(alphabet.files["tokenizer.json"])
    text = '{"a": \u00e9}\n\n'.replace(":", " ").replace("}", "b")
    ids = file.encode(text, add_special_tokens=False).ids
    assert ids == alphabet.encode(text)
    assert file.decode(ids) == text
    assert file.get_vocab_size() == alphabet.vocab_size
    with pytest.raises(Exception, match="Missing"):
        file.encode("x")


def test_the_default_alphabet_is_printable_ascii() -> None:
    tokenizer = _tokenizer(type="character")
    text = "".join(chr(code) for code in range(32, 127)) + "\n"
    assert tokenizer.vocab_size == 97
    assert tokenizer.decode(tokenizer.encode(text)) == text


# The sections that a tokenizer.json has of a tokenizer that was set up for training or serving.
TRUNCATION = {"direction": "Left", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 12},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<unk>",
}


@pytest.mark.parametrize("kind", ["file", "pretrained"])
@pytest.mark.parametrize("sections", [{"truncation": TRUNCATION}, {"padding": PADDING}])
def test_y21_a_text_has_all_its_tokens_and_no_padding(
    tmp_path: Path, sections: dict[str, Any], kind: str
) -> None:
    alphabet = _tokenizer(type="character", characters="0123456789+-= ")
    values = json.loads(alphabet.files["tokenizer.json"])
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(values | sections), encoding="utf-8")
    end = "<|end_of_text|>"
    if kind == "file":
        tokenizer = _tokenizer(type="file", path=str(path), end_token=end)
    else:
        config = PretrainedTokenizerConfig(type="pretrained", end_tokens=(end,))
        tokenizer = build_tokenizer(config, tmp_path)
    assert tokenizer.encode("7 + 5 =") == alphabet.encode("7 + 5 =")
    # As transformers reads the same file, that of a checkpoint.
    for name, content in tokenizer.files.items():
        (tmp_path / name).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("7 + 5 =")["input_ids"] == alphabet.encode("7 + 5 =")


def test_an_unknown_character_is_named() -> None:
    with pytest.raises(UserError, match=r"characters` must hold .* no 'x', 'y' of 'axby'"):
        _tokenizer(type="character", characters="ab").encode("axby")


def test_a_file_gives_its_tokens_and_no_special_ones(tokenizer_file: Path) -> None:
    tokenizer = _tokenizer(type="file", path=str(tokenizer_file), end_token="</s>")
    assert tokenizer.end_tokens == (1,)
    ids = tokenizer.encode("what is 12 + 7 ?")
    assert len(ids) < 16
    assert 0 not in ids
    assert max(ids) < tokenizer.vocab_size
    assert tokenizer.decode([*ids, 1]) == "what is 12 + 7 ?"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"path": "none.json"}, "`tokenizer.path`: no such file: none.json"),
        ({"path": "broken.json"}, "broken.json: must be a tokenizer.json: "),
        ({"end_token": "<end>"}, "`tokenizer.end_token` must be a token of "),
    ],
)
def test_a_file_that_does_not_serve_is_one_message(
    tmp_path: Path,
    tokenizer_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        _tokenizer(**{"type": "file", "path": str(tokenizer_file), "end_token": "</s>"} | values)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("characters", ["", "abca"])
def test_an_alphabet_has_each_character_once(characters: str) -> None:
    with pytest.raises(UserError, match=r"must hold each character once and at least one"):
        _tokenizer(type="character", characters=characters)
