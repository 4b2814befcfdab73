"""Sees slow failures coming: features of the record stream, a small model, a calibrated limit.

Needs nothing but the standard library. The model is made and judged by ``tools/forecast`` in the
repository, which is not installed.
"""
