"""AdaGC against its published code, calm and clipping.

pytest benchmarks/bench_adagc_.py --benchmark-quiet
"""

OP = "rule"
RULES = ("adagc",)
CLIPS = (False, True)


def test_adagc_(contend, case, contender):
    contend()
