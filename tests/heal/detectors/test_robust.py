"""A window over the last values: the same numbers as of a plain list, whenever it is asked."""

import math
import random

import pytest

from heal.detectors.robust import LARGEST, QUARTILES_OF_NORMAL, Window


class PlainWindow:
    """As said, in the plainest way."""

    def __init__(self, size):
        self.size, self.values = size, []

    def push(self, value):
        if math.isfinite(value) and abs(value) < LARGEST:
            self.values = [*self.values, value][-self.size :]

    def quantile(self, share):
        ordered = sorted(self.values)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else math.nan

    def spread(self):
        return (self.quantile(0.75) - self.quantile(0.25)) / QUARTILES_OF_NORMAL


def same(left, right):
    return left == right or (math.isnan(left) and math.isnan(right))


@pytest.mark.parametrize("size", [1, 2, 5, 16])
@pytest.mark.parametrize("asked", [0.05, 0.5, 1.0], ids=["seldom", "often", "always"])
def test_it_answers_as_a_plain_list_does(size, asked):
    chance = random.Random(size)
    window, plain = Window(size), PlainWindow(size)
    for _ in range(600):
        drawn = chance.random()
        if drawn < 0.02:
            window.clear()
            plain.values = []
        odd = chance.choice([math.nan, math.inf, -math.inf, 1e101])
        value = odd if drawn > 0.95 else float(chance.randrange(20))  # equal ones among them
        window.push(value)
        plain.push(value)
        assert len(window) == len(plain.values)
        if chance.random() < asked:
            for share in (0.0, 0.25, 0.5, 0.9, 1.0):
                assert same(window.quantile(share), plain.quantile(share))
            median, spread = window.median_and_spread()
            assert same(median, plain.quantile(0.5))
            assert same(spread, plain.spread())
            assert same(spread, window.spread)
    assert window.values() == plain.values


def test_values_that_were_saved_come_back():
    window = Window(4, [1.0, math.nan, 2.0, 3.0, 4.0, 5.0])
    assert window.values() == [2.0, 3.0, 4.0, 5.0]
    assert window.median == 4.0


@pytest.mark.parametrize(("value", "is_kept"), [(0.99e100, True), (1.01e100, False)])
def test_numbers_that_no_loss_comes_near_are_ignored(value, is_kept):
    window = Window(4, [value, -value])
    assert window.values() == ([value, -value] if is_kept else [])


def test_the_oldest_value_is_the_one_that_the_next_replaces():
    window = Window(2, [3.0, 1.0, 2.0])
    assert window.oldest == 1.0
    window.push(5.0)
    assert window.oldest == 2.0
