"""What clipping costs on this machine, beside its rivals, in one interleaved run."""
