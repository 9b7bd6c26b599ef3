"""The text of `fastrl estimate`."""

from __future__ import annotations

from collections.abc import Sequence

from fastrl.config.base import UserError
from fastrl.config.model import LlamaConfig
from fastrl.config.phases import RLPhaseConfig
from fastrl.config.training import RunConfig
from fastrl.estimate.arithmetic import arithmetic_line
from fastrl.estimate.collectives import Collective, collectives
from fastrl.estimate.head import Memory, head_ops, total
from fastrl.estimate.memory import Step, peak
from fastrl.estimate.sizes import Shapes, Weights


def estimate_run(config: RunConfig, tokens: int | None = None) -> str:
    """Memory and collectives of one rank, phase by phase, as a text.

    Args:
        config: of the run, with the `vocab_size` of a model that it describes.
        tokens: of a packed sequence. Default: each phase's `max_tokens_per_micro_batch`.

    Raises:
        UserError: the folder of a pretrained model cannot be read, or its model is one of
            transformers; a strategy is not possible.
    """
    if isinstance(config.model, LlamaConfig):
        model = config.model
    elif config.model.type == "transformers":
        raise UserError(
            "`estimate` must have a `model` of `type: llama` or `pretrained`, got `transformers`,"
            " whose code it does not know"
        )
    else:
        from fastrl.models.checkpoint import read_llama_config

        model = read_llama_config(config.model.path, head=config.model.head)
    parallel = config.parallel
    lines = [
        f"{Weights.of(model, 1).total:,} parameters over {parallel.num_processes} rank(s) (data"
        f" {parallel.data} x sequence_data {parallel.sequence_data} x tensor {parallel.tensor});"
        " a Hopper GPU each",
        "every token with a label and a gradient, several micro-batches an update",
    ]
    for index, phase in enumerate(config.phases):
        step = _step(config, index, model, tokens or phase.max_tokens_per_micro_batch)
        lines += ["", f"phase {config.phase_name(index)}: {step.shapes.tokens:,} tokens a"]
        lines[-1] += " packed sequence"
        try:
            lines += [*_memory_lines(step), arithmetic_line(step), *_collective_lines(step)]
        except ValueError as error:
            raise UserError(f"`phases.{index}`: {error}") from error
    return "\n".join(lines)


def _step(config: RunConfig, index: int, model: LlamaConfig, tokens: int) -> Step:
    phase = config.phases[index]
    losses = config.losses_of(phase)
    samples = isinstance(phase, RLPhaseConfig) and phase.rollouts.type != "files"
    return Step(
        model,
        config.parallel,
        Shapes.of(config.parallel, tokens, config.dtype),
        losses,
        has_reference=samples
        and any(getattr(loss, "kl", None) is not None for loss in losses.values()),
    )


def _memory_lines(step: Step) -> list[str]:
    """The strategies of the head, and the table of the step's peak."""
    ops = head_ops(step.model.head, step.losses, step.head_shape)
    moment, items = peak(step)
    lines = [f"  head, {op.what}" for op in ops]
    lines.append(f"  memory of one rank at the peak, in the {moment}")
    return lines + _items(items)


def _items(items: Sequence[Memory]) -> list[str]:
    sums: dict[str, int] = {}
    for item in items:
        sums[item.name] = sums.get(item.name, 0) + item.num_bytes
    sums["total"] = total(items)
    return [f"    {name:<64}{_size(num_bytes):>12}" for name, num_bytes in sums.items()]


def _collective_lines(step: Step) -> list[str]:
    ops = head_ops(step.model.head, step.losses, step.head_shape)
    calls = list(
        collectives(step.model, step.parallel, step.shapes, is_single_pass=ops[0].is_single_pass)
    )
    lines = [f"{'  sent by one rank in a micro-batch':<68}{'a call':>12}{'calls':>7}{'sent':>12}"]
    return [*lines, *map(_call, calls)] if calls else [*lines, "    nothing"]


def _call(call: Collective) -> str:
    name = f"{call.axis}: {call.name} of {call.what}" + " (an update)" * call.per_update
    return f"    {name:<64}{_size(call.num_bytes):>12}{call.count:>7}{_size(call.sent_bytes):>12}"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
