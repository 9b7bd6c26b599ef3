"""The examples: what they claim, and that a shortened one runs."""

from pathlib import Path

import pytest

from fastrl.cli import main
from fastrl.config import RunConfig, load_config
from fastrl.config.environment import PretrainedTokenizerConfig
from fastrl.config.training import PretrainedLlamaConfig
from fastrl.config.transformers_model import TransformersModelConfig
from fastrl.training.environment import RunEnvironment
from fastrl.training.log_files import iter_metrics

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_a_shortened_example_runs(
    tmp_path: Path, loss: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run = str(EXAMPLES / f"llama_{loss}.yaml"), tmp_path / "run"
    shorter = ["phases.0.steps=2", "phases.1.steps=1", "environment.heldout_prompts=8"]
    smaller = ["environment.train_prompts=64", "phases.1.rollouts.prompts_per_step=4"]
    assert main(["train", config, "--run-dir", str(run), *shorter, *smaller]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("held-out reward: ")
    assert f"({loss}, " in last
    assert (run / "report.png").exists()


def test_the_two_examples_differ_in_the_loss_alone() -> None:
    grpo, gspo = (load_config(RunConfig, EXAMPLES / f"llama_{n}.yaml") for n in ("grpo", "gspo"))
    for config, loss in ((grpo, "grpo"), (gspo, "gspo")):
        assert [entry.type for entry in config.losses_of(config.phases[1]).values()] == [loss]
        assert config.phase_name(1) == loss
    head = grpo.model.head
    phases = (gspo.phases[0], gspo.phases[1].model_copy(update={"name": "grpo"}))
    model = gspo.model.model_copy(update={"head": head})
    assert gspo.model_copy(update={"phases": phases, "model": model}) == grpo


def test_the_example_with_a_server_differs_in_its_rollouts_alone() -> None:
    own, served = (
        load_config(RunConfig, EXAMPLES / f"{name}_grpo.yaml").model_dump()
        for name in ("transformers", "server")
    )
    for config in (own, served):
        (loss,) = config["phases"][1].pop("losses").values()
        rollouts = config["phases"][1].pop("rollouts")
        assert loss["type"] == "grpo"
        assert (rollouts["prompts_per_step"], rollouts["group_size"]) == (16, 8)
    assert own == served


def test_the_offline_example_goes_on_with_the_model_of_the_first() -> None:
    grpo = load_config(RunConfig, EXAMPLES / "llama_grpo.yaml")
    offline = load_config(RunConfig, EXAMPLES / "offline_grpo.yaml")
    assert isinstance(offline.model, PretrainedLlamaConfig)
    warm_up = grpo.phases[0]
    assert offline.model.path.endswith(f"{grpo.phase_name(0)}-{warm_up.steps:06}")
    assert offline.tokenizer == PretrainedTokenizerConfig()  # the checkpoint has the first one's
    assert offline.environment == grpo.environment


def test_the_adapters_example_goes_on_with_the_supervised_model() -> None:
    grpo = load_config(RunConfig, EXAMPLES / "transformers_grpo.yaml")
    lora = load_config(RunConfig, EXAMPLES / "transformers_lora.yaml")
    assert isinstance(lora.model, TransformersModelConfig)
    assert lora.model.path.endswith(f"{grpo.phase_name(0)}-{grpo.phases[0].steps:06}")
    for key in ("environment", "sampler", "tokenizer", "seed"):
        assert getattr(lora, key) == getattr(grpo, key)


def test_heldout_prompts_of_the_examples_are_not_trained_on() -> None:
    config = load_config(RunConfig, EXAMPLES / "llama_grpo.yaml")
    assert config.environment is not None
    environment = RunEnvironment(config.environment, config.seed)
    heldout = {problem.prompt for problem in environment.heldout}
    assert len(heldout) == 512
    assert heldout.isdisjoint(problem.prompt for problem in environment.train)
    some = environment.heldout[:20]
    scores = environment.score(some, [problem.answer for problem in some])
    assert scores.rewards == [1.0] * 20
    for problem in some:
        assert problem.answer is not None
        assert problem.answer not in problem.prompt


def test_a_task_of_30_lines_is_trained_scored_and_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len((EXAMPLES / "my_task.py").read_text(encoding="utf-8").splitlines()) <= 30
    monkeypatch.chdir(EXAMPLES.parent)
    config, run = str(EXAMPLES / "my_task.yaml"), tmp_path / "run"
    shorter = ["phases.0.steps=12", "phases.1.steps=10", "logging.report=false"]
    assert main(["train", config, "--run-dir", str(run), *shorter]) == 0
    records = [*iter_metrics(run)]
    rewards = [record["heldout/reward"] for record in records if "heldout/reward" in record]
    assert rewards[-1] > rewards[0] + 0.05  # learned something
    steps = [record for record in records if "reward" in record]
    assert len(steps) == 10
    assert {record["score_errors"] for record in steps} == {0.0}
    capsys.readouterr()

    assert main(["eval", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"held-out reward: {rewards[-1]:.3f}"
    assert main(["sample", str(run), "fade ="]) == 0
    assert capsys.readouterr().out.startswith("fade =")
