"""What the trainer integrations share: attributes set for a while, and models of callbacks."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from torch.nn import Module

from heal.healer import Healer


class Patches(ExitStack):
    """Sets attributes of instances; :meth:`put_back`, or the end of ``with``, undoes it.

    Classes are never changed, so that other trainers of the same class are not affected.
    """

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``, remembering what the instance itself had under that name."""
        if name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
        else:
            self.callback(lambda: vars(owner).pop(name, None))
        setattr(owner, name, value)

    def put_back(self) -> None:
        """Undo everything, last one first; safe to call twice."""
        self.close()


WRITTEN_IN_TRAINING = {
    "SyncRefModelCallback": "ref_model",  # of TRL: follows the policy every so many steps
    "WeightAveraging": "_average_model",  # of Lightning, and EMAWeightAveraging after it
    "StochasticWeightAveraging": "_average_model",
}
"""Callbacks, by the names of their classes, and where they keep a model that they write."""


def hold_models_of(callbacks: Iterable[Any], healer: Healer) -> None:
    """Have snapshots hold the models that known callbacks write; note any other model once."""
    trained = {id(param) for param in healer.model.parameters()}
    for callback in callbacks:
        kinds = {kind.__name__ for kind in type(callback).__mro__}
        written = {WRITTEN_IN_TRAINING[kind] for kind in kinds & WRITTEN_IN_TRAINING.keys()}
        for attribute, value in vars(callback).items():
            if not isinstance(value, Module) or any(id(p) in trained for p in value.parameters()):
                continue
            name = f"{type(callback).__name__}.{attribute}"
            if attribute in written:
                healer.add_state(name, value.state_dict, value.load_state_dict)
            else:
                healer.note(
                    f"{name} is a model that no snapshot holds: if training changes it, a rollback "
                    "leaves it as it is; healer.add_state has it returned too"
                )
