"""The config of a training run: `RunConfig`, what `fastrl train` reads.

The model's architecture and the losses have modules of their own.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from fastrl.config.base import Config
from fastrl.config.losses import (
    AnyLossConfig,
    CrossEntropyLossConfig,
    HeadOptions,
    ZLossConfig,
)
from fastrl.config.model import LlamaConfig
from fastrl.config.policy_losses import PolicyGradientLossConfig

QUESTION = "{question}"


class PretrainedLlamaConfig(Config):
    """A Llama from a folder in Hugging Face's format."""

    type: Literal["pretrained"] = "pretrained"
    """Names the kind of model."""

    path: str
    """Folder with config.json and safetensors, relative to the current folder."""

    head: HeadOptions = HeadOptions()
    """The language-model head: its losses and how it computes them."""


ModelConfig = Annotated[LlamaConfig | PretrainedLlamaConfig, Field(discriminator="type")]


class CharacterTokenizerConfig(Config):
    """One token a character, and one more that ends a text."""

    type: Literal["character"] = "character"
    """Names the kind of tokenizer."""

    characters: str = "\n" + "".join(chr(code) for code in range(32, 127))
    """The alphabet, each character once. Default: printable ASCII and the line feed. The end of a
    text is token 0, the first character token 1."""

    @field_validator("characters")
    @classmethod
    def _check_characters(cls, characters: str) -> str:
        if not characters or len(set(characters)) < len(characters):
            double = sorted({char for char in characters if characters.count(char) > 1})
            raise ValueError(f"must hold each character once and at least one, repeated: {double}")
        return characters


class FileTokenizerConfig(Config):
    """A tokenizer file of Hugging Face's `tokenizers` package."""

    type: Literal["file"] = "file"
    """Names the kind of tokenizer."""

    path: str
    """A tokenizer.json, relative to the current folder."""

    end_token: str
    """The token that ends a text, such as `<|end_of_text|>`; it must be in the file."""


TokenizerConfig = Annotated[
    CharacterTokenizerConfig | FileTokenizerConfig, Field(discriminator="type")
]


class ReasoningGymConfig(Config):
    """Problems and verifier of a task of the reasoning-gym package."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    """Names the kind of environment."""

    task: str
    """Name of the task, such as `chain_sum`."""

    config: dict[str, Any] = Field(default_factory=dict)
    """Options of the task, such as `max_digits: 2`; what reasoning-gym documents for it, without
    `seed` and `size`."""

    question_pattern: str | None = None
    """Regular expression that is searched for in the task's question; its first group becomes the
    question. For small models, which need not read the same sentence before each problem. Default:
    the whole question."""

    prompt: str = QUESTION
    """The prompt; `{question}` stands for the question. Default: the question alone."""

    train_prompts: int = Field(default=8192, gt=0)
    """Problems drawn for training. Those whose prompt is among the held-out ones, or comes a second
    time, are left out."""

    heldout_prompts: int = Field(default=512, gt=0)
    """Different prompts to be drawn for evaluation, which training never sees."""

    @field_validator("config")
    @classmethod
    def _check_config(cls, config: dict[str, Any]) -> dict[str, Any]:
        taken = sorted({"seed", "size"} & config.keys())
        if taken:
            raise ValueError(
                f"must not have {taken}, which follow from the run's `seed` and from"
                " `train_prompts` and `heldout_prompts`"
            )
        return config

    @field_validator("question_pattern")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        if pattern is None:
            return None
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"must be a regular expression: {error}") from error
        if groups == 0:
            raise ValueError("must have a group (in parentheses), which becomes the question")
        return pattern

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: str) -> str:
        if QUESTION not in prompt:
            raise ValueError(f"must contain `{QUESTION}`")
        return prompt


class SamplerConfig(Config):
    """The built-in sampler, for rollouts, evaluation and `fastrl sample`."""

    max_new_tokens: int = Field(default=64, gt=0)
    """Longest completion, its end token included. A completion that has not ended by then counts as
    no answer."""

    max_batch_size: int = Field(default=1024, gt=0)
    """Most completions that are sampled at a time; bounds the key-value cache."""


class EvaluationConfig(Config):
    """Scoring on the held-out prompts, before each phase, after the last and by `fastrl eval`."""

    temperature: float = Field(default=1.0, ge=0)
    """Of sampling; 0 takes the most likely token each time (greedy)."""

    samples_per_prompt: int = Field(default=1, gt=0)
    """Completions of each held-out prompt; the reward is the mean over all."""

    every: int | None = Field(default=None, gt=0)
    """Steps of a phase between evaluations; none within phases by default."""


class OptimizerConfig(Config):
    """AdamW with a learning-rate schedule; every phase starts a new one."""

    learning_rate: float = Field(default=1e-3, gt=0)
    """After the warm-up."""

    warmup_updates: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises linearly: update i of n takes i / n of it."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up, over the updates of the phase."""

    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the learning rate that `linear` and `cosine` end at."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.95,
    )
    """Decay of the means of the gradient and of its square."""

    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the mean square."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay of the weight matrices; norms and biases have none."""

    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm over all parameters; null: never."""


class PhaseConfig(Config):
    """What every phase of a run shares."""

    name: str | None = None
    """In the display and in file names. Default: the phase's type."""

    steps: int = Field(gt=0)
    """Number of steps."""

    losses: dict[str, AnyLossConfig] | None = None
    """The losses by name. Default: `model.head.losses`."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer of this phase."""

    max_tokens_per_micro_batch: int = Field(default=8192, gt=0)
    """Most tokens of a forward and backward pass. The gradients of an update are summed over its
    micro-batches and do not depend on this number. No document may be longer."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
            raise ValueError(
                "must begin with a letter, a digit or `_` and go on with these, `.` and `-`, as "
                f"folders are named after it; got {name!r}"
            )
        return name


class SupervisedPhaseConfig(PhaseConfig):
    """Training on the answers that the environment gives for its training prompts."""

    type: Literal["supervised"] = "supervised"
    """Names the kind of phase."""

    documents_per_step: int = Field(default=128, gt=0)
    """Prompts with their answers, for one update a step."""


class SamplerRolloutsConfig(Config):
    """Rollouts sampled from the model that is trained, on the environment's training prompts."""

    type: Literal["sampler"] = "sampler"
    """Names the source."""

    prompts_per_step: int = Field(default=32, gt=0)
    """Different prompts in a step."""

    group_size: int = Field(default=16, gt=1)
    """Completions of each prompt; their rewards are compared with one another."""

    temperature: float = Field(default=1.0, gt=0)
    """Of sampling and of the log-probabilities in the loss."""

    old_logprobs: Literal["recompute", "sampler"] = "recompute"
    """Denominator of the ratio. `recompute`: the head's, in a pass of its own before the updates of
    a step, so that the first ratio is 1 whatever the sampler's rounding. `sampler`: as sampled."""


class FileRolloutsConfig(Config):
    """Rollouts from files, which some other model may have sampled (offline)."""

    type: Literal["files"] = "files"
    """Names the source."""

    paths: tuple[str, ...] = Field(min_length=1)
    """JSONL and Parquet files, relative to the current folder. All are read when the run begins."""

    documents_per_step: int = Field(default=128, gt=0)
    """Documents of a step. Groups stay whole, so a step takes groups until it has at least so many.
    All groups come, in random order, before any comes again."""

    ignore: tuple[str, ...] = ()
    """Columns beside those of docs/data.md that the files may have and nothing reads."""

    reward_columns: dict[str, float] = Field(default_factory=dict)
    """Name and weight of columns whose weighted sum is the reward, instead of `reward`."""


RolloutsConfig = Annotated[SamplerRolloutsConfig | FileRolloutsConfig, Field(discriminator="type")]


class AdvantageConfig(Config):
    """From rewards to advantages, among the completions of one prompt.

    Documents of rollout files that carry advantages of their own keep them.
    """

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What is subtracted from a reward: the group's mean, or that of its other members."""

    scale: Literal["none", "group", "batch"] = "group"
    """Divisor: the standard deviation of the group's rewards, of the step's, or none."""

    zero_variance: Literal["keep", "drop"] = "keep"
    """Groups of equal rewards teach nothing. `keep` counts their tokens in what the loss is divided
    by, `drop` leaves them out of the step."""


class RLPhaseConfig(PhaseConfig):
    """Training on rewards. A step takes rollouts and makes `epochs` * `mini_batches` updates."""

    type: Literal["rl"] = "rl"
    """Names the kind of phase."""

    rollouts: RolloutsConfig = SamplerRolloutsConfig()
    """Where completions come from."""

    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages."""

    mini_batches: int = Field(default=1, gt=0)
    """Parts that a step's rollouts are split into, one update each. After the first update the
    model differs from the one that sampled, and the ratio from 1."""

    epochs: int = Field(default=1, gt=0)
    """Times that a step's rollouts are used."""


AnyPhaseConfig = Annotated[SupervisedPhaseConfig | RLPhaseConfig, Field(discriminator="type")]


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


class CheckpointConfig(Config):
    """Checkpoints; there is always one of the end of the run."""

    every: int | None = Field(default=None, gt=0)
    """Steps of a phase between checkpoints; none within phases by default."""

    keep: int = Field(default=2, gt=0)
    """Number of checkpoints that are kept, the latest ones."""


class ParallelConfig(Config):
    """Sizes of the axes that a run is spread over; they multiply to the number of processes."""

    data: int = Field(default=1, gt=0)
    """Ranks with different documents."""

    sequence_data: int = Field(default=1, gt=0)
    """Ranks with pieces of the same packed sequence (context parallel)."""

    tensor: int = Field(default=1, gt=0)
    """Ranks with shards of the weights."""

    sequence_parallel: bool = False
    """Whether the tensor axis also splits the hidden states by tokens (Megatron)."""

    sequence_layout: Literal["contiguous", "zigzag"] = "zigzag"
    """Which slots of a packed sequence a sequence-data rank holds: one chunk, or two that even out
    the work of causal attention in long documents."""

    micro_sequences: int = Field(default=1, gt=0)
    """Pieces that a packed sequence is run in, one after the other: activation memory is that of a
    piece, for one more forward pass of the layers."""

    fully_sharded: bool = False
    """Whether parameters, gradients and optimizer states are sharded over the data and
    sequence-data axes together (FSDP2). Otherwise these axes hold replicas."""

    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Of activations and of gathered weights, with `fully_sharded` (also on one process);
    parameters, sums of gradients and optimizer states keep the run's `dtype`. Default: `dtype`."""

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
        return self


class RunConfig(Config):
    """A training run: a model, an environment, and phases that follow one another."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of weights, problems, their order and sampling. The same seed on the same machine gives the
    same run."""

    device: str = "auto"
    """`cpu`, `cuda` or `cuda:N`. `auto`: the GPU if there is one."""

    dtype: Literal["float32", "float64"] = "float32"
    """Of parameters, activations and optimizer states."""

    num_threads: int | None = Field(default=None, gt=0)
    """CPU threads of torch; default: torch's choice."""

    model: ModelConfig = LlamaConfig()
    """The model."""

    tokenizer: TokenizerConfig = CharacterTokenizerConfig()
    """From text to tokens."""

    environment: ReasoningGymConfig | None = None
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

    def losses_of(self, phase: PhaseConfig) -> dict[str, AnyLossConfig]:
        """Returns the losses of a phase: its own, or the model's."""
        return self.model.head.losses if phase.losses is None else phase.losses

    def phase_name(self, index: int) -> str:
        """Returns the name of a phase: its own, or its type, with its number where not alone."""
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
            is_policy = [isinstance(loss, PolicyGradientLossConfig) for loss in losses.values()]
            if phase.type == "supervised" and any(is_policy):
                raise ValueError(
                    f"{where} is supervised and has no advantages, so `phases.{index}.losses` must"
                    f" have no policy-gradient loss, got {_listed(losses)}; `cross_entropy` is one"
                )
            if phase.type == "rl" and not any(is_policy):
                raise ValueError(
                    f"{where} must have a policy-gradient loss such as `grpo` or `gspo` in"
                    f" `phases.{index}.losses`, got {_listed(losses)}"
                )
            self.model.head.check_losses(losses)
            for name, loss in losses.items():
                _check_loss(f"`phases.{index}` loss `{name}`", loss, self.model.head)
            from_files = phase.type == "rl" and phase.rollouts.type == "files"
            if phase.type == "rl" and not from_files and self.model.head.keep is not None:
                raise ValueError(
                    f"{where} samples from the whole vocabulary, so `model.head.keep` must not be"
                    " given; it is for `rollouts` of type `files` whose sampler kept a part"
                )
            if self.environment is None and not from_files:
                raise ValueError(f"{where} needs an `environment`, which gives its problems")
        names = [self.phase_name(index) for index in range(len(self.phases))]
        if len(set(names)) < len(names):
            raise ValueError(f"`phases` must have different names, got {names}")
        return self


def _check_loss(where: str, loss: AnyLossConfig, head: HeadOptions) -> None:
    """Refuses losses and options that the trainer has no data for."""
    trained = (CrossEntropyLossConfig, ZLossConfig, PolicyGradientLossConfig)
    if not isinstance(loss, trained):
        raise ValueError(
            f"{where}: the trainer makes no batches for `type: {loss.type}`; use the head in a "
            "trainer of your own"
        )
    if not isinstance(loss, PolicyGradientLossConfig):
        return
    if loss.max_staleness is not None:
        raise ValueError(
            f"{where}: `max_staleness` has no effect, as the trainer waits for the rollouts of each"
            " step; leave it out"
        )
    is_adaptive = loss.entropy is not None and loss.entropy.adaptive is not None
    if is_adaptive and not head.metrics:
        raise ValueError(f"{where}: `entropy.adaptive` needs `model.head.metrics: true`")


def _listed(losses: dict[str, AnyLossConfig]) -> str:
    return ", ".join(f"`{name}: {{type: {loss.type}}}`" for name, loss in losses.items())
