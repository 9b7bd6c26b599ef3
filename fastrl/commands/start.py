"""`fastrl init` and `fastrl doctor`: before the first run."""

import argparse
from pathlib import Path
from typing import Any

from fastrl.commands.arguments import path, with_example


def add_commands(commands: Any) -> None:
    """Adds the commands to those of a parser."""
    init = commands.add_parser(
        "init",
        help="write a commented config for a model's folder and a task",
        **with_example(
            "fastrl init models/qwen3-0.6b run.yaml --task chain_sum",
            "fastrl init models/gemma run.yaml --task examples/my_task.py:Reversal --lora",
        ),
    )
    init.add_argument("folder", type=path, metavar="MODEL_FOLDER", help="in Hugging Face's format")
    init.add_argument(
        "file",
        type=path,
        nargs="?",
        default=Path("run.yaml"),
        metavar="FILE",
        help="config to write, which must not exist (default: run.yaml)",
    )
    init.add_argument(
        "--task",
        default="chain_sum",
        metavar="TASK",
        help="a task of reasoning-gym, or FILE.py:CLASS of your own (default: chain_sum)",
    )
    init.add_argument(
        "--lora",
        action="store_true",
        help="train adapters in place of the weights, by transformers and peft",
    )
    init.set_defaults(command=_init)

    doctor = commands.add_parser(
        "doctor",
        help="print versions and devices, what runs fused here, and what missing pieces cost",
        **with_example("fastrl doctor"),
    )
    doctor.set_defaults(command=_doctor)


def _init(arguments: argparse.Namespace) -> int:
    from fastrl.training.init_config import init_config

    return init_config(arguments.folder, arguments.file, task=arguments.task, lora=arguments.lora)


def _doctor(arguments: argparse.Namespace) -> int:
    from fastrl.training.doctor import doctor_lines

    for line in doctor_lines():
        print(line)
    return 0
