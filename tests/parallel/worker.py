"""One rank of a world: runs the checks and writes down, after each, how it went."""

import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.parallel.registry import checks_for

SECONDS_PER_COLLECTIVE = 300  # then gloo raises on the ranks that are waiting


def main(folder: str, *names: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS_PER_COLLECTIVE))
    report = {}
    path = Path(folder) / f"rank{dist.get_rank()}.json"
    for name, check in checks_for(dist.get_world_size(), names).items():
        torch.manual_seed(0)
        start = time.monotonic()
        try:
            check()
            error = None
        except Exception:
            error = traceback.format_exc()
        report[name] = {"error": error, "seconds": time.monotonic() - start}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(report))
        partial.replace(path)
        if error is not None:
            print(error, flush=True)
            os._exit(1)  # the others may wait for us in a collective; torchrun ends them
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
