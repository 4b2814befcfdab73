"""Hooks on a model by which gradients are measured as they become final, and their removal."""

import sys
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from zclip.during_backward.buckets import Buckets, CommHook, install
from zclip.during_backward.counted_writes import CountedWrites
from zclip.during_backward.rows import EarlyRows
from zclip.parallel.fsdp1 import is_fsdp_model
from zclip.parallel.placement import has_dtensor, is_dtensor

SMALLEST = 32 << 10
"""Bytes of a gradient that is worth a hook.

A hook costs about what reading this much from memory does. Smaller gradients are measured by the
step, all in one call, as they are without hooks.
"""

Self = TypeVar("Self", bound="Attachment")


class Attachment:
    """What :meth:`zclip.Clipper.attach` returns: undo it by :meth:`detach`, or use ``with``.

    Args:
        targets: models, or lists of parameters or of groups.
        comm_hook: state and communication hook of a DistributedDataParallel model.
    """

    def __init__(self, targets: Sequence[Any], comm_hook: CommHook | None = None) -> None:
        modules = [target for target in targets if isinstance(target, Module)]
        params = [p for target in targets for p in _params_of(target) if p.requires_grad]
        replicas = _replicated(modules)
        if comm_hook is not None and not replicas:
            raise ValueError(
                "comm_hook: expected None without a DistributedDataParallel model, got a hook"
            )
        in_buckets = {id(p) for replica in replicas for p in replica.parameters()}
        is_alone = _check_final(modules, params, bool(replicas))
        self._rows = EarlyRows()
        self._handles: list[tuple[Tensor, Any]] = []
        buckets = [install(replica, comm_hook) for replica in replicas]
        seen: set[int] = set()
        for param in params:
            if id(param) in seen:
                continue
            seen.add(id(param))
            if id(param) in in_buckets:
                self._rows.watch(param)
            elif _is_watchable(param, is_alone):
                self._watch(param)
        for each in buckets:
            each.start(self._rows)
        writes = CountedWrites() if self._rows.is_watching else None
        # Also when nothing holds this any more: then what the hooks measure is not asked for.
        self._end = weakref.finalize(self, _detach, self._handles, buckets, self._rows, writes)

    @property
    def is_attached(self) -> bool:
        """Whether the hooks are in place."""
        return self._end.alive

    @property
    def is_watching(self) -> bool:
        """Whether a gradient is large enough to be measured during backward."""
        return self._rows.is_watching

    @property
    def early(self) -> int:
        """How many gradients of the last step had been measured during backward."""
        return self._rows.early

    @property
    def late(self) -> int:
        """How many the last step had to measure: small ones, and those changed after backward."""
        return self._rows.late

    def complete(self, params: Sequence[Tensor], parts: list[Tensor]) -> Tensor:
        """Return stats of gradients, of which ``parts`` is what this rank holds."""
        return self._rows.complete(params, parts)

    def drop(self) -> None:
        """Forget what was measured, so that the step measures everything.

        Call it after changing gradients in a way that autograd does not count: through ``.data``,
        NumPy or a kernel of your own, or by a collective such as ``dist.all_reduce``.
        """
        self._rows.forget()

    def detach(self) -> None:
        """Take all hooks off the model again; clipping then measures after backward.

        torch cannot take back the communication hook of DistributedDataParallel. It stays, and
        does what DDP would do without it, bit by bit.
        """
        self._end()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _watch(self, param: Tensor) -> None:
        slot = self._rows.watch(param)
        hook = self._rows.hook_of(slot)
        self._handles.append((param, param.register_post_accumulate_grad_hook(hook)))


def _detach(
    handles: list[tuple[Tensor, Any]],
    buckets: list[Buckets],
    rows: EarlyRows,
    writes: CountedWrites | None,
) -> None:
    for param, handle in handles:
        handle.remove()
        if not param._post_accumulate_grad_hooks:
            # An empty dictionary would still be looked at in every backward pass.
            param._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    for each in buckets:
        each.stop()
    if writes is not None:
        writes.stop()
    rows.close()


def _params_of(target: Any) -> list[Tensor]:
    if isinstance(target, Module):
        return list(target.parameters())
    if isinstance(target, Tensor):
        return [target]
    listed = list(target)
    if listed and isinstance(listed[0], dict):  # groups, as in optimizer.param_groups
        listed = [p for group in listed for p in group["params"]]
    return [entry[1] if isinstance(entry, tuple) else entry for entry in listed]


def _replicated(modules: Sequence[Module]) -> list[Any]:
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is None:
        return []
    kind = parallel.DistributedDataParallel
    return [unit for module in modules for unit in module.modules() if isinstance(unit, kind)]


def _check_final(modules: Sequence[Module], params: Sequence[Tensor], has_buckets: bool) -> bool:
    """Return whether plain gradients are final once accumulated: there is no other rank.

    Raises:
        NotImplementedError: the model is one of FSDP1.
        ValueError: there are other ranks, and no gradient is known to become final in backward.
    """
    if any(is_fsdp_model(module) for module in modules):
        raise NotImplementedError(
            "model: expected DistributedDataParallel, fully_shard or one process, got "
            "FullyShardedDataParallel, whose gradients have no moment when each becomes final; "
            "clip after backward"
        )
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    if params and not has_buckets and not has_dtensor(params):
        raise ValueError(
            "model: expected DistributedDataParallel or fully_shard, because gradients that are "
            "added up after backward would be measured too early, got parameters of neither on "
            f"{dist.get_world_size()} ranks"
        )
    return False


def _is_watchable(param: Tensor, is_alone: bool) -> bool:
    if param.numel() * param.element_size() < SMALLEST:
        return False
    if not is_dtensor(param):
        return is_alone
    # With CPU offload a gradient is still on its way when the hook runs.
    return bool(param.device_mesh.device_type == param.device.type)
