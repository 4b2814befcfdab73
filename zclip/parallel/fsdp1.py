"""FullyShardedDataParallel (FSDP1): plain shards; only their module knows that they are shards.

FSDP2 (``fully_shard``) makes DTensors, which say for themselves what they are.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.nn import Module

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def is_fsdp_model(pl_module: Module) -> bool:
    """Return whether a module, or one inside it, is sharded by FullyShardedDataParallel."""
    return bool(_units([pl_module]))


def shard_group(modules: Sequence[Module]) -> "ProcessGroup | None":
    """Return the group over which the squares of FSDP1's shards add up; None if nothing is sharded.

    Under ``HYBRID_SHARD`` it is the group of one replica, under ``NO_SHARD`` there is none.

    Raises:
        NotImplementedError: parameters are sharded over several groups, or some are not sharded.
    """
    units = _units(modules)
    sharded = [unit for unit in units if unit.sharding_strategy.name != "NO_SHARD"]
    if not sharded:
        return None
    groups = {id(unit.process_group): unit.process_group for unit in sharded}
    managed = {id(param) for unit in sharded for param in _params_of(unit)}
    named = [pair for module in modules for pair in module.named_parameters()]
    whole = [name for name, p in named if p.requires_grad and id(p) not in managed]
    if len(groups) > 1 or whole:
        found = f"{len(groups)} groups" if len(groups) > 1 else f"some that are whole: {whole[:3]}"
        raise NotImplementedError(
            f"expected parameters of FullyShardedDataParallel in one group, got {found}; use its "
            "own clip_grad_norm_, or fully_shard, whose tensors say how they are sharded"
        )
    group: ProcessGroup = sharded[0].process_group
    return group


def _units(modules: Sequence[Module]) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # not imported, so it cannot have been used
        return []
    kind = fsdp.FullyShardedDataParallel
    return [unit for module in modules for unit in module.modules() if isinstance(unit, kind)]


def _params_of(unit: Any) -> list[Any]:
    handle = unit._handle
    if handle is None:  # all its parameters are those of units inside it
        return []
    return list(handle.flat_param._params or [handle.flat_param])
