"""AGC, which reads the weights too, against plain clipping to a fixed norm, which does not.

pytest benchmarks/bench_agc_.py --benchmark-quiet
"""

OP = "rule"
RULES = ("agc",)


def test_agc_(contend, case, contender):
    contend()
