"""What the Triton backend costs the host per call: looking a table up, and building it anew.

``python benchmarks/bench_triton_table.py``. No GPU is needed: CPU tensors stand in, so the upload
is a plain copy, and nothing is launched. "dispatch" is an operator written in Python that does
nothing: the list crosses to C++ and back. "C++ op" is the whole of zclip::clip_by_ on
tensors of one element, whose time is all crossing and checking.
"""

import os
import statistics
import time

os.environ.setdefault("TRITON_INTERPRET", "1")  # so that no GPU driver is asked for

import torch

import zclip  # noqa: F401  registers the operators
from zclip.backends.triton import table as tables
from zclip.backends.triton.tensor_list import WRITE, TensorList
from zclip.layout import PROPAGATE

COUNTS = (150, 1_000, 10_000)
REPEATS = 15
WANTED_RATIO = 5.0  # a cached table must be at least this much cheaper than a new one


def median_us(call, prepare=lambda: None):
    """Return the median time of a call in microseconds; ``prepare`` is not timed."""
    samples = []
    for _ in range(REPEATS):
        prepare()
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return 1e6 * statistics.median(samples)


def measure(count):
    """Return microseconds per tensor: dispatch, cached, rebuilt, the C++ operator on the CPU."""
    # Two chunks each, from a little memory that is never read.
    pool = torch.zeros(20_000 * 64)
    grads = [pool[i % 64 * 20_000 :][:20_000] for i in range(count)]
    tiny = [torch.ones(1) for _ in range(count)]
    state = torch.zeros(0, dtype=torch.float64)

    TensorList(grads, WRITE)
    dispatch = median_us(lambda: torch.ops.zclip_bench.nothing_(grads))
    cached = median_us(lambda: TensorList(grads, WRITE))
    rebuilt = median_us(lambda: TensorList(grads, WRITE), tables.forget_tables)
    native = median_us(lambda: torch.ops.zclip.clip_by_(tiny, state, 0, (float("inf"), PROPAGATE)))
    return tuple(us / count for us in (dispatch, cached, rebuilt, native))


def main():
    torch.set_num_threads(1)
    library = torch.library.Library("zclip_bench", "DEF")
    library.define("nothing_(Tensor(a!)[] grads) -> ()")
    library.impl("nothing_", lambda grads: None, "CPU")
    print("us per tensor   dispatch    cached   rebuilt   ratio   C++ op")
    for count in COUNTS:
        dispatch, cached, rebuilt, native = measure(count)
        ratio = rebuilt / cached
        print(
            f"{count:>6} tensors  {dispatch:8.3f}  {cached:8.3f}  {rebuilt:8.3f}  {ratio:5.1f}x"
            f"  {native:7.3f}"
        )
        if ratio < WANTED_RATIO:
            raise SystemExit(f"a cached table is only {ratio:.1f}x cheaper, wanted {WANTED_RATIO}x")


if __name__ == "__main__":
    main()
