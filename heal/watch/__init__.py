"""Follows a live run from its journal. Imports no torch: it may run on another machine."""
