"""One benchmark per contender of a case, with the shapes, rivals and checks of ``zclip-bench``.

A file says which operator it is about: ``OP``, and where they differ ``SHAPES``, ``DTYPES``,
``RULES`` and ``CLIPS``. pytest-benchmark times one contender after the other, which a busy machine
disturbs; ``zclip-bench`` takes turns. The table at the end has both, to see whether they agree.
"""

import statistics
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table

from zclip.bench import shapes
from zclip.bench.catalogue import DTYPES, Case
from zclip.bench.gradients import Gradients
from zclip.bench.results import read_document
from zclip.bench.work import OURS, is_rival

SAVED = Path(__file__).parent / "results" / "bench.json"
ROUNDS, QUICK_ROUNDS = 25, 5


def pytest_addoption(parser):
    parser.addoption("--shapes", nargs="+", help="of zclip-bench --list, instead of each file's")
    parser.addoption("--quick", action="store_true", help="a few rounds, float32 only")


def cases_of(module, config):
    names = config.getoption("--shapes") or getattr(module, "SHAPES", ("gpt2-small", "2000-small"))
    dtypes = getattr(module, "DTYPES", ("float32", "bfloat16"))
    for name in names:
        for dtype in dtypes[:1] if config.getoption("--quick") else dtypes:
            for rule in getattr(module, "RULES", (None,)):
                for clips in getattr(module, "CLIPS", (False,)):
                    yield Case(module.OP, name, dtype, rule, clips)


def work_of(module, case, gradients):
    make = getattr(module, "work", None)
    return make(gradients) if make else case.work(gradients, [], [])


def pytest_generate_tests(metafunc):
    if "contender" not in metafunc.fixturenames:
        return
    found = []
    for case in cases_of(metafunc.module, metafunc.config):
        few = Gradients([(2, 3)], DTYPES[case.dtype])  # only to learn who takes part
        for name in work_of(metafunc.module, case, few).contenders:
            found.append(pytest.param(case, name, id=f"{case.name}-{name}"))
    metafunc.parametrize(("case", "contender"), found)


@pytest.fixture(scope="module")
def kept():
    """The work of the last case: made once for all its contenders, and only one at a time."""
    return {}


@pytest.fixture
def contend(request, benchmark, kept, case, contender):
    """Check a contender against float64, then time it."""

    def run():
        if case not in kept:
            kept.clear()
            gradients = Gradients(shapes.named(case.shapes), DTYPES[case.dtype])
            kept[case] = work_of(request.module, case, gradients)
        work = kept[case]
        error = work.check(contender)
        assert not work.is_wrong(contender, error), f"{contender} is off by {error}"
        turns = iter(range(1_000_000))
        rounds = QUICK_ROUNDS if request.config.getoption("--quick") else ROUNDS
        benchmark.group = case.name
        benchmark.pedantic(
            work.contenders[contender],
            setup=lambda: work.between and work.between(next(turns)),
            rounds=rounds,
            warmup_rounds=1,
        )
        benchmark.extra_info.update(contender=contender, error=error, bytes=work.gradients.bytes)

    return run


def pytest_terminal_summary(terminalreporter, config):
    """Print one table of all cases, beside what zclip-bench saved of them."""
    by_case = {}
    for one in config._benchmarksession.benchmarks:
        if one.stats.rounds:
            median = statistics.median(one.stats.data) * 1e3
            by_case.setdefault(one.group, {})[one.extra_info["contender"]] = median
    if not by_case:
        return
    try:
        saved = {r.case: r for r in read_document(SAVED).results}
    except ValueError:
        saved = {}  # none yet, or of another time
    table = Table(title=f"{torch.get_num_threads()} threads, one contender after the other")
    for column in ("work", "zclip ms", "rival ms", "ratio", "ratio of zclip-bench"):
        table.add_column(column, justify="left" if column == "work" else "right")
    for case, times in by_case.items():
        rival = min((n for n in times if is_rival(n)), key=times.get, default=None)
        before = saved.get(case)
        table.add_row(
            case,
            f"{times[OURS]:.2f}" if OURS in times else "-",
            f"{rival} {times[rival]:.2f}" if rival else "-",
            f"{times[rival] / times[OURS]:.2f}x" if rival and OURS in times else "-",
            f"{before.ratio:.2f}x" + "?" * bool(before.noise) if before else "-",
        )
    Console(file=terminalreporter._tw._file, width=110).print(table)
