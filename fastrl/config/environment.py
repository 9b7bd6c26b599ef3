"""Configs of what a model reads and what it is scored on: tokenizer, environment, sampler."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from fastrl.config.base import Config, PathText

QUESTION = "{question}"

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-3, 1e3
"""Beyond them logits overflow, or all tokens are equally likely in fp32."""


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

    path: PathText
    """A tokenizer.json, relative to the current folder."""

    end_token: str
    """The token that ends a text, such as `<|end_of_text|>`; it must be in the file."""


class PretrainedTokenizerConfig(Config):
    """The tokenizer of the model's folder."""

    type: Literal["pretrained"] = "pretrained"
    """Names the kind of tokenizer."""

    end_tokens: tuple[str, ...] | None = Field(default=None, min_length=1)
    """The tokens that end a text, such as `[<|im_end|>, <|endoftext|>]`: sampling stops at any of
    them, and the first one is written after an answer. Default: those that the folder names, the
    `eos_token` of tokenizer_config.json (or special_tokens_map.json) first, then the `eos_token_id`
    of generation_config.json (or config.json)."""


TokenizerConfig = Annotated[
    CharacterTokenizerConfig | FileTokenizerConfig | PretrainedTokenizerConfig,
    Field(discriminator="type"),
]


class ScoringLimitsConfig(Config):
    """What the scoring of a completion may take; beyond it counts as no answer."""

    seconds: float = Field(default=5.0, ge=0.01, le=3600)
    """Most time for one completion."""

    memory_gib: float = Field(default=2.0, ge=0.25, le=4096)
    """Most memory of a worker (its address space, on Linux), with what it imports."""


class EnvironmentConfig(Config):
    """What every environment shares: how many problems are taken, and how they are scored."""

    train_prompts: int = Field(default=8192, gt=0, le=10**7)
    """Problems drawn for training. Those whose prompt is among the held-out ones (see `disjoint`),
    or comes a second time, are left out."""

    heldout_prompts: int = Field(default=512, gt=0, le=10**6)
    """Different prompts to be drawn for evaluation, which training never sees."""

    disjoint: Literal["prompts", "answers", "answer_characters"] = "prompts"
    """What no training problem shares with a held-out one. `answers`: nor its reference answer;
    `answer_characters`: nor the characters of its answer in any order, for tasks whose problems
    have several answers, such as palindromes of the same letters. Such training problems are left
    out."""

    workers: int = Field(default=2, gt=0, le=1024)
    """Processes that score completions, at most, beside each process of the run. They start when
    there is work for them."""

    limits: ScoringLimitsConfig = ScoringLimitsConfig()
    """Of each worker. One that is beyond them is killed and replaced."""

    @property
    def has_fence(self) -> bool:
        """Whether workers can write no files, start no processes and reach no network."""
        return True


class ReasoningGymConfig(EnvironmentConfig):
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

    @property
    def label(self) -> str:
        """What messages call the environment."""
        return self.task

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


class PythonEnvironmentConfig(EnvironmentConfig):
    """Problems and rewards of a class of one's own; docs/adding_an_environment.md."""

    type: Literal["python"] = "python"
    """Names the kind of environment."""

    path: str
    """The class: `FILE.py:CLASS`, relative to the current folder, or `PACKAGE.MODULE:CLASS`. Its
    code runs with all rights of the user."""

    config: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class beside `seed`."""

    fence: bool = True
    """Whether `score` can write no files, start no processes and reach no network, and sees no
    environment variables. False is for a class that needs them, such as one that asks a server, and
    does not evaluate a completion's text itself."""

    @property
    def has_fence(self) -> bool:
        """Whether workers can write no files, start no processes and reach no network."""
        return self.fence

    @property
    def label(self) -> str:
        """What messages call the environment."""
        return self.path

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        if not re.fullmatch(r"(.*\.py|\w+(\.\w+)*):\w+", path):
            raise ValueError(f"must read `FILE.py:CLASS` or `PACKAGE.MODULE:CLASS`, got {path!r}")
        return path

    @field_validator("config")
    @classmethod
    def _check_config(cls, config: dict[str, Any]) -> dict[str, Any]:
        if "seed" in config:
            raise ValueError("must not have ['seed'], which follows from the run's `seed`")
        return config


def _with_type(values: Any) -> Any:
    """`reasoning_gym` where a section names no type but a task."""
    if isinstance(values, dict) and "type" not in values and "task" in values:
        return {"type": "reasoning_gym"} | values
    return values


AnyEnvironmentConfig = Annotated[
    ReasoningGymConfig | PythonEnvironmentConfig,
    Field(discriminator="type"),
    BeforeValidator(_with_type),
]


class SamplerConfig(Config):
    """The built-in sampler, for rollouts, evaluation and `fastrl sample`."""

    max_new_tokens: int = Field(default=64, gt=0, le=2**24)
    """Longest completion, its end token included, of servers too. One that has not ended by then
    counts as no answer."""

    max_batch_size: int = Field(default=1024, gt=0, le=2**24)
    """Most completions that are sampled at a time; bounds the key-value cache."""


class EvaluationConfig(Config):
    """Scoring on the held-out prompts, before each phase, after the last and by `fastrl eval`."""

    temperature: float = Field(default=1.0, ge=0, le=HIGHEST_TEMPERATURE)
    """Temperature of sampling; 0 takes the most likely token each time (greedy)."""

    samples_per_prompt: int = Field(default=1, gt=0, le=10**6)
    """Completions of each held-out prompt; the reward is the mean over all."""

    every: int | None = Field(default=None, gt=0)
    """Steps of a phase between evaluations; none within phases by default."""

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, temperature: float) -> float:
        if 0 < temperature < LOWEST_TEMPERATURE:
            raise PydanticCustomError(
                "temperature",
                "must be 0 (greedy) or at least {least}, got {found}",
                {"least": LOWEST_TEMPERATURE, "found": temperature},
            )
        return temperature
