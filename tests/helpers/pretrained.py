"""A Hugging Face folder as others save it: a tiny Llama with a tokenizer of its own."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch

from fastrl.config import LlamaConfig
from fastrl.models.checkpoint import save_llama
from fastrl.models.llama import Llama

END, END_OF_TURN = 1, 2
"""Ids of `</s>` and `<turn>`, special tokens of `bpe_tokenizer_json`."""

TOKENIZER_CONFIG = {"eos_token": {"content": "</s>", "special": True}, "add_bos_token": True}
GENERATION_CONFIG = {"eos_token_id": [END_OF_TURN, END], "temperature": 0.6}


@cache
def bpe_tokenizer_json() -> str:
    """A byte-level BPE tokenizer that begins texts with a special token, as those of Llama do."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<turn>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["what is 12 + 7 ?", "what is 3 - 4 ?"] * 4, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    text: str = tokenizer.to_str()
    return text


def write_pretrained(folder: Path, *, eos_token_id: int | None = END) -> Path:
    """The folder of a tiny Llama for `bpe_tokenizer_json`, its vocabulary larger than that."""
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.2,
        eos_token_id=eos_token_id,
    )
    save_llama(Llama(config, dtype=torch.float64), folder)
    write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    write_json(folder / "generation_config.json", GENERATION_CONFIG)
    (folder / "tokenizer.json").write_text(bpe_tokenizer_json(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    return folder


def write_json(file: Path, values: object) -> None:
    file.write_text(json.dumps(values), encoding="utf-8")
