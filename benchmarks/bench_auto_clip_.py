"""AutoClip against plain clipping to a fixed norm, which is less work.

pytest benchmarks/bench_auto_clip_.py --benchmark-quiet
"""

OP = "rule"
RULES = ("auto_clip",)


def test_auto_clip_(contend, case, contender):
    contend()
