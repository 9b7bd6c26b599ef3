"""`fastrl rollouts`: rollout files looked at, and made of what other programs write."""

import argparse
from typing import Any

from fastrl.commands.arguments import path, temperature, with_example

_FORMATS = {
    "openai": "completions of an OpenAI-compatible server with token ids (vLLM), as JSONL",
    "trl": "TRL's completions/*.parquet (`log_completions`), text",
    "verl": "verl's JSONL of `trainer.rollout_data_dir`, text",
}


def add_commands(commands: Any) -> None:
    """Adds the commands to those of a parser."""
    rollouts = commands.add_parser(
        "rollouts",
        help="about rollout files, which `train` reads",
        **with_example("fastrl rollouts inspect rollouts.jsonl"),
    )
    group = rollouts.add_subparsers(title="commands", required=True, metavar="COMMAND")

    inspect = group.add_parser(
        "inspect",
        help="print what rollout files hold, and what of it looks wrong",
        **with_example("fastrl rollouts inspect 'rollouts/step-*.jsonl.gz'"),
    )
    inspect.add_argument(
        "paths", nargs="+", metavar="FILE", help="files, folders or patterns, taken together"
    )
    inspect.add_argument(
        "--ignore", action="append", default=[], metavar="COLUMN", help="a column to skip"
    )
    inspect.set_defaults(command=_inspect)

    read = group.add_parser(
        "import",
        help="write a rollout file from what another program wrote",
        description="Formats:\n"
        + "\n".join(f"  {name:8}{what}" for name, what in _FORMATS.items()),
        **with_example(
            "fastrl rollouts import --from openai answers.jsonl rollouts.jsonl.gz",
            "fastrl rollouts import --from verl --tokenizer models/qwen dump/7.jsonl r.jsonl",
        ),
    )
    read.add_argument("source", metavar="SOURCE", help="file, folder or pattern to read")
    read.add_argument(
        "file", type=path, metavar="FILE", help="rollout file to write; not there yet"
    )
    read.add_argument(
        "--from", dest="format", choices=tuple(_FORMATS), required=True, help="what wrote SOURCE"
    )
    read.add_argument(
        "--tokenizer", type=path, metavar="FOLDER", help="of the model; trl and verl need it"
    )
    read.add_argument(
        "--reward",
        metavar="COLUMN",
        help="trl: the reward function whose rewards are taken, in place of TRL's advantages",
    )
    read.add_argument(
        "--temperature",
        type=temperature,
        metavar="T",
        help="openai: that the requests had (default: 1)",
    )
    read.add_argument(
        "--processed-logprobs",
        action="store_true",
        help="openai: the log-probabilities were taken after temperature (vLLM's --logprobs-mode "
        "processed_logprobs); needed where T is not 1",
    )
    read.set_defaults(command=_import)


def _inspect(arguments: argparse.Namespace) -> int:
    from fastrl.data.rollout_paths import rollout_files
    from fastrl.data.rollout_summary import RolloutSummary
    from fastrl.data.rollouts import read_rollouts

    summary = RolloutSummary()
    files = rollout_files(arguments.paths)
    for file in files:
        for document in read_rollouts(file, require=(), ignore=arguments.ignore):
            summary.add(document)
    print(", ".join(files))
    for line in summary.lines():
        print(line)
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from fastrl.training.import_rollouts import import_rollouts

    return import_rollouts(
        arguments.format,
        arguments.source,
        arguments.file,
        tokenizer=arguments.tokenizer,
        reward=arguments.reward,
        temperature=arguments.temperature,
        processed_logprobs=arguments.processed_logprobs,
    )
