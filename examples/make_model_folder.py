"""Writes the folder of a small random model of transformers, with a tokenizer of its own.

Run: python examples/make_model_folder.py qwen3 runs/qwen3. It is what
examples/transformers_grpo.yaml trains; `gemma`, `llama` and others are families too.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz"
END = "<|end|>"
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.07,
    "tie_word_embeddings": False,
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that joins a space to the letter after it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted({*LETTERS, ",", "=", "\u0120"})
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(LETTERS) + 2,
        special_tokens=[END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([" =" + "".join(f", {each}" for each in LETTERS)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def main(family: str, folder: Path, seed: int = 0, num_heads: int = 4) -> None:
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    end = tokenizer.eos_token_id
    ids = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None}
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads}
    heads["head_dim"] = SIZES["hidden_size"] // num_heads
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **SIZES, **heads, **ids)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heads", type=int, default=4, help="vLLM on a CPU needs 2, of 32 each")
    arguments = parser.parse_args()
    main(arguments.family, arguments.folder, arguments.seed, arguments.heads)
