"""Optimizers of other libraries that say they support AMP scaling, and mean one of two things."""

import math
import warnings

import pytest
import torch
from torch.amp import GradScaler

import zclip


class LikeApex(torch.optim.Optimizer):
    """FusedAdam(capturable=True) of apex and of TransformerEngine, as far as GradScaler sees it.

    It asks for the scaler itself and reads what that found; ``self.found_inf`` it never reads.
    """

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "weight_decay": 0.1})
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        scale = 1.0
        if grad_scaler is not None:
            found = grad_scaler._check_inf_per_device(self)
            if any(flag.item() for flag in found.values()):
                return
            scale = grad_scaler._get_scale_async().item()
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * (p.grad / scale + group["weight_decay"] * p)


class LikeTorch(LikeApex):
    """The other contract: attributes that GradScaler sets."""

    @torch.no_grad()
    def step(self, closure=None):
        if getattr(self, "found_inf", None) is None or not self.found_inf:
            super().step()


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is not fused")
        yield


def one_parameter():
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.tensor([1.0, 2.0, 2.0])
    return param


@pytest.mark.parametrize("kind", [LikeApex, LikeTorch])
@pytest.mark.parametrize("on_nonfinite", ["skip", "official"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_step_moves_nothing(kind, on_nonfinite, bad):
    param = one_parameter()
    optimizer = zclip.ClippedOptimizer(kind([param]), zclip.ZClip(on_nonfinite=on_nonfinite))
    param.grad[1] = bad
    optimizer.step()
    assert param.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", [LikeApex, LikeTorch])
def test_a_good_step_moves_what_it_should(kind):
    param = one_parameter()
    optimizer = zclip.ClippedOptimizer(kind([param]), zclip.GlobalNorm(1.5), lag=0)
    optimizer.step()
    want = 1 - 0.1 * (torch.tensor([0.5, 1.0, 1.0]) + 0.1)
    torch.testing.assert_close(param.detach(), want, rtol=1e-5, atol=0)


def test_only_what_reads_the_flag_is_trusted_with_it():
    assert zclip.wrap(LikeTorch([one_parameter()])).guards_on_device
    assert not zclip.wrap(LikeApex([one_parameter()])).guards_on_device
    with pytest.raises(ValueError, match="expected an optimizer built with fused=True"):
        zclip.wrap(LikeApex([one_parameter()]), apply="grad_scale")


def test_the_warning_says_why_the_host_has_to_look():
    with pytest.warns(UserWarning, match="LikeApex takes the verdict from a GradScaler only"):
        zclip.wrap(LikeApex([one_parameter()])).step()


def test_under_a_scaler_gradients_are_unscaled_once_and_overflows_skipped():
    param, scaler = one_parameter(), GradScaler("cpu", init_scale=4.0, growth_interval=99)
    optimizer = zclip.ClippedOptimizer(LikeApex([param]), zclip.GlobalNorm(math.inf))
    for loss, moves in ((param.sum(), True), (param.sum() * math.inf, False)):
        optimizer.zero_grad()
        before = param.detach().clone()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        want = before - 0.1 * (1 + 0.1 * before) if moves else before
        torch.testing.assert_close(param.detach(), want)
    assert scaler.get_scale() == 2.0
