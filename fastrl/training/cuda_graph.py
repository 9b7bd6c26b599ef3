"""A step that is run many times: on a GPU by one launch, as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

from fastrl.config.base import UserError


@contextmanager
def repeated(step: Callable[[], None], generator: torch.Generator) -> Iterator[Callable[[], None]]:
    """What runs `step` once: on a GPU a graph that is captured here, elsewhere the step itself.

    A graph runs the kernels of the capture on the same memory, so the step must read and write the
    same tensors each time, and it must have run once before. What the step does on the host, it
    does in the capture alone. Memory that the graph needs is given back at the end.

    Args:
        step: enqueues work of equal shapes in each call, and never waits for the device.
        generator: the only source of randomness of the step; a graph draws what the step would.

    Raises:
        UserError: the step cannot be captured.
    """
    if generator.device.type != "cuda":
        yield step
        return
    with torch.cuda.device(generator.device):
        pool = torch.cuda.MemPool()  # one that returns its memory to the device
        graph = _capture(step, generator, pool.id)
        try:
            yield graph.replay
        finally:
            torch.cuda.current_stream().synchronize()
            graph.reset()  # before its memory goes
            del pool


def _capture(
    step: Callable[[], None], generator: torch.Generator, pool: Any
) -> torch.cuda.CUDAGraph:
    """The graph of a step."""
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    stream = _capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    try:
        # Not `torch.cuda.graph`, which empties the allocator's cache. Other threads, such as one
        # that writes a checkpoint, go on.
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                step()
            except BaseException:
                with suppress(RuntimeError):  # says only that something failed before
                    graph.capture_end()
                _release(generator)
                raise
            graph.capture_end()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UserError(
            f"sampler: a decoding step must be captured as a CUDA graph on"
            f" {torch.cuda.get_device_name()}, which fails: {error}; unset CUDA_LAUNCH_BLOCKING if"
            " it is set, or sample elsewhere (`rollouts` of type `server`, `device: cpu`)"
        ) from error
    return graph


def _release(generator: torch.Generator) -> None:
    """Takes generators out of a capture that failed, in which they would draw nothing more."""
    for each in (generator, torch.cuda.default_generators[torch.cuda.current_device()]):
        each.graphsafe_set_state(each.clone_state())


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """The stream of all captures, whose workspace of cuBLAS lies in no graph's memory."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda.current_blas_handle()
    return stream
