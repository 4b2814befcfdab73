"""The statistics of a clipper: where they live, how they are saved, loaded and made to fit."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zclip.layout import CLIP_COUNT, NUM_COUNTERS, SKIP_COUNT, STEPS
from zclip.schemas import wide_dtype
from zclip.targets import Targets

if TYPE_CHECKING:
    from zclip.clippers.clipper import Clipper

COUNTERS: Mapping[str, int] = {"steps": STEPS, "clips": CLIP_COUNT, "skips": SKIP_COUNT}

Entries = Sequence[tuple[str, Tensor | None]]
"""Name and parameter of each entry of a state; None if only the name is known."""

_NAMES_SHOWN = 5  # names in an error before "and N more"


class ClipState:
    """One float64 vector per group, on the device; zeros are a fresh one.

    Where the state has one entry per parameter, entries belong to names, so that a state may be
    loaded into a model that lists its parameters in another order.

    Attributes:
        states: the vectors.
        counters: steps, clips and skips of the whole, where there are several groups; else None.
        fitted: the parameters that the states were made to match.
        place: device and length of the first state at that time.
    """

    fitted: Targets | None = None
    place: tuple[torch.device, int] | None = None

    def __init__(self, owner: "Clipper") -> None:
        self.states: list[Tensor] = []
        self.counters: Tensor | None = None  # of the whole, where there are several groups
        self._owner = owner
        self._entries: Sequence[Entries] = []  # of a state per parameter
        self._is_loaded = False

    def fit(self, targets: Targets, device: torch.device) -> None:
        """Make the states match the parameters and their device; nearly free if they do.

        Raises:
            ValueError: a loaded state does not fit, or a setting that sizes the state has changed.
        """
        if targets is self.fitted and self.place == (device, self._size(targets, 0)):
            return
        num_groups = len(targets.sizes) if self._owner.per_group else 1
        self._check_groups(targets, num_groups)
        entries = [list(zip(targets.names, targets.params, strict=True))]
        if num_groups > 1:
            entries = [targets.named_group(g) for g in range(num_groups)]
        self.states = [
            self._fitting(g, self._size(targets, g), entries[g], device) for g in range(num_groups)
        ]
        if num_groups > 1:
            zeros = torch.zeros(NUM_COUNTERS, dtype=wide_dtype(device), device=device)
            self.counters = zeros if self.counters is None else self._moved(self.counters, device)
        self._entries, self.fitted, self._is_loaded = entries, targets, False
        self.place = device, self.states[0].numel()

    def ensure(self) -> list[Tensor]:
        """Return the states, made on the CPU if there was no step yet."""
        if not self.states:
            self.states = [torch.zeros(self._owner.state_size(0), dtype=torch.float64)]
        return self.states

    def tensors(self) -> list[Tensor]:
        """Return all that is learned, to be written in place."""
        return self.states if self.counters is None else [*self.states, self.counters]

    def reset(self) -> None:
        """Make every state a fresh one, in place."""
        for state in self.tensors():
            state.zero_()

    def save(self) -> dict[str, Any]:
        groups: list[dict[str, Any]] = []
        for g, state in enumerate(self.states):
            group: dict[str, Any] = {
                name: state[where].clone() for name, where in self._columns().items()
            }
            if self._owner.is_per_tensor:
                group["names"] = [name for name, _ in self._entries[g]] if self._entries else []
            groups.append(group)
        saved: dict[str, Any] = {"clipper": type(self._owner).__name__, "groups": groups}
        if self.counters is not None:
            saved["counters"] = self.counters.clone()
        return saved

    def load(self, saved: Mapping[str, Any]) -> None:
        kind = saved.get("clipper")
        if kind != type(self._owner).__name__:
            raise ValueError(
                f"state: expected that of {type(self._owner).__name__}, got that of {kind}"
            )
        if "groups" not in saved:
            raise ValueError(f"state: expected groups, got only {', '.join(saved)}")
        before, fitted = self.__dict__.copy(), self.fitted
        device = self.states[0].device if self.states else torch.device("cpu")
        self.states = [self._unpacked(g, group) for g, group in enumerate(saved["groups"])]
        self._entries = [[(n, None) for n in group.get("names", ())] for group in saved["groups"]]
        counters = saved.get("counters")
        self.counters = None if counters is None else counters.clone()
        self.fitted, self._is_loaded = None, True
        try:
            if fitted is not None and self.states:
                self.fit(fitted, device)
        except ValueError:
            self.__dict__.update(before)
            raise
        if not self.states:  # saved before the first step: start afresh
            self.fitted, self._is_loaded = None, False
        self._keep_addresses(before["states"])

    def _keep_addresses(self, old: list[Tensor]) -> None:
        """Load into the tensors that were there, because a captured graph writes to these."""
        if len(old) != len(self.states):
            return
        for g, (there, loaded) in enumerate(zip(old, self.states, strict=True)):
            if there.shape == loaded.shape and there.device == loaded.device:
                self.states[g] = there.copy_(loaded)

    def _size(self, targets: Targets, group: int) -> int:
        several = self._owner.per_group and len(targets.sizes) > 1
        return self._owner.state_size(targets.sizes[group] if several else len(targets.names))

    def _columns(self) -> dict[str, int | slice]:
        return {**COUNTERS, **self._owner.fields}

    def _unpacked(self, group: int, saved: Mapping[str, Any]) -> Tensor:
        columns = self._columns()
        if missing := columns.keys() - saved.keys():
            raise ValueError(
                f"state of group {group}: expected {', '.join(sorted(missing))}, got none"
            )
        saved = self._owner.adapt_state(saved)
        return torch.cat([saved[name].double().reshape(-1) for name in columns])

    def _fitting(
        self, g: int, size: int, entries: list[tuple[str, Tensor]], device: torch.device
    ) -> Tensor:
        if g >= len(self.states) or (self._owner.is_per_tensor and not self._entries):
            return torch.zeros(size, dtype=wide_dtype(device), device=device)
        state = self.states[g]
        if self._owner.is_per_tensor:
            state = self._reordered(state, self._entries[g], entries)
        if state.numel() != size:
            raise ValueError(
                f"state: expected {size} entries by the settings of this "
                f"{type(self._owner).__name__}, got {state.numel()}; {self._owner.size_hint()}"
            )
        return self._moved(state, device)

    @staticmethod
    def _moved(state: Tensor, device: torch.device) -> Tensor:
        return state.to(device, wide_dtype(device), non_blocking=True)

    def _reordered(
        self,
        state: Tensor,
        old: Entries,
        new: list[tuple[str, Tensor]],
    ) -> Tensor:
        """Give every parameter what is known of it, by its name or as the same object."""
        old_names, new_names = [name for name, _ in old], [name for name, _ in new]
        if old_names == new_names:
            return state
        missing = [name for name in new_names if name not in set(old_names)]
        unexpected = [name for name in old_names if name not in set(new_names)]
        if self._is_loaded and (missing or unexpected):
            raise ValueError(
                "state: expected that of these parameters, got one without "
                f"{_listed(missing)} and with {_listed(unexpected)} besides"
            )
        known = state[NUM_COUNTERS:].unbind()
        by_name = dict(zip(old_names, known, strict=True))
        by_object = {id(param): value for (_, param), value in zip(old, known, strict=True)}
        unset = state.new_zeros(())
        entries = [by_object.get(id(param), by_name.get(name, unset)) for name, param in new]
        return torch.cat([state[:NUM_COUNTERS], torch.stack(entries)])

    def _check_groups(self, targets: Targets, num_groups: int) -> None:
        if self._is_loaded and self.states and len(self.states) != num_groups:
            raise ValueError(
                f"state: expected {num_groups} groups (per_group={self._owner.per_group}), got "
                f"{len(self.states)}"
            )
        key = self._owner.limit_key
        given = [g for g, group in enumerate(targets.settings) if key is not None and key in group]
        if given and not self._owner.per_group:
            raise ValueError(
                f"param_groups[{given[0]}]: expected no {key} for a clipper that treats all groups "
                "as one, got one; make it with per_group=True"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Keep the names, but not the parameters: they belong to the model."""
        names = [[(name, None) for name, _ in group] for group in self._entries]
        return {**self.__dict__, "fitted": None, "_entries": names}


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN]) or "nothing"
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
