"""What a clipper is handed, as a fixed list of parameters: each once, in order, with its name.

Walking a model costs more than clipping it when its tensors are small, so the list is kept; but it
is never trusted: every step proves by identity, in nanoseconds per parameter, that it still holds.
Gradients are never kept, or memory that ``zero_grad`` gave back would stay in use.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from zclip.parallel.fsdp1 import shard_group
from zclip.parameters import Parameters, as_list, tensor_at
from zclip.reading import native

Target = Module | Parameters | Iterable[Module] | Iterable[Mapping[str, Any]]
"""A model, several, parameters in any form, or groups of them as in ``optimizer.param_groups``."""

_NONE = id(None)


class Targets:
    """Parameters in groups; ``params`` and ``names`` are those of all groups, one after another."""

    def __init__(
        self,
        groups: Sequence[Sequence[tuple[str, Tensor]]],
        settings: Sequence[Mapping[str, Any]],
        shard_group: Any = None,
    ) -> None:
        self.params: list[Tensor] = []
        self.names: list[str] = []
        self.sizes: list[int] = []
        self.settings = settings  # the dictionaries of the groups, read at every step
        self.shard_group = shard_group  # over which FSDP1 has spread them, if it has
        seen: set[int] = set()
        for group in groups:
            unique = [(n, p) for n, p in group if not (id(p) in seen or seen.add(id(p)))]  # type: ignore[func-returns-value]
            self.params += [p for _, p in unique]
            self.names += [n for n, _ in unique]
            self.sizes.append(len(unique))

    def gradients(self, aligned: bool) -> tuple[list[Tensor], list[int] | None]:
        """Return the gradients, each once, and which parameters they belong to; None means all.

        Args:
            aligned: put an empty tensor where a parameter has no gradient, so that there is one
                for each; its statistics are zero and scaling it does nothing.
        """
        return self.unique(native.gradients(self.params), aligned)

    def unique(
        self, grads: list[Any], aligned: bool = False
    ) -> tuple[list[Tensor], list[int] | None]:
        """Return of one gradient for every parameter what :meth:`gradients` does."""
        identities = set(map(id, grads))
        if len(identities) == len(grads) and _NONE not in identities:
            return grads, None
        first = {id(g): i for i, g in reversed(list(enumerate(grads))) if g is not None}
        present = sorted(first.values())
        if aligned and present:
            nothing = grads[present[0]].new_empty(0)
            kept = set(present)
            return [g if i in kept else nothing for i, g in enumerate(grads)], None
        return [grads[i] for i in present], present

    def among(
        self, names: list[str], own: slice, sizes: list[int], order: list[int] | None
    ) -> "Targets":
        """Return these as part of a longer list.

        Args:
            names: of the whole list: a model of which other ranks hold the rest.
            own: where in it these are.
            sizes: of the groups of the whole.
            order: brings the list into the order of its groups; None if it is in it.
        """
        params = [torch.empty(0) for _ in names]  # each its own object, as parameters are
        params[own] = self.params
        whole = Targets([[]], self.settings)
        whole.sizes = sizes
        whole.names = names if order is None else [names[i] for i in order]
        whole.params = params if order is None else [params[i] for i in order]
        return whole

    def sizes_of(self, present: list[int] | None) -> list[int]:
        """Return how many of the present gradients each group has."""
        if present is None:
            return self.sizes
        sizes, start = [], 0
        for size in self.sizes:
            sizes.append(sum(start <= i < start + size for i in present))
            start += size
        return sizes

    def named_group(self, group: int) -> list[tuple[str, Tensor]]:
        """Return names and parameters of one group."""
        start = sum(self.sizes[:group])
        pairs = zip(self.names, self.params, strict=True)
        return list(pairs)[start : start + self.sizes[group]]


class TargetCache:
    """Turns what a step is handed into :class:`Targets`, and makes new ones only on change."""

    _groups: Sequence[tuple[Mapping[str, Any], list[Tensor]]] = ()

    def __init__(self) -> None:
        self._given: dict[int, tuple[str, Tensor]] = {}  # holds the tensors, or ids could return
        self._targets: Targets | None = None
        self._trees: list[_Tree] = []
        self._entries: list[Any] = []

    @property
    def targets(self) -> Targets | None:
        return self._targets

    def give_names(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Call parameters of groups by these names; what they have in the groups counts less."""
        self._given = {id(param): (name, param) for name, param in named}
        self._targets, self._groups = None, ()

    def find(self, handed: tuple[Any, ...]) -> Targets:
        """Return the parameters to clip.

        Args:
            handed: the arguments of ``step``: one target, or several models.

        Raises:
            TypeError: something in there is not a parameter.
        """
        known = self.known_groups(handed)
        if known is not None:
            return known
        target = handed[0] if len(handed) == 1 else handed
        if isinstance(target, Module):
            return self._find_modules([target])
        if isinstance(target, Tensor):
            target = [target]
        listed: list[Any] = as_list(target)
        first = listed[0] if listed else None
        if isinstance(first, Module):
            return self._find_modules(listed)
        if isinstance(first, Mapping):
            return self._find_groups(listed)
        if not self._holds(listed):
            tensors = [e[1] if type(e) is tuple else e for e in listed]
            if not self._holds(tensors):
                pairs = [(_name(i, e), tensor_at(i, e)) for i, e in enumerate(listed)]
                self._keep(Targets([pairs], [{}]), [], tensors)
        assert self._targets is not None
        return self._targets

    def known_groups(self, handed: tuple[Any, ...]) -> Targets | None:
        """Return what was found last if these are the same groups of the same parameters."""
        kept, groups = self._groups, handed[0] if len(handed) == 1 else None
        if not kept or type(groups) is not list or len(groups) != len(kept):
            return None
        for now, (group, params) in zip(groups, kept, strict=True):
            if now is not group:
                return None
            listed = group["params"]
            if type(listed) is not list:
                listed = list(listed)
            if not native.are_same(listed, params):
                return None
        return self._targets

    def _find_modules(self, modules: list[Module]) -> Targets:
        roots = [tree.modules[0] for tree in self._trees]
        current = native.are_same(roots, modules) and all(tree.is_current() for tree in self._trees)
        if self._targets is None or not current:
            for i, module in enumerate(modules):
                if not isinstance(module, Module):
                    raise TypeError(
                        f"models[{i}]: expected a Module, got {type(module).__name__} "
                        f"{module!r:.60}"
                    )
            prefixes = [f"models[{i}]." for i in range(len(modules))] if modules[1:] else [""]
            pairs = [
                (prefix + name, param)
                for prefix, module in zip(prefixes, modules, strict=True)
                for name, param in module.named_parameters()
            ]
            targets = Targets([pairs], [{}], shard_group(modules))
            self._keep(targets, [_Tree(module) for module in modules], [])
        assert self._targets is not None
        return self._targets

    def _find_groups(self, groups: list[Mapping[str, Any]]) -> Targets:
        known = self.known_groups((groups,))  # of another kind of sequence than a list
        if known is not None:
            return known
        named, position = [], 0
        for group in groups:
            listed = group.get("param_names")
            pairs = []
            for i, param in enumerate(group["params"]):
                name = listed[i] if listed else _name(position, param)
                name, _ = self._given.get(id(param), (name, param))
                pairs.append((name, tensor_at(position, param)))
                position += 1
            named.append(pairs)
        targets = Targets(named, groups)
        self._keep(targets, [], [])
        self._groups = [(group, list(group["params"])) for group in groups]
        return targets

    def _holds(self, entries: list[Any]) -> bool:
        if self._targets is None or self._trees or self._groups:
            return False
        return native.are_same(entries, self._entries)

    def _keep(self, targets: Targets, trees: list["_Tree"], entries: list[Any]) -> None:
        self._targets, self._trees, self._entries = targets, trees, entries
        self._groups = ()


class _Tree:
    """A tree of modules, flattened, that knows whether it is still the same."""

    def __init__(self, root: Module) -> None:
        self.modules = list(root.modules())
        self._children = self._list_children()
        self._params = self._list_params()

    def is_current(self) -> bool:
        same_children = native.are_same(self._list_children(), self._children)
        return same_children and native.are_same(self._list_params(), self._params)

    def _list_children(self) -> list[Any]:
        return [child for m in self.modules for child in m._modules.values()]

    def _list_params(self) -> list[Any]:
        return [p for m in self.modules for p in m._parameters.values()]


def _name(i: int, entry: object) -> str:
    return str(entry[0]) if isinstance(entry, tuple) else f"parameters[{i}]"
