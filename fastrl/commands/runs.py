"""`fastrl train`, `fastrl eval`, `fastrl sample` and `fastrl export`."""

import argparse
from typing import Any

from fastrl.commands.arguments import add_overrides, path, positive, temperature, with_example

_RUN = "folder of a run; its latest checkpoint is taken"


def add_commands(commands: Any) -> None:
    """Adds the commands to those of a parser."""
    _add_train(commands)
    _add_eval(commands)
    _add_sample(commands)
    _add_export(commands)


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train a model as a config says",
        **with_example(
            "fastrl train run.yaml --run-dir runs/first seed=1 phases.0.steps=20",
            "fastrl train run.yaml --run-dir runs/first seed=1 phases.0.steps=20 --resume",
        ),
    )
    train.add_argument("config", type=path, metavar="CONFIG", help="YAML file of the run")
    train.add_argument(
        "--run-dir", type=path, required=True, metavar="DIR", help="where everything is written"
    )
    train.add_argument(
        "--resume",
        action="store_true",
        help="go on from the latest checkpoint in DIR; without one, begin",
    )
    add_overrides(train, "phases.1.steps=20 or model.hidden_size=96")
    train.set_defaults(command=_train)


def _add_eval(commands: Any) -> None:
    evaluate = commands.add_parser(
        "eval",
        help="score a run's model on held-out prompts",
        **with_example("fastrl eval runs/first evaluation.temperature=0"),
    )
    evaluate.add_argument("run", type=path, metavar="RUN", help=_RUN)
    add_overrides(evaluate, "evaluation.temperature=0 or evaluation.samples_per_prompt=8")
    evaluate.set_defaults(command=_eval)


def _add_sample(commands: Any) -> None:
    sample = commands.add_parser(
        "sample",
        help="complete a prompt with a run's model",
        **with_example("fastrl sample runs/first 'k, a, k, a =' --temperature 0"),
    )
    sample.add_argument("run", type=path, metavar="RUN", help=_RUN)
    sample.add_argument("prompt", metavar="PROMPT", help="text to complete, as the model reads it")
    sample.add_argument(
        "--max-tokens", type=positive, metavar="N", help="longest completion; the run's by default"
    )
    sample.add_argument(
        "--temperature",
        type=temperature,
        metavar="T",
        help="temperature of sampling, 0 for the most likely tokens; the run's by default",
    )
    sample.add_argument(
        "--num", type=positive, default=1, metavar="N", help="number of completions (default: 1)"
    )
    sample.set_defaults(command=_sample)


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write a run's model as a plain Hugging Face folder",
        description="Writes the model of a checkpoint as a folder that transformers and vLLM\n"
        "load: config.json, safetensors, and the files of its tokenizer.",
        **with_example("fastrl export runs/grpo models/palindromes --dtype bfloat16"),
    )
    export.add_argument("run", type=path, metavar="RUN", help="folder of a run")
    export.add_argument("folder", type=path, metavar="FOLDER", help="what to write; must not exist")
    export.add_argument(
        "--checkpoint", metavar="NAME", help="one of RUN/checkpoints; the latest by default"
    )
    export.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="of the weights; as in the checkpoint by default",
    )
    export.set_defaults(command=_export)


def _train(arguments: argparse.Namespace) -> int:
    from fastrl.config import RunConfig, load_config

    # Before torch is imported, so that a mistake in the config is reported at once.
    config = load_config(RunConfig, arguments.config, arguments.overrides)

    from fastrl.training.run import train

    return train(config, arguments.run_dir, resume=arguments.resume)


def _eval(arguments: argparse.Namespace) -> int:
    from fastrl.training.inspect import evaluate

    return evaluate(arguments.run, arguments.overrides)


def _sample(arguments: argparse.Namespace) -> int:
    from fastrl.training.inspect import sample

    return sample(
        arguments.run,
        arguments.prompt,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        num=arguments.num,
    )


def _export(arguments: argparse.Namespace) -> int:
    from fastrl.training.export import export

    return export(
        arguments.run,
        arguments.folder,
        checkpoint=arguments.checkpoint,
        dtype=arguments.dtype,
    )
