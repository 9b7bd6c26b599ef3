"""Random configs: any class of `fastrl.config` by its own fields, choices and bounds.

A loss or an option that is added to the config is drawn without a change here.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from random import Random
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from fastrl.config import AnyLossConfig, PolicyGradientLossConfig, RunConfig
from fastrl.config.base import Config
from fastrl.config.losses import BuiltInLossConfig
from fastrl.config.phases import AnyPhaseConfig

LOSSES: dict[str, type[Any]] = {
    loss.model_fields["type"].default: loss for loss in get_args(get_args(BuiltInLossConfig)[0])
}
# Where the values of a field change something, if its default does not say it.
CENTRES = {
    "coefficient": 0.3,
    "low": 0.9,
    "high": 1.1,
    "threshold": 0.03,
    "delta": 1.3,
    "bonus": 0.1,
    "top_fraction": 0.4,
    "label_smoothing": 0.2,
    "target": 1.0,
    "length": 8,
    "max_staleness": 2,
    "epsilon_low": 0.15,
    "epsilon_high": 0.2,
    "beta": 0.4,
}
# Of a run: what names files, code or other processes, or takes minutes.
LEFT_OUT = {
    "paths", "path", "task", "config", "device", "num_threads", "compile", "characters", "name",
    "end_token", "end_tokens", "data", "sequence_data", "tensor", "steps", "ignore", "prompt",
    "reward_columns", "question_pattern", "betas", "type", "preset", "limits", "fence", "workers",
    "tokenizer", "project", "wandb", "trackio",
}  # fmt: skip
_LOSS: TypeAdapter[Any] = TypeAdapter(AnyLossConfig)


def draw_loss(random: Random, names: list[str]) -> dict[str, Any]:
    """A loss of one of the types, with random options that the config accepts."""
    name = random.choice(names)
    share = random.choice((0.0, 0.2, 0.4))
    while True:
        drawn = {"type": name, **draw_fields(LOSSES[name], random, share, without={"preset"})}
        if drawn.get("normalisation") == "constant":
            drawn.setdefault("length", random.randint(1, 12))
        if is_valid(drawn):
            return drawn


def is_valid(loss: Mapping[str, Any]) -> bool:
    """Whether the config accepts the loss."""
    try:
        config = _LOSS.validate_python(dict(loss))
    except ValidationError:
        return False
    if not isinstance(config, PolicyGradientLossConfig) or config.entropy is None:
        return True
    # Its controller has a state; the definition has none.
    return config.entropy.adaptive is None


def changed_run(random: Random, values: Mapping[str, Any], num_changes: int) -> dict[str, Any]:
    """A run's plain values with so many random changes, which its config may refuse."""
    changed: dict[str, Any] = json.loads(json.dumps(values))
    for _ in range(num_changes):
        _change(random, RunConfig, changed)
    return changed


def _change(random: Random, config: type[Config], values: dict[str, Any]) -> None:
    """Sets one field of a section, or of one inside of it, if it has any to set."""
    names = [name for name in config.model_fields if name not in LEFT_OUT]
    if not names:
        return
    name = random.choice(names)
    field = config.model_fields[name]
    if name == "losses":
        types = [name for name in LOSSES if name not in ("dpo", "distillation")]
        values[name] = {f"loss_{i}": draw_loss(random, types) for i in range(random.randint(1, 2))}
        return
    if name == "phases":
        section = random.choice(values["phases"])
        _change(random, _section_class(AnyPhaseConfig, section), section)
        return
    sections = _section_classes(field.annotation)
    if not sections:
        values[name] = draw_value(name, field.annotation, field, random, values.get(name))
        return
    if type(None) in get_args(field.annotation) and random.random() < 0.2:
        values[name] = None
        return
    section = values.get(name) or {}
    values[name] = section
    is_union = len(sections) > 1
    if is_union and "type" not in section:
        section["type"] = random.choice(sections).model_fields["type"].default
    _change(random, _section_class(field.annotation, section), section)


def _section_classes(annotation: Any) -> list[type[Config]]:
    """The config classes that a value may be of."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, Config) else []
    return [each for arg in get_args(annotation) for each in _section_classes(arg)]


def _section_class(annotation: Any, values: Mapping[str, Any]) -> type[Config]:
    """The class of a section, by its `type` where there are several."""
    classes = _section_classes(annotation)
    if len(classes) == 1:
        return classes[0]
    (found,) = [each for each in classes if each.model_fields["type"].default == values["type"]]
    return found


def draw_fields(
    config: type[Config],
    random: Random,
    share: float,
    without: frozenset[str] | set[str] = frozenset(),
) -> dict[str, Any]:
    """Values of some of the fields: of those that are required, and of a share of the others."""
    drawn: dict[str, Any] = {}
    for name, field in config.model_fields.items():
        is_drawn = field.is_required() or random.random() < share
        if is_drawn and name not in without | {"type"}:
            drawn[name] = draw_value(name, field.annotation, field, random)
    return drawn


def draw_value(
    name: str, annotation: Any, field: FieldInfo, random: Random, now: Any = None
) -> Any:
    """A value of the annotated type, within the field's bounds, around `now` or the default."""
    if get_origin(annotation) in (Union, types.UnionType):
        choices = [each for each in get_args(annotation) if each is not type(None)]
        if type(None) in get_args(annotation) and random.random() < 0.2:
            return None
        return draw_value(name, random.choice(choices), field, random, now)
    if get_origin(annotation) is Literal:
        return random.choice(get_args(annotation))
    if annotation is bool:
        return random.random() < 0.5
    if annotation in (int, float):
        return _number(name, annotation, field, random, now)
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return draw_fields(annotation, random, 0.5)
    if get_origin(annotation) is Annotated:
        return draw_value(name, get_args(annotation)[0], field, random, now)
    if get_origin(annotation) is tuple:
        return [draw_value(name, get_args(annotation)[0], field, random) for _ in range(2)]
    raise TypeError(f"no draw for `{name}` of type {annotation}")


def _number(name: str, kind: type, field: FieldInfo, random: Random, now: Any) -> float | int:
    """A number around the default, now and then a bound itself, inside of the bounds."""
    low, high = -math.inf, math.inf
    closed: list[float] = []
    for bound in field.metadata:
        if isinstance(bound, Ge):
            low, closed = float(bound.ge), [*closed, float(bound.ge)]  # type: ignore[arg-type]
        elif isinstance(bound, Gt):
            low = float(bound.gt) + 1e-3  # type: ignore[arg-type]
        elif isinstance(bound, Le):
            high = float(bound.le)  # type: ignore[arg-type]
        elif isinstance(bound, Lt):
            high = float(bound.lt) - 1e-3  # type: ignore[arg-type]
    if closed and name != "logits_scale" and random.random() < 0.05:
        value = random.choice(closed)
    else:
        default = field.default if isinstance(field.default, int | float) else None
        centre = now if isinstance(now, int | float) else CENTRES.get(name)
        centre = centre or default or 1.0
        value = min(max(float(centre) * math.exp(random.uniform(-1.5, 1.5)), low), high)
        if low < 0 and random.random() < 0.2:
            value = -value
    return round(value) if kind is int else value
