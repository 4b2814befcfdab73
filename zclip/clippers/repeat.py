"""The step before, once more: most steps differ from the last one in nothing but the numbers.

After a forward and a backward pass our Python has left the caches of the processor, and to bring
back a function that is called takes most of a microsecond. So a step is prepared once, and repeated
by one function for as long as it is proven that nothing but the numbers has changed.
"""

from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zclip.clippers.result import ClipResult
from zclip.targets import Targets

if TYPE_CHECKING:
    from zclip.clippers.clipper import Clipper

_GRAD = attrgetter("grad")
_NONE = id(None)


class Repeat:
    """One call of a clipper's operator on the groups of an optimizer.

    Args:
        found: the groups, and the parameters in them, each once.
        owner: the clipper.
    """

    def __init__(self, found: Targets, owner: "Clipper") -> None:
        self._groups = [(group, list(group["params"])) for group in found.settings]
        self._params = found.params
        self._settings = owner._settings
        self._op = owner._ops()[1]

    @classmethod
    def of(cls, found: Targets, owner: "Clipper") -> "Repeat | None":
        """Prepare one, if the parameters came in the groups of an optimizer."""
        groups = found.settings
        return cls(found, owner) if groups and "params" in groups[0] else None

    def step(self, targets: tuple[Any, ...], states: list[Tensor]) -> ClipResult | None:
        """Clip again; None if it cannot be proven to be the same, and then nothing was done.

        Args:
            targets: what is handed over now.
            states: of the clipper, now.
        """
        kept, groups = self._groups, targets[0]
        if len(states) != 1 or type(groups) is not list or len(groups) != len(kept):
            return None
        for now, (group, params) in zip(groups, kept, strict=True):
            listed = group["params"]
            if now is not group or len(listed) != len(params) or not all(map(is_, listed, params)):
                return None
        grads = list(map(_GRAD, self._params))
        identities = set(map(id, grads))
        if len(identities) != len(grads) or _NONE in identities:
            return None
        try:
            return ClipResult(*self._op(grads, states[0], *self._settings(groups[0])))
        except (RuntimeError, TypeError, ValueError):
            return None  # kernels check before they write: the long way says what is wrong
