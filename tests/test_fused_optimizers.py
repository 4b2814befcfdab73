"""The fused optimizers are torch's, to everything that uses an optimizer."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zclip
from zclip.layout import FLAGS, LOSS, LOSS_NAN, LOSS_RATIO, NUM_LOSS_STATE
from zclip.optim import SGD, Adam, AdamW, FusedOptimizer, Guard, Lion

PAIRS = [
    (AdamW, torch.optim.AdamW, {"lr": 1e-2}),
    (AdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    (AdamW, torch.optim.AdamW, {"lr": 1e-2, "maximize": True, "betas": (0.8, 0.95)}),
    (Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    (Adam, torch.optim.Adam, {"lr": 1e-2, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    (SGD, torch.optim.SGD, {"lr": 0.1}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (SGD, torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
]


def make_model(dtype=torch.float32):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    return model.to(dtype)


def train(model, optimizer, steps, start=0, scheduler=None, scaler=None):
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 12, generator=generator).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if scheduler is not None:
            scheduler.step()
    return model


def flat(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def assert_near(left, right, within=1e-5):
    torch.testing.assert_close(flat(left), flat(right), rtol=within, atol=within / 10)


@pytest.mark.parametrize(("ours", "theirs", "settings"), PAIRS)
def test_it_trains_as_torch_does(ours, theirs, settings):
    mine, other = make_model(), make_model()
    train(mine, ours(mine.parameters(), **settings), 30)
    train(other, theirs(other.parameters(), **settings), 30)
    assert_near(mine, other)


@pytest.mark.parametrize(("ours", "theirs", "settings"), PAIRS)
@pytest.mark.parametrize("back", [False, True])
def test_state_goes_over_in_the_middle_of_a_run(ours, theirs, settings, back):
    """Ours into torch's, and torch's into ours; the run goes on as if nothing had happened."""
    first, second = (ours, theirs) if not back else (theirs, ours)
    model, whole = make_model(), make_model()
    before = first(model.parameters(), **settings)
    train(model, before, 10)
    after = second(model.parameters(), **settings)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    train(model, after, 10, start=10)
    train(whole, theirs(whole.parameters(), **settings), 20)
    assert_near(model, whole)


@pytest.mark.parametrize("back", [False, True])
def test_a_saved_state_is_plain_data(back, tmp_path):
    model = make_model()
    optimizer = AdamW(model.parameters(), clipper="zclip")
    train(model, optimizer, 3)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    kind = torch.optim.AdamW if back else AdamW
    again = kind(model.parameters())
    again.load_state_dict(loaded)
    assert type(loaded["state"][0]) is dict


def test_a_thousand_steps_are_no_farther_from_float64_than_torchs_fused_adamw():
    def run(make, dtype):
        torch.manual_seed(3)
        p = nn.Parameter(torch.randn(4000).to(dtype))
        optimizer = make([p])
        generator = torch.Generator().manual_seed(4)
        for _ in range(1000):
            noise = torch.randn(4000, generator=generator)
            p.grad = (p.detach().float() * 0.1 + noise).to(dtype)
            optimizer.step()
        return p.detach().double()

    settings = {"lr": 1e-3, "weight_decay": 0.1}
    exact = run(lambda p: torch.optim.AdamW(p, **settings), torch.float64)
    ours = run(lambda p: AdamW(p, **settings), torch.float32) - exact
    torchs = run(lambda p: torch.optim.AdamW(p, fused=True, **settings), torch.float32) - exact
    assert ours.norm() <= torchs.norm()
    assert ours.abs().max() <= torchs.abs().max()


def test_clipping_inside_the_step_is_clipping_before_it():
    inside, before = make_model(), make_model()
    optimizer = AdamW(inside.parameters(), lr=1e-2, clipper="global_norm", max_norm=0.05)
    train(inside, optimizer, 20)
    wrapped = zclip.wrap(
        torch.optim.AdamW(before.parameters(), lr=1e-2, fused=True), "global_norm", max_norm=0.05
    )
    train(before, wrapped, 20)
    assert_near(inside, before)
    assert float(optimizer.result.clip.coefs[0]) < 1.0


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("zclip", {"warmup_steps": 3}),
        ("adagc", {"warmup_steps": 3}),
        ("auto_clip", {}),
        ("spike_skip", {}),
        ("agc", {}),
        ("zclip", {"per_group": True, "warmup_steps": 3}),
    ],
)
def test_every_clipper_works_inside(name, settings):
    inside, before = make_model(), make_model()
    optimizer = SGD(inside.parameters(), lr=0.1, clipper=name, **settings)
    train(inside, optimizer, 12)
    clipper = zclip.wrap(torch.optim.SGD(before.parameters(), lr=0.1, fused=True), name, **settings)
    train(before, clipper, 12)
    assert_near(inside, before)
    ours, theirs = optimizer.result.clip.verdict, clipper.result.verdict
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_rule_of_the_users_own_works_inside():
    def halve(stats, state):
        return stats.new_full((), 0.5)

    inside, before = make_model(), make_model()
    train(inside, SGD(inside.parameters(), lr=0.1, clipper=zclip.PythonRule(halve)), 5)
    train(before, torch.optim.SGD(before.parameters(), lr=0.05), 5)
    assert_near(inside, before)


def test_gradients_are_not_written():
    model = make_model()
    optimizer = AdamW(model.parameters(), clipper="global_norm", max_norm=1e-3)
    model(torch.randn(4, 12)).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", [AdamW, SGD, Lion])
def test_a_skipped_step_changes_no_bit(kind):
    model = make_model()
    more = {"momentum": 0.9} if kind is SGD else {}
    optimizer = kind(model.parameters(), clipper="zclip", **more)
    train(model, optimizer, 3)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    model[0].weight.grad[0, 0] = math.nan
    optimizer.step()
    assert float(optimizer.result.taken) == 0.0
    after = (model.state_dict(), optimizer.state_dict()["state"])
    for old, new in zip(_tensors(before), _tensors(after), strict=True):
        assert torch.equal(old, new)


def _tensors(tree):
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def guarded(model, path):
    clipper = path(zclip.ZClip(max_grad_norm=0.5, warmup_steps=3))
    watch = torch.zeros(NUM_LOSS_STATE, dtype=torch.float64)
    return AdamW(model.parameters(), lr=1e-2), Guard(clipper, watch, (2.0, 0, 0.99, 5))


def aligned(clipper):
    clipper.align()
    return clipper


def not_one_call(clipper):
    clipper.align()
    clipper.rule_call = lambda groups, device, loss=None: None
    return clipper


@pytest.mark.parametrize("path", [aligned, not_one_call], ids=["native", "apart"])
def test_a_guard_clips_and_watches_the_loss_as_two_operators_do(path):
    model, reference = make_model(), make_model()
    optimizer, guard = guarded(model, path)
    ours = AdamW(reference.parameters(), lr=1e-2)
    clipper = aligned(zclip.ZClip(max_grad_norm=0.5, warmup_steps=3))
    state = torch.zeros_like(guard.watch)
    for step in range(12):
        torch.manual_seed(step)
        x = torch.randn(16, 12) * (30.0 if step == 9 else 1.0)
        for each, stepped in ((model, optimizer), (reference, ours)):
            stepped.zero_grad()
            loss = each(x).square().mean()
            loss.backward()
            if each is model:
                optimizer.step(loss=loss, guard=guard)
        clipper.step(reference)
        verdict = clipper.result.verdict
        torch.ops.zclip.watch_loss_(state, loss.detach(), verdict, *guard.settings)
        if not verdict[0]:
            ours.step()
        assert torch.equal(optimizer.result.clip.verdict, verdict)
    assert torch.equal(guard.watch, state)
    assert_near(model, reference)


@pytest.mark.parametrize("path", [aligned, not_one_call], ids=["native", "apart"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_skips_a_guarded_step(path, bad):
    model = make_model()
    optimizer, guard = guarded(model, path)
    model(torch.randn(4, 12)).sum().backward()
    before = flat(model)
    optimizer.step(loss=torch.tensor(bad), guard=guard)
    assert torch.equal(flat(model), before)
    assert optimizer.result.taken == 0.0
    verdict = optimizer.result.clip.verdict
    assert int(verdict[FLAGS]) & LOSS_NAN
    assert not math.isfinite(verdict[LOSS])
    assert not math.isfinite(verdict[LOSS_RATIO])
    optimizer.step(loss=torch.tensor(1.0), guard=guard)
    assert optimizer.result.taken == 1.0


def test_momentum_begins_after_a_first_step_that_was_skipped():
    model, other = make_model(), make_model()
    settings = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    optimizer = SGD(model.parameters(), clipper="global_norm", max_norm=math.inf, **settings)
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    optimizer.step()
    train(model, optimizer, 5)
    train(other, torch.optim.SGD(other.parameters(), **settings), 5)
    assert_near(model, other)


def test_a_scheduler_sets_its_rate():
    mine, other = make_model(), make_model()
    ours = AdamW(mine.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2)
    train(mine, ours, 12, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(ours, 12))
    train(other, theirs, 12, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(theirs, 12))
    assert_near(mine, other)


def test_lr_scale_rides_along_and_is_not_seen():
    mine, other = make_model(), make_model()
    optimizer = SGD(mine.parameters(), lr=0.2)
    optimizer.lr_scale = 0.5
    train(mine, optimizer, 5)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), 5)
    assert_near(mine, other)
    assert optimizer.param_groups[0]["lr"] == 0.2


def test_a_rate_may_be_a_tensor():
    mine, other = make_model(), make_model()
    rate = torch.tensor(1e-2)
    optimizer = AdamW(mine.parameters(), lr=rate, capturable=False)
    train(mine, optimizer, 3)
    rate.fill_(2e-2)
    train(mine, optimizer, 3, start=3)
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2)
    train(other, theirs, 3)
    theirs.param_groups[0]["lr"] = 2e-2
    train(other, theirs, 3, start=3)
    assert_near(mine, other)


def test_groups_have_settings_of_their_own():
    def groups(model):
        return [
            {"params": [model[0].weight, model[2].weight], "weight_decay": 0.1},
            {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0, "lr": 1e-3},
        ]

    mine, other = make_model(), make_model()
    train(mine, AdamW(groups(mine), lr=1e-2), 10)
    train(other, torch.optim.AdamW(groups(other), lr=1e-2), 10)
    assert_near(mine, other)


CHANGES = [
    (SGD, torch.optim.SGD, {}, {"momentum": 0.9, "dampening": 0.3}),
    (SGD, torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0}),
    (SGD, torch.optim.SGD, {"momentum": 0.9}, {"nesterov": True}),
    (AdamW, torch.optim.AdamW, {"amsgrad": True}, {"amsgrad": False}),
    (AdamW, torch.optim.AdamW, {}, {"weight_decay": 0.5, "betas": (0.5, 0.9), "maximize": True}),
]


@pytest.mark.parametrize(("ours", "theirs", "settings", "change"), CHANGES)
def test_settings_of_a_group_may_change_in_the_middle_of_a_run(ours, theirs, settings, change):
    trained = []
    for kind in (ours, theirs):
        model = make_model()
        optimizer = kind(model.parameters(), lr=1e-2, **settings)
        train(model, optimizer, 3)
        optimizer.param_groups[0].update(change)
        trained.append(train(model, optimizer, 4, start=3))
    assert_near(*trained)


def test_amsgrad_may_begin_in_the_middle_of_a_run():
    """torch's raises a KeyError there; its maximum then starts from zero, as in a new run."""
    ours, theirs = make_model(), make_model()
    optimizer, other = AdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters())
    for model, each in ((ours, optimizer), (theirs, other)):
        train(model, each, 3)
        each.param_groups[0]["amsgrad"] = True
    for state in other.state.values():
        state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
    assert_near(train(ours, optimizer, 4, start=3), train(theirs, other, 4, start=3))


def test_sgd_without_momentum_saves_no_state_as_torch_does():
    model = make_model()
    groups = [
        {"params": layer.parameters(), "momentum": m}
        for layer, m in ((model[0], 0), (model[2], 0.9))
    ]
    optimizer = SGD(groups)
    train(model, optimizer, 2)
    saved = optimizer.state_dict()
    assert saved["state"].keys() == {2, 3}
    optimizer.load_state_dict(saved)
    train(model, optimizer, 1)


def test_a_distributed_checkpoint_goes_on_with_the_state_of_the_clipper_beside_it():
    saved_from, loaded_into = make_model(), make_model()
    optimizer, other = (
        AdamW(m.parameters(), lr=1e-2, clipper="zclip", warmup_steps=3)
        for m in (saved_from, loaded_into)
    )
    train(saved_from, optimizer, 6)
    weights, state = copy.deepcopy(get_state_dict(saved_from, optimizer))
    clip_state = optimizer.clipper.state_dict()
    set_state_dict(loaded_into, other, model_state_dict=weights, optim_state_dict=state)
    other.clipper.load_state_dict(clip_state)
    train(saved_from, optimizer, 4, start=6)
    train(loaded_into, other, 4, start=6)
    assert torch.equal(flat(saved_from), flat(loaded_into))
    assert torch.equal(optimizer.result.clip.verdict, other.result.clip.verdict)


def test_a_group_may_join_late():
    def run(kind):
        model = make_model()
        optimizer = kind(model[0].parameters(), lr=1e-2)
        train(model, optimizer, 3)
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 1e-3})
        return train(model, optimizer, 3, start=3)

    assert_near(run(AdamW), run(torch.optim.AdamW))


def test_frozen_and_late_parameters_and_idle_ones():
    def run(kind):
        model = make_model()
        model[0].weight.requires_grad_(False)
        optimizer = kind(model.parameters(), lr=1e-2)
        train(model, optimizer, 3)
        model[0].weight.requires_grad_(True)
        train(model, optimizer, 3, start=3)
        model[2].bias.requires_grad_(False)
        optimizer.zero_grad()
        return train(model, optimizer, 3, start=6)

    assert_near(run(AdamW), run(torch.optim.AdamW))
    assert_near(
        run(lambda p, lr: AdamW(p, lr=lr, clipper="adagc")),
        run(lambda p, lr: zclip.wrap(torch.optim.AdamW(p, lr=lr, fused=True), "adagc")),
    )


@pytest.mark.parametrize("what", ["param", "exp_avg", "exp_avg_sq", "step"])
def test_a_tensor_whose_memory_moved_is_updated_where_it_is_now(what):
    def run(kind):
        model = make_model()
        optimizer = kind(model.parameters(), lr=1e-2)
        train(model, optimizer, 3)
        for p in model.parameters():
            tensor = p if what == "param" else optimizer.state[p][what]
            tensor.data = tensor.detach().clone()
        train(model, optimizer, 3, start=3)
        return model, optimizer

    model, optimizer = run(AdamW)
    assert_near(model, run(torch.optim.AdamW)[0])
    assert int(optimizer.result.health_flags) == 0  # a copy is no foreign write
    assert all(float(optimizer.state[p]["step"]) == 6.0 for p in model.parameters())


def test_tied_parameters_are_updated_once():
    def run(kind):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
        model[1].weight = model[0].weight
        return train(model, kind(model.parameters(), lr=1e-2), 4)

    assert_near(run(AdamW), run(torch.optim.AdamW))


def test_no_gradient_at_all_is_no_step():
    model = make_model()
    optimizer = AdamW(model.parameters(), clipper="zclip")
    before = flat(model)
    optimizer.step()
    assert optimizer.result is None
    assert torch.equal(flat(model), before)


def test_a_closure_is_called_once_and_its_loss_returned():
    model = make_model()
    optimizer = AdamW(model.parameters())
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = model(torch.ones(2, 12)).square().mean()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) > 0
    assert len(calls) == 1


def test_grad_scaler_unscales_on_load_and_skips_overflow():
    scaled, plain = make_model(), make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    train(scaled, AdamW(scaled.parameters(), lr=1e-2), 5, scaler=scaler)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), 5)
    assert_near(scaled, plain)

    optimizer = AdamW(plain.parameters(), clipper="zclip")
    before = flat(plain)
    optimizer.zero_grad()
    (scaler.scale(plain(torch.ones(2, 12)).sum()) * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(flat(plain), before)
    assert scaler.get_scale() < 1024.0


def test_the_clip_rule_sees_unscaled_norms():
    model = make_model()
    optimizer = AdamW(model.parameters(), clipper="zclip")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    x = torch.ones(2, 12)
    scaler.scale(model(x).sum()).backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm() / 2**16
    scaler.step(optimizer)
    torch.testing.assert_close(optimizer.result.clip.total_norm, norm, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_have_float32_moments_through_a_checkpoint(dtype):
    model = make_model(dtype)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 5)
    twin = copy.deepcopy(model)
    other = AdamW(twin.parameters(), lr=1e-2)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    moments = [state["exp_avg_sq"].dtype for state in other.state.values()]
    assert set(moments) == {torch.float32}
    train(model, optimizer, 5, start=5)
    train(twin, other, 5, start=5)
    assert torch.equal(flat(model), flat(twin))


def test_stochastic_rounding_makes_small_updates_count():
    def run(**settings):
        p = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = SGD([p], lr=1e-4, **settings)
        for _ in range(50):
            p.grad = torch.ones_like(p)
            optimizer.step()
        return float(p.detach().double().mean())

    assert run() == 1.0
    assert abs(run(stochastic_rounding=True) - 0.995) < 1e-3
    assert run(stochastic_rounding=True) == run(stochastic_rounding=True)
    assert run(stochastic_rounding=True) != run(stochastic_rounding=True, seed=1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_goes_on_alone(copied):
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=1e-2, clipper="zclip")
    train(model, optimizer, 3)
    model_again, again = copied((model, optimizer))
    train(model, optimizer, 3, start=3)
    train(model_again, again, 3, start=3)
    assert torch.equal(flat(model), flat(model_again))
    assert again.clipper is not optimizer.clipper


def test_a_whole_optimizer_can_be_saved():
    model = make_model()
    optimizer = AdamW(model.parameters(), clipper="zclip")
    train(model, optimizer, 2)
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    buffer.seek(0)
    assert isinstance(torch.load(buffer, weights_only=False), AdamW)


def test_compiling_a_step_around_it():
    torch.compiler.reset()
    model, plain = make_model(), make_model()
    optimizer = AdamW(model.parameters(), lr=1e-2, clipper="zclip")

    @torch.compile(backend="eager")
    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    other = AdamW(plain.parameters(), lr=1e-2, clipper="zclip")
    for seed in range(3):
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(seed))
        step(x)
        other.zero_grad()
        plain(x).square().mean().backward()
        other.step()
    assert_near(model, plain)


def test_hooks_are_called():
    model = make_model()
    optimizer = AdamW(model.parameters())
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(model, optimizer, 1)
    assert seen == ["before", "after"]


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_foreach_and_fused_are_accepted(settings):
    mine, other = make_model(), make_model()
    train(mine, AdamW(mine.parameters(), **settings), 3)
    train(other, torch.optim.AdamW(other.parameters()), 3)
    assert_near(mine, other)


def test_memory_formats_and_strides_of_gradients_do_not_matter():
    torch.manual_seed(0)
    start = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    mine, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours, theirs = AdamW([mine], lr=1e-2), torch.optim.AdamW([other], lr=1e-2)
    for k in range(4):
        grad = torch.randn(4, 3, 5, 5)
        if k == 1:
            grad = grad.to(memory_format=torch.channels_last)
        if k == 2:
            grad = grad[:, :1].expand(4, 3, 5, 5)
        mine.grad, other.grad = grad, grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_lion_is_what_the_paper_says():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(300))
    q, m = p.detach().double().clone(), torch.zeros(300, dtype=torch.float64)
    optimizer = Lion([p], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(20):
        p.grad = torch.randn(300)
        g = p.grad.double()
        q = q - 1e-2 * ((0.9 * m + 0.1 * g).sign() + 0.1 * q)
        m = 0.95 * m + 0.05 * g
        optimizer.step()
    torch.testing.assert_close(p.detach().double(), q, rtol=1e-5, atol=1e-6)


def test_sparse_gradients_are_named():
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = AdamW(embedding.named_parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match=r"the gradient of weight: .*, got torch.sparse_coo"):
        optimizer.step()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"clipper": "zlcip"}, ValueError, "clipper: expected one of .*, got 'zlcip'"),
        ({"clipper": 1.0}, TypeError, "clipper: expected a zclip.Clipper .*, got float"),
        ({"clipper": zclip.ZClip}, TypeError, "expected a zclip.Clipper .*, got <class .*ZClip'>"),
        ({"clipper": "zclip", "z": 3}, TypeError, "ZClip: expected settings among alpha, .* got z"),
        ({"clipper": zclip.ZClip(), "alpha": 0.9}, TypeError, "got ZClip; set these on it"),
        ({"max_norm": 1.0}, TypeError, "AdamW: expected its arguments, or .* got max_norm"),
        (
            {"seed": 1.5},
            ValueError,
            r"seed: expected a whole number from 0 to .* got 1.5",
        ),
        ({"seed": 2**63}, ValueError, "seed: expected a whole number"),
        ({"differentiable": True}, ValueError, "differentiable of param_groups.0.: expected False"),
        ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
    ],
)
def test_wrong_arguments_are_named(settings, error, message):
    with pytest.raises(error, match=message):
        AdamW(make_model().parameters(), **settings)


def test_a_group_that_joins_is_checked_too():
    optimizer = AdamW(make_model().parameters())
    with pytest.raises(ValueError, match=r"differentiable of param_groups\[1\]: expected False"):
        optimizer.add_param_group({"params": [torch.ones(2)], "differentiable": True})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("clipper", [None, "zclip"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: torch.ones(4, 12)[:, ::2],
            r"w of shape \(4, 6\): expected elements that fill",
        ),
        (lambda: torch.ones(1).expand(5), r"w of shape \(5,\): expected memory of its own"),
    ],
)
def test_a_parameter_that_cannot_be_updated_is_named(make, message, clipper):
    param = nn.Parameter(make())
    optimizer = AdamW([("w", param)], clipper=clipper)
    param.grad = torch.ones(param.shape)
    with pytest.raises(ValueError, match=message):
        optimizer.step()


@pytest.mark.parametrize("clipper", [None, "zclip"])
def test_a_float64_gradient_of_a_float32_parameter_is_named(clipper):
    param = nn.Parameter(torch.ones(4))
    param.grad_dtype = torch.float64
    param.grad = torch.ones(4, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"gradient of w: expected .* got torch.float64 of"):
        AdamW([("w", param)], clipper=clipper).step()


def test_lion_names_wrong_arguments_too():
    with pytest.raises(ValueError, match=r"betas\[1\]: expected a number from 0 to 1, got 2"):
        Lion(make_model().parameters(), betas=(0.9, 2.0))
    with pytest.raises(TypeError, match="is a base class"):
        FusedOptimizer(make_model().parameters())


def test_wrapping_one_guards_on_the_device():
    model, other = make_model(), make_model()
    wrapped = zclip.wrap(AdamW(model.parameters(), lr=1e-2), "zclip")
    assert wrapped.guards_on_device
    train(model, wrapped, 5)
    inside = AdamW(other.parameters(), lr=1e-2, clipper="zclip")
    train(other, inside, 5)
    assert_near(model, other)
    with pytest.raises(ValueError, match="expected one without a clipper"):
        zclip.wrap(inside, "zclip")


MISFITS = {
    "a moment of another shape": ("exp_avg", torch.zeros(2), "expected shape (40, 12), got (2,)"),
    "a moment transposed": ("exp_avg_sq", torch.zeros(12, 40), "expected shape (40, 12), got (12"),
    "two steps": ("step", torch.zeros(2), "expected shape (), got (2,)"),
    "a word": ("step", "x", "expected a tensor or a number, got str"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_state_that_does_not_fit_is_named_before_anything_is_written(misfit):
    key, value, expected = MISFITS[misfit]
    model = make_model()
    optimizer = AdamW(model.named_parameters(), clipper="zclip")
    train(model, optimizer, 2)
    before = [p.clone() for p in model.parameters()]
    optimizer.state[model[0].weight][key] = value
    with pytest.raises((TypeError, ValueError)) as error:
        train(model, optimizer, 1)
    assert str(error.value).startswith(f"state[0.weight]['{key}']: {expected}")
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("clipper", [None, "zclip"])
def test_a_gradient_of_another_shape_is_named(clipper):
    model = make_model()
    optimizer = AdamW(model.named_parameters(), clipper=clipper)
    train(model, optimizer, 2)
    model[2].weight.grad.data = torch.ones(5)
    with pytest.raises(ValueError, match=r"the gradient of 2.weight: expected \(3, 40\).*got \(5,"):
        optimizer.step()
