"""What is added to a reward before advantages are taken."""

from __future__ import annotations

import numpy as np

from fastrl.data.documents import Document


def overlong_punishment(length: int, *, max_length: int, cache_length: int) -> float:
    """DAPO's soft punishment of a completion's length, to be added to its reward.

         0                                                  length <= max_length - cache_length
         (max_length - cache_length - length) / cache_length        up to max_length
        -1                                                          beyond it

    Args:
        length: tokens of the completion, its end token included.
        max_length: L_max, tokens.
        cache_length: L_cache, tokens over which the punishment grows; at most `max_length`.

    References:
        DAPO, arXiv:2503.14476, equation 13.
    """
    free_length = max_length - cache_length
    if length <= free_length:
        return 0.0
    if length <= max_length:
        return (free_length - length) / cache_length
    return -1.0


def completion_length(document: Document) -> int:
    """Number of tokens that the model wrote: those after the prompt, or those of the loss mask."""
    if document.prompt_length is not None:
        return len(document.tokens) - document.prompt_length
    assert document.loss_mask is not None
    return int(np.count_nonzero(np.asarray(document.loss_mask)))
