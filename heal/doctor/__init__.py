"""Checks of checkpoints, settings and clusters, for ``heal doctor``: each returns findings."""
