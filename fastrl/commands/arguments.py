"""Types of the arguments of commands, and arguments that several have."""

import argparse
from pathlib import Path
from typing import Any

from fastrl.config.environment import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE


def with_example(*lines: str) -> dict[str, Any]:
    """Arguments of a parser that shows examples, a line each, under its options."""
    text = "".join(f"\n  {line}" for line in lines)
    return {"epilog": f"example:{text}", "formatter_class": argparse.RawDescriptionHelpFormatter}


def add_overrides(parser: argparse.ArgumentParser, examples: str) -> None:
    """Adds changes of the config, which follow the other arguments."""
    help_text = f"changes of the config, such as {examples}"
    parser.add_argument("overrides", nargs="*", metavar="KEY.PATH=VALUE", help=help_text)


def path(text: str) -> Path:
    """A path that a file system can have."""
    if "\0" in text:
        raise argparse.ArgumentTypeError(
            f"must not hold the character NUL, which no path can have, got {text!r}"
        )
    return Path(text)


def positive(text: str) -> int:
    """An integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def temperature(text: str) -> float:
    """A temperature of sampling; 0 is greedy."""
    value = float(text)
    if value != 0 and not LOWEST_TEMPERATURE <= value <= HIGHEST_TEMPERATURE:
        raise argparse.ArgumentTypeError(
            f"must be 0 (greedy) or from {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}, got "
            f"{text}"
        )
    return value
