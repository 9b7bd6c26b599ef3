"""Other projects' heads behind one signature. A peer that cannot run says why."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.products import Products, Rows

# Per-token log-probabilities [T] from hidden states and weight; 0 or anything without label.
Logprobs = Callable[[Tensor, Tensor], Tensor]
# The loss from hidden states and weight.
Loss = Callable[[Tensor, Tensor], Tensor]


class NotRun(Exception):
    """The peer does not run here; the message is the reason."""


@dataclass(frozen=True)
class Implementation:
    """A head under its name.

    Attributes:
        name: as in the results.
        strategy: how it goes about it, in a word.
        loss: builds the loss of a case, or raises `NotRun`.
        logprobs: builds the forward without gradient, None if it has none.
        fp32_logits: whether its log-probabilities are meant to be those of fp32 logits.
        objective: the loss that it computes and is held to: `grpo`, `gspo` or `cross_entropy`.
        products: the products it executes for loss and gradients; None where nobody knows.
        forward_rows: the rows of the one product of its forward without gradient.
    """

    name: str
    strategy: str
    loss: Callable[[Case], Loss] | None
    logprobs: Callable[[Case], Callable[[], Tensor]] | None = None
    fp32_logits: bool = False
    objective: str = "grpo"
    products: tuple[Products, ...] | None = None
    forward_rows: Rows = "all"

    def executed(self, passes: str) -> tuple[Products, ...] | None:
        """The products of a pass, `fwd` or `fwdbwd`."""
        return (Products(self.forward_rows, "f"),) if passes == "fwd" else self.products


def from_logprobs(build: Callable[[Case], Logprobs]) -> Callable[[Case], Loss]:
    """The GRPO loss of a peer that gives log-probabilities."""

    def build_loss(case: Case) -> Loss:
        logprobs = build(case)
        return lambda hidden, weight: case.grpo(logprobs(hidden, weight))

    return build_loss


def without_gradient(
    build: Callable[[Case], Logprobs],
) -> Callable[[Case], Callable[[], Tensor]]:
    """The forward of a peer that gives log-probabilities."""

    def build_forward(case: Case) -> Callable[[], Tensor]:
        logprobs = build(case)
        hidden, weight = case.hidden_states.detach(), case.weight.detach()
        return torch.no_grad()(lambda: logprobs(hidden, weight))

    return build_forward


def torch_eager(case: Case) -> Logprobs:
    """bf16 logits, fp32 log_softmax."""
    labels, softcap = case.labels.clamp(min=0), case.shape.softcap

    def logprobs(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = (hidden @ weight.t()).float()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return torch.log_softmax(logits, 1).gather(1, labels[:, None])[:, 0]

    return logprobs


def torch_fp32_logits(case: Case) -> Logprobs:
    """fp32 logits straight from the product: what the accuracy of log-probabilities is held to."""
    if not torch.cuda.is_available():
        raise NotRun("needs a GPU")
    labels, softcap = case.labels.clamp(min=0), case.shape.softcap

    def logprobs(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return torch.log_softmax(logits, 1).gather(1, labels[:, None])[:, 0]

    return logprobs


def torch_compiled(case: Case) -> Logprobs:
    """The same, compiled."""
    if not torch.cuda.is_available():
        raise NotRun("compiled for GPUs only")
    return torch.compile(torch_eager(case), dynamic=False)


def torch_linear_cross_entropy(case: Case) -> Logprobs:
    """`F.linear_cross_entropy`, in chunks."""
    function = getattr(F, "linear_cross_entropy", None)
    if function is None:
        raise NotRun(f"torch {torch.__version__} has no F.linear_cross_entropy")
    if case.shape.softcap is not None:
        raise NotRun("no softcap")
    labels = case.labels
    return lambda hidden, weight: (
        -function(hidden, weight, labels, reduction="none", ignore_index=-100)
    )


def trl_chunked(case: Case) -> Logprobs:
    """TRL's ChunkedLogProbFunction as its trainer calls it: labelled rows, chunks of 32768."""
    _require("trl")
    _stub("trl")
    utils = _stub("trl.trainer.utils")
    utils.maybe_gather_lm_head_ctx = lambda *parameters: nullcontext()  # type: ignore[attr-defined]
    function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    mask, labels = case.labels != -100, case.labels
    outputs = ("entropy",)

    def logprobs(hidden: Tensor, weight: Tensor) -> Tensor:
        picked: Tensor
        picked, *_ = function.apply(
            hidden[mask],
            weight,
            None,
            labels[mask],
            1.0,
            32768,
            case.shape.softcap,
            1.0,
            outputs,
        )
        return picked.new_zeros(mask.shape).masked_scatter(mask, picked)

    return logprobs


def liger_grpo(case: Case) -> Loss:
    """Liger's chunked GRPO, one sequence a chunk."""
    _require("liger_kernel")
    if case.shape.softcap is not None:
        raise NotRun("no softcap")
    module = importlib.import_module("liger_kernel.chunked_loss")
    loss = module.LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, chunk_size=1, loss_type="dapo", compiled=True
    )
    shape = case.shape
    grid = (shape.num_documents, shape.document_length)
    mask = (case.labels != -100).view(grid)
    labels = case.labels.clamp(min=0).view(grid)
    advantages = case.advantages.view(grid).amax(1) + case.advantages.view(grid).amin(1)
    old = case.old_logprobs.view(grid)

    def run(hidden: Tensor, weight: Tensor) -> Tensor:
        hidden = hidden.view(*grid, -1)
        value: Tensor
        value, *_ = loss(hidden, weight, labels, mask, advantages, old_per_token_logps=old)
        return value

    return run


def liger_scaled_cross_entropy(case: Case) -> Logprobs:
    """Liger's FLSCE: per-token NLL and entropy, CuTe kernels on Hopper."""
    _require("liger_kernel")
    if find_spec("cutlass") is None:
        raise NotRun("nvidia-cutlass-dsl is not installed")
    if case.shape.softcap is not None:
        raise NotRun("no softcap")
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    labels = case.labels

    def logprobs(hidden: Tensor, weight: Tensor) -> Tensor:
        nll: Tensor = module.LigerFusedLinearScaledCrossEntropyFunction.apply(
            hidden, weight, labels
        )
        return -nll

    return logprobs


def quack_logits(case: Case) -> Logprobs:
    """quack's cross-entropy kernels on whole bf16 logits, whose gradient takes their place."""
    function = _quack(case, "quack.linear_cross_entropy").linear_cross_entropy_func
    labels = case.labels
    return lambda hidden, weight: (
        -function(hidden, weight, None, labels, reduction="none", inplace_backward=True)
    )


def quack_cross_entropy(case: Case) -> Loss:
    """quack's chunked linear cross-entropy, in its default chunks: the mean over the labels.

    It makes its gradients in the forward and scales them by one number in the backward, so it
    gives neither log-probabilities with a gradient nor another loss than this.
    """
    function = _quack(case, "quack.linear_cross_entropy").chunked_linear_cross_entropy
    labels = case.labels
    return lambda hidden, weight: function(hidden, weight, labels)


def quack_forward(case: Case) -> Callable[[], Tensor]:
    """The rows that quack's chunked linear cross-entropy sums up where there is no gradient."""
    epilogue = _quack(case, "quack.epilogue.library").lse_target_epi
    hidden, weight = case.hidden_states.detach(), case.weight.detach()
    mask, labels = case.labels != -100, case.labels

    @torch.no_grad()
    def run() -> Tensor:
        out = epilogue(hidden, weight.mT, store_d=False, target=labels, tuned=False)
        return torch.where(mask, out["target_logit"] - out["lse"], 0)

    return run


def _quack(case: Case, module: str) -> types.ModuleType:
    _require("quack")
    if case.shape.softcap is not None:
        raise NotRun("no softcap")
    return importlib.import_module(module)


def apple_cce(filter_eps: str | None) -> Callable[[Case], Logprobs]:
    """Apple's cut cross-entropy, with its default gradient filter or none."""

    def build(case: Case) -> Logprobs:
        _require("cut_cross_entropy")
        module = importlib.import_module("cut_cross_entropy")
        labels, softcap = case.labels, case.shape.softcap
        return lambda hidden, weight: (
            -module.linear_cross_entropy(
                hidden, weight, labels, softcap=softcap, reduction="none", filter_eps=filter_eps
            )
        )

    return build


def verl_kernel(case: Case) -> Logprobs:
    """verl's Triton linear cross-entropy, without the rest of the package."""
    _require("verl")
    if case.shape.softcap is not None:
        raise NotRun("no softcap")
    _stub("verl")
    _stub("verl.utils")
    device = _stub("verl.utils.device")
    device.get_device_capability = torch.cuda.get_device_capability  # type: ignore[attr-defined]
    device.get_device_name = lambda: "cuda"  # type: ignore[attr-defined]
    device.is_cuda_available = torch.cuda.is_available()  # type: ignore[attr-defined]
    device.get_torch_device = lambda: torch.cuda  # type: ignore[attr-defined]
    module = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    mask = case.labels != -100
    labels = case.labels.clamp(min=0)

    def logprobs(hidden: Tensor, weight: Tensor) -> Tensor:
        picked, _ = module.linear_cross_entropy(hidden, weight, labels, 1.0, "none", None)
        return torch.where(mask, picked, 0)

    return logprobs


def _require(package: str) -> None:
    if package not in sys.modules and find_spec(package) is None:
        raise NotRun(f"{package} is not installed")
    if not torch.cuda.is_available():
        raise NotRun("needs a GPU")


def _stub(name: str) -> types.ModuleType:
    """An empty module in place of a package's own, whose imports are not needed here."""
    if name in sys.modules:
        return sys.modules[name]
    root = name.split(".")[0]
    if root == name:
        spec = find_spec(name)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        path = Path(next(iter(spec.submodule_search_locations)))
    else:
        path = Path(sys.modules[root].__path__[0], *name.split(".")[1:])
    module = types.ModuleType(name)
    module.__path__ = [str(path)]
    sys.modules[name] = module
    return module


# Logits made once, kept or turned into gradients at once; logits made again for the gradients.
ONCE = {rows: (Products(rows, "fhw"),) for rows in get_args(Rows)}
TWICE = {rows: (Products(rows, "ffhw"),) for rows in get_args(Rows)}

PEERS = (
    Implementation(
        "torch eager",
        "logits",
        from_logprobs(torch_eager),
        without_gradient(torch_eager),
        products=ONCE["all"],
    ),
    Implementation("torch fp32 logits", "logits", None, without_gradient(torch_fp32_logits)),
    Implementation(
        "torch.compile",
        "logits",
        from_logprobs(torch_compiled),
        without_gradient(torch_compiled),
        products=ONCE["all"],
    ),
    Implementation(
        "torch F.linear_cross_entropy", "chunks", from_logprobs(torch_linear_cross_entropy)
    ),
    Implementation(
        "TRL ChunkedLogProb",
        "recompute",
        from_logprobs(trl_chunked),
        without_gradient(trl_chunked),
        products=TWICE["labelled"],
        forward_rows="labelled",
    ),
    # Its chunks make their logits a second time for their gradients.
    Implementation("Liger fused linear GRPO", "chunks", liger_grpo, products=TWICE["all"]),
    Implementation(
        "Liger FLSCE",
        "recompute",
        from_logprobs(liger_scaled_cross_entropy),
        without_gradient(liger_scaled_cross_entropy),
        products=TWICE["all"],
    ),
    Implementation(
        "quack linear cross-entropy", "logits", from_logprobs(quack_logits), products=ONCE["all"]
    ),
    Implementation(
        "quack chunked cross-entropy, not GRPO",
        "chunks",
        quack_cross_entropy,
        quack_forward,
        objective="cross_entropy",
        products=ONCE["all"],
    ),
    # What the filter leaves out depends on the logits.
    Implementation(
        "Apple CCE",
        "recompute, filtered",
        from_logprobs(apple_cce("auto")),
        without_gradient(apple_cce("auto")),
        forward_rows="labelled",
    ),
    Implementation(
        "Apple CCE exact",
        "recompute",
        from_logprobs(apple_cce(None)),
        products=TWICE["labelled"],
    ),
    Implementation(
        "verl linear cross-entropy",
        "recompute",
        from_logprobs(verl_kernel),
        without_gradient(verl_kernel),
        products=TWICE["all"],
    ),
)
