"""Detached weights and masks of tokens, by the log-ratio of two policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.config.corrections import CorrectionConfig
from fastrl.functional.quantiles import mean_at_most
from fastrl.layers.losses.correction_statistics import bounds, statistic, token_values, within
from fastrl.layers.losses.policy_inputs import PolicyInputs
from fastrl.layers.losses.ratios import per_document_mean


class Corrections:
    """The factors of a loss's corrections, with l = log policy - log behaviour and w = exp(l).

        truncate: min(max(w, low), high)      mask: w if low <= w <= high else 0
        gate: 1 if low <= s <= high else 0, of the statistic s
        s_t = w_t | k1 = -l | k2 = l^2 / 2 | k3 = w - 1 - l | |exp(log policy) - exp(log behaviour)|
        document: mean or sum over its tokens on all ranks, of l for w; any: all s_t within bounds

    Args:
        entries: by option.
        inputs: of the loss.

    Raises:
        ValueError: the batch lacks a column.

    References:
        Truncated: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL
        Training, 2025. Masked: Liu et al., When Speed Kills Stability, 2025; IcePop in Ling,
        arXiv:2510.18855. k1 of documents with A < 0: DeepSeek-V3.2, arXiv:2512.02556, equation 9.
        Batch level: M2PO, arXiv:2510.01161. k1 to k3: `kl_estimate`.
    """

    def __init__(self, entries: Mapping[str, CorrectionConfig], inputs: PolicyInputs) -> None:
        self.entries = entries
        self.inputs = inputs
        # Of each entry l for a ratio, else the statistic: what is summed over documents.
        self._values = {name: token_values(entry, name, inputs) for name, entry in entries.items()}

    def columns(self) -> dict[str, Tensor]:  # [T] each
        """The per-token values whose sums over documents are needed."""
        found = {}
        for name, entry in self.entries.items():
            if entry.level == "document":
                values = self._values[name]
                if entry.aggregate == "any":
                    outside = ~within(statistic(values, entry), entry) & self.inputs.mask
                    values = outside.to(values.dtype)
                found[name] = values
        return found

    def factors(
        self,
        sums: Mapping[str, Tensor],  # [T] each
        advantages: Tensor,  # [T]
        groups: Sequence[ProcessGroup | None],
    ) -> dict[str, Tensor]:  # [T] each
        """The factor of each entry, from the sums over documents; `groups` hold the micro-batch."""
        found = {}
        for name, entry in self.entries.items():
            values = sums.get(name, self._values[name])
            if entry.aggregate == "mean":
                values = per_document_mean(values, self.inputs.batch)
            held = statistic(values, entry)
            if entry.mode == "truncate":
                factor = held.clamp(*bounds(entry))
            elif entry.mode == "mask":
                factor = torch.where(within(held, entry), held, 0)
            elif entry.level == "batch":
                assert entry.high is not None
                kept = mean_at_most(values, self.inputs.mask, entry.high, groups)
                factor = kept.to(advantages.dtype)
            else:
                kept = values == 0 if entry.aggregate == "any" else within(held, entry)
                factor = kept.to(advantages.dtype)
            if entry.advantage != "any":
                acts = advantages < 0 if entry.advantage == "negative" else advantages > 0
                factor = torch.where(acts, factor, 1)
            found[name] = factor
        return found
