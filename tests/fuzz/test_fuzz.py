"""Some seconds of the fuzzer, and that it finds what is wrong."""

from __future__ import annotations

import re

import pytest
from torch import Tensor

from fastrl.layers.losses.policy_terms import PolicyTerms
from fastrl.layers.losses.reinforce import ReinforceLoss
from tests.fuzz.__main__ import main
from tests.fuzz.cases import draw_case


def test_some_seconds_of_random_cases_are_the_definition(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["--minutes", "0.08", "--ranks", "1"])
    out = capsys.readouterr().out
    assert code == 0, out
    assert re.search(r"seeds 0 to \d+: \d+ cases", out)


def test_a_case_follows_from_its_seed_alone() -> None:
    for seed in range(40):
        assert str(draw_case(seed)) == str(draw_case(seed))


def test_a_planted_fault_is_found_and_shown_again_by_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def surrogate(_: ReinforceLoss, terms: PolicyTerms) -> Tensor:
        return -1.5 * terms.advantages * terms.logprobs

    with monkeypatch.context() as patch:
        patch.setattr(ReinforceLoss, "surrogate", surrogate)
        assert main(["--minutes", "1", "--ranks", "1", "--stop-after", "1"]) == 1
        out = capsys.readouterr().out
        match = re.search(r"again: python -m tests.fuzz --case (\d+)", out)
        assert match is not None, out
        assert "'type': 'reinforce'" in out
        assert main(["--case", match[1]]) == 1
        assert "off by" in capsys.readouterr().out
    assert main(["--case", match[1]]) == 0
