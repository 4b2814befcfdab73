"""The adapters call their packages as these want to be called; the packages are stand-ins."""

import pytest
import torch

from tests.bench import fake_rivals
from zclip.bench import rivals
from zclip.bench.catalogue import Case
from zclip.bench.gradients import Gradients

SHAPES = [(30, 10), (7,), (1025,)]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("rival", rivals.PACKAGES)
def test_every_adapter_clips(monkeypatch, rival, clips):
    fake_rivals.install(monkeypatch)
    case = Case("clip_grad_norm_", "odd", clips=clips)
    work = case.work(Gradients(SHAPES, torch.float32), [], [rival])
    assert not work.is_wrong(rival, work.check(rival))


def test_transformer_engine_is_given_the_coefficient_on_the_device_where_it_takes_one(monkeypatch):
    seen = []

    def scale_tensor(overflow, lists, factor):
        seen.append(factor)
        fake_rivals.scale(overflow, lists, factor)

    fake_rivals.install(monkeypatch, multi_tensor_scale_tensor=scale_tensor)
    work = Case("clip_grad_norm_", "odd", clips=True).work(
        Gradients(SHAPES, torch.float32), [], ["TransformerEngine"]
    )
    assert not work.is_wrong("TransformerEngine", work.check("TransformerEngine"))
    assert isinstance(seen[0], torch.Tensor)


def test_deepspeed_looks_for_overflow(monkeypatch):
    fake_rivals.install(monkeypatch)
    work = Case("flags", "odd").work(Gradients(SHAPES, torch.float32), [], ["DeepSpeed"])
    assert work.check("DeepSpeed") == 0.0
