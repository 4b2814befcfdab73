"""grad_stats against the ways people measure gradients today.

pytest benchmarks/bench_grad_stats.py --benchmark-quiet
"""

OP = "grad_stats"
SHAPES = ("98m-in-150", "2000-small")


def test_grad_stats(contend, case, contender):
    contend()
