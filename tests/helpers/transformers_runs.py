"""Folders of tiny models of transformers with a tokenizer of their own, and configs for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fastrl.config import RunConfig, parse_config
from fastrl.config.yaml_text import dump_yaml
from fastrl.training.tokenizer_folder import character_tokenizer_json, with_end_tokens
from tests.helpers.hf_models import tiny_model
from tests.helpers.runs import tiny

CHARACTERS = "0123456789+-= "


def write_folder(
    folder: Path, family: str = "llama", dtype: torch.dtype = torch.float64, **changes: Any
) -> Path:
    """A random model of a family, for numbers and sums."""
    sizes = {"vocab_size": 24, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    tiny_model(family, dtype=dtype, **sizes | changes).save_pretrained(folder)
    files = {"tokenizer.json": character_tokenizer_json(CHARACTERS)}
    for name, content in with_end_tokens(files, ["<|end_of_text|>"], [0]).items():
        (folder / name).write_bytes(content)
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    return folder


def run_config(
    folder: Path, kind: str = "transformers", *overrides: str, **model: Any
) -> RunConfig:
    """The config of `tests.helpers.runs` for the model of a folder."""
    return parse_config(RunConfig, run_values(folder, kind, **model), overrides)


def run_values(folder: Path, kind: str = "transformers", **model: Any) -> dict[str, Any]:
    values = tiny().model_dump(mode="json")
    del values["tokenizer"]
    return values | {"model": {"type": kind, "path": str(folder), **model}}


def write_run(folder: Path, **model: Any) -> Path:
    """That config as a file beside the folder."""
    path = folder.parent / "run.yaml"
    path.write_text(dump_yaml(run_values(folder, **model)), encoding="utf-8")
    return path
