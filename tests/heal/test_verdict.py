import math

import numpy as np
import pytest

from heal.record import COLUMNS, Flag, HealthRow, Record
from zclip import layout


def test_both_packages_number_the_columns_alike():
    assert len(COLUMNS) == layout.NUM_VERDICT
    for number, name in enumerate(COLUMNS):
        assert getattr(layout, name.upper()) == number


def test_both_packages_number_the_flags_alike():
    names = [
        "HAS_NAN",
        "HAS_INF",
        "OVERFLOW",
        "CLIPPED",
        "SPIKE",
        "LOSS_NAN",
        "LOSS_SPIKE",
        "LOSS_RISING",
        "DESYNC",
    ]
    for name in names:
        assert Flag[name] == getattr(layout, name)
    of_heal = [flag for flag in Flag if flag.name not in names]
    assert min(of_heal) > layout.DESYNC


def test_all_flags_together_survive_float32():
    together = int(sum(Flag))
    assert int(np.float32(together)) == together


def test_a_row_is_decoded_by_name():
    row = [float(100 + column) for column in range(len(COLUMNS))]
    row[layout.FLAGS] = float(layout.HAS_NAN | layout.CLIPPED)
    record = Record.decode(7, row, worst_name="head.weight", lr=0.1, seconds=2.0)
    assert (record.step, record.blocked, record.worst_name) == (7, True, "head.weight")
    assert record.flags == Flag.HAS_NAN | Flag.CLIPPED
    assert (record.norm, record.worst, record.clips) == (102.0, 110, 111)
    assert record.has_nonfinite_gradient
    assert record.lr == 0.1


def test_flags_of_the_host_join_those_of_the_device():
    row = [0.0] * len(COLUMNS)
    row[layout.FLAGS] = float(layout.SPIKE)
    record = Record.decode(0, row, flags=Flag.PREEMPTED)
    assert record.flags == Flag.SPIKE | Flag.PREEMPTED


def test_a_broken_row_does_not_break_the_reader():
    record = Record.decode(0, [math.nan] * len(COLUMNS))
    assert record.flags == 0
    assert record.worst == -1


def test_a_short_row_says_what_was_wanted():
    with pytest.raises(ValueError, match="14 numbers, the row has 3"):
        Record.decode(0, [0.0] * 3)


def test_a_finite_loss_with_the_flag_is_not_trusted():
    assert not Record(step=0, loss=1.0, flags=Flag.LOSS_NAN).has_finite_loss
    assert Record(step=0, loss=1.0).has_finite_loss
    assert not Record(step=0).has_finite_loss


def test_a_tensor_without_a_name_has_its_number():
    row = HealthRow(step=0, weight_norms=(1.0, 2.0), weight_bad=(0, 0), names=("a",))
    assert (row.name(0), row.name(1)) == ("a", "tensor 1")
