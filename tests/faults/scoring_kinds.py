"""What happens to the workers that score completions: their work goes to others."""

from __future__ import annotations

from functools import partial

from tests.faults.kinds import Case, Kind
from tests.faults.places import Place

CONFIG = """
seed: 3
dtype: float64
device: cpu
num_threads: 1
model: {{type: llama, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2}}
tokenizer: {{type: character, characters: "0123456789+-= "}}
environment:
  type: python
  path: "{file}:Failing"
  config: {{fault: {fault}}}
  train_prompts: 8
  heldout_prompts: 2
  limits: {{seconds: 0.4}}
  fence: {fence}
sampler: {{max_new_tokens: 4}}
phases:
  - type: rl
    steps: 1
    losses: {{policy: {{type: grpo}}}}
    rollouts: {{type: sampler, prompts_per_step: 2, group_size: 20}}
logging: {{tensorboard: false, report: false}}
"""

ENVIRONMENT = """
import os, signal, time
from fastrl import Problem

class Failing:
    def __init__(self, seed, fault):
        self.fault = fault

    def problems(self, split):
        for number in range(100):
            yield Problem(prompt=f"{number}{'+' if split == 'train' else '-'}")

    def score(self, problem, answer):
        # Not at every answer: each worker that is lost has to be replaced.
        if answer is not None and sum(map(ord, answer)) % 3 == 0:
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.fault == "exit":
                os._exit(0)
            elif self.fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif self.fault == "sleep":
                time.sleep(1000)
            elif self.fault == "raise":
                raise ValueError("injected")
            elif self.fault == "memory":
                bytearray(10**12)
            elif self.fault == "write":
                open("/tmp/written", "w")
        return 0.5
"""

METRICS = {
    "kill": "score_failures",
    "exit": "score_failures",
    "stop": "score_timeouts",
    "sleep": "score_timeouts",
    "raise": "score_errors",
    "memory": "score_errors",
    "write": "score_errors",
}


def _is_no_answer(place: Place, fault: str, fence: bool) -> None:
    file = place.folder / "failing.py"
    file.write_text(ENVIRONMENT, encoding="utf-8")
    place.config = place.folder / "run.yaml"
    text = CONFIG.format(file=file, fault=fault, fence=str(fence).lower())
    place.config.write_text(text, encoding="utf-8")
    ended = place.train()
    assert ended.codes == [0] * place.num_ranks, ended.err
    counts = {"score_failures": 0.0, "score_timeouts": 0.0, "score_errors": 0.0}
    for record in place.metrics():
        for name in counts:
            counts[name] += record.get(name, 0) + record.get(f"heldout/{name}", 0)
    assert [name for name, count in counts.items() if count] == [METRICS[fault]], counts


def _kind(name: str, fault: str, *, fences: tuple[bool, ...] = (True, False)) -> Kind:
    return Kind(
        name,
        f"0; those completions count as no answer, and in `{METRICS[fault]}`",
        "nothing",
        [Case(1, partial(_is_no_answer, fault=fault, fence=fence)) for fence in fences],
    )


KINDS = [
    _kind("a scoring worker is killed", "kill", fences=(False,)),
    _kind("a scoring worker ends", "exit"),
    _kind("a scoring worker is stopped", "stop", fences=(False,)),
    _kind("a scoring worker hangs", "sleep"),
    _kind("scoring raises", "raise"),
    _kind("scoring asks for more memory than it may have", "memory"),
    _kind("scoring writes a file", "write", fences=(True,)),
]
