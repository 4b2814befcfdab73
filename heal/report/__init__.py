"""What happened in a run, for people: a page, a text or JSON, from the journal alone.

Imports no torch, so that a report can be made anywhere the files are.
"""
