"""An optimizer that passes for another one: it shares groups, state and defaults."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class OptimizerProxy(Optimizer):
    """Stands before an optimizer; what it does not do itself, the wrapped one does.

    Attributes:
        inner: the wrapped optimizer.
        lr_scale: multiplies every learning rate during a step, and is not seen outside of it.
    """

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.lr_scale = 1.0
        # Sets up step hooks. Optimizer.__init__ would as well, but would also make parameter
        # groups of its own; leaving it out altogether breaks register_step_post_hook.
        super().__setstate__({})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer does."""
        self.inner.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the wrapped optimizer."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.inner.param_groups = value

    @property
    def state(self) -> Any:
        """That of the wrapped optimizer."""
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self.inner.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        """Those of the wrapped optimizer."""
        return self.inner.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.inner.defaults = value

    def __getattr__(self, name: str) -> Any:
        """Anything else that is public is the wrapped optimizer's."""
        if name.startswith("_") or "inner" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.inner, name)

    @contextmanager
    def scaled_lr(self) -> Iterator[None]:
        """Multiply the learning rates by ``lr_scale`` for as long as this is open.

        Schedulers own ``lr``; healing owns ``lr_scale``. They meet only here.

        A group whose ``lr`` is None finds its own rate, as Adafactor does, which cannot be scaled.
        """
        if self.lr_scale == 1.0:
            yield
            return
        groups = self.param_groups
        scheduled = [(group, group["lr"]) for group in groups if group.get("lr") is not None]
        for group, lr in scheduled:
            group["lr"] = lr * self.lr_scale
        try:
            yield
        finally:
            for group, lr in scheduled:
                group["lr"] = lr

    @property
    def needs_closure(self) -> bool:
        """Whether the wrapped optimizer calls a closure by itself, as LBFGS does."""
        closure = inspect.signature(self.inner.step).parameters.get("closure")
        return closure is not None and closure.default is inspect.Parameter.empty

    def _check_names(self, named: list[tuple[str, Tensor]]) -> None:
        odd = next((pair for pair in named if isinstance(pair, Tensor)), None)
        if odd is not None:
            raise TypeError(
                "named_parameters: expected pairs of name and parameter, got "
                f"{type(odd).__name__}; give model.named_parameters()"
            )
        known = {id(param) for _, param in named}
        for group in self.param_groups:
            unnamed = [tuple(p.shape) for p in group["params"] if id(p) not in known]
            if unnamed:
                raise ValueError(
                    f"named_parameters: expected all parameters, got none of the shapes {unnamed}"
                )
