"""Ops that read or write lists of tensors."""

import torch
from torch import Tensor

from zclip.schemas.library import library
from zclip.schemas.shapes import check_list, empty_stats

library.define("grad_stats(Tensor[] grads) -> Tensor")
library.define("power_stats(Tensor[] grads, float p) -> Tensor")
library.define("scale_(Tensor(a!)[] grads, Tensor coefs) -> ()")
library.define("zero_nonfinite_(Tensor(a!)[] grads, Tensor stats) -> ()")
library.define("clamp_(Tensor(a!)[] grads, float limit) -> ()")
library.define("fingerprint(Tensor[] tensors) -> Tensor")
library.define("copy_and_hash_(Tensor(a!)[] targets, Tensor[] sources) -> Tensor")
library.define("read_probe(Tensor[] tensors) -> Tensor")
library.define("native_features() -> int")


@torch.library.register_fake("zclip::grad_stats", lib=library)
def _grad_stats(grads: list[Tensor]) -> Tensor:
    return empty_stats(grads)


@torch.library.register_fake("zclip::power_stats", lib=library)
def _power_stats(grads: list[Tensor], p: float) -> Tensor:
    return empty_stats(grads)


@torch.library.register_fake("zclip::scale_", lib=library)
def _scale_(grads: list[Tensor], coefs: Tensor) -> None:
    check_list(grads)


@torch.library.register_fake("zclip::zero_nonfinite_", lib=library)
def _zero_nonfinite_(grads: list[Tensor], stats: Tensor) -> None:
    check_list(grads)


@torch.library.register_fake("zclip::clamp_", lib=library)
def _clamp_(grads: list[Tensor], limit: float) -> None:
    check_list(grads)


@torch.library.register_fake("zclip::fingerprint", lib=library)
def _fingerprint(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty(len(tensors), dtype=torch.int64)


@torch.library.register_fake("zclip::copy_and_hash_", lib=library)
def _copy_and_hash_(targets: list[Tensor], sources: list[Tensor]) -> Tensor:
    return sources[0].new_empty((len(sources), 2), dtype=torch.int64)
