"""Short runs of TRL's trainers on tiny random models: what they log, the weights they leave."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

WORDS = ("<pad>", "<eos>", *"abcdefghijklmnopqrs")
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    # Logits between -3 and 3, not all alike.
    "initializer_range": 0.3,
}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
    "softcap": (Gemma2Config, Gemma2ForCausalLM, {"head_dim": 8, "final_logit_softcapping": 2.0}),
    "logit_scale": (Cohere2Config, Cohere2ForCausalLM, {"logit_scale": 0.5}),
    "bias": (PhiConfig, PhiForCausalLM, {}),
}
TRAINERS: dict[str, tuple[Any, Any]] = {
    name.lower(): (getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config"))
    for name in ("GRPO", "RLOO", "SFT", "DPO", "KTO")
}
# Logged times.
TIMES = ("runtime", "per_second", "step_time")


@dataclass(frozen=True)
class TrlCase:
    """A run of a trainer: 3 updates of a tiny model by plain gradient descent."""

    name: str
    trainer: str
    settings: dict[str, Any] = field(default_factory=dict)
    model: str = "qwen3"
    lora: bool = False

    def run(self, folder: Path) -> TrlRun:
        """The run, from seed 0."""
        trainer_class, config_class = TRAINERS[self.trainer]
        settings: dict[str, Any] = {
            "output_dir": str(folder),
            "max_steps": 3,
            "per_device_train_batch_size": 4,
            # Adam would divide what rounding leaves of a gradient of 0 by itself.
            "optim": "sgd",
            "learning_rate": 0.3,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "bf16": False,
            "use_cpu": True,
            "seed": 0,
        }
        if self.trainer in ("grpo", "rloo"):
            settings |= {"num_generations": 4, "max_completion_length": 6}
        # TRL makes the reference model from the path that the model came from.
        tiny_model(self.model).save_pretrained(folder / "model")
        model = MODELS[self.model][1].from_pretrained(folder / "model")
        arguments: dict[str, Any] = {
            "model": model,
            "args": config_class(**(settings | self.settings)),
            "train_dataset": dataset(self.trainer),
            "processing_class": tokenizer(),
        }
        if self.trainer in ("grpo", "rloo"):
            arguments["reward_funcs"] = reward
        if self.lora:
            arguments["peft_config"] = LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
        trainer = trainer_class(**arguments)
        before = weights_of(trainer.model)
        trainer.train()
        return TrlRun(trainer.state.log_history, before, weights_of(trainer.model))


@dataclass(frozen=True)
class TrlRun:
    """What a trainer logged, and the weights before and after."""

    logs: list[dict[str, float]]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def logs_differ(ours: TrlRun, theirs: TrlRun) -> float:
    """The largest difference of two logged numbers; infinite where one is missing."""
    largest = 0.0
    for one, other in zip(ours.logs, theirs.logs, strict=True):
        if one.keys() != other.keys():
            return math.inf
        for name, value in one.items():
            if name.endswith(TIMES) or (math.isnan(value) and math.isnan(other[name])):
                continue
            difference = abs(value - other[name])
            largest = max(largest, math.inf if math.isnan(difference) else difference)
    return largest


def weights_differ(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of two weights."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def tiny_model(name: str = "qwen3") -> Any:
    """A random model, always the same."""
    config_class, model_class, options = MODELS[name]
    torch.manual_seed(0)
    return model_class(config_class(**(SIZES | options)))


def weights_of(model: Any) -> dict[str, Tensor]:
    """Copies of a model's weights."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word of `WORDS`."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )


def dataset(trainer: str) -> Dataset:
    """Eight rows in the trainer's format."""
    prompts = [" ".join(WORDS[2 + i : 4 + i + i % 3]) for i in range(8)]
    good = [" ".join(reversed(prompt.split())) + " a b" for prompt in prompts]
    bad = [prompt + " c" for prompt in prompts]
    if trainer in ("grpo", "rloo"):
        return Dataset.from_dict({"prompt": prompts})
    if trainer == "sft":
        return Dataset.from_dict({"prompt": prompts, "completion": good})
    if trainer == "dpo":
        return Dataset.from_dict({"prompt": prompts, "chosen": good, "rejected": bad})
    labels = [i % 2 == 0 for i in range(8)]
    completions = [g if label else b for g, b, label in zip(good, bad, labels, strict=True)]
    return Dataset.from_dict({"prompt": prompts, "completion": completions, "label": labels})


def reward(completions: list[str], **_: object) -> list[float]:
    """Different words, and many of the letter a."""
    return [len(set(text.split())) + text.count("a") / 2 for text in completions]
