"""ZClip against its published code, calm and clipping.

pytest benchmarks/bench_zclip_.py --benchmark-quiet
"""

OP = "rule"
RULES = ("zclip",)
CLIPS = (False, True)


def test_zclip_(contend, case, contender):
    contend()
