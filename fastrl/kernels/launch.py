"""Launches of jitted kernels, past Triton's dispatch where a kernel was compiled before.

Triton looks at every argument, option and global variable of a kernel at each launch. Here a few
facts of the arguments choose what it chose for the same facts, which takes the host some 0.7 of the
time: 8 instead of 11 us for a kernel of ten arguments, 18 instead of 26 for one of 25. What a
process changes of Triton's own settings after a kernel's first launch, such as its debug mode, does
not reach that kernel any more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_INT32 = range(-(2**31), 2**31)


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> Any:
    """`kernel[grid](**arguments)`.

    Args:
        kernel: jitted.
        grid: one to three numbers of programs.
        arguments: all of the kernel's, and options such as `num_warps`.

    Returns:
        The compiled kernel, None in the interpreter.
    """
    if not isinstance(kernel, JITFunction):
        return kernel[grid](**arguments)
    known = _known.get(kernel.fn)
    if known is None:
        known = _known[kernel.fn] = _Kernel(kernel)
    key = known.facts(arguments)
    compiled = known.compiled.get(key)
    if compiled is None:
        compiled = known.compiled[key] = kernel[grid](**arguments)
    else:
        compiled[(*grid, 1, 1)[:3]](*[arguments[name] for name in kernel.arg_names])
    return compiled


class _Kernel:
    """What a kernel was compiled for.

    Attributes:
        compiled: by the facts of the arguments.
    """

    def __init__(self, kernel: JITFunction) -> None:
        # By the name of each parameter that is no constant: whether Triton looks at its value.
        self._is_special = {
            each.name: not each.do_not_specialize for each in kernel.params if not each.is_constexpr
        }
        self.compiled: dict[tuple[object, ...], Any] = {}

    def facts(self, arguments: dict[str, Any]) -> tuple[object, ...]:
        """What Triton's choice depends on: device, constants, types, alignments, special ints."""
        is_special = self._is_special
        facts: list[object] = [torch.cuda.current_device(), *arguments]
        for name, value in arguments.items():
            special = is_special.get(name)
            if special is None or value is None:
                facts += (type(value), value)
            elif isinstance(value, Tensor):
                facts.append((value.dtype, value.data_ptr() % 16 == 0))
            elif type(value) is int:
                size = 32 if value in _INT32 else 64 + (value >= 2**63)
                facts.append((size, special and (value == 1, value % 16 == 0)))
            elif isinstance(value, TensorDescriptor):
                facts.append((value.base.dtype, *value.block_shape))
            else:
                facts.append(type(value))
        return tuple(facts)


_known: dict[Any, _Kernel] = {}
