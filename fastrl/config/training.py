"""The config of a training run: `RunConfig`, what `fastrl train` reads.

Model, losses, environment and phases have modules of their own.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fastrl.config.advantages import AdvantageConfig
from fastrl.config.base import Config, PathText
from fastrl.config.environment import (
    AnyEnvironmentConfig,
    CharacterTokenizerConfig,
    EvaluationConfig,
    SamplerConfig,
    TokenizerConfig,
)
from fastrl.config.losses import (
    AnyLossConfig,
    DistillationLossConfig,
    HeadOptions,
)
from fastrl.config.model import LlamaConfig
from fastrl.config.phases import AnyPhaseConfig, PhaseConfig, RLPhaseConfig
from fastrl.config.policy_losses import PolicyGradientLossConfig
from fastrl.config.rollouts import ServerRolloutsConfig, check_server_rollouts
from fastrl.config.transformers_model import TransformersModelConfig, check_transformers_run


class PretrainedLlamaConfig(Config):
    """A Llama from a folder in Hugging Face's format."""

    type: Literal["pretrained"] = "pretrained"
    """Names the kind of model."""

    path: PathText
    """Folder with config.json and safetensors, relative to the current folder."""

    head: HeadOptions = HeadOptions()
    """The language-model head: its losses and how it computes them."""


ModelConfig = Annotated[
    LlamaConfig | PretrainedLlamaConfig | TransformersModelConfig, Field(discriminator="type")
]

_OF_A_FOLDER = ("pretrained", "transformers")
"""Types of models that bring a tokenizer."""


class LoggingConfig(Config):
    """What a run writes beside its checkpoints."""

    samples_every: int = Field(default=25, gt=0)
    """Steps of an RL phase between sample completions, shown and written to samples.jsonl."""

    num_samples: int = Field(default=4, ge=0)
    """Number of sample completions each time."""

    tensorboard: bool = True
    """Whether TensorBoard events are written (needs the tensorboard package)."""

    report: bool = True
    """Whether report.png is drawn at the end (needs the matplotlib package)."""

    wandb: bool = False
    """Whether the metrics also go to Weights & Biases (needs the wandb package and its login)."""

    trackio: bool = False
    """Whether the metrics also go to trackio (needs the trackio package)."""

    project: str = "fastrl"
    """The project that `wandb` and `trackio` put the run into, under the name of its folder."""

    @model_validator(mode="after")
    def _check_project(self) -> Self:
        if self.project != "fastrl" and not (self.wandb or self.trackio):
            raise ValueError(
                "`project` has no effect without `wandb: true` or `trackio: true`; leave it out"
            )
        return self


class CheckpointConfig(Config):
    """Checkpoints; one is always written at the end of the run."""

    every: int | None = Field(default=None, gt=0)
    """Steps of a phase between checkpoints; none within phases by default."""

    keep: int = Field(default=2, gt=0)
    """Number of checkpoints that are kept, the most recent ones."""

    asynchronous: bool = True
    """Whether training goes on while a checkpoint is written, from a copy in the host's memory."""


ReshardAfter = Literal["forward", "backward", "update"]


class ParallelConfig(Config):
    """Sizes of the axes that a run is spread over; they multiply to the number of processes."""

    data: int = Field(default=1, gt=0, le=10**6)
    """Ranks with different documents."""

    sequence_data: int = Field(default=1, gt=0, le=10**6)
    """Ranks with pieces of the same packed sequence (context parallel)."""

    tensor: int = Field(default=1, gt=0, le=10**6)
    """Ranks with shards of the weights."""

    sequence_parallel: bool = False
    """Whether the tensor axis also splits the hidden states by tokens (Megatron)."""

    sequence_layout: Literal["contiguous", "zigzag"] = "zigzag"
    """Which slots of a packed sequence a sequence-data rank holds: one chunk, or two that even out
    the work of causal attention in long documents."""

    micro_sequences: int = Field(default=1, gt=0, le=10**6)
    """Pieces that a packed sequence is run in, one after the other: activation memory is that of a
    piece, for one more forward pass of the layers."""

    fully_sharded: bool = False
    """Whether parameters, gradients and optimizer states are sharded over the data and
    sequence-data axes together (FSDP2). Otherwise these axes hold replicas."""

    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of activations and of gathered weights, with `fully_sharded` (also on one process);
    parameters, sums of gradients and optimizer states keep the run's `dtype`. Default: `dtype`."""

    reshard_after: ReshardAfter = "forward"
    """When gathered weights are freed, with `fully_sharded`. `forward`: a layer's after its
    forward, and gathered again for its backward. `backward`: after its backward, so that they are
    gathered once a micro-batch, all of them for some time. `update`: once an update, for all of its
    micro-batches: a copy of the whole model in the compute dtype. The results are the same."""

    timeout: float | None = Field(default=None, ge=1, le=7 * 24 * 3600)
    """Seconds that a step, an evaluation or a checkpoint may take on several processes, before the
    process ends with the place where it waits: another may hang. Default: 1800."""

    @property
    def num_processes(self) -> int:
        """The product of the sizes."""
        return self.data * self.sequence_data * self.tensor

    @model_validator(mode="after")
    def _check_effect(self) -> Self:
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError(
                "`sequence_parallel` must be false with `tensor: 1`, where it has no effect"
            )
        if self.compute_dtype is not None and not self.fully_sharded:
            raise ValueError("`compute_dtype` must be given with `fully_sharded: true` only")
        if self.reshard_after != "forward" and not self.fully_sharded:
            raise ValueError(
                "`reshard_after` must be `forward` without `fully_sharded: true`, got"
                f" `{self.reshard_after}`: no weights are gathered"
            )
        if self.timeout is not None and self.num_processes == 1:
            raise ValueError(
                "`timeout` must be given for several processes only: one waits for no other"
            )
        return self


class RunConfig(Config):
    """A training run: a model, an environment, and phases that follow one another."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of weights, problems, their order and sampling. The same seed on the same machine gives
    the same run."""

    device: str = "auto"
    """`cpu`, `cuda` or `cuda:N`. `auto`: the GPU if there is one."""

    dtype: Literal["float32", "float64"] = "float32"
    """Dtype of parameters, activations and optimizer states."""

    compile: bool = False
    """Whether the decoder layers run under torch.compile: less memory and time on a GPU, after a
    minute of compilation. It needs a C++ compiler."""

    num_threads: int | None = Field(default=None, gt=0, le=4096)
    """CPU threads of torch; default: torch's choice."""

    model: ModelConfig = LlamaConfig()
    """The model."""

    tokenizer: TokenizerConfig = CharacterTokenizerConfig()
    """From text to tokens. `character` is for a model of `type: llama`, which learns its alphabet;
    the default for a model from a folder is `pretrained`, the tokenizer of that folder."""

    environment: AnyEnvironmentConfig | None = None
    """Problems and rewards. Only runs on rollout files can do without; they have no held-out
    reward then."""

    sampler: SamplerConfig = SamplerConfig()
    """The sampler."""

    evaluation: EvaluationConfig = EvaluationConfig()
    """Scoring on held-out prompts."""

    phases: tuple[AnyPhaseConfig, ...] = Field(min_length=1)
    """What the run does, in order."""

    logging: LoggingConfig = LoggingConfig()
    """What the run writes."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written."""

    parallel: ParallelConfig = ParallelConfig()
    """How the run is spread over processes."""

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        if re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,2})?", device) is None:
            raise PydanticCustomError(
                "device",
                "must be `auto`, `cpu`, `cuda` or `cuda:N`, got {found}",
                {"found": repr(device)},
            )
        return device

    @model_validator(mode="before")
    @classmethod
    def _take_the_folders_tokenizer(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "tokenizer" in values:
            return values
        model = values.get("model")
        kind = model.get("type") if isinstance(model, dict) else getattr(model, "type", None)
        return values | {"tokenizer": {"type": "pretrained"}} if kind in _OF_A_FOLDER else values

    @model_validator(mode="after")
    def _check_tokenizer(self) -> Self:
        model, tokenizer = self.model.type, self.tokenizer.type
        if model in _OF_A_FOLDER and tokenizer == "character":
            raise ValueError(
                f"`tokenizer.type: character` must not be given with `model.type: {model}`, whose"
                " ids are another tokenizer's; leave `tokenizer` out to take the folder's own"
            )
        if (model, tokenizer) == ("llama", "pretrained"):
            raise ValueError(
                "`tokenizer.type: pretrained` must be given with `model.type: pretrained` or"
                " `transformers` only, as a new model has no folder; use `file` or `character`"
            )
        return self

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if isinstance(self.model, TransformersModelConfig):
            check_transformers_run(self, self.model)
        return self

    def losses_of(self, phase: PhaseConfig) -> dict[str, AnyLossConfig]:
        """The losses of a phase: its own, or the model's."""
        return self.model.head.losses if phase.losses is None else phase.losses

    def required_columns(self, phase: PhaseConfig) -> frozenset[str]:
        """The optional columns of `BatchKwargs` that the losses of a phase and the head need."""
        losses = self.losses_of(phase).values()
        columns = frozenset[str]().union(*(loss.required_columns() for loss in losses))
        if isinstance(phase, RLPhaseConfig) and phase.advantage.kl_in_reward is not None:
            columns |= {"ref_logprobs"}
        keep = self.model.head.keep
        return columns | {"kept_tokens"} if keep is not None and keep.recorded else columns

    def phase_name(self, index: int) -> str:
        """The name of a phase: its own, or its type, with a number where several have that type."""
        phase = self.phases[index]
        same_type = [number for number, other in enumerate(self.phases) if other.type == phase.type]
        suffix = f"{same_type.index(index) + 1}" if len(same_type) > 1 else ""
        return phase.name or f"{phase.type}{suffix}"

    @model_validator(mode="after")
    def _check_phases(self) -> Self:
        for index, phase in enumerate(self.phases):
            losses = self.losses_of(phase)
            where = f"`phases.{index}`"
            if not losses:
                raise ValueError(
                    f"{where} has no losses: set `phases.{index}.losses` or `model.head.losses`"
                )
            columns = self.required_columns(phase)
            from_files = phase.type == "rl" and phase.rollouts.type == "files"
            if phase.type == "supervised" and "advantages" in columns:
                raise ValueError(
                    f"{where} is supervised and has no advantages, so `phases.{index}.losses` must"
                    f" have no policy-gradient loss, got {_listed(losses)}; `cross_entropy` is one"
                )
            if phase.type == "supervised" and "kept_tokens" in columns:
                raise ValueError(
                    f"{where} is supervised and has no `kept_tokens`, so `model.head.keep.recorded`"
                    " must not be given; it is for `rollouts` of type `files`"
                )
            learns = any(_learns_from_rollouts(loss, from_files) for loss in losses.values())
            if phase.type == "rl" and not learns:
                raise ValueError(
                    f"{where} must have a policy-gradient loss such as `grpo` or `gspo` in"
                    f" `phases.{index}.losses`, got {_listed(losses)}; with `rollouts` of type"
                    " `files` a `distillation` that is `recorded` does as well"
                )
            self.model.head.check_losses(losses)
            for name, loss in losses.items():
                source = phase.rollouts.type if phase.type == "rl" else phase.type
                _check_loss(f"`phases.{index}` loss `{name}`", loss, source, self.model.head)
            if phase.type == "rl" and not from_files and self.model.head.keep is not None:
                raise ValueError(
                    f"{where} samples from the whole vocabulary, so `model.head.keep` must not be"
                    " given; it is for `rollouts` of type `files` whose sampler kept a part"
                )
            if phase.type == "rl":
                self._check_rl_phase(index, phase, losses)
            if self.environment is None and not from_files:
                raise ValueError(f"{where} needs an `environment`, which gives its problems")
        names = [self.phase_name(index) for index in range(len(self.phases))]
        if len(set(names)) < len(names):
            raise ValueError(f"`phases` must have different names, got {names}")
        return self

    def _check_rl_phase(
        self, index: int, phase: RLPhaseConfig, losses: dict[str, AnyLossConfig]
    ) -> None:
        columns = self.required_columns(phase)
        from_files = phase.rollouts.type == "files"
        max_new_tokens = None if from_files else self.sampler.max_new_tokens
        _check_advantage(f"`phases.{index}.advantage", phase.advantage, max_new_tokens)
        if "advantages" not in columns:
            _check_no_advantage(f"`phases.{index}.advantage", phase.advantage, from_files)
        _check_on_policy(index, phase, losses)
        _check_proximal(index, phase, losses)
        if phase.reference is not None and (from_files or "ref_logprobs" not in columns):
            raise ValueError(
                f"`phases.{index}.reference` has no effect: it is for `rollouts` of type `sampler`"
                " or `server`, and `kl`, `kl_in_reward` or distillation; leave it out"
            )
        if isinstance(phase.rollouts, ServerRolloutsConfig):
            check_server_rollouts(f"`phases.{index}", phase.rollouts, losses)
            if isinstance(self.model, TransformersModelConfig) and self.model.lora:
                raise ValueError(
                    f"`phases.{index}`: `rollouts` of type `server` must not go with `model.lora`,"
                    " as servers are given whole weights; use the type `sampler`"
                )
        if phase.share_prefixes:
            _check_shared_prefixes(index, self.parallel)


def _learns_from_rollouts(loss: AnyLossConfig, from_files: bool) -> bool:
    """Whether a loss is one for an `rl` phase, with documents from files or from the sampler."""
    if isinstance(loss, PolicyGradientLossConfig) or "advantages" in loss.required_columns():
        return True
    return from_files and "teacher_tokens" in loss.required_columns()


def _check_advantage(where: str, advantage: AdvantageConfig, max_new_tokens: int | None) -> None:
    """Refuses what does not fit the source of rollouts; `max_new_tokens` is None for files."""
    if max_new_tokens is None and advantage.truncated == "drop":
        raise ValueError(
            f"{where}.truncated` must be `keep` with `rollouts` of type `files`, which do not say "
            "whether a completion had ended; leave such documents out of the files"
        )
    if advantage.shaping is not None:
        try:
            advantage.shaping.resolved(max_new_tokens)
        except ValueError as error:
            raise ValueError(f"{where}.shaping`: {error}") from error


def _check_no_advantage(where: str, advantage: AdvantageConfig, from_files: bool) -> None:
    """Refuses what has no effect where no loss reads advantages."""
    # These leave sampled documents out, whatever the losses read.
    used = () if from_files else ("zero_variance", "truncated")
    for name in AdvantageConfig.model_fields:
        value, default = getattr(advantage, name), getattr(AdvantageConfig(), name)
        if name not in used and value != default:
            raise ValueError(
                f"{where}.{name}` has no effect, as no loss of the phase reads advantages; leave it"
                " out"
            )


def _check_on_policy(index: int, phase: RLPhaseConfig, losses: dict[str, AnyLossConfig]) -> None:
    """Refuses to take a policy that has moved since it sampled for the one that did."""
    on_policy = [
        name
        for name, loss in losses.items()
        if isinstance(loss, PolicyGradientLossConfig) and loss.on_policy
    ]
    if not on_policy or phase.rollouts.type == "files":
        return
    if phase.mini_batches * phase.epochs > 1:
        raise ValueError(
            f"`phases.{index}` loss `{on_policy[0]}`: `on_policy` must go with one update a step,"
            f" got `mini_batches: {phase.mini_batches}` and `epochs: {phase.epochs}`: from the"
            " second on, the policy is not the one that sampled; leave `on_policy` out"
        )
    reads_old = any("old_logprobs" in loss.required_columns() for loss in losses.values())
    if phase.rollouts.old_logprobs == "sampler" and not reads_old:
        raise ValueError(
            f"`phases.{index}.rollouts.old_logprobs: sampler` has no effect with `on_policy` of the"
            f" losses {on_policy}, which do not read it; leave one of the two out"
        )


def _check_proximal(index: int, phase: RLPhaseConfig, losses: dict[str, AnyLossConfig]) -> None:
    """Refuses a stand-in for log-probabilities that the trainer has without another pass."""
    for name, loss in losses.items():
        is_given = isinstance(loss, PolicyGradientLossConfig) and loss.proximal is not None
        if is_given and phase.rollouts.type == "sampler":
            raise ValueError(
                f"`phases.{index}` loss `{name}`: `proximal` must go with `rollouts` of type"
                " `files` or `server`: of what it samples itself, the trainer has the old"
                " log-probabilities from the first update; leave it out"
            )


def _check_shared_prefixes(index: int, parallel: ParallelConfig) -> None:
    """Refuses attention over shared prefixes where there is none."""
    where = f"`phases.{index}.share_prefixes`"
    for name in ("sequence_data", "micro_sequences"):
        if (size := getattr(parallel, name)) > 1:
            raise ValueError(
                f"{where} must go with `parallel.{name}: 1`, got {size}: of a sequence that is"
                " split, attention takes one interval of keys for a token, and with shared"
                " prefixes it is several; use `parallel.data` and `parallel.tensor`"
            )


_OF_ROLLOUTS = frozenset(
    {"advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs", "group_label_counts"}
)
_COLUMNS: dict[str, frozenset[str]] = {
    "supervised": frozenset(),
    "sampler": _OF_ROLLOUTS,
    "server": _OF_ROLLOUTS | {"model_version"},
    "files": _OF_ROLLOUTS | {"rl_weights", "ce_weights", "distill_weights", "teacher_tokens"},
}
"""Optional columns of the batches of a phase, by where its documents come from. No `group_index`:
the members of a group may be in different micro-batches."""


def _check_loss(where: str, loss: AnyLossConfig, source: str, head: HeadOptions) -> None:
    """Refuses losses and options that the trainer has no data for."""
    if isinstance(loss, PolicyGradientLossConfig):
        if loss.max_staleness is not None and source != "server":
            raise ValueError(
                f"{where}: `max_staleness` has no effect but with `rollouts` of type `server`, as"
                " the trainer waits for others in each step; leave it out"
            )
        for name in ("entropy", "kl"):
            option = getattr(loss, name)
            if option is not None and option.adaptive is not None and not head.metrics:
                raise ValueError(f"{where}: `{name}.adaptive` needs `model.head.metrics: true`")
    missing = sorted(loss.required_columns() - _COLUMNS[source])
    has_live_teacher = isinstance(loss, DistillationLossConfig) and not loss.recorded
    if missing or has_live_teacher:
        needs = f", which needs {', '.join(f'`{name}`' for name in missing)}," if missing else ""
        phase = "supervised" if source == "supervised" else f"rl` with `rollouts` of type `{source}"
        in_files = not has_live_teacher and set(missing) <= _COLUMNS["files"]
        remedy = "; `rollouts` of type `files` can have it" if in_files else ""
        raise ValueError(
            f"{where}: the trainer makes no batches for `type: {loss.type}`{needs} in a phase of"
            f" type `{phase}`{remedy}; use the head in a trainer of your own"
        )


def _listed(losses: dict[str, AnyLossConfig]) -> str:
    return ", ".join(f"`{name}: {{type: {loss.type}}}`" for name, loss in losses.items())
