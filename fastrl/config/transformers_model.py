"""The config of a model of Hugging Face transformers, and what it cannot be asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fastrl.config.base import Config, PathText
from fastrl.config.losses import HeadOptions

if TYPE_CHECKING:
    from fastrl.config.training import RunConfig

# What the model itself says of its logits; a tensor axis, which alone shards the vocabulary.
_SAID_BY_THE_MODEL = ("bias", "softcap", "logit_scale")
_LLAMAS = "use `type: pretrained`, which has it for Llama, Mistral, Qwen2 and Qwen3 folders"


class LoraConfig(Config):
    """Adapters of low rank, by the peft package.

        W + (alpha / rank) B A

    of which A and B are trained and W is not.
    """

    rank: int = Field(default=16, gt=0, le=2**16)
    """Rows of A, columns of B."""

    alpha: int = Field(default=32, gt=0, le=2**16)
    """Factor of the adapters, times 1 / rank."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that are left out in training; none in sampling and in the
    log-probabilities of an old or a reference policy."""

    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = (
        "all-linear"
    )
    """Names, or ends of names, of the layers that get adapters, such as `[q_proj, v_proj]`. By
    default all linear layers but the output layer."""


class TransformersModelConfig(Config):
    """Any causal language model that the transformers package loads from a folder."""

    type: Literal["transformers"] = "transformers"
    """Names the kind of model."""

    path: PathText
    """Folder with config.json, safetensors and tokenizer.json, relative to the current folder. None
    of its code is run."""

    head: HeadOptions = HeadOptions()
    """The language-model head: its losses and how it computes them. Bias, soft cap and scale of the
    logits are the model's own."""

    lora: LoraConfig | None = None
    """Adapters that are trained in place of the weights; none by default."""


def check_transformers_run(config: RunConfig, model: TransformersModelConfig) -> None:
    """Refuses what a run on a model of transformers has not.

    Raises:
        ValueError: by the name of the option, with what to use in its place.
    """
    parallel = config.parallel
    for name, does in (
        ("sequence_data", "splits documents over ranks"),
        ("tensor", "splits layers and vocabulary over ranks"),
        ("micro_sequences", "runs a packed sequence piece by piece"),
    ):
        if (size := getattr(parallel, name)) > 1:
            raise ValueError(
                f"`parallel.{name}` must be 1 with `model.type: transformers`, got {size}: it"
                f" {does}, and the model's own code computes whole documents on a rank; {_LLAMAS},"
                " or spread the run by `parallel.data` and `parallel.fully_sharded`"
            )
    for index, phase in enumerate(config.phases):
        if phase.type == "rl" and phase.share_prefixes:
            raise ValueError(
                f"`phases.{index}.share_prefixes` must be false with `model.type: transformers`,"
                f" whose attention knows whole documents alone; {_LLAMAS}"
            )
    defaults = HeadOptions()
    for name in _SAID_BY_THE_MODEL:
        if (value := getattr(model.head, name)) != getattr(defaults, name):
            raise ValueError(
                f"`model.head.{name}` must not be given with `model.type: transformers`, got"
                f" {value}: the model's own is measured when it is loaded; leave it out"
            )
    if not model.head.vocabulary_parallel:
        raise ValueError(
            "`model.head.vocabulary_parallel` must not be given with `model.type: transformers`,"
            " which has no tensor axis; leave it out"
        )
