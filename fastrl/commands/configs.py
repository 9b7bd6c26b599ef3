"""`fastrl estimate` and `fastrl config`: what can be said of a config without running it."""

import argparse
import json
import sys
from typing import Any

from fastrl.commands.arguments import add_overrides, path, positive, with_example


def add_commands(commands: Any) -> None:
    """Adds the commands to those of a parser."""
    estimate = commands.add_parser(
        "estimate",
        help="print the memory and communication that a config needs on each rank",
        **with_example("fastrl estimate run.yaml --tokens 32768 parallel.tensor=8"),
    )
    estimate.add_argument("config", type=path, metavar="CONFIG", help="YAML file of the run")
    estimate.add_argument(
        "--tokens",
        type=positive,
        metavar="N",
        help="tokens of a packed sequence; by default the largest of the config's phases",
    )
    add_overrides(estimate, "parallel.tensor=8 or model.hidden_size=8192")
    estimate.set_defaults(command=_estimate)

    config = commands.add_parser(
        "config",
        help="about the configs that `train` reads",
        **with_example("fastrl config check run.yaml"),
    )
    _add_config_commands(config)


def _add_config_commands(config: argparse.ArgumentParser) -> None:
    config_commands = config.add_subparsers(title="commands", required=True, metavar="COMMAND")
    schema = config_commands.add_parser(
        "schema",
        help="print the JSON schema of a run's config",
        **with_example("fastrl config schema > run.schema.json"),
    )
    schema.set_defaults(command=_config_schema)
    check = config_commands.add_parser(
        "check",
        help="refuse what `train` would refuse, or print the resolved config",
        **with_example("fastrl config check run.yaml phases.0.steps=20"),
    )
    check.add_argument("file", type=path, metavar="FILE", help="YAML file of the run")
    add_overrides(check, "phases.1.steps=20 or model.hidden_size=96")
    check.set_defaults(command=_config_check)


def _estimate(arguments: argparse.Namespace) -> int:
    from fastrl.config import LlamaConfig, RunConfig, load_config
    from fastrl.estimate.report import estimate_run

    config = load_config(RunConfig, arguments.config, arguments.overrides)
    if isinstance(config.model, LlamaConfig) and config.model.vocab_size is None:
        from fastrl.training.tokenizer import build_tokenizer

        vocab_size = build_tokenizer(config.tokenizer).vocab_size
        model = config.model.model_copy(update={"vocab_size": vocab_size})
        config = config.model_copy(update={"model": model})
    print(estimate_run(config, arguments.tokens))
    return 0


def _config_schema(arguments: argparse.Namespace) -> int:
    from fastrl.config import RunConfig

    print(json.dumps(RunConfig.model_json_schema(), indent=2))
    return 0


def _config_check(arguments: argparse.Namespace) -> int:
    from fastrl.config import RunConfig, dump_config, load_config

    config = load_config(RunConfig, arguments.file, arguments.overrides)

    from fastrl.training.check import check_run

    check_run(config)
    print(f"# {arguments.file} is valid. With its overrides and all defaults:")
    text = dump_config(config)
    encoding = sys.stdout.encoding or "utf-8"
    # Escaped, not replaced: what is printed loads back as the same config.
    has_all = text.encode(encoding, "replace").decode(encoding) == text
    print(text if has_all else dump_config(config, only_ascii=True), end="")
    return 0
