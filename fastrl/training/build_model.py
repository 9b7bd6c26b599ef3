"""The model of a run, as its config says: a Llama, or one of transformers."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

from fastrl.config.base import UserError
from fastrl.config.model import LlamaConfig
from fastrl.config.training import RunConfig
from fastrl.config.transformers_model import TransformersModelConfig
from fastrl.models.checkpoint import load_weights, read_llama_config
from fastrl.models.llama import Llama
from fastrl.training.llama_model import LlamaDecoder, LlamaModel
from fastrl.training.model import Decoder, FrozenPolicy, TrainedModel
from fastrl.training.processes import Processes, empty_llama, load_full_weights
from fastrl.training.tokenizer import Tokenizer


def model_folder(config: RunConfig, checkpoint: Path | None) -> Path | None:
    """The folder of weights and tokenizer; None for a new model."""
    if checkpoint is not None or isinstance(config.model, LlamaConfig):
        return checkpoint
    return Path(config.model.path)


def build_model(
    config: RunConfig,
    tokenizer: Tokenizer,
    processes: Processes,
    checkpoint: Path | None,
    *,
    with_weights: bool,
) -> tuple[TrainedModel, Decoder]:
    """The model as the trainer and as the sampler call it.

    Args:
        config: of the run.
        tokenizer: whose ids the model must have.
        processes: that share it.
        checkpoint: folder of its weights, in place of the config's.
        with_weights: as in `build_context`.

    Raises:
        UserError: the model cannot be made, or not for this run.
    """
    if isinstance(config.model, TransformersModelConfig):
        return _build_transformers(config, config.model, tokenizer, processes, checkpoint)
    folder = model_folder(config, checkpoint)
    llama_config = _llama_config(config, tokenizer, folder)
    if with_weights:
        llama = _build_llama(config, llama_config, processes, folder)
    else:
        llama = Llama(llama_config, device="meta")
    return LlamaModel(llama, processes), LlamaDecoder(llama, processes)


def build_reference(
    config: RunConfig, folder: Path, vocab_size: int, processes: Processes
) -> FrozenPolicy:
    """The frozen model of a folder, of the kind of the run's model and sharded like it.

    Args:
        config: of the run.
        folder: of the model.
        vocab_size: of the run's model, which the reference must have.
        processes: that share it.

    Raises:
        UserError: the model cannot be made, or has another vocabulary.
    """
    if isinstance(config.model, TransformersModelConfig):
        from fastrl.integrations.transformers.trained import Build, TransformersModel

        of_folder = config.model.model_copy(update={"path": str(folder), "lora": None})
        build = Build(of_folder, getattr(torch, config.dtype), samples=False)
        model = TransformersModel(build, processes)
        _check_same_vocabulary(folder, model.limits.vocab_size, vocab_size)
        return model.frozen()
    llama_config = read_reference_config(config, folder, vocab_size)
    llama = empty_llama(llama_config, processes, getattr(torch, config.dtype))
    load_weights(llama, folder)
    return LlamaModel(llama.requires_grad_(False).eval(), processes)


def read_reference_config(config: RunConfig, folder: Path, vocab_size: int) -> LlamaConfig:
    """The sizes of a reference that is a Llama; raises as `build_reference`."""
    llama_config = read_llama_config(folder, head=config.model.head)
    assert llama_config.vocab_size is not None
    _check_same_vocabulary(folder, llama_config.vocab_size, vocab_size)
    return llama_config


def _check_same_vocabulary(folder: Path, got: int, required: int) -> None:
    if got != required:
        raise UserError(
            f"{folder}: `vocab_size` of a reference must be the model's {required}, got {got}"
        )


def _build_transformers(
    config: RunConfig,
    model_config: TransformersModelConfig,
    tokenizer: Tokenizer,
    processes: Processes,
    checkpoint: Path | None,
) -> tuple[TrainedModel, Decoder]:
    try:
        from fastrl.integrations.transformers.trained import Build, TransformersModel

        if model_config.lora is not None:
            importlib.import_module("fastrl.integrations.transformers.adapters")
    except ImportError as error:
        raise lacks_package(error) from error
    dtype, samples = getattr(torch, config.dtype), config.environment is not None
    model = TransformersModel(Build(model_config, dtype, samples, checkpoint), processes)
    _check_vocabulary(model.limits.vocab_size, tokenizer, str(model_config.path))
    return model, model.decoder()


def lacks_package(error: ImportError) -> UserError:
    """What to say where a model of transformers lacks a package."""
    return UserError(
        f"`model.type: transformers` needs a package that is not there ({error}); install it"
        " with: pip install 'fastrl[integrations]'"
    )


def _llama_config(config: RunConfig, tokenizer: Tokenizer, folder: Path | None) -> LlamaConfig:
    """The sizes of the model: those of `folder`, or as `config.model` says."""
    if folder is not None:
        llama_config = read_llama_config(folder, head=config.model.head)
        _check_vocabulary(llama_config.vocab_size, tokenizer, str(folder))
        return llama_config
    model = config.model
    assert isinstance(model, LlamaConfig)
    vocab_size = tokenizer.vocab_size if model.vocab_size is None else model.vocab_size
    end_token = tokenizer.end_tokens[0] if model.eos_token_id is None else model.eos_token_id
    llama_config = model.model_copy(update={"vocab_size": vocab_size, "eos_token_id": end_token})
    _check_end_token(llama_config)
    _check_vocabulary(llama_config.vocab_size, tokenizer, "`model`")
    _check_padding(llama_config)
    return llama_config


def _build_llama(
    config: RunConfig, llama_config: LlamaConfig, processes: Processes, folder: Path | None
) -> Llama:
    """The model with the weights of `folder`, or new ones."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    if folder is not None:
        llama = empty_llama(llama_config, processes, dtype)
        load_weights(llama, folder)
        return llama
    llama = Llama(llama_config, device=processes.device, dtype=dtype)
    if processes.mesh is None:
        processes.parallelize(llama)
        return llama
    # Initialised whole, so that the weights are those of a run on one process.
    llama_shards = empty_llama(llama_config, processes, dtype)
    load_full_weights(llama_shards, dict(llama.named_parameters()))
    return llama_shards


def _check_vocabulary(vocab_size: int | None, tokenizer: Tokenizer, source: str) -> None:
    """Refuses a tokenizer with ids that the model has no embedding for."""
    needed = 1 + max(tokenizer.vocab_size - 1, *tokenizer.end_tokens)
    assert vocab_size is not None
    if vocab_size < needed:
        raise UserError(
            f"{source}: `vocab_size` must be at least the tokenizer's {needed}, got {vocab_size}"
        )


def _check_padding(config: LlamaConfig) -> None:
    """Refuses fewer rows than the vocabulary, which may be the tokenizer's, has ids."""
    rows, needed = config.padded_vocab_size, config.vocab_size
    assert needed is not None
    if rows is not None and rows < needed:
        raise UserError(
            "`model`: `padded_vocab_size` must be at least the vocabulary size "
            f"{needed}, got {rows}"
        )


def _check_end_token(config: LlamaConfig) -> None:
    ids = config.eos_token_id
    assert config.vocab_size is not None
    for token in ids if isinstance(ids, tuple) else [ids or 0]:
        if token >= config.vocab_size:
            raise UserError(
                f"`model.eos_token_id` must be below the vocabulary size {config.vocab_size}, got "
                f"{token}"
            )
