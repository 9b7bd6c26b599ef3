"""fastrl under TRL's trainers: the same runs, the same function, and what is refused."""

from __future__ import annotations

import gc
import re
import runpy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import linear_logprobs
from fastrl.functional.head import recompute
from fastrl.functional.head.extra_statistics import extra_statistics
from fastrl.functional.reference import head as reference

with warnings.catch_warnings():  # of what TRL imports
    warnings.simplefilter("ignore")
    import trl
    from trl.trainer import utils

    from fastrl.integrations import trl as integration
    from tests.helpers.trl_runs import TrlCase, logs_differ, tiny_model, weights_differ

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL, transformers and datasets


def current() -> Any:
    """What TRL's trainers call."""
    return getattr(utils, integration.NAME)


PLAIN = current()

RUNS = [
    TrlCase("grpo", "grpo", {"loss_type": "grpo", "beta": 0.1}),
    TrlCase("bnpo", "grpo", {"loss_type": "bnpo", "entropy_coef": 0.1}),
    TrlCase("dapo", "grpo", {"loss_type": "dapo", "top_entropy_quantile": 0.4}),
    TrlCase("dr_grpo", "grpo", {"loss_type": "dr_grpo", "num_iterations": 2}),
    TrlCase("cispo", "grpo", {"loss_type": "cispo", "temperature": 0.7}),
    TrlCase("sapo", "grpo", {"loss_type": "sapo", "gradient_accumulation_steps": 2}),
    TrlCase("luspo", "grpo", {"loss_type": "luspo", "importance_sampling_level": "sequence"}),
    TrlCase("vespo", "grpo", {"loss_type": "vespo", "cast_lm_head_to_fp32": True}),
    TrlCase("rloo", "rloo", {"beta": 0.1}),
    TrlCase("sft", "sft"),
    TrlCase("dpo_weighted", "dpo", {"use_weighting": True}),
    TrlCase("kto", "kto"),
    TrlCase("lora", "grpo", {"beta": 0.1}, lora=True),
    TrlCase("softcap", "dpo", model="softcap"),
    TrlCase("logit_scale", "dpo", model="logit_scale"),
    TrlCase("bias", "sft", model="bias"),
]
# TRL rounds logits to bf16, fastrl does not. Without sampling, which could choose another token.
AUTOCAST = TrlCase("bf16_autocast", "sft", {"bf16": True})


@pytest.fixture(autouse=True, scope="module")
def _small_collections() -> Iterator[None]:
    """TRL's trainers collect garbage several times, each time over all that pytest holds."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtype of the operands of each call of the op."""
    dtypes: list[torch.dtype] = []

    def counted(*args: Any, compute_dtype: torch.dtype, **options: Any) -> Any:
        dtypes.append(compute_dtype)
        return original(*args, compute_dtype=compute_dtype, **options)

    original = linear_logprobs
    monkeypatch.setattr(integration, "linear_logprobs", counted)
    return dtypes


@pytest.mark.parametrize("case", [*RUNS, AUTOCAST], ids=lambda case: case.name)
def test_a_run_is_that_of_plain_trl(
    case: TrlCase, tmp_path: Path, calls: list[torch.dtype]
) -> None:
    plain = case.run(tmp_path)
    assert not calls
    with integration.installed():
        ours = case.run(tmp_path)
    assert set(calls) == {torch.bfloat16 if case is AUTOCAST else torch.float32}
    assert weights_differ(plain.after, plain.before) > 0.01
    of_logs, of_weights = (2e-2, 4e-3) if case is AUTOCAST else (2e-5, 2e-6)
    assert logs_differ(ours, plain) < of_logs
    assert weights_differ(ours.after, plain.after) < of_weights


@dataclass(frozen=True)
class Inputs:
    """Arguments of TRL's function."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in (self.hidden, self.weight, self.bias) if x is not None]

    def call(self, function: Any, outputs: tuple[str, ...] = integration.OUTPUTS) -> Any:
        return function.apply(
            self.hidden,
            self.weight,
            self.bias,
            self.targets,
            self.temperature,
            16,
            self.softcap,
            self.logit_scale,
            outputs,
        )


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "temperature": {"temperature": 0.6},
    "softcap": {"softcap": 1.5},
    "logit_scale": {"logit_scale": 0.3},
    "everything": {"bias": True, "temperature": 1.3, "softcap": 2.0, "logit_scale": 1.7},
}


def make_inputs(
    dtype: torch.dtype = torch.float32, bias: bool = False, num_rows: int = 13, **options: Any
) -> Inputs:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()

    hidden, weight = normal(num_rows, 8), normal(37, 8)
    targets = torch.randint(37, (num_rows,))
    return Inputs(hidden, weight, normal(37) if bias else None, targets, **options)


def upstream(num_rows: int = 13) -> list[Tensor]:
    """Gradients of log-probabilities and entropies; every third token has none."""
    draws = torch.randn(2, num_rows, generator=torch.Generator().manual_seed(3))
    draws[:, ::3] = 0
    return list(draws)


def gradients(inputs: Inputs, outputs: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(outputs[:2], inputs.leaves, [g.to(outputs[0]) for g in upstream()])


def truth(inputs: Inputs) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """The five statistics and the gradients by the definition, in the dtype of the inputs."""
    z = reference.logits(
        inputs.hidden,
        inputs.weight,
        bias=inputs.bias,
        temperature=inputs.temperature,
        softcap=inputs.softcap,
        logit_scale=inputs.logit_scale,
    )
    logprobs, entropy, _ = reference.token_statistics(z, inputs.targets)
    p = torch.softmax(z.detach(), 1)
    others = [p.square().sum(1).log(), z.detach().mean(1), z.argmax(1) == inputs.targets]
    return [logprobs, entropy, *others], gradients(inputs, (logprobs, entropy))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_function_is_trls(name: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(dtype, **OPTIONS[name])
    ours, theirs = inputs.call(integration.LinearLogprobs), inputs.call(PLAIN)
    assert [x.requires_grad for x in ours] == [x.requires_grad for x in theirs]
    grads = gradients(inputs, ours)
    assert {grad.dtype for grad in grads} == {dtype}
    # TRL's statistics are fp32 whatever the inputs are.
    for got, wanted in zip([*ours, *grads], [*theirs, *gradients(inputs, theirs)], strict=True):
        torch.testing.assert_close(got.float(), wanted.float(), atol=5e-6, rtol=5e-6)
    if dtype == torch.float64:
        statistics, true_grads = truth(inputs)
        for got, wanted in zip([*ours, *grads], [*statistics, *true_grads], strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_under_autocast_products_are_bf16_and_nothing_else_is(name: str) -> None:
    inputs = make_inputs(**OPTIONS[name])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = inputs.call(integration.LinearLogprobs), inputs.call(PLAIN)
    grads = gradients(inputs, ours)
    # The same with operands that are rounded, and nothing after them.
    hidden, weight = (
        x.detach().bfloat16().double().requires_grad_() for x in (inputs.hidden, inputs.weight)
    )
    bias = None if inputs.bias is None else inputs.bias.detach().double().requires_grad_()
    exact = replace(inputs, hidden=hidden, weight=weight, bias=bias)
    statistics, true_grads = truth(exact)
    for index in (0, 1, 2):
        error, error_of_trl = (
            (x[index] - statistics[index]).abs().max().item() for x in (ours, theirs)
        )
        assert error < 1e-5 < 1e-4 < error_of_trl
    for grad, wanted in zip(grads, true_grads, strict=True):
        assert grad.dtype == torch.float32
        # dz is rounded, as the operand of a product; the gradients are not.
        torch.testing.assert_close(grad.double(), wanted, atol=3e-2, rtol=2e-2)
        assert not torch.equal(grad, grad.bfloat16().float())


def test_a_weight_of_another_dtype_is_cast_to_that_of_the_hidden_states() -> None:
    inputs = make_inputs()
    mixed = replace(inputs, weight=inputs.weight.detach().bfloat16())
    same = replace(inputs, weight=mixed.weight.float())
    for got, wanted in zip(
        mixed.call(integration.LinearLogprobs), same.call(integration.LinearLogprobs), strict=True
    ):
        torch.testing.assert_close(got, wanted)


def test_statistics_on_request_alone() -> None:
    inputs = make_inputs(bias=True)
    whole = inputs.call(integration.LinearLogprobs)
    for name in integration.OUTPUTS:
        outputs = inputs.call(integration.LinearLogprobs, (name,))
        wanted = [x in ("log_probs", name) for x in integration.OUTPUTS]
        assert [x is not None for x in outputs] == wanted
        for got, other in zip(outputs, whole, strict=True):
            assert got is None or torch.equal(got, other)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_metrics_of_sft_dpo_and_kto_take_no_pass_of_their_own(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the mean of capped logits."""
    passes: list[list[str]] = []

    def recorded(call: Any, names: list[str], **options: Any) -> dict[str, Tensor]:
        passes.append(names)
        return extra_statistics(call, names, **options)

    op = import_module("fastrl.functional.linear_logprobs")  # the package has the function's name
    monkeypatch.setattr(op, "extra_statistics", recorded)
    outputs = ("log_probs", "entropy", "mean_logits", "is_top1")
    make_inputs(softcap=softcap).call(integration.LinearLogprobs, outputs)
    assert passes == ([] if softcap is None else [["mean_logit"]])


def test_no_row_gives_a_gradient_of_zero() -> None:
    """A micro-batch without a label."""
    inputs = make_inputs(num_rows=0)
    outputs = inputs.call(integration.LinearLogprobs)
    assert [x.shape for x in outputs] == [(0,)] * 5
    grads = torch.autograd.grad(outputs[0].sum(), inputs.leaves)
    assert grads[0].shape == (0, 8)
    assert grads[1].count_nonzero() == 0


def test_rows_without_a_gradient_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Tensor] = []
    backward: Callable[..., Any] = recompute.recompute_backward

    def recorded(call: Any, chosen: Tensor, *others: Any) -> Any:
        rows.append(chosen)
        return backward(call, chosen, *others)

    monkeypatch.setattr(recompute, "recompute_backward", recorded)
    inputs = make_inputs()
    gradients(inputs, inputs.call(integration.LinearLogprobs))
    assert rows[0].tolist() == [t for t in range(13) if t % 3]


def test_each_of_several_largest_logits_is_top_1() -> None:
    """TRL takes the first of them; the two differ where two logits are equal to the bit."""
    weight = torch.tensor([[1.0], [2.0], [2.0], [0.5]])
    inputs = Inputs(torch.ones(4, 1), weight, None, torch.arange(4))
    assert inputs.call(PLAIN)[4].tolist() == [False, True, False, False]
    assert inputs.call(integration.LinearLogprobs)[4].tolist() == [False, True, True, False]


def test_install_once_and_uninstall_exactly(calls: list[torch.dtype]) -> None:
    model = tiny_model()
    utils.add_fused_lm_head(model)
    tokens = torch.randint(2, 20, (2, 7))
    plain = model(tokens, labels=tokens, fused_lm_head=True)
    integration.uninstall()
    assert current() is PLAIN
    integration.install()
    integration.install()
    with integration.installed():
        pass
    # A model that TRL patched before goes through it as well.
    ours = model(tokens, labels=tokens, fused_lm_head=True)
    assert len(calls) == 1
    torch.testing.assert_close(ours.log_probs, plain.log_probs, atol=2e-6, rtol=0)
    integration.uninstall()
    assert current() is PLAIN
    with pytest.raises(ZeroDivisionError), integration.installed():
        1 / 0  # noqa: B018
    assert current() is PLAIN


def test_what_was_installed_later_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    integration.install()
    with monkeypatch.context() as patch:
        patch.setattr(utils, "_ChunkedLogProbFunction", int)
        with pytest.raises(
            RuntimeError, match=r"must be what `install` put there, got <class 'int'>"
        ):
            integration.uninstall()
    integration.uninstall()
    assert current() is PLAIN


def other_signature(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> None: ...


def other_head(model: Any) -> None: ...


REFUSED: list[tuple[Any, str, Any, str]] = [
    (trl, "__version__", "1.14.2", r"TRL 1\.14\.2, whose trainers each have"),
    (utils, "_ChunkedLogProbFunction", None, r"without `trl\.trainer\.utils\._Chunked"),
    (
        utils,
        "_ChunkedLogProbFunction",
        SimpleNamespace(forward=other_signature),
        r"takes \['hidden', 'weight', 'targets'\] instead of \['hidden', 'weight', 'bias', ",
    ),
    (utils, "add_fused_lm_head", other_head, r"`add_fused_lm_head` does not call `_Chunked"),
]


@pytest.mark.parametrize(("owner", "name", "value", "message"), REFUSED)
def test_another_trl_is_refused_with_the_reason(
    owner: Any, name: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, value)
    before = current()
    with pytest.raises(RuntimeError, match=message):
        integration.install()
    assert current() is before


def test_the_example_of_60_lines_runs(
    tmp_path: Path,
    calls: list[torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = Path(__file__).parent.parent.parent / "examples" / "trl_grpo.py"
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 60
    monkeypatch.setattr("sys.argv", [str(example), "--steps", "3", "--output-dir", str(tmp_path)])
    try:
        runpy.run_path(str(example), run_name="__main__")
    finally:
        integration.uninstall()
    assert calls == [torch.bfloat16] * 3  # TRL's default is autocast
    assert re.fullmatch(r"reward: \d\.\d\d -> \d\.\d\d", capsys.readouterr().out.splitlines()[-1])
