"""clip_grad_value_ against torch's two passes.

pytest benchmarks/bench_clip_grad_value_.py --benchmark-quiet
"""

OP = "clip_grad_value_"


def test_clip_grad_value_(contend, case, contender):
    contend()
