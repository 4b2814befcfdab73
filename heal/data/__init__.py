"""Batches: the stream that skips and rewinds, the passes it reads, and how a batch is cut."""
