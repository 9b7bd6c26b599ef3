"""The `fastrl` command and its exit codes; the commands themselves are in `fastrl.commands`.

A command imports what it needs when it runs, so that `--help` is fast and needs neither torch nor
Triton. A mistake of the user (`UserError`) or an error of the system (`OSError`) gives a message
without a traceback and exit code 2.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from io import TextIOWrapper
from pathlib import Path

from fastrl.commands import configs, rollouts, runs, start
from fastrl.commands.arguments import with_example
from fastrl.config.base import UserError
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
    arguments = _arguments(argv)
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


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        # argparse stops taking positional arguments at the first option; overrides may follow it.
        takes_overrides = hasattr(arguments, "overrides")
        surplus = [text for text in rest if text.startswith("-") or not takes_overrides]
        if surplus:
            parser.error(f"unrecognized arguments: {' '.join(surplus)}")
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastrl",
        description="Reinforcement learning of language models without the logits.",
        **with_example("fastrl train examples/llama_grpo.yaml --run-dir runs/grpo"),
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for group in (start, runs, configs, rollouts):
        group.add_commands(commands)
    return parser
