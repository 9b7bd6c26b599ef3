"""A model from a folder reads with the tokenizer of the folder, and ends where the folder says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastrl.cli import main
from fastrl.config import ConfigError, RunConfig, UserError, parse_config
from fastrl.config.environment import PretrainedTokenizerConfig
from fastrl.training.context import build_context
from fastrl.training.phases import Phase, StepResult
from fastrl.training.tokenizer import Tokenizer, build_tokenizer
from tests.helpers.pretrained import END, END_OF_TURN, write_json, write_pretrained
from tests.helpers.runs import begin_phase, final_weights, tiny, write_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_pretrained(tmp_path / "model")


def _tokenizer(folder: Path, **options: Any) -> Tokenizer:
    return build_tokenizer(PretrainedTokenizerConfig(**options), folder)


def _write_run(folder: Path) -> Path:
    values = {"model": {"type": "pretrained", "path": str(folder)}}
    config = write_tiny(folder.parent, values)
    text = config.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if line.startswith("tokenizer:"))
    stop = next(i for i in range(start + 1, len(lines)) if not lines[i].startswith(" "))
    config.write_text("".join(lines[:start] + lines[stop:]), encoding="utf-8")
    return config


def test_b1_a_folder_brings_its_tokenizer_and_end_tokens(folder: Path) -> None:
    values = {
        "model": {"type": "pretrained", "path": str(folder)},
        "environment": {"type": "reasoning_gym", "task": "chain_sum", "heldout_prompts": 2}
        | {"train_prompts": 8, "config": {"max_terms": 2, "max_digits": 1}},
        "phases": [
            {"type": "supervised", "steps": 1, "losses": {"answers": {"type": "cross_entropy"}}}
        ],
    }
    config = parse_config(RunConfig, values)
    assert config.tokenizer == PretrainedTokenizerConfig()
    context = build_context(config)
    assert context.tokenizer.end_tokens == (END, END_OF_TURN)
    text = "what is 12 + 7 ?"
    assert 3 < len(context.tokenizer.encode(text)) < len(text)
    assert context.tokenizer.decode([*context.tokenizer.encode(text), END_OF_TURN, END]) == text
    document = begin_phase(config, 0, context).source.next().documents[0]
    assert document.tokens[-1] == END
    assert context.environment is not None
    context.environment.close()


def test_b1_the_sampler_stops_at_any_end_token(folder: Path) -> None:
    config = tiny("sampler.max_new_tokens=400").model_dump(mode="json")
    config |= {"model": {"type": "pretrained", "path": str(folder)}, "dtype": "float32"}
    config["tokenizer"] = {"type": "pretrained"}
    context = build_context(parse_config(RunConfig, config), with_environment=False)
    context.generator.manual_seed(1)
    (completions,) = context.sampler.sample([[5, 6, 7]], num_each=100)
    finished = [completion.tokens for completion in completions if completion.finished]
    assert {tokens[-1] for tokens in finished} == {END, END_OF_TURN}
    for completion in completions:
        assert not {END, END_OF_TURN} & set(completion.tokens[:-1])
        assert completion.finished or len(completion.tokens) == 400


def test_b1_a_run_its_checkpoints_and_its_resumption_keep_the_tokenizer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _write_run(folder)
    steps = ["phases.0.steps=2", "phases.1.steps=3", "checkpoint.every=1"]
    runs = [folder.parent / name for name in ("whole", "stopped")]
    assert main(["train", str(config), "--run-dir", str(runs[0]), *steps]) == 0
    step = Phase.step

    def interrupted(phase: Phase) -> StepResult:
        if phase.name == "rl" and phase.steps_done == 1:
            raise KeyboardInterrupt
        return step(phase)

    command = ["train", str(config), "--run-dir", str(runs[1]), *steps]
    with monkeypatch.context() as patch:
        patch.setattr(Phase, "step", interrupted)
        assert main(command) == 130
    (folder / "tokenizer.json").rename(folder / "moved")  # the checkpoint has it
    assert main([*command, "--resume"]) == 0
    weights = [final_weights(run) for run in runs]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])

    capsys.readouterr()
    assert main(["eval", str(runs[0])]) == 0
    assert main(["sample", str(runs[0]), "what is 1", "--max-tokens", "1"]) == 0
    assert "what is 1" in capsys.readouterr().out

    checkpoint = runs[0] / "checkpoints" / "rl-000005"
    for name in ("tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (checkpoint / name).read_bytes() == (folder / name).read_bytes()
    assert (checkpoint / "tokenizer.json").read_bytes() == (folder / "moved").read_bytes()


def test_b1_a_checkpoint_of_a_new_model_is_such_a_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert (
        main(["train", str(write_tiny(tmp_path)), "--run-dir", str(run), "phases.1.steps=1"]) == 0
    )
    checkpoint = run / "checkpoints" / "rl-000013"
    mine = build_tokenizer(tiny().tokenizer)
    theirs = _tokenizer(checkpoint)
    assert theirs.end_tokens == mine.end_tokens == (0,)
    assert theirs.vocab_size == mine.vocab_size
    assert theirs.encode("12 + 3 =") == mine.encode("12 + 3 =")
    with pytest.raises(UserError, match=r"tokenizer\.json: has no tokens for '1 x'"):
        theirs.encode("1 x")


# (files that go, files that are written, the end tokens that are left)
SOURCES: dict[str, tuple[set[str], dict[str, object], tuple[int, ...]]] = {
    "all": (set(), {}, (END, END_OF_TURN)),
    "no generation config": ({"generation_config.json"}, {}, (END,)),
    "one id": (set(), {"generation_config.json": {"eos_token_id": END_OF_TURN}}, (1, 2)),
    "of the config alone": ({"generation_config.json", "tokenizer_config.json"}, {}, (END,)),
    "special tokens": (
        {"generation_config.json", "tokenizer_config.json"},
        {"special_tokens_map.json": {"eos_token": "<turn>"}},
        (END_OF_TURN, END),
    ),
    "a name alone": (set(), {"tokenizer_config.json": {"eos_token": "<turn>"}}, (2, 1)),
}


@pytest.mark.parametrize("name", SOURCES)
def test_b1_end_tokens_are_those_of_any_file(folder: Path, name: str) -> None:
    gone, written, expected = SOURCES[name]
    for file in gone:
        (folder / file).unlink()
    for file, values in written.items():
        write_json(folder / file, values)
    assert _tokenizer(folder).end_tokens == expected


def test_b1_end_tokens_can_be_given_and_go_into_the_checkpoint(folder: Path) -> None:
    tokenizer = _tokenizer(folder, end_tokens=("<turn>",))
    assert tokenizer.end_tokens == (END_OF_TURN,)
    for name, content in tokenizer.files.items():
        (folder / name).write_bytes(content)
    assert _tokenizer(folder).end_tokens == (END_OF_TURN,)
    assert json.loads(tokenizer.files["tokenizer_config.json"])["add_bos_token"] is True
    with pytest.raises(UserError, match=r"`tokenizer.end_tokens` must be a token of .*'<end>'"):
        _tokenizer(folder, end_tokens=("<end>",))


def test_b1_a_folder_without_one_is_refused_by_name_and_remedy(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    write_json(folder / "tokenizer_config.json", {"eos_token": None})
    hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", hf | {"eos_token_id": None})
    with pytest.raises(
        UserError, match=r"but none does; add it there, or give `tokenizer\.end_tok"
    ):
        _tokenizer(folder)
    write_json(folder / "config.json", hf | {"eos_token_id": "</s>"})
    with pytest.raises(UserError, match=r"config\.json: `eos_token_id` must be an id or a list of"):
        _tokenizer(folder)
    write_json(folder / "tokenizer_config.json", {"eos_token": "<end>"})
    with pytest.raises(
        UserError, match=r"`eos_token` must be a token of tokenizer\.json, got '<end"
    ):
        _tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        UserError, match=r"must hold a tokenizer\.json, .*AutoTokenizer.*type: file"
    ):
        _tokenizer(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "must be JSON in UTF-8"), ("[1]", "must be a JSON object, got a list")],
)
@pytest.mark.parametrize("options", [{}, {"end_tokens": ("<turn>",)}])
def test_b1_a_malformed_file_is_one_error(
    folder: Path, content: str, message: str, options: dict[str, Any]
) -> None:
    (folder / "tokenizer_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=rf"tokenizer_config\.json: {message}"):
        _tokenizer(folder, **options)


def test_b1_an_end_token_that_is_no_text_is_one_error(folder: Path) -> None:
    write_json(folder / "tokenizer_config.json", {"eos_token": ["</s>"]})
    with pytest.raises(UserError, match=r"`eos_token` must be a token of tokenizer\.json, got"):
        _tokenizer(folder)


def test_b1_end_tokens_beyond_the_embedding_are_refused(folder: Path) -> None:
    write_json(folder / "generation_config.json", {"eos_token_id": [END, 320]})
    config = tiny().model_dump(mode="json")
    config |= {"model": {"type": "pretrained", "path": str(folder)}}
    config["tokenizer"] = {"type": "pretrained"}
    with pytest.raises(
        UserError, match=r"`vocab_size` must be at least the tokenizer's 321, got 320"
    ):
        build_context(parse_config(RunConfig, config), with_environment=False)


@pytest.mark.parametrize(
    ("model", "tokenizer", "message"),
    [
        (
            {"type": "pretrained", "path": "x"},
            {"type": "character"},
            "`tokenizer.type: character` must not be given with `model.type: pretrained`",
        ),
        (
            {"type": "llama"},
            {"type": "pretrained"},
            "`tokenizer.type: pretrained` must be given with `model.type: pretrained` or",
        ),
    ],
)
def test_b1_a_tokenizer_of_another_kind_of_model_is_refused(
    model: dict[str, Any], tokenizer: dict[str, Any], message: str
) -> None:
    values = tiny().model_dump(mode="json") | {"model": model, "tokenizer": tokenizer}
    with pytest.raises(ConfigError) as caught:
        parse_config(RunConfig, values)
    assert message in str(caught.value)
