"""What a case must give, by the plain loops of `fastrl.functional.reference`, in float64.

The label shift, the counts and the keep-sets are made here from the documents, so that packing and
splitting are part of what is compared. Beside each gradient stands what rounding may do to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastrl.config.losses import DistillationLossConfig
from fastrl.functional.reference import head as reference
from fastrl.functional.reference import losses as reference_losses
from fastrl.functional.reference.divergences import recorded_divergence, token_divergence
from fastrl.functional.reference.tokens import Tokens
from fastrl.functional.reference.tokens import of_stream as reference_of_stream
from tests.fuzz.cases import VERSION, WEIGHTS, FuzzCase
from tests.fuzz.metrics import metrics_of

FLOATS = ("advantages", "old", "ref", "rollout", "temperature", *WEIGHTS)


@dataclass
class Answer:
    """Of all documents together; gradients and statistics in the order of the case's documents.

    Attributes:
        gradients: `hidden_states` [T, D], `weight` [V, D] and `bias` [V] of loss * upstream.
        sizes: for each gradient the sum of its terms without their signs: those of each statistic.
        doubts: the same of gradients of log-probabilities, entropies and log-sum-exps alone, whose
            rounding is relative to the logits.
    """

    loss: Tensor
    logprobs: Tensor  # [T]
    entropy: Tensor  # [T]
    metrics: dict[str, Tensor]
    gradients: dict[str, Tensor]
    sizes: dict[str, Tensor] = field(default_factory=dict)
    doubts: dict[str, Tensor] = field(default_factory=dict)


def definition(
    case: FuzzCase, perturbation: float = 0.0, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Answer:
    """The answer; with a perturbation, for logits that are off by so much of their size.

    Args:
        case: whose losses, gradients and metrics are computed.
        perturbation: relative size of the errors.
        seed: of the errors; the keep-sets of an odd one are those of logits of fewer binary digits.
        dtype: of all numbers, to see what the same formulas lose in fp32.
    """
    hidden = torch.cat([text.hidden for text in case.texts]).to(dtype)
    weight = case.weight.to(dtype, copy=True).requires_grad_()
    bias = None if case.bias is None else case.bias.to(dtype, copy=True).requires_grad_()
    hidden.requires_grad_()
    products = hidden @ weight.T
    if bias is not None:
        products = products + torch.where(bias.isfinite(), bias, 0)
    if perturbation:
        noise = torch.randn(products.shape, generator=torch.Generator().manual_seed(seed),
                            dtype=products.dtype)  # fmt: skip
        products = products + noise * perturbation * (1 + products.detach().abs().max())
    products.retain_grad()
    columns = _columns(case)
    for name in FLOATS:
        columns[name] = columns[name].to(dtype)
    # What is equal in fp32, as where the softcap saturates, need not be so in float64, and ties
    # belong to a keep-set together.
    columns["digits"] = 18 + seed % 6 if perturbation and seed % 2 else None
    pieces: list[Tensor] = []
    total = products.new_zeros(())
    metrics: dict[str, Tensor] = {}
    for name, config in case.configs.items():
        tokens, used = _tokens(case, products, columns, config)
        for vector in used:
            vector.retain_grad()
        pieces += used
        options = config.model_dump()
        if config.stream is not None:
            tokens = reference_of_stream(tokens, config.stream)
        value = products.sum() * 0  # of no label, where means are 0 / 0
        if bool((tokens.labels != -100).any()):
            value = reference_losses.LOSSES[config.type](tokens, options)
        total = total + config.weight * value
        if case.head["metrics"]:
            of_loss = metrics_of(config, tokens, value.detach(), columns)
            metrics |= {f"{name}/{metric}": each for metric, each in of_loss.items()}
    with torch.no_grad():
        plain = _statistics(case, products, columns, 1.0)
    answer = Answer(total.detach(), plain[0], plain[1], metrics, {})
    inputs = {"hidden_states": hidden, "weight": weight, "bias": bias}
    sizes = torch.zeros_like(products)
    if total.requires_grad:
        (total * case.upstream).backward(retain_graph=True)
        for piece in pieces:
            if piece.grad is not None:
                (grad,) = torch.autograd.grad(piece, products, piece.grad, retain_graph=True)
                sizes += grad.abs()
    for name, tensor in inputs.items():
        if tensor is not None:
            answer.gradients[name] = _gradient(tensor)
    answer.sizes = _spread(case, hidden, weight, sizes)
    answer.doubts = _spread(case, hidden, weight, _doubt(case, products, pieces, columns))
    return answer


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _spread(case: FuzzCase, hidden: Tensor, weight: Tensor, of_logits: Tensor) -> dict[str, Tensor]:
    """What so much in the gradient of the logits is in that of each input."""
    return {
        "hidden_states": of_logits @ weight.detach().abs().to(of_logits.dtype),
        "weight": of_logits.T @ hidden.detach().abs().to(of_logits.dtype),
        "bias": of_logits.sum(0),
    }


def _doubt(
    case: FuzzCase, products: Tensor, pieces: list[Tensor], columns: dict[str, Any]
) -> Tensor:  # [T, V]
    """The gradients with respect to the statistics, as they would lie in that of the logits."""
    by_token = torch.stack([_gradient(piece).abs() for piece in pieces]).sum(0)
    scales = max(config.logits_scale for config in case.configs.values())
    factor = abs(case.head["logit_scale"]) * scales / columns["temperature"]
    z = products.detach().abs() * factor[:, None]
    doubts: Tensor = by_token[:, None] * factor[:, None] * (1 + z.amax(1, keepdim=True))
    return doubts.expand_as(products)


def _columns(case: FuzzCase) -> dict[str, Any]:
    """The step's documents one after the other, each value moved to the slot that predicts it."""
    rows: dict[str, list[Any]] = {}

    def put(name: str, values: list[Any], filler: Any) -> None:
        rows.setdefault(name, []).extend([*values[1:], filler])

    for number, text in enumerate(case.texts):
        length = len(text.tokens)
        labels = [
            token if is_label else -100
            for token, is_label in zip(text.tokens, text.is_label, strict=True)
        ]
        put("labels", labels, -100)
        for name in ("advantages", "old", "ref", "rollout"):
            values = getattr(text, name)
            put(name, [v if m else 0.0 for v, m in zip(values, text.is_label, strict=True)], 0.0)
        for name in WEIGHTS:
            values = text.weights[name]
            put(name, [v if m else 0.0 for v, m in zip(values, text.is_label, strict=True)], 0.0)
        put("kept", text.kept, [])
        put("teacher", text.teacher, None)
        rows.setdefault("document_index", []).extend([number] * length)
        rows.setdefault("group_index", []).extend([text.group] * length)
        rows.setdefault("model_version", []).extend([text.version] * length)
        rows.setdefault("temperature", []).extend([text.temperature] * length)
    made: dict[str, Any] = {
        name: torch.tensor(values, dtype=torch.float64 if name in FLOATS else torch.int64)
        for name, values in rows.items()
        if name not in ("kept", "teacher")
    }
    rewards = [text.reward for text in case.texts]
    return made | {"kept": rows["kept"], "teacher": rows["teacher"], "rewards": rewards}


def _tokens(
    case: FuzzCase, products: Tensor, columns: dict[str, Any], config: Any
) -> tuple[Tokens, list[Tensor]]:
    """The tokens as a loss sees them, and the vectors that it is a function of."""
    logprobs, entropy, logsumexp, mean_logit = _statistics(
        case, products, columns, config.logits_scale
    )
    used = [logprobs, entropy, logsumexp, mean_logit]
    divergence = None
    if isinstance(config, DistillationLossConfig):
        divergence = _divergence(case, products, columns, config)
        used = [divergence]
    tokens = Tokens(
        labels=columns["labels"],
        document_index=columns["document_index"],
        logprobs=logprobs,
        entropy=entropy,
        logsumexp=logsumexp,
        mean_logit=mean_logit,
        divergence=divergence,
        old_logprobs=columns["old"],
        ref_logprobs=columns["ref"],
        rollout_logprobs=columns["rollout"],
        advantages=columns["advantages"],
        group_index=columns["group_index"],
        model_version=columns["model_version"],
        current_version=VERSION,
        **{name: columns[name] for name in WEIGHTS},
    )
    return tokens, [vector for vector in used if vector.requires_grad]


def _logits(case: FuzzCase, products: Tensor, columns: dict[str, Any], scale: float) -> Tensor:
    """Logits of the raw products, as if these were states under a weight of ones."""
    z = reference.logits(
        products,
        torch.eye(products.shape[1], dtype=products.dtype),
        temperature=columns["temperature"] / scale,
        softcap=case.head["softcap"],
        logit_scale=case.head["logit_scale"],
        vocab_size=case.vocab_size,
    )
    is_possible = torch.zeros(case.vocab_size, dtype=torch.bool)
    is_possible[case.possible] = True
    return torch.where(is_possible, z, -torch.inf)


def _statistics(
    case: FuzzCase, products: Tensor, columns: dict[str, Any], scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logprobs, entropy, logsumexp, mean_logit) [T], over the keep-set if there is one."""
    z = _logits(case, products, columns, scale)
    keep = case.head.get("keep")
    if keep is None:
        return *reference.token_statistics(z, columns["labels"]), z.mean(1)
    found = []
    for t, label in enumerate(columns["labels"].tolist()):
        if label == -100:
            found.append(torch.stack([z[t, 0] * 0] * 3))
            continue
        options = {name: keep.get(name) for name in ("top_k", "top_p", "min_p")}
        recorded = columns["kept"][t] if keep.get("recorded") else None
        row = z[t].detach()
        if columns["digits"] is not None:
            step = row[row.isfinite()].abs().max() * 2.0 ** -columns["digits"] + 1e-300
            row = (row / step).round() * step
        entries = reference.kept_entries(row, label, **options, recorded=recorded)
        found.append(torch.stack(reference.kept_statistics(z[t], label, entries)))
    logprobs, entropy, logsumexp = torch.stack(found, 1).unbind()
    return logprobs, entropy, logsumexp, z.mean(1)


def _divergence(
    case: FuzzCase, products: Tensor, columns: dict[str, Any], config: DistillationLossConfig
) -> Tensor:
    z = _logits(case, products, columns, config.logits_scale)
    if config.recorded:
        values = []
        for t, label in enumerate(columns["labels"].tolist()):
            values.append(products[t, 0] * 0)
            if label != -100:
                ids, logprobs = columns["teacher"][t]
                values[t] = recorded_divergence(z[t], ids, logprobs, config.divergence, config.beta)
        return torch.stack(values)
    teacher = case.teacher(torch.cat([text.teacher_hidden for text in case.texts]), slice(None))
    assert teacher is not None
    z_teacher = reference.logits(
        teacher.hidden_states,
        teacher.weight,
        bias=teacher.bias,
        temperature=columns["temperature"] / config.logits_scale,
        softcap=teacher.softcap,
        logit_scale=teacher.logit_scale,
        vocab_size=case.vocab_size,
    )
    return torch.stack(
        [
            token_divergence(a, b, config.divergence, config.beta)
            for a, b in zip(z, z_teacher, strict=True)
        ]
    )
