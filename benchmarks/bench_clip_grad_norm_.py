"""clip_grad_norm_ against torch's, with nothing to clip and with everything to clip.

pytest benchmarks/bench_clip_grad_norm_.py --benchmark-quiet
"""

OP = "clip_grad_norm_"
CLIPS = (False, True)


def test_clip_grad_norm_(contend, case, contender):
    contend()
