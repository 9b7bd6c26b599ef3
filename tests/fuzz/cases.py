"""A random case of the head from one seed: losses, options, documents and how they are split."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from fastrl.config import AnyLossConfig
from fastrl.config.losses import KeepSetConfig
from fastrl.data.documents import Document
from fastrl.functional.head.distillation import Teacher
from fastrl.functional.reference import head as reference
from fastrl.layers.losses import build_loss
from tests.helpers.layouts import FOUR_RANKS, TWO_RANKS, Ranks
from tests.helpers.random_configs import LOSSES, draw_fields, draw_loss

VERSION = 9
DTYPES = (torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LOSS: TypeAdapter[Any] = TypeAdapter(AnyLossConfig)

WEIGHTS = ("rl_weights", "ce_weights", "distill_weights")


@dataclass(frozen=True)
class Text:
    """A document in token alignment, value i of each list for token i, and its hidden states."""

    tokens: list[int]
    is_label: list[bool]  # the first is False
    hidden: Tensor  # [n, D] float64, of the case's dtype
    teacher_hidden: Tensor  # [n, D'] float64
    advantages: list[float]
    old: list[float]
    ref: list[float]
    rollout: list[float]
    kept: list[list[int]]
    weights: dict[str, list[float]]  # of each of `WEIGHTS`
    teacher: list[tuple[list[int], list[float]]]  # ids and their log-probabilities
    temperature: float
    version: int
    reward: float  # NaN: none
    group: int
    document: Document


@dataclass(frozen=True)
class FuzzCase:
    """What is computed, in float64 numbers that the case's dtype can hold.

    Attributes:
        dtype: of hidden states, weight and gradients.
        compute_dtype: of the operands of products, where another.
        losses: options of each loss by name.
        head: options of the head's config without sizes and losses.
        packs: numbers of the documents of each data rank's micro-batches, rank after rank.
        micro_sequences: pieces of each packed sequence, a call of the head each; joined where a
            loss sums over documents.
    """

    seed: int
    dtype: torch.dtype
    compute_dtype: torch.dtype | None
    layout: Ranks
    losses: dict[str, dict[str, Any]]
    head: dict[str, Any]
    vocab_size: int
    possible: list[int]  # the ids without a bias of -inf
    weight: Tensor  # [V + padding, D] float64
    bias: Tensor | None
    teacher_weight: Tensor | None  # [V + padding, D'] float64
    texts: list[Text]
    packs: list[list[int]]
    micro_sequences: int
    share_prefixes: bool
    pad_to_multiple: int
    upstream: float
    is_guest: bool
    is_strided: bool
    needs_gradient: tuple[bool, bool]  # of hidden states, of weight and bias

    @property
    def product_dtype(self) -> torch.dtype:
        """Of the operands of products."""
        return self.compute_dtype or self.dtype

    @property
    def configs(self) -> dict[str, Any]:
        """The losses, validated."""
        return {name: _LOSS.validate_python(loss) for name, loss in self.losses.items()}

    def has(self, option: str) -> bool:
        """Whether any loss has the option."""
        return any(loss.get(option) for loss in self.losses.values())

    def teacher(self, hidden_states: Tensor, rows: slice) -> Teacher | None:
        """The teacher of some tokens and rows of the vocabulary; None without."""
        if self.teacher_weight is None:
            return None
        weight = self.teacher_weight[rows].to(hidden_states)
        return Teacher(hidden_states, weight, weight[:, 0].clone(), 4.0, 0.7)

    def __str__(self) -> str:
        numbers = [len(text.tokens) for text in self.texts]
        return (
            f"seed {self.seed}: {self.dtype} in {self.product_dtype}, {self.layout}, vocabulary"
            f" {self.vocab_size} of {len(self.weight)} rows, documents {numbers} in {self.packs},"
            f" {self.micro_sequences} micro-sequences, upstream {self.upstream}\n"
            f"  losses {self.losses}\n  head {self.head}, guest {self.is_guest},"
            f" strided {self.is_strided}, gradients {self.needs_gradient},"
            f" share_prefixes {self.share_prefixes}"
        )


def draw_case(seed: int) -> FuzzCase:
    """The case of a seed, the same on every machine and rank."""
    random = Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = random.choice(DTYPES)
    computes_in = torch.bfloat16 if dtype == torch.float32 and random.random() < 0.3 else None
    losses = _draw_losses(random)
    layout = _draw_layout(random)
    vocab_size = random.choice((1, 2, 3, 7, 13, 29, 29, 64, 131, 600))
    padding = random.choice((0, 0, 3))
    width = random.choice((1, 3, 8, 16))
    head = _draw_head(random, losses)
    has_bias = random.random() < 0.5

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
        return drawn.to(computes_in or dtype).double()

    spread = random.choice((0.3, 1.0, 1.0, 4.0))
    weight = normal(vocab_size + padding, width, scale=spread / math.sqrt(width))
    bias = normal(vocab_size + padding) if has_bias else None
    has_teacher = any(
        loss["type"] == "distillation" and not loss.get("recorded") for loss in losses.values()
    )
    possible = list(range(vocab_size))
    if bias is not None and random.random() < 0.2 and _allows_impossible(head, losses):
        possible = [v for v in possible if v % 5 != 4]
        bias[4:vocab_size:5] = -torch.inf
    case = FuzzCase(
        seed=seed,
        dtype=dtype,
        compute_dtype=computes_in,
        layout=layout,
        losses=losses,
        head=head | {"bias": has_bias},
        vocab_size=vocab_size,
        possible=possible,
        weight=weight,
        bias=bias,
        teacher_weight=normal(vocab_size + padding, 5) if has_teacher else None,
        texts=[],
        packs=[],
        micro_sequences=random.choice((1, 1, 1, 2, 3)),
        share_prefixes=random.random() < 0.2 and layout.sequence_data == 1,
        pad_to_multiple=random.choice((1, 1, 3, 8)),
        upstream=random.choice((1.0, 0.7, -1.7, 64.0)),
        is_guest=random.random() < 0.2 and layout.world_size == 1,
        is_strided=random.random() < 0.2,
        needs_gradient=random.choice(((True, True),) * 4 + ((True, False), (False, True))),
    )
    if layout.world_size > 1 and not _is_of_tokens(case):
        # One data rank may have a document that no chunk holds, and be refused alone.
        case = replace(case, head=case.head | {"strategy": "auto"})
    case = replace(case, texts=_draw_texts(case, random, normal))
    if case.share_prefixes:
        case = replace(case, micro_sequences=1)
    return replace(case, packs=_draw_packs(case, random))


def _allows_impossible(head: dict[str, Any], losses: dict[str, dict[str, Any]]) -> bool:
    """Whether -inf among the logits stays -inf and is no part of a mean of logits."""
    means = any(
        loss["type"] == "distillation" or loss.get("label_smoothing") for loss in losses.values()
    )
    return head["softcap"] is None and not means


def _is_of_tokens(case: FuzzCase) -> bool:
    """Whether any strategy is possible for the losses, whatever the documents."""
    losses = [build_loss(config) for config in case.configs.values()]
    return all(loss.scope == "token" and not loss.needs - {"entropy"} for loss in losses)


def _draw_layout(random: Random) -> Ranks:
    draw = random.random()
    if draw < 0.85:
        return Ranks()
    return random.choice(TWO_RANKS if draw < 0.97 else FOUR_RANKS)


def _draw_losses(random: Random) -> dict[str, dict[str, Any]]:
    """One to three losses. `dpo` takes documents in pairs, and so do those beside it."""
    names = list(LOSSES)
    return {f"loss_{i}": draw_loss(random, names) for i in range(random.choice((1, 1, 1, 1, 2, 3)))}


def _draw_head(random: Random, losses: dict[str, dict[str, Any]]) -> dict[str, Any]:
    head: dict[str, Any] = {
        "strategy": random.choice(("auto", "recompute", "single_pass")),
        "chunk_size": random.choice((None, None, 1, 2, 5, 12, 24)),
        "metrics": random.random() < 0.7,
        "softcap": random.choice((None, None, 5.0, 1.5)),
        "logit_scale": random.choice((1.0, 1.0, 0.3, 1.7, 0.05)),
    }
    if random.random() < 0.3:
        head["max_logits_bytes"] = random.choice((64, 512, 4096))
    if head["strategy"] != "single_pass":
        head["drop_inactive_rows"] = random.random() < 0.3
    if random.random() < 0.15 and not any(loss.get("label_smoothing") for loss in losses.values()):
        head["strategy"] = random.choice(("auto", "recompute"))
        keep = draw_fields(KeepSetConfig, random, 0.5, without={"recorded"})
        keep = {name: value for name, value in keep.items() if value is not None}
        head["keep"] = keep or {"recorded": True}
        if "top_k" in keep:
            head["keep"]["top_k"] = random.randint(1, 12)
    return head


def _draw_texts(case: FuzzCase, random: Random, normal: Any) -> list[Text]:
    needs_pairs = any(loss["type"] == "dpo" for loss in case.losses.values())
    count = 2 * random.randint(1, 3) if needs_pairs else random.choice((1, 2, 3, 4, 6, 8))
    shared = random.choice((0.3, 0.7, 1.0, 1.3))
    is_shared = random.random() < 0.5
    noise = (random.choice((0.05, 0.3, 1.0)), random.choice((0.0, 0.05, 0.3)))
    prompts = [random.choices(case.possible, k=4) for _ in range(3)]
    texts = []
    for number in range(count):
        group = number // 2 if needs_pairs else random.randrange(3)
        sign = (1 if number % 2 else -1) if needs_pairs else None
        tokens = random.choices(case.possible, k=random.randint(1, 12))
        tokens[: random.randint(0, 4)] = prompts[group % 3][: random.randint(0, 4)]
        tokens = tokens if len(tokens) > needs_pairs else [0, 0]
        temperature = shared if is_shared else random.choice((0.4, 0.8, 1.0, 1.5))
        reward = random.choice((0.0, 1.0, random.gauss(0, 1), math.nan))
        texts.append(
            _draw_text(case, random, normal, tokens, (temperature, group, reward, sign), noise)
        )
    return texts


def _draw_text(
    case: FuzzCase,
    random: Random,
    normal: Any,
    tokens: list[int],
    facts: tuple[float, int, float, int | None],
    noise: tuple[float, float],
) -> Text:
    """A document whose old policies are near the head's own, in one of the forms of `Document`."""
    temperature, group, reward, sign = facts
    length = len(tokens)
    prompt = random.randint(0, length)
    is_label = [i >= max(prompt, 1) for i in range(length)]
    has_mask = random.random() < 0.3
    if has_mask:
        is_label = [i > 0 and random.random() < 0.6 for i in range(length)]
    if sign is not None:  # both of a pair have a label
        prompt, is_label[-1] = min(prompt, length - 1), True
    hidden = normal(length, case.weight.shape[1])
    weights = {name: random.choices((0.0, 0.5, 1.0, 2.0), k=length) for name in WEIGHTS}
    teacher = [_entries(case, random) for _ in tokens]
    most = min(6, len(case.possible))
    # A label has an entry at least.
    kept = [random.sample(case.possible, random.randint(labelled, most)) for labelled in is_label]
    near = _own_logprobs(case, hidden, tokens, temperature)
    far = random.choice((0.0,) * 8 + (-2.0, 40.0 if case.dtype == torch.float64 else 3.0, -40.0))
    if case.dtype != torch.float64:
        far = max(far, -3.0)

    def numbers(centre: list[float], scale: float) -> list[float]:
        values = [min(x + random.gauss(0, scale), -1e-3) for x in centre]
        wide = np.asarray(values, np.float64 if case.dtype == torch.float64 else np.float32)
        return [float(value) for value in wide]

    old = numbers([x + far for x in near], noise[0])
    advantage = random.choice((0.0, 1.0, random.gauss(0, 1), random.gauss(0, 1)))
    if sign is not None:
        advantage = sign * (abs(advantage) + 0.1)
    advantages = [advantage] * length
    if sign is None and random.random() < 0.3:
        advantages = [random.choice((0.0, random.gauss(0, 1))) for _ in range(length)]
    if case.dtype != torch.float64:
        advantages = [float(np.float32(value)) for value in advantages]
        reward = float(np.float32(reward))
        temperature = float(np.float32(temperature))
    text = Text(
        tokens=tokens, is_label=is_label, hidden=hidden, teacher_hidden=normal(length, 5),
        advantages=advantages, old=old, ref=numbers(near, 0.4), rollout=numbers(old, noise[1]),
        kept=kept, temperature=temperature, version=VERSION - random.randint(0, 5),
        reward=reward, group=group, weights=weights, teacher=teacher,
        document=Document([0], prompt_length=0),
    )  # fmt: skip
    return replace(text, document=_as_document(text, case, random, None if has_mask else prompt))


def _entries(case: FuzzCase, random: Random) -> tuple[list[int], list[float]]:
    """Some ids of a teacher, at least one, and their log-probabilities; sometimes all of them."""
    size = random.choice((1, 2, min(6, case.vocab_size), case.vocab_size))
    ids = random.sample(range(case.vocab_size), min(size, case.vocab_size))
    draws = [math.exp(random.gauss(0, 1)) for _ in ids]
    rest = 0.0 if len(ids) == case.vocab_size else random.choice((1e-9, 0.1, 1.0, 10.0))
    total = sum(draws) + rest
    return ids, [float(np.float32(math.log(draw / total))) for draw in draws]


def _own_logprobs(
    case: FuzzCase, hidden: Tensor, tokens: list[int], temperature: float
) -> list[float]:
    """[n] of each token by the state before it; that of the first is anything."""
    z = reference.logits(
        hidden, case.weight, bias=case.bias, temperature=temperature, softcap=case.head["softcap"],
        logit_scale=case.head["logit_scale"], vocab_size=case.vocab_size,
    )  # fmt: skip
    own = torch.log_softmax(z, 1)
    return [-1.0, *(float(own[i, token]) for i, token in enumerate(tokens[1:]))]


def _as_document(text: Text, case: FuzzCase, random: Random, prompt: int | None) -> Document:
    """The same numbers in one of the layouts that a `Document` may have."""
    layouts = ["token", "label"] if prompt is None else ["token", "label", "completion"]
    layout = random.choice(layouts)
    start = {"token": 0, "label": 1, "completion": prompt or 0}[layout]
    as_array = case.dtype == torch.float64

    def column(values: list[float]) -> Any:
        return np.asarray(values[start:], np.float64) if as_array else values[start:]

    per_token = len(set(text.advantages)) > 1 or random.random() < 0.2
    advantage: Any = column(text.advantages) if per_token else text.advantages[0]
    recorded = case.head.get("keep", {}).get("recorded")
    teacher = text.teacher[start:] if case.has("recorded") else None
    weights = {
        name.removesuffix("s"): column(values)
        for name, values in text.weights.items()
        if case.has("stream")
    }
    return Document(
        tokens=np.asarray(text.tokens) if random.random() < 0.3 else text.tokens,
        prompt_length=prompt,
        loss_mask=text.is_label if prompt is None else None,
        logprobs=column(text.old),
        ref_logprobs=column(text.ref),
        rollout_logprobs=column(text.rollout),
        advantage=advantage,
        temperature=text.temperature,
        model_version=text.version,
        reward=text.reward,
        group_id=f"group {text.group}",
        alignment="label" if layout == "label" else "token",
        kept_tokens=text.kept[start:] if recorded else None,
        teacher_ids=None if teacher is None else [ids for ids, _ in teacher],
        teacher_logprobs=None if teacher is None else [values for _, values in teacher],
        **weights,
    )


def _draw_packs(case: FuzzCase, random: Random) -> list[list[int]]:
    """Deals the documents to micro-batches and data ranks; what belongs together stays so."""
    micro_batches = random.choice((1, 1, 2, 3))
    whole_groups = any(loss["type"] == "dpo" for loss in case.losses.values())
    if any(build_loss(config).scope == "batch" for config in case.configs.values()):
        micro_batches = 1  # the quantile is that of a micro-batch
    if whole_groups or case.layout.data > 1:
        units: dict[int, list[int]] = {}
        for number, text in enumerate(case.texts):
            units.setdefault(text.group, []).append(number)
        dealt = list(units.values())
    else:
        dealt = [[number] for number in range(len(case.texts))]
    random.shuffle(dealt)
    packs: list[list[int]] = [[] for _ in range(case.layout.data * micro_batches)]
    for unit in dealt:
        packs[random.randrange(len(packs))] += unit
    return packs
