"""Scaling by a number on the device.

pytest benchmarks/bench_scale_.py --benchmark-quiet
"""

OP = "scale_"


def test_scale_(contend, case, contender):
    contend()
