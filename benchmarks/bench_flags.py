"""NaN and Inf flags against isfinite and against what a GradScaler does.

pytest benchmarks/bench_flags.py --benchmark-quiet
"""

OP = "flags"
SHAPES = ("98m-in-150", "2000-small")


def test_flags(contend, case, contender):
    contend()
