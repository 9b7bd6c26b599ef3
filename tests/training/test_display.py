"""What a person sees: lines, or a display on a terminal."""

import io

import pytest
from rich.console import Console

from fastrl.training.display import Display, open_display
from fastrl.training.evaluate import Evaluation
from fastrl.training.rollouts import Sample


def _show(display: Display) -> None:
    samples = [Sample("4 + 3 =", "[7]", 1.0, True), Sample("1 + 1 =", "222", 0.0, False)]
    display.evaluation(Evaluation(0.25, 0.2, 1.0))
    display.begin_phase("rl", 10, 8)
    display.step({"reward": 0.5, "loss": -0.125, "tokens_per_second": 1234.5})
    display.samples(samples)
    display.step({"reward": 0.75, "loss": 0.5, "tokens_per_second": 2000.0})
    display.message("[done]")
    display.close()


def test_lines_where_there_is_no_terminal() -> None:
    file = io.StringIO()
    _show(open_display(Console(file=file, width=40)))
    lines = file.getvalue().splitlines()
    assert lines == [
        "held-out reward 0.250 (solved 0.200, finished 1.000)",
        "[rl] step 9/10  reward 0.500  loss -0.1250  1,234 tokens/s  left 0:00",
        "  '4 + 3 =' -> '[7]'  reward 1.00",
        "  '1 + 1 =' -> '222 ...'  reward 0.00",
        "[rl] step 10/10  reward 0.750  loss +0.5000  2,000 tokens/s  left 0:00",
        "[done]",
    ]


def test_lines_come_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("fastrl.training.display.time.monotonic", lambda: now[0])
    file = io.StringIO()
    display = open_display(Console(file=file, width=40))
    display.begin_phase("supervised", 40, 0)
    for _ in range(40):
        now[0] += 2
        display.step({"loss": 1.0, "tokens_per_second": 1.0})
    lines = file.getvalue().splitlines()
    assert len(lines) == 1 + 13  # the first step, then every third, and the last is one of these
    assert "step 1/40" in lines[0]
    assert "step 40/40" in lines[-1]
    assert lines[0].endswith("left 1:18")


def test_a_display_on_a_terminal() -> None:
    file = io.StringIO()
    _show(open_display(Console(file=file, force_terminal=True, width=120, color_system=None)))
    shown = file.getvalue()
    for text in ("held-out reward 0.250", "[7]", "222 ...", "10/10", "reward 0.750", "[done]"):
        assert text in shown
