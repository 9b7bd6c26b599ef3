"""The head under TRL's trainers: `install` once, or `with installed():`.

TRL from 1.15 on computes the log-probabilities of its GRPO, RLOO, SFT, DPO, KTO and AsyncGRPO
trainers in one autograd function, `trl.trainer.utils._ChunkedLogProbFunction`, which
`add_fused_lm_head` calls by that name. It is replaced here by `linear_logprobs`; models, trainers,
losses and metrics remain TRL's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
import trl
from packaging.version import Version
from torch import Tensor
from trl.trainer import utils

from fastrl.functional.head.extra_statistics import StatisticName
from fastrl.functional.linear_logprobs import linear_logprobs
from fastrl.integrations.layer_call import autocast_dtype

OLDEST_TRL = "1.15"
NAME = "_ChunkedLogProbFunction"
PARAMETERS = (
    "hidden",
    "weight",
    "bias",
    "targets",
    "temperature",
    "chunk_size",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
)
# TRL's names of what it computes on request, but for the entropy, and ours.
STATISTICS: dict[str, StatisticName] = {
    "log_sum_sq_probs": "sum_squares",
    "mean_logits": "mean_logit",
    "is_top1": "is_argmax",
}
OUTPUTS = ("log_probs", "entropy", *STATISTICS)

Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def install() -> None:
    """Puts `linear_logprobs` under all trainers of TRL, also those that exist already.

    A second call changes nothing.

    Raises:
        RuntimeError: this TRL is older than 1.15, or calls its head in another way.
    """
    global _replaced
    function = getattr(utils, NAME, None)
    if function is not LinearLogprobs:
        _check(function)
        _replaced = function
        setattr(utils, NAME, LinearLogprobs)


def uninstall() -> None:
    """Puts back what `install` replaced; without an `install` it changes nothing.

    Raises:
        RuntimeError: something else was installed over it since, which must go first.
    """
    global _replaced
    if _replaced is None:
        return
    function = getattr(utils, NAME, None)
    if function is not LinearLogprobs:
        raise RuntimeError(
            f"`trl.trainer.utils.{NAME}` must be what `install` put there, got {function!r};"
            " undo that replacement first."
        )
    setattr(utils, NAME, _replaced)
    _replaced = None


@contextmanager
def installed() -> Iterator[None]:
    """A context in which `linear_logprobs` is under TRL's trainers; it ends as it began."""
    was_installed = getattr(utils, NAME, None) is LinearLogprobs
    install()
    try:
        yield
    finally:
        if not was_installed:
            uninstall()


class LinearLogprobs:
    """`linear_logprobs` with the interface of TRL's `_ChunkedLogProbFunction`.

    The products have operands in autocast's dtype where that is on, else in that of `hidden`, as in
    TRL. Logits stay fp32, where TRL rounds them to that dtype. `is_top1` is True for each of
    several equal largest logits, where TRL takes the first. The backward skips rows without a
    gradient, which synchronises; TRL does so just before, in the backward of `masked_scatter`.
    """

    @staticmethod
    def apply(
        hidden: Tensor,  # [N, D]
        weight: Tensor,  # [V, D]
        bias: Tensor | None,  # [V]
        targets: Tensor,  # [N]
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> Outputs:
        """TRL's five statistics of the targets, of which log-probs and entropy have gradients.

        Args:
            hidden: hidden states of the scored tokens.
            weight: of the head; any float dtype.
            bias: of the head.
            targets: int64 in [0, V).
            temperature: divides the logits.
            chunk_size: width of TRL's tiles of logits; the head has bounds of its own.
            final_logit_softcapping: bound of the logits, None for none.
            logit_scale: factor on h W^T + b.
            outputs: which of `OUTPUTS` are computed; `log_probs` always.

        Returns:
            log p(target), entropy, log sum p^2, mean logit, whether the target's is the largest:
            [N] each in fp32 (float64 for float64), None where not in `outputs`.
        """
        names = [name for name in STATISTICS if name in outputs]
        mean_logit: Tensor | None = None
        if final_logit_softcapping is None and "mean_logits" in names:
            names.remove("mean_logits")
            mean_logit = _mean_logit(hidden, weight, bias, logit_scale / temperature)
        result = linear_logprobs(
            hidden,
            weight,
            targets,
            bias=bias,
            temperature=temperature,
            softcap=final_logit_softcapping,
            logit_scale=logit_scale,
            entropy="entropy" in outputs,
            statistics=[STATISTICS[name] for name in names],
            compute_dtype=autocast_dtype(hidden.device) or hidden.dtype,  # as TRL's function
            rows=torch.arange(targets.shape[0], device=targets.device),
            drop_inactive_rows=True,
        )
        sum_squares = result.sum_squares
        mean_logit = result.mean_logit if mean_logit is None else mean_logit
        return (
            result.logprobs,
            result.entropy,
            None if sum_squares is None else sum_squares.detach().log(),
            None if mean_logit is None else mean_logit.detach(),
            result.is_argmax,
        )


@torch.no_grad()
def _mean_logit(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V]
    scale: float,
) -> Tensor:  # [N]
    """The mean over the vocabulary without logits: scale (h mean(W) + mean(b))."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        mean = torch.mv(hidden.to(dtype), weight.mean(0, dtype=dtype))
        if bias is not None:
            mean += bias.mean(dtype=dtype)
    return mean * scale


def _check(function: Any) -> None:
    """Refuses a TRL whose head is called in another way than `LinearLogprobs` is."""
    found = ""
    # A source tree without an installed distribution says "unknown".
    if trl.__version__ != "unknown" and Version(trl.__version__) < Version(OLDEST_TRL):
        found = "whose trainers each have a head of their own"
    elif function is None:
        found = f"without `trl.trainer.utils.{NAME}` (TRL 1.15 has none where Triton is missing)"
    elif NAME not in _names(utils.add_fused_lm_head.__code__):
        found = f"whose `add_fused_lm_head` does not call `{NAME}`"
    else:
        parameters = tuple(inspect.signature(function.forward).parameters)[1:]
        if parameters != PARAMETERS:
            found = f"whose `{NAME}` takes {list(parameters)} instead of {list(PARAMETERS)}"
    if found:
        raise RuntimeError(
            f"fastrl.integrations.trl needs TRL {OLDEST_TRL} or newer with a head that it knows,"
            f" got TRL {trl.__version__}, {found}; install another TRL (1.16 is tested), or go on"
            " with TRL's own head."
        )


def _names(code: CodeType) -> set[str]:
    """Global names and attributes that a function and those inside it use."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*(_names(constant) for constant in inner))


# What TRL had before `install`; None where nothing is replaced.
_replaced: Any = None
