"""GRPO by TRL's trainer with fastrl under it, on a tiny random model: rewards rise in a minute.

    pip install trl && python examples/trl_grpo.py --steps 60

With a model of your own, the two lines that matter are the import and `install()`.
"""

import argparse

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from fastrl.integrations import trl as fastrl_trl

WORDS = ["<pad>", "<eos>", *"abcdefghijklmnop"]


def reward(completions: list[str], **_: object) -> list[float]:
    """The share of a completion's words that are `a`."""
    return [text.split().count("a") / max(len(text.split()), 1) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output-dir", default="runs/trl_grpo")
    options = parser.parse_args()

    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
    )
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    fastrl_trl.install()  # before or after the trainer is made
    trainer = GRPOTrainer(
        model=LlamaForCausalLM(config),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=options.output_dir, max_steps=options.steps, learning_rate=1e-2,
            per_device_train_batch_size=16, num_generations=8, max_completion_length=8,
            logging_steps=1, save_strategy="no", report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"{a} {b}" for a in "abcd" for b in "efgh"]}),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"reward: {rewards[0]:.2f} -> {rewards[-1]:.2f}")


if __name__ == "__main__":
    main()
