"""Gradients measured during backward: the same bits as after it, and no trace once detached."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zclip
from zclip.layout import SUMSQ

WIDE = 512  # WIDE x WIDE in float32 is 1 MiB: enough for a measurement of its own
STEPS = 4


class Net(nn.Module):
    """Large and small parameters, a tied pair, and a branch that is used in some steps only."""

    def __init__(self, width=WIDE, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(width, width, dtype=dtype)
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.outer = nn.Linear(width, width, bias=False, dtype=dtype)
        self.tied = nn.Linear(width, width, bias=False, dtype=dtype)
        self.tied.weight = self.outer.weight
        self.branch = nn.Linear(width, width, dtype=dtype)
        self.frozen = nn.Linear(width, width, dtype=dtype).requires_grad_(False)
        self.recompute = None

    def forward(self, x, branch=False):
        def body(x):
            return self.tied(torch.tanh(self.outer(self.norm(self.inner(x)))))

        x = body(x) if self.recompute is None else checkpoint(body, x, **self.recompute)
        return self.branch(x) if branch else self.frozen(x)


def loss_of(model, step, branch=False):
    weight = next(model.parameters())
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, weight.shape[1], generator=generator).to(weight.dtype).requires_grad_()
    return model(x, branch=branch).square().mean() * (50.0 if step == 2 else 1.0)


def backward(model, step):
    loss_of(model, step).backward()


# What happens between zero_grad and step, by name.


def accumulate(model, step):
    for micro in range(3):
        backward(model, 10 * step + micro)


def accumulate_ever_longer(model, step):
    for micro in range(step + 1):
        backward(model, 10 * step + micro)


def backward_twice_through_one_graph(model, step):
    loss = loss_of(model, step)
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses(model, step):
    backward(model, step)
    loss_of(model, step + 50, branch=True).backward()


def use_the_branch_sometimes(model, step):
    loss_of(model, step, branch=step % 2 == 1).backward()


def recompute(model, step):
    model.recompute = {"use_reentrant": False}
    backward(model, step)


def recompute_in_a_nested_backward(model, step):
    model.recompute = {"use_reentrant": True}
    backward(model, step)


def scale_by_hand(model, step):
    backward(model, step)
    with torch.no_grad():
        model.inner.weight.grad.mul_(3.0)
        torch._foreach_mul_([model.outer.weight.grad], 0.5)
        model.outer.weight.grad[0].zero_()


def replace_a_gradient(model, step):
    backward(model, step)
    model.inner.weight.grad = model.inner.weight.grad * 2
    model.outer.weight.grad.data = model.outer.weight.grad.data * 2


def set_a_gradient_with_the_same_address(model, step):
    backward(model, step)
    old = model.inner.weight.grad
    model.inner.weight.grad = old.detach()[:].mul_(2)
    assert model.inner.weight.grad.data_ptr() == old.data_ptr()


def write_through_numpy(model, step):
    backward(model, step)
    memory = model.inner.weight.grad.numpy()
    memory *= 2.0
    model.inner.weight.grad = torch.from_numpy(memory)  # another tensor: address, version the same


def clip_values_first(model, step):
    backward(model, step)
    zclip.clip_grad_value_(model.parameters(), 1e-3)
    zclip.clip_grad_norm_(model.parameters(), 1e-2)


def free_a_gradient(model, step):
    backward(model, step)
    model.inner.weight.grad = None


def fail_in_the_middle(model, step):
    def fail(_):
        raise ZeroDivisionError

    handle = model.inner.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        backward(model, step + 70)
    handle.remove()
    assert model.outer.weight.grad is not None  # this far it had come
    backward(model, step)


def a_bad_element(model, step):
    backward(model, step)
    if step == 1:
        model.outer.weight.grad[-1, -1] = float("nan")


SCENARIOS = [
    backward,
    accumulate,
    accumulate_ever_longer,
    backward_twice_through_one_graph,
    two_losses,
    use_the_branch_sometimes,
    recompute,
    recompute_in_a_nested_backward,
    scale_by_hand,
    replace_a_gradient,
    set_a_gradient_with_the_same_address,
    write_through_numpy,
    clip_values_first,
    free_a_gradient,
    fail_in_the_middle,
    a_bad_element,
]


CHANGED = (scale_by_hand, replace_a_gradient, clip_values_first)  # nothing measured early holds


def half_of_the_largest(stats, state):
    return (stats[:, SUMSQ].max() / stats[:, SUMSQ].clamp(min=1e-30)).sqrt().clamp(max=1.0)


CLIPPERS = {
    "zclip": lambda: zclip.ZClip(warmup_steps=2, max_grad_norm=0.05),
    "adagc": lambda: zclip.AdaGC(warmup_steps=1),
    "global_norm": lambda: zclip.GlobalNorm(0.02),
    "spike_skip": lambda: zclip.SpikeSkip(),
    "official": lambda: zclip.ZClip(warmup_steps=2, on_nonfinite="official"),
    "own rule": lambda: zclip.PythonRule(half_of_the_largest),
}


class Loop:
    """Only the clipper, and any optimizer."""

    def __init__(self, model, clipper):
        self.model, self.clipper = model, clipper
        self.inner = torch.optim.SGD(model.parameters(), lr=0.1)

    def zero_grad(self, **how):
        self.inner.zero_grad(**how)

    def step(self):
        self.clipper.step(self.model)
        self.inner.step()


OPTIMIZERS = {
    "loop": Loop,
    "wrapped": lambda model, clipper: zclip.wrap(
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), clipper
    ),
    "fused": lambda model, clipper: zclip.optim.AdamW(model.parameters(), clipper=clipper),
}


def bits(tensor):
    return tensor.detach().reshape(-1).clone().view(torch.uint8)


def trace(attached, scenario, make_clipper, make, *, zero=None, model=None, steps=STEPS):
    """Train, and return every bit that came out; and how many gradients were measured early."""
    model = Net() if model is None else model
    clipper = make_clipper()
    optimizer = make(model, clipper)
    handle = clipper.attach(model) if attached else None
    seen, early = [], 0
    for step in range(steps):
        optimizer.zero_grad(**(zero or {}))
        scenario(model, step)
        optimizer.step()
        result = clipper.result
        seen += [result.total_norm, result.stats, result.coefs, result.verdict]
        seen += [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
        seen = [t if t.dtype == torch.uint8 else bits(t) for t in seen]
        early += handle.early if handle else 0
    seen += [bits(t) for t in tensors_of(clipper.state_dict())]
    return seen, early


def tensors_of(state):
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        state = list(state.values())
    return [t for value in state for t in tensors_of(value)] if isinstance(state, list) else []


def assert_same(*arguments, **more):
    plain, _ = trace(False, *arguments, **more)
    attached, early = trace(True, *arguments, **more)
    assert len(plain) == len(attached)
    for number, (one, other) in enumerate(zip(plain, attached, strict=True)):
        assert torch.equal(one, other), number
    return early


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_bits_are_those_of_measuring_after_backward(optimizer, scenario):
    for name in ("zclip", "adagc"):
        early = assert_same(scenario, CLIPPERS[name], OPTIMIZERS[optimizer])
        assert (early > 0) == (scenario not in CHANGED)


@pytest.mark.parametrize("clipper", CLIPPERS)
def test_every_clipper_by_norm_can_be_attached(clipper):
    for make in OPTIMIZERS.values():
        assert assert_same(two_losses, CLIPPERS[clipper], make) > 0


@pytest.mark.parametrize("zero", [{"set_to_none": False}, {"set_to_none": True}])
def test_gradients_may_be_kept_as_zeros(zero):
    for scenario in (accumulate, use_the_branch_sometimes):
        assert assert_same(scenario, CLIPPERS["zclip"], OPTIMIZERS["wrapped"], zero=zero) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype):
    for make in OPTIMIZERS.values():
        runs = [
            trace(on, backward, CLIPPERS["zclip"], make, model=Net(1024, dtype))
            for on in (False, True)
        ]
        assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
        assert (runs[1][1] > 0) == (dtype != torch.float64)  # the norm is float64 then, too


def test_layouts_other_than_contiguous():
    class Images(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Conv2d(96, 384, 3).to(memory_format=torch.channels_last)

        def forward(self, x, branch=False):
            return self.layers(x)

    def images(model, step):
        x = torch.randn(2, 96, 4, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()

    runs = [
        trace(on, images, CLIPPERS["adagc"], OPTIMIZERS["wrapped"], model=Images())
        for on in (False, True)
    ]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
    assert runs[1][1] > 0


def test_parameter_groups_with_limits_of_their_own():
    def groups(model, clipper):
        named = list(model.parameters())
        split = [{"params": named[:2]}, {"params": named[2:], "max_norm": 0.01}]
        return zclip.wrap(torch.optim.AdamW(split, lr=1e-3, fused=True), clipper)

    def clipper():
        return zclip.GlobalNorm(0.02, per_group=True)

    assert assert_same(use_the_branch_sometimes, clipper, groups) > 0


def test_compiled_models():
    def compiled(model, step):
        torch.compile(model, backend="aot_eager", fullgraph=True)(
            torch.randn(4, WIDE, generator=torch.Generator().manual_seed(step))
        ).square().mean().backward()

    assert assert_same(compiled, CLIPPERS["zclip"], OPTIMIZERS["wrapped"]) > 0


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
@pytest.mark.parametrize(
    ("unscale", "own_loop"),
    [(False, False), (True, False), (True, True)],
    ids=["folded", "unscaled first", "unscaled first, clipper alone"],
)
@pytest.mark.filterwarnings("ignore:AdamW is not fused")
def test_a_grad_scaler_divides_once(fused, unscale, own_loop):
    runs = []
    for attached in (False, True):
        model, clipper = Net(), zclip.ZClip(warmup_steps=2, max_grad_norm=0.05)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        optimizer = inner if own_loop else zclip.wrap(inner, clipper)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        handle = clipper.attach(model) if attached else None
        seen = []
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            if own_loop:
                clipper.step(model)
            scaler.step(optimizer)
            scaler.update()
            seen += [bits(clipper.result.stats), bits(clipper.result.verdict)]
            seen += [bits(p) for p in model.parameters()]
            if handle is not None:
                assert (handle.early > 0) == (fused and not unscale)
        runs.append(seen)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("part", range(4))
def test_two_hundred_random_trials(part):
    for seed in range(50 * part, 50 * part + 50):
        draw = random.Random(seed)
        scenario = draw.choice(SCENARIOS)
        clipper, make = draw.choice(list(CLIPPERS.values())), draw.choice(list(OPTIMIZERS.values()))
        zero = draw.choice([{}, {"set_to_none": False}])
        width = draw.choice([64, 300, WIDE])
        runs = [
            trace(on, scenario, clipper, make, zero=zero, model=Net(width), steps=2)[0]
            for on in (False, True)
        ]
        same = [torch.equal(a, b) for a, b in zip(*runs, strict=True)]
        assert all(same), (seed, scenario.__name__)


def test_under_accumulation_only_the_last_backward_is_measured(monkeypatch):
    model, clipper = Net(), zclip.GlobalNorm(1.0)
    from zclip.during_backward import rows

    measured = []
    original = rows.measure
    monkeypatch.setattr(rows, "measure", lambda slots: measured.append(1) or original(slots))
    with clipper.attach(model) as handle:
        for step in range(3):
            measured.clear()
            model.zero_grad()
            accumulate(model, step)
            clipper.step(model)
            assert len(measured) == (6 if step == 0 else 2)  # two large gradients in each backward
            assert handle.early == 2


def test_what_autograd_does_not_count_has_to_be_dropped():
    model, clipper = Net(), zclip.GlobalNorm(1e9)
    with clipper.attach(model) as handle:
        backward(model, 0)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.data.mul_(2.0)
        handle.drop()
        norm = clipper.step(model)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(norm, torch.stack([g.norm() for g in grads]).norm())


def test_a_second_step_without_backward_measures_what_the_first_has_scaled():
    model, clipper = Net(), zclip.GlobalNorm(0.01)
    with clipper.attach(model):
        backward(model, 0)
        assert clipper.step(model) > 0.02
        torch.testing.assert_close(clipper.step(model), torch.tensor(0.01), rtol=1e-4, atol=0.0)


def test_gradients_are_not_kept_alive():
    import weakref

    model, clipper = Net(), zclip.GlobalNorm(1.0)
    with clipper.attach(model):
        backward(model, 0)
        kept = weakref.ref(model.inner.weight.grad)
        model.zero_grad()
        assert kept() is None


def test_detaching_leaves_nothing_behind():
    model, untouched = Net(), Net()
    before = {name: vars(p).copy() for name, p in model.named_parameters()}
    other = []
    kept = model.inner.weight.register_post_accumulate_grad_hook(other.append)
    clipper = zclip.GlobalNorm(0.01)
    handle = clipper.attach(model)
    backward(model, 0)
    handle.detach()
    handle.detach()
    for name, p in model.named_parameters():
        hooks = p._post_accumulate_grad_hooks
        assert (list(hooks.values()) == [other.append]) if hooks else hooks is None, name
        assert vars(p) == before[name]
    kept.remove()
    for candidate in (model, untouched):
        candidate.zero_grad()
        backward(candidate, 1)
    clipper.step(model)
    plain = zclip.GlobalNorm(0.01)
    plain.step(untouched)
    assert torch.equal(clipper.result.stats, plain.result.stats)
    assert handle.early == 0
    grad = model.inner.weight.grad
    version = grad._version
    torch._amp_foreach_non_finite_check_and_unscale_([grad], torch.zeros(1), torch.ones(1))
    assert grad._version == version  # torch's operator is as it was


def test_copies_of_an_attached_clipper_are_not_attached():
    model = Net()
    optimizer = zclip.wrap(
        torch.optim.AdamW(model.parameters(), fused=True), "zclip", during_backward=True
    )
    assert optimizer.attachment.is_attached
    twin = copy.deepcopy(optimizer)
    assert twin.attachment is None
    twin.clipper.attach(model).detach()


def test_wrap_attaches():
    model = Net()
    optimizer = zclip.wrap(
        torch.optim.AdamW(model.parameters(), fused=True), "adagc", during_backward=model
    )
    backward(model, 0)
    optimizer.step()
    assert optimizer.attachment.early == 2


def test_a_model_with_small_gradients_only_is_clipped_as_ever():
    model, clipper = Net(16), zclip.GlobalNorm(1.0)
    with clipper.attach(model) as handle:
        assert not handle.is_watching
        assert all(p._post_accumulate_grad_hooks is None for p in model.parameters())
        backward(model, 0)
        clipper.step(model)
        with pytest.raises(ValueError, match="expected a clipper that is not attached"):
            clipper.attach(model)


def test_a_clipper_is_attached_once():
    clipper = zclip.ZClip()
    first = clipper.attach(Net())
    with pytest.raises(ValueError, match="expected a clipper that is not attached"):
        clipper.attach(Net())
    first.detach()
    clipper.attach(Net())


def test_a_clipper_that_looks_at_rows_says_so():
    with pytest.raises(NotImplementedError, match=r"by norms of tensors.*got AGC"):
        zclip.AGC().attach(Net())


def test_a_communication_hook_needs_a_model_that_communicates():
    with pytest.raises(ValueError, match="expected None without a DistributedDataParallel"):
        zclip.ZClip().attach(Net(), comm_hook=(None, print))
