"""`fastrl init`: a commented config for a model's folder and a task."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from fastrl.config import RunConfig, UserError, parse_config
from fastrl.config.yaml_text import parse_yaml
from fastrl.environments.problem_sets import draw_problem_sets
from fastrl.environments.protocol import Problem
from fastrl.environments.scoring import build_environment
from fastrl.models.checkpoint import CONFIG_FILE, read_json, read_llama_config
from fastrl.models.hf_config import MODEL_TYPES
from fastrl.models.llama import Llama
from fastrl.training.build_model import lacks_package
from fastrl.training.display import print_line
from fastrl.training.tokenizer import Tokenizer, build_tokenizer

_SMALL = 50_000_000
"""Parameters below which a model takes larger steps."""

_LORA_RATE = 10
"""Learning rate of adapters, times that of weights."""

_MICRO_BATCH = 8192


@dataclass(frozen=True)
class _Model:
    """The model of a folder, as the config names it and as its comments tell of it.

    Attributes:
        kind: `model.type`.
        architecture: `model_type` of config.json.
        num_parameters: of the whole model.
        context: `max_position_embeddings`; None where it has no such bound.
        has_lora: whether adapters are trained.
    """

    kind: str
    architecture: str
    num_parameters: int
    context: int | None
    has_lora: bool


@dataclass(frozen=True)
class _Facts:
    """What the comments and numbers of the config follow from."""

    model: _Model
    end_tokens: str
    has_template: bool
    longest_prompt: int
    problem: Problem


def init_config(folder: Path, file: Path, *, task: str, lora: bool = False) -> int:
    """Writes the config and says what to do with it; the exit code is 0.

    Args:
        folder: of the model, in Hugging Face's format.
        file: to write, which must not exist.
        task: the name of a task of reasoning-gym, or `FILE.py:CLASS` of one's own.
        lora: whether adapters are trained in place of the weights.

    Raises:
        UserError: a file that is there, a folder of no model that can be trained, a task that there
            is not. Nothing has been written then.
    """
    if file.exists():
        raise UserError(f"{file}: exists already; write the config to a new file")
    model = _model(folder, lora)
    # Answers of a quarter of a short context leave room for prompts.
    longest = min(256, (model.context or 1024) // 4)
    source = "\n".join(
        [
            f"model: {{type: {model.kind}, path: {_quoted(str(folder))}, "
            "head: {losses: {policy: {type: grpo}}}}",
            f"environment: {{{_environment(task)}}}",
            f"sampler: {{max_new_tokens: {longest}}}",
            "phases: [{type: rl, steps: 1}]",
        ]
    )
    config = parse_config(RunConfig, parse_yaml(source), source=f"--task {task}")
    tokenizer = build_tokenizer(config.tokenizer, folder)
    facts = _facts(config, model, tokenizer, folder)
    text = _text(config, facts, task, file)
    parse_config(RunConfig, parse_yaml(text), source=str(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("x", encoding="utf-8") as opened:
        opened.write(text)
    print_line(Console(), f"{file}: go on with: fastrl train {file} --run-dir runs/{file.stem}")
    return 0


def _model(folder: Path, lora: bool) -> _Model:
    """The reference Llama where it knows the folder, else what transformers makes of it."""
    architecture = read_json(folder / CONFIG_FILE).get("model_type", MODEL_TYPES[0])
    if architecture in MODEL_TYPES and not lora:
        config = read_llama_config(folder)
        with torch.device("meta"):
            num_parameters = _size(Llama(config))
        context = config.max_position_embeddings
        return _Model("pretrained", config.architecture, num_parameters, context, False)
    try:
        from fastrl.integrations.transformers.folder import empty_model
    except ImportError as error:
        raise lacks_package(error) from error
    model = empty_model(folder)
    bound = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return _Model("transformers", model.config.model_type, _size(model), bound, lora)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _environment(task: str) -> str:
    if ":" in task:
        return f"type: python, path: {_quoted(task)}"
    return f"type: reasoning_gym, task: {_quoted(task)}"


def _facts(config: RunConfig, model: _Model, tokenizer: Tokenizer, folder: Path) -> _Facts:
    assert config.environment is not None
    problems = draw_problem_sets(
        config.environment, build_environment(config.environment, config.seed)
    )
    lengths = [len(tokenizer.encode(p.prompt)) for p in (*problems.heldout, *problems.train)]
    tokenizer_config = folder / "tokenizer_config.json"
    in_config = tokenizer_config.is_file() and "chat_template" in json.loads(
        tokenizer_config.read_text(encoding="utf-8")
    )
    return _Facts(
        model,
        " or ".join(str(token) for token in tokenizer.end_tokens),
        (folder / "chat_template.jinja").is_file() or in_config,
        max(lengths),
        problems.train[0],
    )


def _text(config: RunConfig, facts: _Facts, task: str, file: Path) -> str:
    model, longest = facts.model, config.sampler.max_new_tokens
    is_llama = model.kind == "pretrained"
    needed = facts.longest_prompt + longest
    if model.context is not None and needed > model.context:
        raise UserError(
            f"the longest prompt of `{task}` has {facts.longest_prompt} tokens, which with answers "
            f"of {longest} must be within the model's {model.context}; take a task "
            "of shorter questions"
        )
    rate = 1e-4 if model.num_parameters < _SMALL else 1e-6
    assert config.environment is not None
    return _TEMPLATE.format(
        file=file,
        stem=file.stem,
        architecture=model.architecture,
        parameters=f"{model.num_parameters:,}",
        context="no bound" if model.context is None else f"{model.context:,} tokens",
        estimate=_ESTIMATE.format(file=file) if is_llama else "",
        kind=model.kind,
        how="" if is_llama else _OF_TRANSFORMERS,
        lora=_LORA if model.has_lora else "",
        end=facts.end_tokens,
        path=_quoted(getattr(config.model, "path", "")),
        template=_CHAT if facts.has_template else "",
        environment=_environment(task).replace(", ", "\n  "),
        prompt="" if ":" in task else _PROMPT,
        question=_quoted(facts.problem.prompt),
        answer=_quoted(facts.problem.answer or ""),
        longest=longest,
        needed=f"{needed:,}",
        bound=max(_MICRO_BATCH, needed),
        rate=f"{rate * (_LORA_RATE if model.has_lora else 1):.1e}",
        tensorboard=str(find_spec("tensorboard") is not None).lower(),
        report=str(find_spec("matplotlib") is not None).lower(),
    )


def _quoted(text: str) -> str:
    return json.dumps(text)


_ESTIMATE = "#     fastrl estimate {file}\n"

_OF_TRANSFORMERS = """
# Its own code in transformers computes it, over data ranks and FSDP2. On a GPU in bf16 with fp32
# master weights: `parallel: {fully_sharded: true, compute_dtype: bfloat16}`.\
"""

_LORA = """
  # Adapters of all linear layers but the output layer; `target_modules` names fewer. Checkpoints
  # hold them alone and name `path`, which must stay as it is.
  lora: {rank: 16, alpha: 32}\
"""

_CHAT = """
# The folder has a chat template, which is not applied: prompts are read as they are. Write its
# markers into `environment.prompt` if the model needs them.
"""

_PROMPT = """
  # Options of the task, as reasoning-gym documents them.
  config: {}
  # What the model reads; {question} stands for the question.
  prompt: "{question}"\
"""

_TEMPLATE = """\
# A run of `fastrl train`. `fastrl config schema` describes every key, docs/training.md how they
# work together.
#
#     fastrl config check {file}
{estimate}#     fastrl train {file} --run-dir runs/{stem}

# Weights, problems, their order and sampling follow from it.
seed: 0

# Of architecture {architecture}, {parameters} parameters, with a context of {context}.
# A text ends at token {end}, as its folder says.{how}
model:
  type: {kind}
  path: {path}{lora}
  head:
    losses:
      # Other policy losses: gspo, dapo's bounds (epsilon_high: 0.28), cispo, ...: docs/losses.md.
      policy: {{type: grpo, epsilon_low: 0.2, epsilon_high: 0.2}}
{template}
# The first training prompt is
#     {question}
# and its answer {answer}
environment:
  {environment}{prompt}
  train_prompts: 8192
  heldout_prompts: 512

sampler:
  # The longest answer, its end token included; a longer one counts as no answer.
  max_new_tokens: {longest}

# Scored on held-out prompts before and after the phase; 0 takes the most likely token each time.
evaluation: {{temperature: 1.0, every: 50}}

phases:
  - type: rl
    steps: 200
    # 16 prompts with 8 answers each are 128 documents a step. More answers tell good and bad ones
    # apart better, more prompts make steps steadier.
    rollouts: {{type: sampler, prompts_per_step: 16, group_size: 8, temperature: 1.0}}
    # Groups whose answers all have one reward teach nothing and are left out.
    advantage: {{baseline: mean, scale: group, zero_variance: drop}}
    # Memory of a pass; at least {needed}, the longest prompt with the longest answer. No result
    # depends on it.
    max_tokens_per_micro_batch: {bound}
    optimizer: {{learning_rate: {rate}, warmup_updates: 10, schedule: constant}}

checkpoint: {{every: 50, keep: 2}}

logging: {{samples_every: 25, tensorboard: {tensorboard}, report: {report}}}
"""
