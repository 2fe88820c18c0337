"""torch's own guards, by which its compiler knows tensors again, in the place of their facts (known_calls.py).

A guard is held against five tensors in one C++ call of 0.3 us: with it a call is named and found in 1.5 us, by facts in
2.7. It covers all of these facts, negation too, which is a bit of a tensor's dispatch keys. The class is not among
torch's public names (2.5, 2.11 and 2.12 have it), so it is tried before it is used, and where it does not serve, facts
do.

Guards are made for calls that were launched, and for each once; what has no guard is known by its facts.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .known_calls import Reader

__all__ = ["TorchGuards", "find_guards"]

Guard = Callable[..., bool]
"""(k, v, k_cache, v_cache, indices) -> whether they are what they were when it was made, but for their addresses."""

# Of calls that are alike in k's shape, as those of two models in one process can be. Past this many the first loses its
# guard.
MAX_ALIKE = 8


class TorchGuards:
    """The guards of calls with torch tensors."""

    def __init__(self, tensor_guards: Any, read_facts: "Reader", most: int) -> None:
        """`tensor_guards` is torch's class. Past `most` shapes all are forgotten."""
        self._tensor_guards, self._read_facts, self._most = tensor_guards, read_facts, most
        self.by_shape: dict[Any, list[Guard]] = {}
        """By the shape of k: most often one guard, found by one question."""

    def read(self, k: Any, v: Any, k_cache: Any, v_cache: Any, indices: Any) -> Any:
        """What known_calls.Reader says; the guard that the tensors pass stands for their facts."""
        try:
            addresses = k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), indices.data_ptr()
            # Nested tensors have an address, but no strides: asked for them, a guard ends the process.
            if k.is_nested or v.is_nested or k_cache.is_nested or v_cache.is_nested or indices.is_nested:
                return None
            for passes in self.by_shape.get(k.shape, ()):
                if passes(k, v, k_cache, v_cache, indices):
                    return passes, addresses
        except Exception:  # of what is no tensor, or one without memory; guards let none of that pass
            return None
        return self._read_facts(k, v, k_cache, v_cache, indices)

    def add(self, facts: Any, tensors: tuple[Any, ...]) -> Guard | None:
        """The guard that stands for these facts from now on, if torch can tell, and the tensors still have them."""
        try:
            sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
            if [len(each) for each in sizes] != [len(each) for each in strides]:
                return None  # another thread changes one; a guard would read past its end
            passes: Guard = self._tensor_guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
            now = self._read_facts(*tensors)
            if now is None or now[0] != facts or not passes(*tensors):  # none passes where a tensor is there twice
                return None
            shape = tensors[0].shape
        except Exception:  # the store is done, and known by its facts
            return None
        if len(self.by_shape) >= self._most:
            self.by_shape.clear()
        self.by_shape[shape] = [*self.by_shape.get(shape, ()), passes][-MAX_ALIKE:]
        return passes


def find_guards(read_facts: "Reader", most: int) -> TorchGuards | None:
    """None where torch has no such class, or one that does not tell tensors apart."""
    import torch

    try:
        from torch._C._dynamo.guards import TensorGuards

        tensor = torch.empty(2, 2, device="cpu")
        if type(tensor) is not torch.Tensor:  # under a mode that wraps results; a guard may not be asked about those
            return None
        passes = TensorGuards(tensor, dynamic_dims_sizes=[[2, 2]], dynamic_dims_strides=[[2, 1]]).check
        others = (
            tensor[:1], tensor.T, tensor.int(), tensor.to("meta"), torch._neg_view(tensor),
            torch.nn.Parameter(tensor, requires_grad=False), None,
        )  # fmt: skip
        serves = passes(tensor) and not any(passes(other) for other in others)
    except Exception:  # a private class may have changed in any way
        return None
    return TorchGuards(TensorGuards, read_facts, most) if serves else None
