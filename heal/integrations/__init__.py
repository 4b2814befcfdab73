"""Healing inside other people's loops and trackers; each file needs the package it is named after.

None of these packages is imported before it is used.
"""
