"""The table of docs/scaling.md on equal work: what the slowest data rank does over the mean.

    python -m benchmarks.balance_table

Documents of three distributions of lengths are given to ranks and micro-batches by the trainer's
own plan, by tokens and by floating-point operations. Arithmetic; runs anywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from benchmarks.memory_cases import LLAMA_1B, llama
from benchmarks.table import markdown
from fastrl.data.documents import Document
from fastrl.data.partition import Work, balance_groups, balance_micro_batches, num_tokens
from fastrl.models.flops import TrainingFlops

RANKS = (8, 32, 128, 512)
# Prompt groups a rank, documents a group, and tokens of a prompt.
GROUPS, GROUP, PROMPT = 8, 8, 128
MAX_TOKENS = 32768

Length = Callable[[random.Random], float]
LENGTHS: dict[str, Length] = {
    "log-normal": lambda draw: min(draw.lognormvariate(7.3, 0.8), 8000),
    "uniform": lambda draw: draw.uniform(200, 8000),
    "heavy tail": lambda draw: min(500 * draw.paretovariate(1.1), 32000),
}


def table() -> str:
    """The table in Markdown."""
    head = ["lengths", "ranks", "micro-batches"]
    head += [f"{what} by {unit}" for unit in ("tokens", "FLOPs") for what in ("ranks", "step")]
    lines = [head]
    for name, length in LENGTHS.items():
        for ranks in RANKS:
            documents = draw_documents(ranks * GROUPS, length)
            plans = [slowest(documents, ranks, work) for work in (num_tokens, flops)]
            micro_batches = str(plans[1][2])
            values = [f"{value:.3f}" for plan in plans for value in plan[:2]]
            lines.append([name, str(ranks), micro_batches, *values])
    return markdown(lines)


def draw_documents(groups: int, length: Length) -> list[Document]:
    """Prompt groups of completions, at least 200 tokens a document."""
    draw = random.Random(0)
    return [
        Document(
            tokens=range(max(int(length(draw)), 200)),
            prompt_length=PROMPT,
            group_id=group,
        )
        for group in range(groups)
        for _ in range(GROUP)
    ]


def flops(document: Document, num_shared: int = 0) -> float:
    """Of Llama-3.2-1B."""
    num_tokens = len(document.tokens)
    return _LLAMA_1B.document(num_tokens, num_tokens - PROMPT, num_shared)


def slowest(documents: list[Document], ranks: int, work: Work) -> tuple[float, float, int]:
    """FLOPs of the slowest over the mean rank: of whole steps, and where micro-batches wait.

    Returns:
        Both ratios, and the number of micro-batches.
    """
    plan = balance_micro_batches(balance_groups(documents, ranks, work), MAX_TOKENS, work)
    most = max(map(len, plan))
    totals = [[math.fsum(map(flops, pack)) for pack in packs] for packs in plan]
    totals = [each + [0.0] * (most - len(each)) for each in totals]
    mean = math.fsum(map(math.fsum, totals)) / ranks
    step = math.fsum(max(column) for column in zip(*totals, strict=True))
    return max(map(math.fsum, totals)) / mean, step / mean, most


_LLAMA_1B = TrainingFlops.of(llama(LLAMA_1B))


if __name__ == "__main__":
    print(table(), end="")
