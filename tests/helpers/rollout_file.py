"""A small rollout file with all columns, for the ids of the tiny run."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random


def write_rollout_file(path: Path) -> None:
    """Four groups of three documents, some without a completion."""
    random = Random(1)
    lines = []
    for group in range(4):
        prompt = [random.randrange(1, 15) for _ in range(4)]
        for number in range(3):
            completion = [random.randrange(15) for _ in range(random.randint(0, 6))]
            logprobs = [-3 * random.random() for _ in completion]
            record = {
                "tokens": prompt + completion,
                "prompt_length": 4,
                "logprobs": logprobs,
                "ref_logprobs": [value - 0.1 for value in logprobs],
                "rollout_logprobs": [value - 0.05 for value in logprobs],
                "kept_tokens": [[1, 2, token] for token in completion],
                "reward": float(number % 2),
                "group_id": group,
            }
            lines.append(json.dumps(record))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
