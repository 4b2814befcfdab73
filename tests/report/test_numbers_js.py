"""The arithmetic of the page's charts, run by node without a page."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

WEB = Path(__file__).parents[2] / "heal" / "report" / "web"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(
    NODE is None,
    reason="no node to run report scripts without a browser (apt-get install nodejs)",
)


def evaluate(expression):
    source = f"const N = require({str(WEB / 'numbers.js')!r}); " + (
        f"console.log(JSON.stringify({expression}, (k, v) => typeof v === 'number' && "
        "!Number.isFinite(v) ? String(v) : v))"
    )
    done = subprocess.run([NODE, "-e", source], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("['NaN', 'Infinity', 'x', null, 2].map(N.decode)", ["NaN", "Infinity", None, None, 2]),
        ("N.undone([0, 1, 2, 3, 1, 2, 3, 4])", [False, True, True, True] + [False] * 4),
        ("N.undone([0, 1, 2, 3, 4, 2, 3, 1, 2])", [False] + [True] * 6 + [False] * 2),
        ("N.linearTicks(0, 10, 5)", [0, 2, 4, 6, 8, 10]),
        ("N.logTicks(0.5, 2e6, 4)", [1, 1e2, 1e4, 1e6]),
        ("N.logTicks(1.9, 32, 5)", [2, 3, 5, 10, 20, 30]),
        ("N.logTicks(1.9, 32, 3)", [2, 5, 10, 20]),
        (
            "N.countOnce([[5, 'a', 0], [5, 'a', 0], [5, 'a', 1], [6, 'a', 1]]"
            ".map(([step, text, rank]) => ({ step, text, rank })))",
            3,
        ),
        ("N.nearest([1, 5, 9], 6.9)", 1),
        ("N.nearest([1, 5, 9], 7.1)", 2),
        ("N.nearest([], 3)", -1),
        ("N.nearest([4], -100)", 0),
        ("N.zoomed([0, 100], [0, 100], 2, 25)", [12.5, 62.5]),
        ("N.zoomed([0, 50], [0, 100], 0.5, 0)", [0, 100]),
        ("N.zoomed([90, 100], [0, 100], 0.5, 95)", [80, 100]),
        (
            "[0, 1234, 0.000123, 2.34567, 5e7, NaN, null, -Infinity].map(N.format)",
            ["0", "1,234", "1.23e-4", "2.346", "5e7", "NaN", "-", "-Inf"],
        ),
        (
            "[0.5, 90, 600, 8000, 2e5].map(N.duration)",
            ["0.5 s", "90 s", "10 min", "2.2 h", "2.3 days"],
        ),
        ("N.timeTicks(0, 1000, 5)", [0, 300, 600, 900]),
        ("N.timeTicks(100, 101, 2)", [100, 100.5, 101]),
        ("N.timeTicks(0, 4e5, 4)", [0, 172800, 345600]),
        ("N.extent([null, NaN, Infinity], false)", [0, 1]),
        ("N.extent([-1, 0], true)", [0.1, 1]),
        ("N.extent([5, 5], false)", [4.5, 5.5]),
    ],
)
def test_what_a_chart_computes(expression, value):
    assert evaluate(expression) == value


def test_thinning_keeps_the_extremes_of_every_pixel_and_the_order():
    height = "i === 4321 ? 99 : i === 77 ? -9 : i % 5"
    points = f"Array.from({{length: 10000}}, (_, i) => ({{x: i, y: {height}}}))"
    kept = evaluate(f"N.thin({points}, (x) => x / 100).map((p) => [p.x, p.y])")
    assert len(kept) <= 4 * 101
    assert [4321, 99] in kept
    assert [77, -9] in kept
    assert kept == sorted(kept)
    assert (kept[0][0], kept[-1][0]) == (0, 9999)
