"""Configs of where completions come from: the built-in sampler, servers, or files."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from fastrl.config.base import Config, PathText
from fastrl.config.environment import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from fastrl.config.losses import AnyLossConfig
from fastrl.config.policy_losses import PolicyGradientLossConfig


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


class ReloadWeightsConfig(Config):
    """Weights reach vLLM as safetensors in a folder, which its servers are told to read."""

    type: Literal["reload"] = "reload"
    """Names the way."""

    folder: PathText
    """Folder that the run writes the weights of each step to, new or empty at first, and that the
    servers see under the same path. One step's weights are there at a time."""


class ServerRolloutsConfig(SampledRolloutsConfig):
    """Rollouts sampled by vLLM servers from the weights of the model that is trained."""

    type: Literal["server"] = "server"
    """Names the source."""

    urls: tuple[str, ...] = Field(min_length=1)
    """Addresses of the servers, such as `http://127.0.0.1:8000`; all serve the same model."""

    weights: ReloadWeightsConfig
    """How the weights reach the servers, at the begin of each step."""

    model: str | None = None
    """Name of the model in requests. Default: the one that the servers have."""

    ahead: int = Field(default=0, ge=0, le=1)
    """Steps between sampling and training. 0: a step waits for its own rollouts. 1: the next step's
    are sampled while this one trains, by weights that are then one step old."""

    processed_logprobs: bool = False
    """Whether the servers give log-probabilities after temperature, as vLLM does when started with
    `--logprobs-mode processed_logprobs`. Required at a `temperature` other than 1."""

    max_in_flight: int = Field(default=64, gt=0, le=10**5)
    """Most prompts that a server is sent before it has answered; each asks for `group_size`
    completions."""

    timeout: float = Field(default=600.0, gt=0, le=24 * 3600)
    """Seconds that a server may take to answer a request, before it is tried again."""

    retries: int = Field(default=4, ge=0, le=100)
    """Further tries of a request that a server does not answer, or answers with a status of its
    own failure, after 0.5 s, 1 s, 2 s and so on. Then the run ends."""

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            _check_url(url)
        plain = tuple(url.rstrip("/") for url in urls)
        if len(set(plain)) < len(plain):
            raise ValueError(f"must be different servers, got {list(plain)}")
        return plain

    @model_validator(mode="after")
    def _check_temperature(self) -> Self:
        if self.temperature != 1 and not self.processed_logprobs:
            raise ValueError(
                f"`temperature: {self.temperature:g}` needs log-probabilities that were taken after"
                " temperature, and servers take them before it unless they are told otherwise;"
                " start vLLM with `--logprobs-mode processed_logprobs` and give"
                " `processed_logprobs: true`, or sample at temperature 1"
            )
        if self.temperature == 1 and self.processed_logprobs:
            raise ValueError(
                "`processed_logprobs: true` has no effect at `temperature: 1`, where both are the"
                " same; leave it out"
            )
        return self


def _check_url(url: str) -> None:
    """Refuses what is not `http[s]://HOST[:PORT]`."""
    try:
        parts = urlsplit(url)
        is_valid = parts.hostname is not None and parts.port != 0
    except ValueError:
        is_valid = False
    is_plain = is_valid and parts.scheme in ("http", "https") and not parts.username
    if (
        not is_plain
        or parts.path.strip("/")
        or parts.query
        or parts.fragment
        or url.split() != [url]
    ):
        raise ValueError(
            "must be addresses of servers, such as `http://127.0.0.1:8000`, without a path or a"
            f" password, got {url!r}"
        )


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


RolloutsConfig = Annotated[
    SamplerRolloutsConfig | ServerRolloutsConfig | FileRolloutsConfig, Field(discriminator="type")
]


def check_server_rollouts(
    where: str, rollouts: ServerRolloutsConfig, losses: Mapping[str, AnyLossConfig]
) -> None:
    """Refuses losses that would take the documents of older weights for fresh ones.

    Args:
        where: a backtick and the key of the phase.
        rollouts: of the phase.
        losses: of the phase.

    Raises:
        ValueError: by the name of the loss and of the option.
    """
    if rollouts.ahead == 0:
        return
    for name, loss in losses.items():
        if not isinstance(loss, PolicyGradientLossConfig):
            continue
        problem, reads_sampler = None, "rollout_logprobs" in loss.required_columns()
        if loss.on_policy:
            problem = "`on_policy` must not be given, as the weights that sampled are one step old"
        elif loss.max_staleness is not None and loss.max_staleness < rollouts.ahead:
            problem = (
                f"`max_staleness` must be at least {rollouts.ahead}, or all documents are dropped"
                f" but those of the first step, got {loss.max_staleness}"
            )
        elif rollouts.old_logprobs == "recompute" and not reads_sampler:
            problem = (
                "`rollout_correction` must be given, or `rollouts.old_logprobs: sampler`, as"
                " nothing else accounts for the weights that sampled, which are one step old"
            )
        if problem is not None:
            raise ValueError(f"{where}` loss `{name}` with `rollouts.ahead: 1`: {problem}")
