"""The `fastrl` command: its arguments and exit codes.

A command imports what it needs when it runs, so that `--help` is fast and needs neither torch nor
Triton. A mistake of the user (`UserError`) or an error of the system (`OSError`) gives a message
without a traceback and exit code 2.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from io import TextIOWrapper
from pathlib import Path

from fastrl.config.base import UserError
from fastrl.config.environment import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from fastrl.training.interrupt import INTERRUPTED, exit_code

BROKEN_PIPE = 141
"""Exit code of a command whose output pipe was closed, as in `fastrl config schema | head`."""


ESCAPES = "backslashreplace"
"""How Python itself writes errors to a terminal that lacks their characters."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; its exit code.

    It is 0, 2 (error), 130 (Ctrl-C), 143 (SIGTERM), 129 (SIGHUP) or 141 (broken pipe).

    Args:
        argv: the arguments after the program's name; those of this process by default.
    """
    _replace_what_the_terminal_lacks()
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        # argparse stops taking positional arguments at the first option; overrides may follow it.
        takes_overrides = hasattr(arguments, "overrides")
        surplus = [text for text in rest if text.startswith("-") or not takes_overrides]
        if surplus:
            parser.error(f"unrecognized arguments: {' '.join(surplus)}")
        arguments.overrides = [*arguments.overrides, *rest]
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        code = command(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # So that the interpreter's flush at exit does not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (UserError, OSError) as error:
        print(f"fastrl: error: {_message(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print("fastrl: interrupted", file=sys.stderr)
        return exit_code(*error.args) if error.args else INTERRUPTED


def _replace_what_the_terminal_lacks() -> None:
    """Characters outside of the terminal's encoding are replaced, and end no run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors not in ("replace", ESCAPES):
            stream.reconfigure(errors="replace")


def _message(error: UserError | OSError) -> str:
    if isinstance(error, UserError):
        return str(error)
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{error.filename}: {reason}"


def _version() -> str:
    try:
        return f"fastrl {version('fastrl')}"
    except PackageNotFoundError:
        return f"fastrl of {Path(__file__).parent}, not installed, so it has no version"


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastrl", description="Reinforcement learning of language models without the logits."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run_help = "folder of a run; its latest checkpoint is taken"

    train = commands.add_parser("train", help="train a model as a config says")
    train.add_argument("config", type=_path, metavar="CONFIG", help="YAML file of the run")
    train.add_argument(
        "--run-dir", type=_path, required=True, metavar="DIR", help="where everything is written"
    )
    train.add_argument(
        "--resume",
        action="store_true",
        help="go on from the latest checkpoint in DIR; without one, begin",
    )
    _add_overrides(train, "phases.1.steps=20 or model.hidden_size=96")
    train.set_defaults(command=_train)

    evaluate = commands.add_parser("eval", help="score a run's model on held-out prompts")
    evaluate.add_argument("run", type=_path, metavar="RUN", help=run_help)
    _add_overrides(evaluate, "evaluation.temperature=0 or evaluation.samples_per_prompt=8")
    evaluate.set_defaults(command=_eval)

    sample = commands.add_parser("sample", help="complete a prompt with a run's model")
    sample.add_argument("run", type=_path, metavar="RUN", help=run_help)
    sample.add_argument("prompt", metavar="PROMPT", help="text to complete, as the model reads it")
    sample.add_argument(
        "--max-tokens", type=_positive, metavar="N", help="longest completion; the run's by default"
    )
    sample.add_argument(
        "--temperature",
        type=_temperature,
        metavar="T",
        help="temperature of sampling, 0 for the most likely tokens; the run's by default",
    )
    sample.add_argument(
        "--num", type=_positive, default=1, metavar="N", help="number of completions (default: 1)"
    )
    sample.set_defaults(command=_sample)

    estimate = commands.add_parser(
        "estimate", help="print the memory and communication that a config needs on each rank"
    )
    estimate.add_argument("config", type=_path, metavar="CONFIG", help="YAML file of the run")
    estimate.add_argument(
        "--tokens",
        type=_positive,
        metavar="N",
        help="tokens of a packed sequence; by default the largest of the config's phases",
    )
    _add_overrides(estimate, "parallel.tensor=8 or model.hidden_size=8192")
    estimate.set_defaults(command=_estimate)

    config = commands.add_parser("config", help="about the configs that `train` reads")
    _add_config_commands(config)
    return parser


def _add_config_commands(config: argparse.ArgumentParser) -> None:
    config_commands = config.add_subparsers(title="commands", required=True, metavar="COMMAND")
    schema = config_commands.add_parser("schema", help="print the JSON schema of a run's config")
    schema.set_defaults(command=_config_schema)
    check = config_commands.add_parser(
        "check", help="refuse what `train` would refuse, or print the resolved config"
    )
    check.add_argument("file", type=_path, metavar="FILE", help="YAML file of the run")
    _add_overrides(check, "phases.1.steps=20 or model.hidden_size=96")
    check.set_defaults(command=_config_check)


def _add_overrides(parser: argparse.ArgumentParser, examples: str) -> None:
    help_text = f"changes of the config, such as {examples}"
    parser.add_argument("overrides", nargs="*", metavar="KEY.PATH=VALUE", help=help_text)


def _path(text: str) -> Path:
    if "\0" in text:
        raise argparse.ArgumentTypeError(
            f"must not hold the character NUL, which no path can have, got {text!r}"
        )
    return Path(text)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _temperature(text: str) -> float:
    value = float(text)
    if value != 0 and not LOWEST_TEMPERATURE <= value <= HIGHEST_TEMPERATURE:
        raise argparse.ArgumentTypeError(
            f"must be 0 (greedy) or from {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}, got "
            f"{text}"
        )
    return value
