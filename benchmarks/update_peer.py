"""An update as TRL runs it: transformers' model, padded rows, checkpoints, TRL's chunked head."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.cases import clipped_losses
from benchmarks.trl import import_trl
from benchmarks.update_cases import GROUP
from fastrl.data.advantages import with_group_advantages
from fastrl.data.documents import Document


class PeerUpdate:
    """As `benchmarks.update_cases.Update`, on micro-batches of 8 padded rows.

    Rows are padded on the right to the longest of the micro-batch; TRL pads prompts and completions
    each to their longest, which takes more. Bf16 weights, attention by SDPA under a mask, AdamW.

    Args:
        model: sizes of a Llama.
        device: of the model.
    """

    def __init__(self, model: dict[str, Any], device: torch.device) -> None:
        utils = import_trl()
        transformers = importlib.import_module("transformers")
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**model, max_position_embeddings=131072)
        with torch.device(device):
            self.model = transformers.LlamaForCausalLM(config)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = self.model.to(dtype).train()
        self.model.gradient_checkpointing_enable()
        utils.add_fused_lm_head(self.model, outputs=("log_probs", "entropy"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.device = device

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def __call__(self, documents: Sequence[Document]) -> None:
        """From documents to changed weights."""
        documents = with_group_advantages(documents, baseline="mean", scale="group")
        num_labels = sum(document.num_labels for document in documents)
        for start in range(0, len(documents), GROUP):
            self._loss(documents[start : start + GROUP], num_labels).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _loss(self, documents: Sequence[Document], num_labels: int) -> Tensor:
        tokens = [torch.as_tensor(document.tokens) for document in documents]
        labels = [each.clone() for each in tokens]
        for label, document in zip(labels, documents, strict=True):
            label[: document.prompt_length] = -100
        mask = [torch.ones_like(each) for each in tokens]
        ids, attention, targets = (
            pad_sequence(each, batch_first=True, padding_value=value).to(self.device)
            for each, value in ((tokens, 0), (mask, 0), (labels, -100))
        )
        output = self.model(ids, attention_mask=attention, labels=targets, fused_lm_head=True)
        logprobs = output.log_probs
        learned = targets[:, 1:] != -100
        advantages = torch.tensor([document.advantage for document in documents])
        advantages = advantages.to(self.device)[:, None]
        losses = clipped_losses(logprobs - logprobs.detach(), advantages)
        return (losses * learned).sum() / num_labels
