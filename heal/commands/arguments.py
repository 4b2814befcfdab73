"""Arguments that several commands take."""

import argparse


def at_least_one(word: str) -> int:
    """Return the whole number that a word is, 1 or more; argparse names the argument."""
    if not word.strip().isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} given; wanted a whole number >= 1")
    return int(word)
