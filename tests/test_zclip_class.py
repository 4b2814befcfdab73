"""ZClip as its users know it: the published constructor, attributes, errors and trajectories."""

import math

import pytest
import torch
from torch import nn

import zclip
from tests.models import backward, make_model, norms_of, parameters_with_norms, set_norms
from tests.upstream import PlainZClip

# Norms in, and after each step: norm of the gradients, mean and variance, as the published
# package gives them with warmup_steps=5 and no max_grad_norm (research notes, section 1.3).
NORMS_IN = [1.0, 1.2, 0.9, 1.1, 1.05, 1.0, 1.3, 5.0, 1.1, 50.0, 0.8]
ADAPTIVE = [
    *[(norm, None, None) for norm in NORMS_IN[:4]],
    (1.05, 1.05, 0.010000005),
    (1.0, 1.0485, 0.0097705721),
    (1.291309, 1.0557843, 0.011141625),
    (1.0734392, 1.056314, 0.010816175),
    (1.1, 1.0576245, 0.01054556),
    (1.0589713, 1.0576649, 0.010229244),
    (0.8, 1.049935, 0.011796392),
]
PERCENTILE = [
    *ADAPTIVE[:6],
    (1.2956146, 1.0559135, 0.011201167),
    (1.3205022, 1.0638511, 0.012841228),
    (1.1, 1.0649356, 0.012492877),
    (1.3443644, 1.0733185, 0.014322068),
    (0.8, 1.0651189, 0.016001047),
]
MEAN = [
    *ADAPTIVE[:6],
    (1.0484992, 1.0485, 0.0097705721),
    (1.0484998, 1.0485, 0.0097705721),
    (1.1, 1.050045, 0.0095523201),
]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ADAPTIVE),
        ({"mode": "percentile"}, PERCENTILE),
        ({"clip_option": "mean", "skip_update_on_spike": True}, MEAN),
    ],
    ids=["adaptive_scaling", "percentile", "mean"],
)
def test_the_published_trajectory(settings, expected):
    clipper = zclip.ZClip(warmup_steps=5, max_grad_norm=None, **settings)
    params = parameters_with_norms([1.0])
    for norm, (clipped, mean, var) in zip(NORMS_IN, expected, strict=False):
        set_norms(params, [norm])
        assert float(clipper.step(params)) == pytest.approx(norm, rel=1e-6)
        assert norms_of(params)[0] == pytest.approx(clipped, rel=2e-6)
        assert (clipper.mean is None) == (mean is None)
        if mean is not None:
            assert clipper.mean == pytest.approx(mean, rel=1e-5)
            assert clipper.var == pytest.approx(var, rel=1e-5)


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("skip_update", [False, True])
@pytest.mark.parametrize("option", ["adaptive_scaling", "mean", "percentile"])
def test_four_hundred_steps_of_a_noisy_run(option, skip_update, max_grad_norm):
    generator = torch.Generator().manual_seed(3)
    norms = torch.exp(0.2 * torch.randn(400, generator=generator, dtype=torch.float64))
    norms[torch.rand(400, generator=generator) < 0.05] *= 20
    mode = "percentile" if option == "percentile" else "zscore"
    clipper = zclip.ZClip(
        mode=mode,
        clip_option=option,
        clip_factor=0.9,
        skip_update_on_spike=skip_update,
        max_grad_norm=max_grad_norm,
    )
    params = parameters_with_norms([1.0, 1.0], dtype=torch.float64)
    plain = PlainZClip(
        option=option,
        clip_factor=0.9,
        skip_update_on_spike=skip_update,
        max_grad_norm=max_grad_norm,
    )
    for norm in norms.tolist():
        coef = plain.step(norm)
        set_norms(params, [0.6 * norm, 0.8 * norm])
        clipper.step(params)
        assert norms_of(params) == pytest.approx([0.6 * norm * coef, 0.8 * norm * coef], rel=1e-9)
        if plain.mean is not None:
            assert (clipper.mean, clipper.var) == pytest.approx((plain.mean, plain.var), rel=1e-9)


def test_the_constructor_echoes_its_arguments():
    clipper = zclip.ZClip(
        alpha=0.9,
        z_thresh=3.0,
        max_grad_norm=2.0,
        eps=1e-8,
        warmup_steps=50,
        mode="Percentile",
        clip_factor=0.8,
        skip_update_on_spike=True,
    )
    assert (clipper.alpha, clipper.z_thresh, clipper.max_grad_norm) == (0.9, 3.0, 2.0)
    assert (clipper.eps, clipper.warmup_steps, clipper.mode) == (1e-8, 50, "percentile")
    assert clipper.clip_option is None
    assert (clipper.clip_factor, clipper.skip_update_on_spike) == (0.8, True)
    assert (clipper.initialized, clipper.mean, clipper.var) == (False, None, None)
    assert clipper.buffer == []


def test_bad_arguments_raise_what_the_published_package_raises():
    with pytest.raises(ValueError, match=r"mode must be either 'zscore' or 'percentile'\."):
        zclip.ZClip(mode="median")
    for error in (AssertionError, ValueError):
        with pytest.raises(error, match="clip_option must be either 'mean' or 'adaptive_scaling'"):
            zclip.ZClip(clip_option="Mean")
    with pytest.raises(
        ValueError, match=r"on_nonfinite: expected one of skip, official.*, got 'ignore'"
    ):
        zclip.ZClip(on_nonfinite="ignore")


def test_warm_up_fills_the_buffer_and_then_empties_it():
    model, clipper = make_model(), zclip.ZClip(warmup_steps=3)
    lengths = []
    for seed in range(3):
        backward(model, seed)
        assert clipper.step(model) > 0
        lengths.append(len(clipper.buffer))
    assert lengths == [1, 2, 0]
    assert clipper.initialized
    assert clipper.mean > 0
    assert clipper.var > 0


@pytest.mark.parametrize("mode", ["zscore", "percentile"])
def test_statistics_may_be_set_and_the_norm_replaced_as_upstream_tests_do(mode):
    model, clipper = make_model(), zclip.ZClip(mode=mode, z_thresh=2.0)
    clipper.mean, clipper.var, clipper.initialized = 1.0, 0.25, True
    backward(model, 0)
    before = [p.grad.clone() for p in model.parameters()]
    original = clipper._compute_grad_norm
    clipper._compute_grad_norm = lambda model: 3.0
    assert clipper.step(model) == 3.0
    clipper._compute_grad_norm = original
    assert clipper.mean != 1.0
    for grad, param in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(param.grad, grad * (1.0 / 3.0), rtol=1e-5, atol=0)
    assert clipper.step(model) == pytest.approx(norm_of(model), rel=1e-6)


def test_skip_update_on_spike_leaves_the_mean():
    model, clipper = make_model(), zclip.ZClip(z_thresh=2.0, skip_update_on_spike=True)
    clipper.mean, clipper.var, clipper.initialized = 1.0, 0.25, True
    backward(model, 0, scale=1e4)
    clipper.step(model)
    assert clipper.mean == 1.0


@pytest.mark.parametrize(("option", "expected"), [("adaptive_scaling", 1.5), ("mean", 1.0)])
def test_compute_clip_val(option, expected):
    clipper = zclip.ZClip(clip_option=option, z_thresh=2.0)
    clipper.mean, clipper.var, clipper.initialized = 1.0, 0.25, True
    assert clipper._compute_clip_val(3.0) == pytest.approx(expected, rel=1e-5)
    assert clipper._compute_clip_val(1.0) is None


def test_apply_in_place_clipping_scales_what_it_is_told():
    model = make_model()
    for apply in (zclip.apply_in_place_clipping, zclip.ZClip().apply_in_place_clipping):
        for norm in (2.0, torch.tensor(2.0)):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            apply(model, global_norm=norm, max_global_norm=1.0)
            for param in model.parameters():
                torch.testing.assert_close(param.grad, torch.full_like(param, 0.5))
            apply(model, 0.5, 1.0)
            torch.testing.assert_close(param.grad, torch.full_like(param, 0.5))


def test_is_fsdp_model_looks_inside(monkeypatch):
    from torch.distributed import fsdp

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    assert not zclip.is_fsdp_model(model)
    monkeypatch.setattr(fsdp, "FullyShardedDataParallel", nn.ReLU)
    assert zclip.is_fsdp_model(model)


def test_a_lightning_callback_without_lightning_says_what_to_install(monkeypatch):
    import sys

    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "zclip.integrations.lightning", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'zclip-heal\[lightning\]'"):
        _ = zclip.ZClipLightningCallback


def test_a_nan_in_official_mode_poisons_the_statistics_as_upstream():
    clipper = zclip.ZClip(warmup_steps=1, on_nonfinite="official")
    params = parameters_with_norms([1.0])
    clipper.step(params)
    set_norms(params, [float("nan")])
    clipper.step(params)
    assert math.isnan(clipper.mean)
    assert float(clipper.result.blocked) == 0


def test_a_spike_can_be_refused_instead_of_clipped():
    clipper = zclip.ZClip(warmup_steps=5, skip_step_on_spike=True)
    params = parameters_with_norms([1.0])
    for norm in [*NORMS_IN[:5], 50.0]:
        set_norms(params, [norm])
        clipper.step(params)
    assert float(clipper.result.blocked) == 1
    assert norms_of(params) == [0.0]


def norm_of(model):
    return torch.stack([p.grad.double().norm() for p in model.parameters()]).norm().item()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"alpha": 1.5}, ValueError, "alpha: expected a number from 0 to 1, got 1.5"),
        ({"alpha": "high"}, TypeError, "alpha: expected a number, got 'high'"),
        ({"z_thresh": -1}, ValueError, "z_thresh: expected a number >= 0, got -1"),
        ({"max_grad_norm": math.nan}, ValueError, "max_grad_norm: expected a number >= 0, got nan"),
        ({"warmup_steps": 2.5}, ValueError, "warmup_steps: expected a whole number >= 0, got 2.5"),
        ({"clip_factor": None}, TypeError, "clip_factor: expected a number, got None"),
    ],
)
def test_wrong_settings_are_named_at_once(settings, error, message):
    with pytest.raises(error, match=message):
        zclip.ZClip(**settings)
