"""SpikeSkip against plain clipping to a fixed norm, which is less work.

pytest benchmarks/bench_spike_skip_.py --benchmark-quiet
"""

OP = "rule"
RULES = ("spike_skip",)


def test_spike_skip_(contend, case, contender):
    contend()
