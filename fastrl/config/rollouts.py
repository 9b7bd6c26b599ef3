"""Configs of where completions come from: the built-in sampler, or files."""

from typing import Annotated, Literal

from pydantic import Field

from fastrl.config.base import Config, PathText
from fastrl.config.environment import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE


class SampledRolloutsConfig(Config):
    """Completions of the environment's training prompts, sampled while the run trains."""

    prompts_per_step: int = Field(default=32, gt=0, le=10**6)
    """Different prompts in a step."""

    group_size: int = Field(default=16, gt=0, le=10**6)
    """Completions of each prompt; their rewards are compared with one another. 1 only where the
    `baseline` of advantages is `greedy` or `none`."""

    temperature: float = Field(default=1.0, ge=LOWEST_TEMPERATURE, le=HIGHEST_TEMPERATURE)
    """Temperature of sampling and of the log-probabilities in the loss."""

    old_logprobs: Literal["recompute", "sampler"] = "recompute"
    """Denominator of the ratio. `recompute`: the head's under the weights at the step's begin, so
    that the first ratio is 1 whatever the sampler's rounding. The first update of a step computes
    them by itself; only further mini-batches take a pass of their own before it, and none where all
    losses are `on_policy`. `sampler`: as sampled."""


class SamplerRolloutsConfig(SampledRolloutsConfig):
    """Rollouts sampled from the model that is trained, on the environment's training prompts."""

    type: Literal["sampler"] = "sampler"
    """Names the source."""


class FileRolloutsConfig(Config):
    """Rollouts from files, which some other model may have sampled (offline)."""

    type: Literal["files"] = "files"
    """Names the source."""

    paths: tuple[PathText, ...] = Field(min_length=1)
    """JSONL (also `.jsonl.gz`) and Parquet files, relative to the current folder; folders of such
    files; patterns such as `rollouts/step-*.jsonl.gz`. All are read when the run begins."""

    documents_per_step: int = Field(default=128, gt=0, le=10**7)
    """Documents of a step. Groups stay whole, so a step takes groups until it has at least so many.
    All groups come, in random order, before any comes again."""

    ignore: tuple[str, ...] = ()
    """Columns beside those of docs/data.md that the files may have and nothing reads."""

    reward_columns: dict[str, float] = Field(default_factory=dict)
    """Name and weight of columns whose weighted sum is the reward, instead of `reward`."""


RolloutsConfig = Annotated[SamplerRolloutsConfig | FileRolloutsConfig, Field(discriminator="type")]
