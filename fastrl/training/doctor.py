"""`fastrl doctor`: versions, devices, what runs fused here, and what each missing piece costs."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from fastrl.kernels import can_run, has_fused_layout
from fastrl.models.attention import uses_flex

_PACKAGES = {
    "tokenizers": "no model with a tokenizer.json of its own: `model.type: pretrained` is refused",
    "reasoning-gym": "no `environment.type: reasoning_gym`; classes of one's own serve",
    "pyarrow": "no Parquet files; .jsonl and .jsonl.gz serve",
    "tensorboard": "`logging.tensorboard` must be false; metrics.jsonl has the same numbers",
    "matplotlib": "`logging.report` must be false: no report.png",
    "wandb": "`logging.wandb` must be false",
    "trackio": "`logging.trackio` must be false",
    "httpx2": "no `rollouts.type: server`: the run samples by itself, or trains on files",
    "transformers": "no `attach_head` for models of transformers",
    "trl": "no head under TRL's trainers",
}
"""Packages beside the required ones, and what is missing without them."""

_REQUIRED = ("numpy", "pydantic", "pyyaml", "rich", "safetensors")


@dataclass(frozen=True)
class _Check:
    """One thing that runs on a device or does not, and what it costs where it does not."""

    name: str
    runs: bool
    cost: str


def doctor_lines() -> Iterator[str]:
    """The lines that the command prints."""
    yield f"fastrl {_version('fastrl')}, Python {platform.python_version()}, {platform.platform()}"
    yield f"torch {torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"
    yield ", ".join(f"{name} {_version(name)}" for name in _REQUIRED)
    yield from _devices()
    for device in _one_of_each():
        yield f"on {device}:"
        for check in _checks(device):
            yield f"  {_mark(check.runs)} {check.name}"
            if not check.runs:
                yield f"      {check.cost}"
    yield "packages:"
    for name, cost in _PACKAGES.items():
        found = _version(name)
        yield f"  {_mark(found != 'missing')} {name} {found}"
        if found == "missing":
            yield f"      {cost}"


def _mark(is_there: bool) -> str:
    return "yes" if is_there else "no "


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _devices() -> Iterator[str]:
    threads = f"torch uses {torch.get_num_threads()} threads"
    yield f"CPU: {os.cpu_count()} cores, {threads}, {torch.backends.cpu.get_cpu_capability()}"
    if not torch.cuda.is_available():
        reason = "torch finds none" if torch.version.cuda else "this torch is built without CUDA"
        yield f"GPU: {reason}; `device: auto` is the CPU"
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield (
            f"cuda:{index}: {found.name}, capability {found.major}.{found.minor}, "
            f"{found.total_memory / 2**30:.0f} GiB"
        )


def _one_of_each() -> list[torch.device]:
    """The CPU, or a GPU of each capability."""
    if not torch.cuda.is_available():
        return [torch.device("cpu")]
    by_capability = {
        torch.cuda.get_device_capability(index): torch.device("cuda", index)
        for index in reversed(range(torch.cuda.device_count()))
    }
    return [by_capability[capability] for capability in sorted(by_capability)]


def _checks(device: torch.device) -> Iterator[_Check]:
    """What a run with 16-bit or fp32 operands would take on a device."""
    half = torch.zeros(64, 64, dtype=torch.bfloat16, device=device)
    needs = "a Hopper GPU, CUDA and Triton"
    yield _Check(
        "products with epilogues (bf16, fp16)",
        has_fused_layout(half, half),
        f"needs {needs}: tiles of logits are written to memory and read again by the next pass",
    )
    has_triton = find_spec("triton") is not None
    needs = "Triton, which is not installed" if not has_triton else "a CUDA device"
    yield _Check(
        "Triton kernels of the head's rows (bf16, fp16, fp32)",
        can_run(half),
        f"needs {needs}: PyTorch's own operations serve, with several passes over each tile",
    )
    yield _Check(
        "FlexAttention over packed documents",
        uses_flex("auto", device, 64, torch.bfloat16),
        "needs a CUDA device: attention goes document by document, slow for many short ones",
    )
    compiler = _compiler()
    yield _Check(
        f"torch.compile of decoder layers (`compile: true`{compiler})",
        bool(compiler),
        "needs a C++ compiler (`CXX`, g++ or clang++): layers run operation by operation",
    )
    yield _Check(
        "several processes over NCCL",
        device.type == "cuda" and torch.distributed.is_nccl_available(),
        "needs CUDA devices: `parallel` runs over gloo on the CPU",
    )


def _compiler() -> str:
    """The C++ compiler that torch.compile would find, as a part of a sentence."""
    names = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    found = [name for name in names if shutil.which(name) is not None]
    return f" with {found[0]}" if found else ""
