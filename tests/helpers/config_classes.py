"""A config with all that configs are made of: unions, lists, mappings of sections, plain values."""

from typing import Annotated, Any, Literal

from pydantic import Field

from fastrl.config import Config, HeadOptions


class Optimizer(Config):
    learning_rate: float = Field(default=1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    fused: bool = False


class Plain(Config):
    type: Literal["plain"] = "plain"
    theta: float = 1e4


class Scaled(Config):
    type: Literal["scaled"] = "scaled"
    theta: float = 5e5
    factor: float = 8.0


class Supervised(Config):
    type: Literal["supervised"] = "supervised"
    steps: int = 10
    epochs: int | None = None


class Reinforced(Config):
    type: Literal["rl"] = "rl"
    steps: int = 10
    group_size: int = 4
    head: HeadOptions = HeadOptions()


class Run(Config):
    seed: int = 0
    name: str = ""
    rope: Annotated[Plain | Scaled, Field(discriminator="type")] = Plain()
    optimizer: Optimizer = Optimizer()
    phases: tuple[Annotated[Supervised | Reinforced, Field(discriminator="type")], ...] = ()
    environment: dict[str, Any] = Field(default_factory=dict)
    rates: dict[str, float] = Field(default_factory=dict)
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    stop: int | tuple[int, ...] | None = None
