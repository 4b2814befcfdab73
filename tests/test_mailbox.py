"""News arrives exactly ``lag`` posts late, and never from an abandoned timeline."""

import copy
import pickle

import pytest
import torch

from zclip import mailbox as mailbox_module
from zclip.layout import NORM, NUM_VERDICT
from zclip.mailbox import METRICS, Mailbox


def verdict(value):
    return torch.arange(NUM_VERDICT, dtype=torch.float32) + value


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_news_arrives_exactly_lag_posts_late(lag):
    mailbox = Mailbox(lag)
    heard = []
    for step in range(10):
        mailbox.post(step, verdict(step))
        heard.append([s for s, _ in mailbox.poll()])
    assert heard == [[]] * lag + [[step] for step in range(10 - lag)]
    assert mailbox.dropped == 0


def test_the_record_is_a_copy():
    mailbox, sent = Mailbox(lag=1), verdict(3)
    mailbox.post(0, sent)
    sent.zero_()
    mailbox.post(1, sent)
    assert mailbox.poll() == [(0, verdict(3).tolist())]


def test_whoever_does_not_poll_loses_the_oldest_and_is_told():
    mailbox = Mailbox(lag=2)
    for step in range(10):
        mailbox.post(step, verdict(step))
    assert [step for step, _ in mailbox.poll()] == [7]
    assert mailbox.dropped == 7


def test_clear_drops_the_mail_of_an_abandoned_timeline():
    mailbox = Mailbox(lag=1)
    mailbox.post(7, verdict(7))
    mailbox.post(8, verdict(8))
    assert mailbox.metrics()
    mailbox.clear()
    assert mailbox.metrics() == {}
    mailbox.post(6, verdict(6))
    assert mailbox.poll() == []
    mailbox.post(7, verdict(7))
    assert [step for step, _ in mailbox.poll()] == [6]


def test_metrics_are_floats_of_the_newest_that_arrived():
    mailbox = Mailbox(lag=1)
    assert mailbox.metrics() == {}
    for step in range(3):
        mailbox.post(step, verdict(100 * step))
    metrics = mailbox.metrics()
    assert metrics.keys() == METRICS.keys()
    assert metrics["zclip/raw_grad_norm"] == 100.0 + NORM
    assert all(type(value) is float for value in metrics.values())
    assert mailbox.metrics() == metrics


def test_copies_start_empty():
    mailbox = Mailbox(lag=0)
    mailbox.post(0, verdict(0))
    for other in (copy.deepcopy(mailbox), pickle.loads(pickle.dumps(mailbox))):
        assert other.poll() == []
        assert other.lag == 0


def test_only_the_event_of_a_record_old_enough_is_waited_for(monkeypatch):
    """On a device: which events are synchronized, and when."""
    waited = []

    class Event:
        def __init__(self, step):
            self.step = step

        def synchronize(self):
            waited.append(self.step)

    class OnDevice:
        """Enough of a CUDA tensor for ``post``: a device, and something to copy from."""

        device = torch.device("cuda")

    steps = iter(range(9))
    mailbox = Mailbox(lag=2)
    monkeypatch.setattr(mailbox_module, "record_event", lambda device: Event(next(steps)))
    monkeypatch.setattr(mailbox, "_new_slot", lambda pinned: _Slot(pinned))
    for step in range(5):
        mailbox.post(step, OnDevice())
        mailbox.poll()
    assert waited == [0, 1, 2]


class _Slot:
    def __init__(self, pinned):
        assert pinned

    def copy_(self, source, non_blocking):
        assert non_blocking

    def tolist(self):
        return [0.0] * NUM_VERDICT


def test_a_negative_lag_is_an_error():
    with pytest.raises(ValueError, match="lag: expected 0 or more, got -1"):
        Mailbox(lag=-1)


def test_a_peek_takes_nothing_away():
    box = Mailbox(lag=1, width=2, room=3)
    assert box.peek() is None
    for step in range(4):
        box.post_row(step, [float(step), 0.0])
        assert box.peek() == ((step - 1, [step - 1.0, 0.0]) if step else None)
    assert [step for step, _ in box.poll()] == [0, 1, 2]
    assert box.peek() is None  # the last one is not old enough


def test_a_peek_does_not_touch_what_comes_from_a_device():
    box = Mailbox(lag=0, width=2)
    box.post(0, torch.ones(2))
    assert box.peek() is None
