"""The benchmarks run, on tiny shapes; there is a file for every operator that users call."""

import subprocess
import sys
from pathlib import Path

from zclip.bench.catalogue import OPS, RULES

ROOT = Path(__file__).parent.parent


def test_every_operator_and_rule_has_a_file():
    files = {path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert set(OPS) - {"rule"} <= files
    assert {f"{rule}_" for rule in RULES if rule != "global_norm"} <= files


def test_they_run_check_and_print_one_table():
    words = ["-q", "benchmarks", "--shapes", "tiny", "--quick", "--benchmark-quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "one contender after the other" in done.stdout
    for case in (
        "clip_grad_norm_, tiny, float32, clipped",
        "adagc, tiny",
        "step, tiny",
        "flags, tiny",
    ):
        assert case in done.stdout
