"""The documents, models and sizes of `benchmarks.update` and `benchmarks.update_bars`."""

from __future__ import annotations

import random
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.memory_cases import LLAMA_1B, QWEN_0_6B, llama
from fastrl import Document, Llama, LlamaConfig, OptimizerStep
from fastrl.config.phases import OptimizerConfig
from fastrl.data.advantages import with_group_advantages
from fastrl.models import flash4
from fastrl.models.compiled import compile_layers
from fastrl.models.flops import TrainingFlops
from fastrl.training.optimizer import apply_update, build_optimizer

GROUP = 8
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama-1b": LLAMA_1B,
    "qwen3-0.6b": QWEN_0_6B,
    "tiny": TINY,
}


def add_sizes(parser: ArgumentParser) -> None:
    """The options of a command line that say what is run."""
    parser.add_argument("--model", default="llama-1b", choices=MODELS)
    parser.add_argument("--tokens", type=int, default=15872, help="of a packed sequence")
    parser.add_argument("--micro-batches", type=int, default=4, help="about so many")
    parser.add_argument("--longest", type=int, default=8000, help="tokens of a document")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--answer", type=int, default=1024)


@dataclass(frozen=True)
class Variant:
    """One way of running an update.

    Attributes:
        options: of `LlamaConfig`.
        compiled: whether the decoder layers are.
        second_forward: whether a forward before the update computes `old_logprobs`.
        shares_prefixes: whether the documents of a group share their prompt.
    """

    options: dict[str, Any] = field(default_factory=dict)
    compiled: bool = False
    second_forward: bool = False
    shares_prefixes: bool = False


def variants(on_gpu: bool) -> dict[str, Variant]:
    """By name; the first is what ran before there were others."""
    fast = {"attention_implementation": "varlen"} if on_gpu else {}
    full = {**fast, "activation_checkpointing": "full"}
    found = {
        "eager": Variant(),
        "eager, full checkpointing": Variant({"activation_checkpointing": "full"}),
        "compiled": Variant({}, True),
        "compiled, varlen": Variant(fast, True),
        "compiled, varlen, attention kept": Variant(
            {**fast, "activation_checkpointing": "attention"}, True
        ),
        "compiled, varlen, full checkpointing": Variant(full, True),
        "compiled, varlen, second forward": Variant(fast, True, second_forward=True),
    }
    if fastest_attention(on_gpu) == "flash4":
        found["compiled, flash4"] = Variant({"attention_implementation": "flash4"}, True)
    return found


def fastest_attention(on_gpu: bool) -> str:
    """The implementation that is fastest of those that run here."""
    if not on_gpu:
        return "auto"
    return "varlen" if flash4.refusal(torch.device("cuda")) else "flash4"


def ragged_documents(num_tokens: int, vocab_size: int, longest: int = 8000) -> list[Document]:
    """Groups of 8 answers to one prompt, log-normal lengths of 200 to `longest` tokens, rewards.

    The last group is the one that reaches `num_tokens`.
    """
    draw = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    documents: list[Document] = []
    total = group = 0
    while total < num_tokens:
        prompt = torch.randint(vocab_size, (min(draw.randint(50, 200), longest // 2),),
                               generator=generator)  # fmt: skip
        for _ in range(GROUP):
            length = min(max(int(draw.lognormvariate(7.1, 0.8)), 200), longest)
            answer = torch.randint(vocab_size, (max(length - len(prompt), 1),), generator=generator)
            documents.append(
                Document(
                    tokens=torch.cat([prompt, answer]),
                    prompt_length=len(prompt),
                    logprobs=torch.full((len(answer),), -11.0),
                    reward=float(draw.random() < 0.5),
                    group_id=group,
                )
            )
            total += len(documents[-1].tokens)
        group += 1
    return documents


def prompt_documents(prompt: int, answer: int, groups: int, vocab_size: int) -> list[Document]:
    """Groups of 8 answers of `answer` tokens to prompts of `prompt` tokens, with advantages."""
    generator = torch.Generator().manual_seed(0)
    documents = []
    for group in range(groups):
        shared = torch.randint(vocab_size, (prompt,), generator=generator)
        for number in range(GROUP):
            own = torch.randint(vocab_size, (answer,), generator=generator)
            documents.append(
                Document(
                    tokens=torch.cat([shared, own]),
                    prompt_length=prompt,
                    logprobs=torch.full((answer,), -11.0),
                    advantage=1.0 - number % 2 * 2,
                    group_id=group,
                )
            )
    return documents


def flops(config: LlamaConfig, documents: Sequence[Document]) -> float:
    """Operations of forward and backward, attention's own included, without recomputed ones."""
    of_model = TrainingFlops.of(config)
    return sum(of_model.document(len(each.tokens), each.num_labels) for each in documents)


class Update:
    """A model, its optimizer over its own weights, and an update on documents.

    Args:
        model: sizes.
        variant: how it is run.
        device: of the model.
        max_tokens: of a micro-batch.
    """

    def __init__(
        self, model: dict[str, Any], variant: Variant, device: torch.device, max_tokens: int
    ) -> None:
        self.config = llama({**model, **variant.options})
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.llama = Llama(self.config, device=device, dtype=dtype)
        if variant.compiled:
            compile_layers(self.llama.model.layers)
        self.variant, self.device, self.max_tokens = variant, device, max_tokens
        self.optimizer_config = OptimizerConfig(learning_rate=1e-6)
        self.optimizer = build_optimizer(self.llama, self.optimizer_config)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.llama.parameters())

    def packed(self, documents: Sequence[Document]) -> OptimizerStep:
        """The step of documents with rewards (or advantages), on the host."""
        if documents[0].advantage is None:
            documents = with_group_advantages(documents, baseline="mean", scale="group")
        options: dict[str, Any] = {"share_prefixes": True} if self.variant.shares_prefixes else {}
        return OptimizerStep.from_documents(
            documents, self.max_tokens, device=self.device, pad_to_multiple=128, **options
        )

    def backward(self, step: OptimizerStep) -> None:
        """Forward and backward of all micro-batches."""
        for batch in step:
            if self.variant.second_forward:
                self.llama.eval()
                with torch.no_grad():
                    old = self.llama(batch).logprobs
                self.llama.train()
                batch = batch.replace(old_logprobs=old)
            output = self.llama(batch)
            output.loss.backward()
            step.add(output)

    def __call__(self, documents: Sequence[Document]) -> dict[str, Tensor]:
        """From documents to changed weights."""
        step = self.packed(documents)
        self.backward(step)
        apply_update(self.optimizer, self.optimizer_config, 0, 1)
        return step.finish(self.llama.lm_head.loss_groups)

    def bare(self, step: OptimizerStep) -> Callable[[], None]:
        """Forward and backward of a step that is on the device already, gradients thrown away."""
        batches = list(step)

        def run() -> None:
            for batch in batches:
                self.llama(batch).loss.backward()
            self.optimizer.zero_grad()

        return run
