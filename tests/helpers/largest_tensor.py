"""The largest tensor that a piece of code makes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Counts the numbers of the largest tensor that an operator returns.

    Args:
        given: tensors that were there before, whose views do not count.
    """

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.numel = 0
        self._given = {tensor.untyped_storage().data_ptr() for tensor in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in self._given:
                self.numel = max(self.numel, leaf.numel())
        return result
