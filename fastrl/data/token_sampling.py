"""A random part of the labels, weighted so that losses and gradients keep their mean."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from fastrl.data.batch import TokenBatch
from fastrl.data.documents import IGNORE_LABEL


def with_sampled_tokens(batch: TokenBatch, probability: float, seed: int) -> TokenBatch:
    """The batch with each label drawn with a probability p, at a weight of 1 / p.

        E[sum over drawn t of (1 / p) l_t] = sum_t l_t

    (Horvitz-Thompson), and so for gradients, of losses that are sums over tokens which each depend
    on no other token. All counts stay those of the whole batch. Labels that are not drawn are -100
    in the batches that `to_kwargs` gives: the head does not compute them.

    Whether a label is drawn follows from the seed, its document's tokens and its place there alone,
    and so does not depend on packing, order, micro-batches or ranks. Equal documents are drawn
    alike.

    Args:
        batch: whose labels are drawn from; it has no drawn ones yet.
        probability: above 0, at most 1.
        seed: of the optimizer step, such as a new number for each; the same on all ranks.

    Raises:
        ValueError: a probability out of range, or a batch whose labels were drawn before.

    References:
        Not All Tokens Are Needed, arXiv:2603.06619: uniform random sampling. Its random prefixes,
        which also shorten the sequences of the model, are not made here.
    """
    if not 0 < probability <= 1:
        raise ValueError(f"`probability` must be above 0 and at most 1, got {probability}")
    if batch.draw_weights is not None:
        raise ValueError("`batch` must not have `draw_weights`, whose labels were drawn already")
    is_drawn = torch.zeros(batch.padded_length, dtype=torch.bool)
    for slots in batch.document_slots:
        is_drawn[slots] = token_draws(batch.tokens[slots], probability, seed)
    is_drawn &= batch.labels != IGNORE_LABEL
    weights = torch.where(is_drawn, 1 / probability, torch.zeros((), dtype=torch.float64))
    return replace(batch, draw_weights=weights)


def token_draws(
    tokens: Tensor,  # [n]
    probability: float,
    seed: int,
) -> Tensor:  # [n]
    """Whether the label at each slot of a document is drawn, from the seed and its tokens.

    The bits of a counter-based generator, whose stream no version of numpy changes.
    """
    text = f"{seed}/".encode() + tokens.numpy().astype("<i8").tobytes()
    key = int.from_bytes(blake2b(text, digest_size=16).digest(), "little")
    bits = np.random.Philox(key=key).random_raw(len(tokens))
    return torch.from_numpy((bits >> np.uint64(11)) * 2.0**-53 < probability)
