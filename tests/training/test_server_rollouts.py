"""Rollouts of servers: answers as vLLM's are taken, all others are refused, and runs go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from fastrl.cli import main
from fastrl.config import ConfigError, UserError
from fastrl.config.phases import RLPhaseConfig
from fastrl.config.rollouts import ServerRolloutsConfig
from fastrl.training.context import RunContext
from fastrl.training.log_files import iter_metrics
from fastrl.training.server_answers import CompletionRequest
from fastrl.training.server_rollouts import ServerRollouts
from tests.helpers.fake_vllm import MODEL, RECORDED, FakeVllm, Fault
from tests.helpers.runs import tiny, tiny_context, write_tiny
from tests.helpers.torchrun import torchrun

STEPS = 3
PROMPTS = 3


@pytest.fixture
def servers() -> Iterator[list[FakeVllm]]:
    started = [FakeVllm(), FakeVllm()]
    yield started
    for each in started:
        each.end()


def overrides(servers: list[FakeVllm], folder: Path, *more: str, **options: Any) -> list[str]:
    rollouts = {
        "type": "server",
        "urls": [each.url for each in servers],
        "weights": {"folder": str(folder / "served")},
        "prompts_per_step": PROMPTS,
        "group_size": 4,
        "retries": 1,
        **options,
    }
    return [
        f"phases.1.rollouts={json.dumps(rollouts)}",
        *(f"phases.1.steps={STEPS}", "phases.0.steps=1", "phases.1.mini_batches=1"),
        *("environment.heldout_prompts=2", "environment.train_prompts=20", "checkpoint.every=1"),
        *more,
    ]


def train(servers: list[FakeVllm], folder: Path, *more: str, **options: Any) -> int:
    config = folder / "tiny.yaml"
    if not config.exists():
        write_tiny(folder)
    arguments = overrides(servers, folder, *more, **options)
    flags = [each for each in arguments if each.startswith("--")]
    changes = [each for each in arguments if not each.startswith("--")]
    return main(["train", str(config), "--run-dir", str(folder / "run"), *flags, *changes])


def rl_steps(folder: Path) -> list[dict[str, Any]]:
    return [each for each in iter_metrics(folder / "run") if "policy/loss" in each]


def recorded_request(**changes: Any) -> CompletionRequest:
    body = RECORDED["request"]
    values = {
        "prompt": body["prompt"],
        "number": body["n"],
        "temperature": 1.0,
        "logprobs_temperature": 1.0,
        "max_new_tokens": body["max_tokens"],
        "end_tokens": tuple(body["stop_token_ids"]),
        "vocab_size": 56,
        "seed": body["seed"],
    }
    return CompletionRequest(**(values | changes))


def test_an_answer_of_vllm_becomes_completions() -> None:
    request = recorded_request()
    assert request.body(MODEL) == RECORDED["request"]
    _, answer = RECORDED["answers"]["/v1/completions"]
    ended, cut = request.completions(answer, MODEL, "server")
    for completion, choice in zip((ended, cut), answer["choices"], strict=True):
        assert completion.tokens == choice["token_ids"]
        assert completion.logprobs == choice["logprobs"]["token_logprobs"]
    assert (ended.finished, cut.finished) == (True, False)


def set_choice(**values: Any) -> Any:
    return lambda answer: answer["choices"][1].update(values)


def set_logprobs(values: list[Any]) -> Any:
    return lambda answer: answer["choices"][1]["logprobs"].update(token_logprobs=values)


WRONG = {
    "other model": (lambda answer: answer.update(model="other"), "of model 'runs/qwen3', got"),
    "text alone": (set_choice(token_ids=None), "got text alone"),
    "no logprobs": (set_choice(logprobs=None), "a log-probability of each token, got none"),
    "a null logprob": (set_logprobs([-1.0, None, -1.0]), "logprobs` must be finite"),
    "probabilities": (set_logprobs([0.5, 0.25, 0.5]), "at most 0, got 0.5"),
    "a short list": (set_logprobs([-1.0]), "must have 3 values"),
    "other prompt": (set_choice(prompt_token_ids=[1, 2]), r"repeat the prompt \[33, 1"),
    "ids outside": (set_choice(token_ids=[3, 56, 2]), "below the vocabulary size 56, got 56"),
    "huge ids": (set_choice(token_ids=[3, 2**80, 2]), "tokens` must be|vocabulary size"),
    "negative ids": (set_choice(token_ids=[3, -1, 2]), "tokens` must be|vocabulary size"),
    "aborted": (set_choice(finish_reason="abort"), "`finish_reason` 'abort'"),
    "own end token": (set_choice(finish_reason="stop"), "nowhere else"),
    "end in its midst": (set_choice(token_ids=[3, 0, 2]), "nowhere else"),
    "too few": (lambda answer: answer["choices"].pop(), "have 2 completions, got 1"),
    "no choices": (lambda answer: answer.pop("choices"), "`choices` must be a list of objects"),
    "an error": (
        lambda answer: [answer.pop("choices"), answer.update(error="no")],
        "have 2 completions, got 0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_refused_by_name(name: str) -> None:
    change, message = WRONG[name]
    answer = deepcopy(RECORDED["answers"]["/v1/completions"][1])
    change(answer)
    with pytest.raises(UserError, match=message):
        recorded_request().completions(answer, MODEL, "server")


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in JSON."""
    yield at
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*at, key))


def changed(answer: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    result = copy(answer)
    result[place[0]] = changed(answer[place[0]], place[1:], value)
    return result


ODD: list[Any] = [
    None,
    True,
    -1,
    2**80,
    0.5,
    float("nan"),
    float("-inf"),
    "x",
    [],
    {},
    [[1]],
    {"a": []},
]


def test_no_value_in_an_answer_comes_out_as_another_error() -> None:
    """What is not refused is what was answered, but for what nobody reads."""
    request = recorded_request()
    _, answer = RECORDED["answers"]["/v1/completions"]
    expected = request.completions(answer, MODEL, "server")
    refused = 0
    for place in list(places(answer))[1:]:
        for value in ODD:
            try:
                found = request.completions(changed(answer, place, value), MODEL, "server")
            except UserError:
                refused += 1
                continue
            same = [(one.tokens, one.finished) for one in found]
            assert same == [(one.tokens, one.finished) for one in expected], (place, value)
    assert refused > 200


@pytest.fixture(scope="module")
def context() -> RunContext:
    _, context = tiny_context("environment.train_prompts=20", "environment.heldout_prompts=2")
    return context


@pytest.fixture
def sources(
    context: RunContext, tmp_path: Path, lively_rewards: None
) -> Iterator[Callable[..., ServerRollouts]]:
    made: list[ServerRollouts] = []

    def make(servers: list[FakeVllm], **options: Any) -> ServerRollouts:
        (change, *_) = overrides(servers, tmp_path, **options)
        phase = tiny(change).phases[1]
        assert isinstance(phase, RLPhaseConfig)
        assert isinstance(phase.rollouts, ServerRolloutsConfig)
        made.append(ServerRollouts(phase.rollouts, phase.advantage, context, "seed", STEPS))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_step_has_the_documents_of_all_servers(
    servers: list[FakeVllm], sources: Callable[..., ServerRollouts]
) -> None:
    for each in servers:
        each.faults = [0.1] * PROMPTS  # so that no server takes all
    source = sources(servers, max_in_flight=1)
    source.start()
    rollouts = source.next()
    requests = [request for each in servers for request in each.requests]
    assert all(each.requests for each in servers)
    assert len(requests) == len({request["seed"] for request in requests}) == PROMPTS
    assert rollouts.metrics["sampled_tokens"] == sum(
        len(document.tokens) - (document.prompt_length or 0) for document in rollouts.documents
    )
    for document in rollouts.documents:
        prompt = list(document.tokens)[: document.prompt_length]
        assert prompt in [request["prompt"] for request in requests]
        assert document.logprobs == document.rollout_logprobs
        assert (document.model_version, document.temperature) == (0, 1.0)


def test_servers_have_the_weights_of_the_step(
    context: RunContext,
    tmp_path: Path,
    servers: list[FakeVllm],
    sources: Callable[..., ServerRollouts],
) -> None:
    source = sources(servers)
    source.start()
    weight = context.model.module.get_parameter("lm_head.weight")
    for number in range(2):
        with torch.no_grad():
            weight.add_(1)
        (document, *_) = source.next().documents
        assert document.model_version == number
        for each in servers:
            assert each.folders[-1] == tmp_path / f"served/version-{number:06}"
            assert torch.equal(each.weights[-1]["lm_head.weight"], weight)
    folder = tmp_path / "served/version-000001"
    assert {path.name for path in (tmp_path / "served").iterdir()} == {".lock", folder.name}
    assert {"config.json", "tokenizer.json"} <= {path.name for path in folder.iterdir()}


def test_rollouts_ahead_are_of_the_weights_before(
    tmp_path: Path, servers: list[FakeVllm], lively_rewards: None
) -> None:
    losses = 'phases.1.losses={"policy": {"type": "grpo", "max_staleness": 1}}'
    assert train(servers, tmp_path, losses, ahead=1, old_logprobs="sampler") == 0
    staleness = [record["policy/staleness"] for record in rl_steps(tmp_path)]
    assert staleness == [0.0] + [1.0] * (STEPS - 1)
    # Of the last step's weights nothing is sampled.
    assert [folder.name for folder in servers[0].folders] == ["version-000000", "version-000001"]
    assert sum(len(each.requests) for each in servers) == STEPS * PROMPTS


def test_problems_come_in_the_same_order_ahead(
    servers: list[FakeVllm], sources: Callable[..., ServerRollouts]
) -> None:
    for ahead, server in enumerate(servers):
        source = sources([server], ahead=ahead, old_logprobs="sampler")
        source.start()
        for _ in range(STEPS):
            source.next()
        source.close()
    asked = [[request["prompt"] for request in each.requests] for each in servers]
    assert sorted(asked[0][:PROMPTS]) == sorted(asked[1][:PROMPTS])
    assert sorted(asked[0]) == sorted(asked[1])


FAULTS: dict[str, list[Fault | None]] = {
    "failures": ["500", "500", None, "500"],
    "cut answers": ["cut", None, "cut"],
    "a slow answer": [1.5],
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_passes_is_tried_again(
    servers: list[FakeVllm], sources: Callable[..., ServerRollouts], name: str
) -> None:
    servers[0].faults = FAULTS[name]
    source = sources(servers[:1], timeout=1, retries=3)
    source.start()
    source.next()
    requests = [json.dumps(request, sort_keys=True) for request in servers[0].requests]
    assert len(set(requests)) == PROMPTS
    failed = sum(fault is not None for fault in FAULTS[name])
    assert len(requests) == PROMPTS + failed


def start_again(server: FakeVllm) -> Fault:
    """With other weights."""

    def change(_: dict[str, Any]) -> None:
        server.version = "default"

    return change


WRONG_STEPS: dict[str, tuple[Callable[[FakeVllm], Fault], str]] = {
    "torn": (lambda _: "torn", "must answer in JSON"),
    "endless": (
        lambda _: lambda answer: answer.update(padding="x" * 2**22),
        "at most 1,[0-9,]* bytes",
    ),
    "text": (lambda _: set_choice(token_ids=None), "got text alone"),
    "started again": (start_again, "must have the weights of this step, '.*-0'"),
}


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_what_is_wrong_ends_the_step_at_once(
    servers: list[FakeVllm], sources: Callable[..., ServerRollouts], name: str
) -> None:
    fault, message = WRONG_STEPS[name]
    servers[0].faults = [fault(servers[0])]
    source = sources(servers[:1])
    source.start()
    with pytest.raises(UserError, match=message) as error:
        source.next()
    assert str(error.value).startswith(servers[0].url)


def test_a_server_that_does_not_see_the_weights_is_named(
    tmp_path: Path, servers: list[FakeVllm], sources: Callable[..., ServerRollouts]
) -> None:
    servers[1].sees_weights = False
    source = sources(servers)
    source.start()
    folder = tmp_path / "served/version-000000"
    with pytest.raises(UserError, match=f"got 500: .*; the server must see {folder}"):
        source.next()


def test_a_killed_server_ends_the_run_which_goes_on_later(
    tmp_path: Path, servers: list[FakeVllm], capsys: pytest.CaptureFixture[str]
) -> None:
    servers[1].faults = [None] * (2 * PROMPTS + 1) + ["end"]
    options: dict[str, Any] = {"ahead": 1, "old_logprobs": "sampler", "max_in_flight": 1}
    assert train(servers[1:], tmp_path, **options) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{servers[1].url}: the server must answer to /v1/completions" in error
    assert "--resume" in error
    before = rl_steps(tmp_path)
    assert [record["step"] for record in before] == [2, 3]
    # With another server, and other numbers of requests.
    assert train(servers[:1], tmp_path, "--resume", ahead=1, old_logprobs="sampler") == 0
    after = rl_steps(tmp_path)
    assert [record["step"] for record in after] == [2, 3, 4]
    assert after[0] == before[0]
    servers[1].start_again()


def test_servers_that_cannot_are_refused_before_the_run(
    tmp_path: Path, servers: list[FakeVllm], sources: Callable[..., ServerRollouts]
) -> None:
    def refused(message: str, **options: Any) -> None:
        with pytest.raises(UserError, match=message):
            sources(servers, **options).start()

    refused(f"must have 'other', has \\['{MODEL}'\\]", model="other")
    servers[1].max_model_len = 8
    refused("takes 8; start vLLM with `--max-model-len")
    servers[1].max_model_len = 64
    servers[1].has_control = False
    refused("start vLLM with VLLM_SERVER_DEV_MODE=1")
    servers[1].has_control = True
    servers[1].end()
    refused(f"{servers[1].url}: the server must answer to /v1/models", retries=0)
    servers[1].start_again()
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "model.safetensors").touch()
    refused("must be new or empty")
    assert (tmp_path / "served" / "model.safetensors").exists()


def test_a_run_that_is_refused_writes_nothing(
    tmp_path: Path, servers: list[FakeVllm], capsys: pytest.CaptureFixture[str]
) -> None:
    servers[0].has_control = False
    assert train(servers, tmp_path) == 2
    assert "VLLM_SERVER_DEV_MODE=1" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.yaml"]


@pytest.mark.slow
def test_all_ranks_train_on_the_same_rollouts_and_end_together(
    tmp_path: Path, servers: list[FakeVllm]
) -> None:
    config = write_tiny(tmp_path)
    ranks = ["parallel.data=2", "parallel.fully_sharded=true"]

    def run(name: str, *more: str) -> Any:
        changes = overrides(servers[:1], tmp_path, *ranks)
        return torchrun(
            2, "fastrl", "train", str(config), "--run-dir", str(tmp_path / name), *changes, *more
        )

    done = run("run")
    assert done.returncode == 0, done.stderr
    assert len(rl_steps(tmp_path)) == STEPS
    assert len(servers[0].requests) == STEPS * PROMPTS
    two = [record["policy/loss"] for record in rl_steps(tmp_path)]
    (tmp_path / "one").mkdir()
    assert train(servers[:1], tmp_path / "one") == 0
    one = [record["policy/loss"] for record in rl_steps(tmp_path / "one")]
    assert two == pytest.approx(one, abs=1e-12)
    of_two, of_one = servers[0].weights[:STEPS], servers[0].weights[STEPS:]
    for sharded, whole in zip(of_two, of_one, strict=True):
        torch.testing.assert_close(sharded, whole, rtol=0, atol=1e-12)

    servers[0].faults = [None] * PROMPTS + ["end"]
    done = run("killed")
    assert done.returncode != 0
    assert done.stderr.count("the server must answer to /v1/completions") == 2


CONFIGS = {
    'urls=["127.0.0.1:8000"]': "must be addresses of servers",
    'urls=["http://a/v1"]': "without a path",
    'urls=["http://u:p@a"]': "or a password",
    'urls=["http://a","http://a/"]': "must be different servers",
    "temperature=0.5": "processed_logprobs: true",
    "processed_logprobs=true": "no effect at `temperature: 1`",
    "ahead=2": "less than or equal to 1|at most 1",
    "ahead=1": "`rollout_correction` must be given, or",
}


@pytest.mark.parametrize("change", CONFIGS)
def test_a_config_that_cannot_be_meant_is_refused(change: str) -> None:
    rollouts = {"type": "server", "urls": ["http://a"], "weights": {"folder": "w"}}
    base = f"phases.1.rollouts={json.dumps(rollouts)}"
    with pytest.raises(ConfigError, match=CONFIGS[change]):
        tiny(base, f"phases.1.rollouts.{change}")


def test_baselines_that_servers_give_nothing_for_are_refused() -> None:
    rollouts = {"type": "server", "urls": ["http://a"], "weights": {"folder": "w"}}
    base = f"phases.1.rollouts={json.dumps(rollouts)}"
    for baseline in ("greedy", "optimal_token"):
        with pytest.raises(ConfigError, match="must not go with `rollouts` of type `server`"):
            tiny(base, f"phases.1.advantage.baseline={baseline}", "phases.1.advantage.scale=none")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"on_policy": True}, "`on_policy` must not be given"),
        ({"max_staleness": 0}, "`max_staleness` must be at least 1"),
    ],
)
def test_losses_of_fresh_rollouts_are_refused_ahead(loss: dict[str, Any], message: str) -> None:
    rollouts = {"type": "server", "urls": ["http://a"], "weights": {"folder": "w"}, "ahead": 1}
    losses = {"policy": {"type": "grpo", **loss}}
    options = [f"phases.1.rollouts={json.dumps(rollouts)}", "phases.1.mini_batches=1"]
    with pytest.raises(ConfigError, match=message):
        tiny(*options, f"phases.1.losses={json.dumps(losses)}")
    if "max_staleness" in loss:
        with pytest.raises(ConfigError, match="no effect but with `rollouts` of type `server`"):
            tiny(f"phases.1.losses={json.dumps(losses)}")
