"""Problems: held-out prompts are never trained on, rewards are the verifier's."""

from __future__ import annotations

from typing import Any

import pytest

from fastrl.config import UserError, parse_config
from fastrl.config.environment import ReasoningGymConfig
from fastrl.environments import Problem
from fastrl.environments.reasoning_gym import ReasoningGymEnvironment
from fastrl.training.environment import RunEnvironment
from fastrl.training.rollout_sources import SupervisedDocuments
from fastrl.training.sampled_rollouts import SampledRollouts
from tests.helpers.runs import begin_phase, tiny_context


def _environment(seed: int = 0, **changes: Any) -> RunEnvironment:
    values = {
        "task": "chain_sum",
        "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "question_pattern": ": (.*)$",
        "train_prompts": 2000,
        "heldout_prompts": 40,
    }
    return RunEnvironment(parse_config(ReasoningGymConfig, values | changes), seed)


def test_heldout_prompts_are_different_and_not_trained_on() -> None:
    environment = _environment()
    heldout = {problem.prompt for problem in environment.heldout}
    train = {problem.prompt for problem in environment.train}
    assert len(heldout) == len(environment.heldout) == 40
    assert len(train) == len(environment.train)
    assert heldout.isdisjoint(train)
    # 200 prompts there are, and 2000 draws: without leaving them out they would be among these.
    assert len(train) == 160


@pytest.mark.parametrize("disjoint", ["answers", "answer_characters"])
def test_heldout_answers_are_not_trained_on(disjoint: str) -> None:
    values: dict[str, Any] = {
        "task": "palindrome_generation",
        "config": {"min_length": 3, "max_length": 5},
        "question_pattern": "following letters: ([a-z, ]*)",
    }
    shared, apart = _environment(**values), _environment(**values, disjoint=disjoint)
    assert apart.heldout == shared.heldout

    def key(problem: Problem) -> str:
        assert problem.answer is not None
        return problem.answer if disjoint == "answers" else "".join(sorted(problem.answer))

    heldout = {key(problem) for problem in apart.heldout}
    # One answer solves both a held-out and a training problem of the same letters.
    assert not heldout.isdisjoint(map(key, shared.train))
    assert heldout.isdisjoint(map(key, apart.train))
    kept = {problem.prompt for problem in shared.train if key(problem) not in heldout}
    assert kept <= {problem.prompt for problem in apart.train}


def test_answers_that_there_are_not_cannot_be_disjoint() -> None:
    with pytest.raises(UserError, match="answers` needs the answer of every problem"):
        _environment(
            task="rush_hour",
            config={},
            question_pattern=None,
            heldout_prompts=2,
            train_prompts=2,
            disjoint="answers",
        )


def test_what_training_reads_is_not_held_out() -> None:
    config, context = tiny_context()
    assert context.environment is not None
    heldout = {tuple(context.tokenizer.encode(p.prompt)) for p in context.environment.heldout}
    supervised, rl = (begin_phase(config, index, context).source for index in (0, 1))
    assert isinstance(supervised, SupervisedDocuments)
    assert isinstance(rl, SampledRollouts)
    prompts = set()
    for _ in range(12):  # more than an epoch
        for document in [*supervised.next().documents, *rl.next().documents]:
            prompts.add(tuple(document.tokens[: document.prompt_length]))
    assert len(prompts) > 100
    assert heldout.isdisjoint(prompts)


def test_the_seed_gives_the_problems() -> None:
    first, again, other = _environment(1), _environment(1), _environment(2)
    assert first.heldout == again.heldout
    assert first.train == again.train
    assert {p.prompt for p in first.heldout} != {p.prompt for p in other.heldout}


def test_rewards_are_the_verifiers() -> None:
    environment = _environment()
    problem = Problem("", "12", {"answer": "12", "metadata": {}})
    answers = ["12", " 12 ", "012", "12.0", "3 12", "13", "", None]
    scores = environment.score([problem] * len(answers), answers)
    # reasoning-gym: 2 of 4 characters are the answer
    assert scores.rewards == [1, 1, 1, 1, 0.5, 0, 0, 0]
    assert scores.metrics == {"score_errors": 0, "score_timeouts": 0, "score_failures": 0}


def test_the_verifier_gets_the_stripped_answer_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ReasoningGymConfig(task="chain_sum", train_prompts=4, heldout_prompts=2)
    environment = ReasoningGymEnvironment(config, seed=0)
    answers = []

    def score_answer(answer: str | None, entry: dict[str, Any]) -> float:
        answers.append(answer)
        return 0.25

    monkeypatch.setattr(environment._heldout, "score_answer", score_answer)
    rewards = [environment.score(Problem("1 + 1"), answer) for answer in (" 7 \n", "", None)]
    assert answers == ["7", "", None]
    assert rewards == [0.25] * 3


def test_an_answer_that_breaks_the_verifier_is_none_and_counted() -> None:
    config = ReasoningGymConfig(task="prime_factorization", train_prompts=4, heldout_prompts=2)
    environment = RunEnvironment(config, seed=0)
    problem = environment.heldout[0]
    scores = environment.score([problem] * 3, [problem.answer, "two x three", None])
    assert scores.rewards == [1, 0, 0]
    assert scores.metrics["score_errors"] == 1


def test_the_prompt_is_the_pattern_in_the_template() -> None:
    prompt = _environment(prompt="Q {question} A").train[0].prompt
    assert prompt.startswith("Q ")
    assert prompt.endswith(" = A")
    whole = _environment(question_pattern=None).train[0].prompt
    assert whole.startswith("State the final answer to the following arithmetic problem: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "chain_sums"}, "has no task `chain_sums`; did you mean `chain_sum`?"),
        ({"task": "???"}, "has no task `???`; its tasks are "),
        ({"config": {"max_digit": 2}}, "does not fit the task `chain_sum`: "),
        ({"config": {"min_terms": 3, "max_terms": 2}}, "max_terms must be >= min_terms"),
        ({"question_pattern": "sum of (.*)"}, "must be found in every question, but is not in '"),
        ({"heldout_prompts": 500}, "`environment.heldout_prompts` must be at most 200 here"),
        (
            {"heldout_prompts": 190, "train_prompts": 1},
            "all 1 training problems of `chain_sum` have held-out prompts; lower",
        ),
    ],
)
def test_what_does_not_fit_is_one_message(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        _environment(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_task_without_answers_cannot_be_learned_by_supervision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, context = tiny_context()
    assert context.environment is not None
    monkeypatch.setattr(context.environment, "train", (Problem("1 + 1 ="),))
    with pytest.raises(UserError, match="a supervised phase needs answers"):
        begin_phase(config, 0, context)
