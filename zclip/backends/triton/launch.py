"""What every launch needs: options, the right device, and doubles that arrive as doubles."""

import struct
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

THREADS = 256
WARP = 64 if torch.version.hip else 32

OPTIONS: dict[str, Any] = {
    "num_warps": THREADS // WARP,
    # Fused multiply-adds would change the bits from one Triton to the next: 3.10 flips the default.
    "enable_fp_fusion": False,
}


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` current, because Triton launches there and not where the tensors are."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def bits_of(value: float) -> int:
    """Pack a float for an int64 argument; Triton would round a float argument to float32."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
