"""Heals training runs: rolls back, lowers the learning rate or shrinks the batch when needed.

Decides what to do about trouble that :mod:`zclip` reports. Imports zclip, never the reverse.
"""
