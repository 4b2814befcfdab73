"""Random generators after a load, also where there are more ranks than were saved."""

import hashlib
import random
import sys

import torch

from heal.checkpoint.ranks import Ranks
from heal.checkpoint.reading import Restored


def restore_rng(restored: Restored, ranks: Ranks) -> None:
    """Set the generators as they were; a rank that is new gets a stream of its own.

    The state of another rank would give it the same random numbers, and so the same dropout, as
    that rank has.
    """
    if ranks.rank == restored.rank:
        restored.values["rng"].put_back()
        return
    text = f"{restored.save_id} {ranks.rank}".encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")
    torch.manual_seed(seed)  # of all devices
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
