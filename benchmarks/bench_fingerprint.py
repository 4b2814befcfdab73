"""Fingerprints against checksums.

pytest benchmarks/bench_fingerprint.py --benchmark-quiet
"""

OP = "fingerprint"
SHAPES = ("98m-in-150", "2000-small")


def test_fingerprint(contend, case, contender):
    contend()
