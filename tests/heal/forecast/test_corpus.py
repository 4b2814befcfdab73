"""The corpus is what it says: reproducible, labelled before the damage, of independent runs."""

import numpy as np
import pytest
import torch

from tools.forecast import corpus, dataset
from tools.forecast.architectures import ARCHITECTURES
from tools.forecast.scenarios import HEALTHY, INSTANT, SLOW, plan
from tools.forecast.simulate import COLUMNS, OPTIMIZERS, Streams, Trainer, simulate
from zclip import ZClip

KINDS = ["plain", "growing_lr", "drift", "nan_batch", "corrupt_weights"]


def some(architecture="mlp", optimizer="adam", kinds=KINDS, seed=3, steps=260):
    torch.set_num_threads(1)
    return simulate(
        architecture,
        optimizer,
        list(kinds),
        steps=steps,
        batch_size=8,
        critical_lr=0.05,
        seed=seed,
    )


@pytest.mark.parametrize("flushes", [False, True])
def test_making_a_corpus_leaves_arithmetic_as_it_was(flushes):
    """Whoever computes on in this process must not lose small numbers by it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    torch.set_flush_denormal(flushes)
    try:
        corpus.make([corpus.Group("mlp", "adam", ("plain",), steps=40, batch_size=4, seed=0)])
        assert bool(torch.tensor(1e-20).square() == 0.0) == flushes
        assert torch.get_num_threads() == 3
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_run_of_a_batch_has_the_gradient_it_would_have_alone(name):
    made = ARCHITECTURES[name]
    generator = torch.Generator().manual_seed(0)
    params = {k: v.requires_grad_() for k, v in made.init(3, generator).items()}
    batch = made.batch(made.tasks(3, generator), torch.zeros(3), 4, generator)
    losses = made.loss(params, batch)
    assert losses.shape == (3,)
    together = torch.autograd.grad(losses.sum(), list(params.values()), retain_graph=True)
    for run in range(3):
        alone = torch.autograd.grad(losses[run], list(params.values()), retain_graph=True)
        for one, many in zip(alone, together, strict=True):
            torch.testing.assert_close(one[run], many[run])
            assert float(one.abs().sum()) == pytest.approx(float(one[run].abs().sum()), rel=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_optimizers_are_those_of_torch(optimizer):
    made = ARCHITECTURES["mlp"]
    lr, no_clip = torch.full((1,), 0.05), torch.zeros(1, dtype=torch.bool)
    trainer = Trainer(made, optimizer, lr, no_clip, 8, seed=0)
    params = {k: v[0].clone().requires_grad_() for k, v in trainer.params.items()}
    reference = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.05),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.05),
    }[optimizer](list(params.values()))
    one, zero = torch.ones(1), torch.zeros(1)
    twin = torch.Generator()
    for _ in range(5):
        twin.set_state(trainer.generator.get_state())
        batch = made.batch(trainer.tasks, zero, 8, twin)
        reference.zero_grad()
        made.loss({k: v.unsqueeze(0) for k, v in params.items()}, batch).sum().backward()
        reference.step()
        trainer.step(one, zero, one, zero)
    for name, param in params.items():
        torch.testing.assert_close(trainer.params[name][0], param.detach(), rtol=1e-4, atol=1e-6)


def test_the_clip_is_that_of_zclip():
    """Refused steps, in the warm-up and after it, teach neither of them anything."""
    norms = 0.5 * torch.exp(0.3 * torch.randn(120, generator=torch.Generator().manual_seed(0)))
    norms[[60, 90]] *= 20.0
    norms[[7, 70]] = torch.nan
    every = torch.ones(1, dtype=torch.bool)
    trainer = Trainer(ARCHITECTURES["linear"], "sgd", torch.ones(1), every, 4, seed=0)
    weight = torch.nn.Parameter(torch.zeros(1))
    clipper = ZClip()
    clipped_below_one = 0  # by the z-score, not by the fixed limit
    for norm in norms:
        weight.grad = norm.reshape(1).clone()
        clipper.step([weight])
        coef = trainer._clip(norm.reshape(1), ~norm.reshape(1).isfinite())
        if norm.isfinite():
            assert float(coef * norm) == pytest.approx(float(weight.grad), rel=1e-4)
            clipped_below_one += float(coef) < 1.0 and float(coef * norm) < 0.999
    assert clipped_below_one >= 2


def test_the_same_seed_gives_the_same_records():
    assert np.array_equal(some().records, some().records, equal_nan=True)
    assert not np.array_equal(some().records, some(seed=4).records, equal_nan=True)


def test_a_run_is_undisturbed_up_to_its_fault():
    faulty, healthy = some(kinds=["growing_lr"] * 2), some(kinds=["plain"] * 2)
    onset = int(faulty.onset.min())
    assert onset >= 100
    lr = faulty.records[:, :, 3]
    assert lr[0, -1] > 3 * lr[0, faulty.onset[0]]
    assert np.isfinite(healthy.records).all()


def test_the_norm_of_the_weights_is_that_before_the_step_and_grows_with_a_drift():
    made = some(kinds=["plain", "drift"], optimizer="sgd")
    norms = made.records[:, :, COLUMNS.index("weight_norm")]
    trainer = Trainer(
        ARCHITECTURES["mlp"], "sgd", torch.ones(2), torch.zeros(2, dtype=torch.bool), 8, seed=3
    )
    first = torch.stack([p.flatten(1).square().sum(1) for p in trainer.params.values()])
    assert norms[:, 0] == pytest.approx(first.sum(0).sqrt().numpy())
    onset = int(made.onset[1])
    assert norms[1, -1] / norms[1, onset] > 1.2 * norms[0, -1] / norms[0, onset]


def test_a_nan_batch_is_refused_and_passes():
    made = some(kinds=["nan_batch"] * 2)
    blocked = made.records[:, :, 5]
    assert blocked.sum(1).tolist() == [1.0, 1.0]
    assert all(blocked[run, made.onset[run]] == 1.0 for run in range(2))
    assert np.isfinite(made.records[:, -1, 0]).all()


def test_doubling_is_of_the_median_and_beyond_the_noise():
    losses = np.ones(200, np.float32)
    assert corpus.damaged_at(losses, 100) == -1
    losses[150:] = 2.1
    assert corpus.damaged_at(losses, 100) == 154  # the fifth of nine
    lone = np.ones(200, np.float32)
    lone[150] = 100.0
    assert corpus.damaged_at(lone, 100) == -1
    g = np.random.default_rng(0)
    near_zero = (1e-3 * g.standard_normal(400)).astype(np.float32)
    assert corpus.damaged_at(near_zero, 200) == -1
    negative = np.full(200, -1.0, np.float32)
    negative[150:] = 0.5
    assert corpus.damaged_at(negative, 100) == 154
    negative[150:] = np.nan
    assert corpus.damaged_at(negative, 100) == 154


def test_labels_end_strictly_before_the_damage_and_begin_after_the_onset():
    made = some(kinds=["growing_lr"] * 6 + ["plain"] * 2, optimizer="sgd", steps=400)
    built = dataset.build(made)
    assert built.slow.any()
    for run in range(len(built)):
        labels = built.labels(run)
        if built.damage[run] >= 0:
            assert (labels[: built.onset[run]] != 1).all()
            assert (labels[built.damage[run] :] == -1).all()
            assert (labels == 1).any()
        else:
            assert not (labels == 1).any()


def test_features_do_not_know_what_comes_later():
    records = some(kinds=["growing_lr"]).records[0]
    whole = dataset.features_of(records)
    assert np.array_equal(dataset.features_of(records[:200]), whole[:200])


def test_a_corpus_survives_its_file_without_pickle(tmp_path):
    made = some()
    corpus.save(made, tmp_path / "deep" / "corpus.npz")
    again = corpus.load(tmp_path / "deep" / "corpus.npz")
    assert np.array_equal(again.records, made.records, equal_nan=True)
    assert (again.kind, again.architecture, again.seed) == (made.kind, made.architecture, made.seed)


def test_every_architecture_optimizer_and_kind_has_its_runs():
    made = corpus.groups(healthy=7, slow=5, instant=2)
    assert {(g.architecture, g.optimizer) for g in made} == {
        (a, o) for a in ARCHITECTURES for o in OPTIMIZERS
    }
    kinds = {kind for g in made for kind in g.kinds}
    assert kinds == {*HEALTHY, *SLOW, *INSTANT}
    assert len({g.seed for g in made}) == len(made)
    assert not any(k in SLOW for g in made if g.architecture == "policy" for k in g.kinds)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"expected one of plain, warmup.*, got 'curse'"):
        plan(["curse"], 300, np.random.default_rng(0))


def test_a_run_that_fails_without_a_fault_is_not_called_healthy():
    records = np.ones((2, 100, len(COLUMNS)), np.float32)
    records[0, 50:, 0] = np.nan
    streams = Streams(records, ["mlp"] * 2, ["sgd"] * 2, ["plain"] * 2, np.array([-1, -1]), [0, 0])
    assert corpus.failed(streams).tolist() == [True, False]
    assert dataset.build(streams).healthy.tolist() == [False, True]


def test_corpora_whose_seeds_differ_by_three_have_the_same_batch_sizes():
    """Runs of both are alike, so that limits set on one may be tested on the other."""
    counts = {"healthy": 1, "slow": 1, "instant": 0}
    one, other, third = (corpus.groups(**counts, seed=seed) for seed in (2, 5, 3))
    assert [g.batch_size for g in one] == [g.batch_size for g in other]
    assert [g.batch_size for g in one] != [g.batch_size for g in third]
    assert not {g.seed for g in one} & {g.seed for g in other}
