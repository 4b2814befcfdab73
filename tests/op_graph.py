"""A CUDA graph without CUDA: records the operators of some code and runs them again, by themselves.

What a replay cannot do here it cannot do on a GPU: no Python of the captured code runs, every
tensor keeps its memory, and what the code computed on the host is what it was in the capture.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zclip.reading import native


class OpGraph(TorchDispatchMode):
    """``with graph: code()`` runs the code and records it; ``graph.replay()`` runs it again."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __enter__(self):
        self._reads = native.read, native.read_to_write
        native.read = native.read_to_write = lambda *_: 0  # a GPU's tensors are never read natively
        return super().__enter__()

    def __exit__(self, *failure):
        native.read, native.read_to_write = self._reads
        return super().__exit__(*failure)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::_local_scalar_dense":
            raise AssertionError("the host reads a value: no graph could be captured")
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self):
        for func, args, kwargs, recorded in self.calls:
            fresh = func(*args, **kwargs)
            given = {_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            for old, new in zip(tree_leaves(recorded), tree_leaves(fresh), strict=True):
                # An output with memory of its own is found by later calls where it was.
                if isinstance(old, torch.Tensor) and _memory(old) not in given:
                    old.copy_(new)


def _memory(tensor):
    return tensor.untyped_storage().data_ptr()
