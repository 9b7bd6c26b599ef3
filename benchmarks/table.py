"""Writes the tables of measurements between markers, from benchmarks/results.

    python -m benchmarks.table

A file says where with `<!-- KIND NAME -->` and `<!-- end -->`, where NAME is a file of
benchmarks/results without its ending and KIND says how to read it: `benchmark` (implementations on
one shape) and `lengths` (one implementation on many) of `benchmarks.lm_head`, `scaling` of
`benchmarks.scaling`, `memory` of `benchmarks.memory`, `slabs` of `benchmarks.slabs`, `frameworks`
of `benchmarks.frameworks`, `trl` of `benchmarks.trl`, `update` of `benchmarks.update`, `bars` of
`benchmarks.update_bars`, `sampler` of `benchmarks.sampler`, `replay` of `benchmarks.replay`.
`memory`, `slabs`, `sampler` and `replay` are sections with a heading, empty as long as there is no
such file. With `--check` nothing is written, and a table that does not say what the files say is an
error.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.frameworks.table import sections

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "docs/integrations.md",
        "docs/losses.md",
        "docs/results.md",
        "docs/sharding.md",
    )
]
KINDS = "benchmark|lengths|scaling|memory|slabs|frameworks|trl|update|bars|sampler|replay"
# Of a table, header included, from the rows of a file.
Lines = Callable[[list[dict[str, Any]]], list[list[str]]]
MARKED = re.compile(rf"(<!-- ({KINDS}) ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", default=PAGES)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    for file in options.files:
        text = file.read_text()
        updated = with_tables(text)
        if options.check and updated != text:
            raise SystemExit(f"{file}: a table differs; run `python -m benchmarks.table {file}`")
        if not options.check:
            file.write_text(updated)


def with_tables(text: str) -> str:
    """The text with every marked table made anew."""
    tables: dict[str, Callable[[str], str]] = {
        "benchmark": benchmark_table,
        "lengths": lengths_table,
        "scaling": speedup_table,
        "frameworks": frameworks_tables,
        "trl": trl_table,
        "update": update_table,
        "sampler": sampler_section,
        "bars": bars_table,
        **{kind: partial(section, *parts) for kind, parts in SECTIONS.items()},
    }
    return MARKED.sub(lambda match: match[1] + tables[match[2]](match[3]) + match[4], text)


def read(name: str) -> Any:
    """A file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def benchmark_table(name: str) -> str:
    """Implementations on one shape, with and without gradient."""
    rows: list[dict[str, Any]] = read(name)
    first = rows[0]
    shape = (
        f"{first['shape_name']}: {sizes(first)}; {first['rows_labelled']} rows labelled,"
        f" {first['rows_active']} with gradient."
    )
    parts = [f"{shape} {provenance(first, name)}{earlier_runs(rows)}\n"]
    for passes, title in (
        ("fwdbwd", "Loss, forward and backward"),
        ("fwd", "Log-probabilities and entropy, no gradient"),
    ):
        chosen = [row for row in rows if row["passes"] == passes]
        if chosen:
            parts.append(f"{title}:\n\n" + passes_table(chosen, passes))
    return "\n".join(parts)


def lengths_table(name: str) -> str:
    """fastrl's loss, forward and backward, over the number of tokens: time of a row, and memory."""
    rows = [row for row in read(name) if row["passes"] == "fwdbwd"]
    shortest: dict[tuple[str, str], float] = {}
    header = ["implementation", "T", "rows with gradient", "ms", "us a row", "of the shortest"]
    lines = [[*header, "x floor", "peak GiB", "without dh"]]
    for row in sorted(rows, key=lambda row: (row["implementation"], row["strategy"], row["shape"])):
        tokens, hidden, _ = row["shape"]
        a_row = 1e3 * row["time_ms"] / row["rows_active"]
        key = (row["implementation"], row["strategy"])
        floor = "floor_recompute_active_ms" if row["strategy"] == "recompute" else "floor_active_ms"
        peak = row["peak_bytes_over_inputs"]
        lines.append(
            [
                f"{row['implementation']} ({row['strategy']})",
                f"{tokens // 1024}k",
                f"{row['rows_active']}",
                f"{row['time_ms']:.1f}",
                f"{a_row:.2f}",
                f"{a_row / shortest.setdefault(key, a_row):.3f}",
                f"{row['time_ms'] / row[floor]:.2f}",
                f"{peak / 2**30:.2f}",
                f"{(peak - 2 * tokens * hidden) / 2**30:.2f}",
            ]
        )
    return f"{provenance(rows[0], name)}\n\n{markdown(lines)}"


def trl_table(name: str) -> str:
    """A training step of a model of transformers with heads of different make."""
    rows = read(name)
    first = rows[0]
    lines = [["weights", "head", "ms", "x body alone", "peak GiB", "error of gradients"]]
    body: dict[str, float] = {}
    for row in rows:
        if row["head"] == "body alone":
            body[row["precision"]] = row["time_ms"]
        error = row.get("error_gradients")
        lines.append(
            [
                row["precision"],
                row["head"],
                f"{row['time_ms']:.1f}",
                f"{row['time_ms'] / body[row['precision']]:.3f}",
                f"{row['peak_bytes'] / 2**30:.2f}",
                "" if error is None else f"{error:.1e}",
            ]
        )
    what = (
        f"Qwen3-0.6B's shape, {first['documents']} x {first['length']} tokens,"
        f" {first['inactive']} documents without an advantage, gradient checkpointing, forward and"
        " backward."
    )
    return f"{what} {provenance(first, name)}\n\n{markdown(lines)}"


def update_table(name: str) -> str:
    """Forward and backward, whole updates, and long prompts, in each variant."""
    rows = read(name)
    lines = [["what", "variant", "tokens", "ms", "tokens/s", "6 N T", "with attention", "GiB"]]
    lines[0].append("ms of kernels: products, attention, head, rest")
    for row in rows:
        kernels = row.get("kernels_ms") or {}
        rest = kernels.get("rest", 0) + kernels.get("optimizer", 0)
        parts = [kernels.get(kind, 0) for kind in ("products", "attention", "head")] + [rest]
        lines.append(
            [
                row["kind"],
                row["variant"],
                f"{row['tokens']:,}",
                f"{row['time_ms']:.0f}",
                f"{row['tokens_per_second']:,}",
                f"{row['share']:.3f}",
                f"{row['share_with_attention']:.3f}",
                f"{row['peak_bytes'] / 2**30:.1f}",
                ", ".join(f"{part:.0f}" for part in parts) if kernels else "",
            ]
        )
    return f"{rows[0]['model']}. {provenance(rows[0], name)}\n\n{markdown(lines)}"


def sampler_section(name: str) -> str:
    """A decoding step and a training step, launched and as a graph."""
    if not (RESULTS / f"{name}.json").exists():
        return ""
    results = read(name)
    header = ["a decoding step", "ms", "products", "attention", "sampling", "rest", "gaps"]
    steps = [[*header, "kernels", "ms of a capture"]]
    wholes = [["a training step", "s", "sampling", "scoring", "update"]]
    for row in results["rows"]:
        if row["what"] == "step":
            kernels = row["kernels_ms"]
            kinds = [kernels[kind] for kind in ("products", "attention", "sampling", "rest")]
            gaps = row["time_ms"] - sum(kinds)
            cells = [f"{each:.2f}" for each in (row["time_ms"], *kinds, gaps)]
            capture = row.get("capture_ms")
            steps.append([row["variant"], *cells, f"{kernels['number']}"])
            steps[-1].append("" if capture is None else f"{capture:.0f}")
        elif row["what"] == "training step":
            seconds = [row["seconds"], row["sampling_s"], row["scoring_s"], row["update_s"]]
            wholes.append([row["variant"], *(f"{each:.2f}" for each in seconds)])
    what = (
        f"{results['model']}, {results['sequences']} sequences, prompts of {results['prompt']}"
        f" tokens, {results['new']} new ones each."
    )
    return (
        f"## Sampling\n\n{what} {provenance(results, name)}\n\n{markdown(steps)}\n"
        f"{markdown(wholes)}"
    )


def bars_table(name: str) -> str:
    """What an update is held to, with the kernels of each row that has some."""
    rows = read(name)
    lines = [["what", "attention", "value", "asked", "aim", "ms of kernels", "GPU idle"]]
    for row in rows:
        kernels = list((row.get("kernels_ms") or {}).values())
        first = kernels[0] if kernels else {}
        parts = [f"{kind} {time:.0f}" for kind, time in first.items() if kind != "wall"]
        idle = f"{1 - first['kernels'] / first['wall']:.1%}" if first else ""
        values = [f"{row[key]:.3f}" for key in ("value", "least", "aim")]
        lines.append([row["what"], row["attention"], *values, ", ".join(parts), idle])
    return f"{rows[0]['model']}. {provenance(rows[0], name)}\n\n{markdown(lines)}"


def speedup_table(name: str) -> str:
    """The head over the GPUs of a host."""
    results = read(name)
    lines = [["layout", "loss", "ran", "ms", "speed-up", "NCCL ms", "alone ms", "peak GiB"]]
    for row in results["rows"]:
        speedup = row.get("speedup")
        lines.append(
            [
                row["layout"],
                row.get("loss", ""),
                row.get("ran", ""),
                f"{row['time_ms']:.1f}",
                "" if speedup is None else f"{speedup:.2f}",
                f"{row['nccl_ms']:.1f} ({row['nccl_share']:.0%})",
                f"{row['exposed_ms']:.1f} ({row['exposed_share']:.0%})",
                f"{row['peak_gib']:.2f}",
            ]
        )
    origin = provenance(results, name)
    return f"{results['ranks']} GPUs, {results['shape']}. {origin}\n\n{markdown(lines)}"


def memory_lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Of the table."""
    header = ["case", "tokens", "peak in the", "predicted GiB", "measured GiB", "ratio"]
    return [
        header,
        *(
            [
                f"{row['kind']}: {row['case']}",
                f"{row['tokens']}",
                row["moment"],
                f"{row['predicted'] / 2**30:.3f}",
                f"{row['measured'] / 2**30:.3f}",
                f"{row['predicted'] / row['measured']:.3f}",
            ]
            for row in rows
        ),
    ]


def slabs_lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Of the table."""
    return [
        ["shape", "full blocks ms", "even ms", "even / full"],
        *(
            [
                row["shape_name"],
                f"{row['full_ms']:.2f}",
                f"{row['even_ms']:.2f}",
                f"{row['even_over_full']:.3f}",
            ]
            for row in rows
        ),
    ]


def replay_lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Of the table."""
    header = ["shape", "ids a label", "pass", "ms", "floor ms", "of the floor", "peak MiB"]
    return [
        [*header, "error dh", "error dW"],
        *(
            [
                row["shape_name"],
                f"{row['mean_entries']:.1f}",
                "loss and gradients" if row["passes"] == "fwdbwd" else "log-probabilities",
                f"{row['time_ms']:.2f}",
                f"{row['floor_ms']:.2f}",
                f"{row['ratio']:.3f}",
                *(
                    [
                        f"{row['peak_bytes_over_gradients'] / 2**20:.0f}",
                        f"{row['error_hidden']:.2e}",
                        f"{row['error_weight']:.2e}",
                    ]
                    if row["passes"] == "fwdbwd"
                    else ["", "", ""]
                ),
            ]
            for row in rows
        ),
    ]


def frameworks_tables(name: str) -> str:
    """fastrl's losses against those of other frameworks."""
    results = read(name)
    return f"{provenance(results, name)}\n\n{sections(results)}\n"


def section(title: str, text: str, lines: Lines, name: str) -> str:
    """A heading, a text and a table; nothing as long as nobody has measured."""
    if not (RESULTS / f"{name}.json").exists():
        return ""
    rows = read(name)
    return f"## {title}\n\n{text} {provenance(rows[0], name)}\n\n{markdown(lines(rows))}"


SECTIONS: dict[str, tuple[str, str, Lines]] = {
    "memory": (
        "Memory, predicted and measured",
        "The peak of the head above its inputs, gradients included, and of a training step with"
        " parameters and optimizer\nstates: as `fastrl estimate` predicts it, and by"
        " `torch.cuda.max_memory_allocated`.",
        memory_lines,
    ),
    "slabs": (
        "Widths of slabs",
        "Forward and backward of GRPO with `recompute`: slabs of full blocks of columns, which the"
        " head takes, against\nslabs of even widths.",
        slabs_lines,
    ),
    "replay": (
        "Recorded sampling sets",
        "The head over [recorded sampling sets](losses.md#recorded-sampling-sets): loss and"
        " gradients of GRPO, and\nlog-probabilities alone, over the products h W^T, dz W and dz^T h"
        " of as many rows of whole logits. Peak: above both\ngradients. Errors: against float64.",
        replay_lines,
    ),
}
"""Heading, text and lines of the table of each kind that is a section."""


def sizes(row: dict[str, Any]) -> str:
    """Of a case."""
    tokens, hidden, vocabulary = row["shape"]
    softcap = f", softcap {row['softcap']:g}" if row["softcap"] else ""
    return f"T={tokens} D={hidden} V={vocabulary}{softcap}, {row['dtype']}"


def provenance(row: dict[str, Any], name: str) -> str:
    """Where the numbers are from."""
    return (
        f"{row['gpu']}, torch {row['torch']}, Triton {row['triton']}, commit"
        f" {row['commit'][:7]}{' and changes' if row['dirty'] else ''}"
        f" (`benchmarks/results/{name}.json`)."
    )


def earlier_runs(rows: list[dict[str, Any]]) -> str:
    """Which rows are of another commit than the first: peers whose own code did not change."""
    others: dict[str, list[str]] = {}
    for row in rows:
        if row["commit"] != rows[0]["commit"]:
            names = others.setdefault(row["commit"][:7], [])
            names += [row["implementation"]] * (row["implementation"] not in names)
    return "".join(f" Of commit {key}: {', '.join(names)}." for key, names in others.items())


def markdown(lines: list[list[str]]) -> str:
    """A table, its header first."""
    header, *body = lines
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, ["---"] * len(header), *body])


def passes_table(rows: list[dict[str, Any]], passes: str) -> str:
    """Rows by time; those that did not run last, with the reason."""
    floor, base_name = "floor_active_ms", "3 products, rows with gradient"
    errors = [("error_grad_hidden", "error of dh"), ("error_grad_weight", "error of dW")]
    if passes == "fwd":
        floor, base_name = "floor_labelled_ms", "1 product, labelled rows"
        errors = [("error_logprobs", "mean error of log-prob")]
    header = ["implementation", "ms", f"x floor ({base_name}, {rows[0][floor]:.1f} ms)", "peak GiB"]
    header += [title for _, title in errors]
    # Results of before it was counted have none.
    with_rate = any("tflops" in row for row in rows)
    header[2:2] = ["TFLOP/s"] if with_rate else []
    lines = [header]
    timed = sorted((row for row in rows if "time_ms" in row), key=lambda row: row["time_ms"])
    for row in timed:
        peak = row["peak_bytes_over_inputs"]
        cells = [
            f"{row['implementation']} ({row['strategy']})",
            f"{row['time_ms']:.1f}",
            over_floor(row, floor),
            "" if peak is None else f"{peak / 2**30:.2f}",
        ]
        cells[2:2] = [rate(row)] if with_rate else []
        lines.append([*cells, *(number(row.get(key)) for key, _ in errors)])
    missing = [row for row in rows if "time_ms" not in row]
    reasons = "".join(f"\n- {row['implementation']}: {row.get('reason')}" for row in missing)
    return markdown(lines) + (f"\nNot run:\n{reasons}\n" if missing else "")


def over_floor(row: dict[str, Any], floor: str) -> str:
    """Time over that of the products of its run; where the head makes four, over these as well."""
    ratio = f"{row['time_ms'] / row[floor]:.2f}"
    if row["strategy"] == "recompute" and row["implementation"].startswith("fastrl"):
        ratio += f" ({row['time_ms'] / row['floor_recompute_active_ms']:.2f} of 4 products)"
    return ratio


def rate(row: dict[str, Any]) -> str:
    """TFLOP/s of the products that were executed; nothing where they are not known."""
    tflops = row.get("tflops")
    return "" if tflops is None else f"{tflops:.0f}"


def number(value: float | None) -> str:
    """Two digits, or nothing."""
    return "" if value is None else f"{value:.1e}"


if __name__ == "__main__":
    main()
