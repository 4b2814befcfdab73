"""One command for a person with a GPU: everything that could not be run where this was written.

    make gpu-check                                    or: python -m benchmarks.gpu_check
    make gpu-check PYTHON=/path/to/python             the one whose torch sees the GPU

Builds the extension, runs the tests on the device, compute-sanitizer, a captured graph, two streams
and two GPUs where there are two, measures beside torch, apex and TransformerEngine, compares with
the cost model, and writes ``report.md`` and ``report.json`` into build/gpu-check. Please send both.

Exit codes: 0 all that applied has passed; 1 something failed; 2 there is no GPU.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
SANITIZERS = ("memcheck", "racecheck", "synccheck")
LINES_KEPT = 40  # of the output of what failed
RIVALS = {"apex": "apex", "TransformerEngine": "transformer_engine"}
MODEL_TOLERANCE = 1.5  # a measured time this many times the predicted one is worth a look


@dataclass(frozen=True)
class Facts:
    """The machine, as far as it decides what to run."""

    torch: str
    runtime: str  # "cuda 13.0", "hip 6.4" or "none"
    gpus: list[str]
    capabilities: list[str]
    multiprocessors: int
    gigabytes_per_s: float  # by the data sheet; 0 if torch does not know
    driver: str
    nvcc: str
    sanitizer: str | None
    rivals: list[str]
    python: str = field(default_factory=platform.python_version)

    @property
    def is_nvidia(self) -> bool:
        """Whether the native kernels can be built; others are served by Triton."""
        return self.runtime.startswith("cuda")


@dataclass(frozen=True)
class Check:
    """Something to run; ``skip`` says why it does not apply."""

    name: str
    shows: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    skip: str = ""
    junit: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a check."""

    name: str
    shows: str
    status: str  # passed, failed or skipped
    detail: str
    seconds: float = 0.0
    output: str = ""


def look_around(torch: Any, which: Callable[[str], str | None] = shutil.which) -> Facts:
    """Return the facts about this machine."""
    there = torch.cuda.is_available()
    count = torch.cuda.device_count() if there else 0
    properties = [torch.cuda.get_device_properties(i) for i in range(count)]
    runtime = "none"
    if there:
        runtime = f"hip {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"
    first = properties[0] if properties else None
    # Kilohertz and bits; memory moves data on both edges of its clock.
    clock, bits = getattr(first, "memory_clock_rate", 0), getattr(first, "memory_bus_width", 0)
    return Facts(
        torch=torch.__version__,
        runtime=runtime,
        gpus=[p.name for p in properties],
        capabilities=[f"{p.major}.{p.minor}" for p in properties],
        multiprocessors=first.multi_processor_count if first else 0,
        gigabytes_per_s=2 * clock * bits / 8 / 1e6,
        driver=_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], which),
        nvcc=_line(["nvcc", "--version"], which, last=True),
        sanitizer=which("compute-sanitizer"),
        rivals=[name for name, package in RIVALS.items() if _is_there(package)],
    )


def _line(command: list[str], which: Callable[[str], str | None], last: bool = False) -> str:
    if which(command[0]) is None:
        return "not found"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return lines[-1 if last else 0] if lines else f"exit code {done.returncode}"


def _is_there(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def plan(facts: Facts, folder: Path, quick: bool = False) -> list[Check]:
    """Return every check, in order, with those that do not apply here marked as skipped."""
    python = sys.executable
    no_native = "" if facts.is_nvidia else "no CUDA: Triton serves this GPU"
    checks = [
        Check(
            "build",
            "nvcc compiles the kernels for this GPU",
            [python, "setup.py", "-q", "build_ext", "--inplace"],
            {"ZCLIP_BUILD": "cuda"},
            skip=no_native,
        ),
        Check("info", "which backend serves the GPU, and why", [python, "-m", "zclip.info"]),
        Check(
            "served",
            "the GPU is served by kernels of ours, not by the reference",
            [python, "-c", SERVED, "native" if facts.is_nvidia else "triton"],
        ),
        _pytest(
            "tests on the device",
            "every operator, on the GPU, against float64; nothing waits for it",
            folder,
            ["tests", "-k", "cuda or gpu"],
        ),
        _pytest(
            "graph, streams, devices",
            "a captured step replays; two streams and two GPUs do not disturb each other",
            folder,
            ["tests/test_gpu.py"],
        ),
        _pytest(
            "triton on the device",
            "the fallback, on the same GPU",
            folder,
            ["tests/test_gpu.py"],
            {"ZCLIP_BACKEND": "triton"},
        ),
    ]
    for tool in SANITIZERS:
        missing = "" if facts.sanitizer else "compute-sanitizer is not installed"
        checks.append(
            Check(
                f"sanitizer {tool}",
                "no bad access, no race, no divergent barrier on the hardware",
                [
                    facts.sanitizer or "compute-sanitizer",
                    *("--tool", tool, "--error-exitcode", "9", "--target-processes", "all"),
                    *(python, "-m", "pytest", "-q", "tests/test_gpu.py", "-k", "not replayed"),
                ],
                skip=no_native or missing,
            )
        )
    bench = [python, "-m", "zclip.bench", "--device", "cuda", "--json", str(folder / "bench.json")]
    checks.append(
        Check(
            "bench",
            f"time beside torch{''.join(f', {name}' for name in facts.rivals)}",
            [*bench, "--quick"] if quick else bench,
        )
    )
    return checks


SERVED = (
    "import sys, zclip; from zclip.backends import answering;"
    "served = {op: answering(op, 'cuda') for op in ('grad_stats', 'rule_', 'clip_by_', 'scale_')};"
    "print(served); sys.exit(set(served.values()) != {sys.argv[1]})"
)


def _pytest(
    name: str,
    shows: str,
    folder: Path,
    words: list[str],
    environment: dict[str, str] | None = None,
) -> Check:
    junit = folder / f"{name.replace(' ', '-').replace(',', '')}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    return Check(name, shows, [*command, f"--junitxml={junit}"], environment or {}, "", junit=junit)


def run(check: Check, clock: Callable[[], float] = time.monotonic) -> Outcome:
    """Run one check, and say what came of it."""
    if check.skip:
        return Outcome(check.name, check.shows, "skipped", check.skip)
    started = clock()
    try:
        done = subprocess.run(
            check.command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **check.environment},
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        return Outcome(check.name, check.shows, "failed", f"cannot be started: {error}")
    text = (done.stdout + done.stderr).strip().splitlines()
    status = "passed" if done.returncode == 0 else "failed"
    detail = f"exit code {done.returncode}"
    if check.junit is not None:
        status, detail = judge_tests(check.junit, done.returncode)
    kept = text if check.name == "info" else text[-LINES_KEPT:] if status == "failed" else text[-1:]
    return Outcome(check.name, check.shows, status, detail, clock() - started, "\n".join(kept))


def judge_tests(junit: Path, returncode: int) -> tuple[str, str]:
    """Return status and detail by pytest's own report. Tests that all were skipped show nothing."""
    if not junit.exists():
        return "failed", f"pytest left no report; exit code {returncode}"
    cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    good = len(cases) - len(bad) - len(skipped)
    detail = f"{good} passed, {len(bad)} failed, {len(skipped)} skipped"
    if bad:
        names = ", ".join(f"{c.get('classname')}::{c.get('name')}" for c in bad[:8])
        return "failed", f"{detail}: {names}"
    if returncode not in (0, 5):
        return "failed", f"{detail}; exit code {returncode}"
    return ("passed", detail) if good else ("skipped", f"{detail}: nothing ran on the device")


@dataclass(frozen=True)
class Timing:
    """One case of the benchmark beside the model."""

    case: str
    milliseconds: float
    gigabytes_per_s: float
    predicted: float | None  # milliseconds; None if the bandwidth is not known
    rivals: dict[str, float]
    is_wrong: bool


def timings(bench: dict[str, Any], facts: Facts) -> list[Timing]:
    """Return our times, those of the others, and what the cost model predicts."""
    from benchmarks.gpu_cost_model import LAUNCH_US, REACHED_BANDWIDTH

    rows = []
    for result in bench["results"]:
        contenders = result["contenders"]
        if "zclip" not in contenders:
            continue
        ours = contenders["zclip"]
        predicted = None
        if facts.gigabytes_per_s:
            moved = ours["gigabytes_per_second"] * ours["milliseconds"] * 1e6
            stream = moved / (facts.gigabytes_per_s * 1e9 * REACHED_BANDWIDTH) * 1e3
            predicted = stream + (ours.get("launches") or 0) * LAUNCH_US / 1e3
        rows.append(
            Timing(
                result["case"],
                ours["milliseconds"],
                ours["gigabytes_per_second"],
                predicted,
                {name: c["milliseconds"] for name, c in contenders.items() if name != "zclip"},
                any(
                    c.get("is_wrong") for name, c in contenders.items() if name.startswith("zclip")
                ),
            )
        )
    return rows


def page(facts: Facts, outcomes: Sequence[Outcome], rows: Sequence[Timing]) -> str:
    """Return the report as Markdown."""
    lines = ["# zclip on a GPU", ""]
    lines += [f"- {name}: {_shown(value)}" for name, value in asdict(facts).items()]
    lines += ["", "| check | result | detail | seconds | shows |", "|---|---|---|---:|---|"]
    for o in outcomes:
        detail = o.detail.replace("|", "/")
        lines.append(f"| {o.name} | **{o.status}** | {detail} | {o.seconds:.0f} | {o.shows} |")
    if rows:
        others = sorted({name for row in rows for name in row.rivals})
        lines += ["", "Milliseconds; the model's figure is bytes over 90 % of the data sheet.", ""]
        lines.append("| case | zclip | GB/s | model | " + " | ".join(others) + " |")
        lines.append("|---|---:|---:|---:|" + "---:|" * len(others))
        for row in rows:
            model = "-" if row.predicted is None else f"{row.predicted:.3f}"
            if row.predicted and row.milliseconds > MODEL_TOLERANCE * row.predicted:
                model += " (slower than predicted)"
            cells = [f"{row.rivals[n]:.3f}" if n in row.rivals else "-" for n in others]
            ours = f"{row.milliseconds:.3f}" + (" **wrong result**" if row.is_wrong else "")
            lines.append(
                f"| {row.case} | {ours} | {row.gigabytes_per_s:.0f} | {model} | "
                + " | ".join(cells)
                + " |"
            )
    for o in outcomes:
        if o.output and (o.status == "failed" or o.name == "info"):
            lines += ["", f"## {o.name}", "", "```text", o.output, "```"]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def write_report(
    folder: Path, facts: Facts, outcomes: Sequence[Outcome], rows: Sequence[Timing]
) -> None:
    """Write report.md and report.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(page(facts, outcomes, rows))
    whole = {
        "facts": asdict(facts),
        "outcomes": [asdict(o) for o in outcomes],
        "timings": [asdict(row) for row in rows],
    }
    (folder / "report.json").write_text(json.dumps(whole, indent=1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what applies, and write the report after every check, so that no crash loses it."""
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu-check")
    parser.add_argument("--quick", action="store_true", help="a short benchmark")
    parser.add_argument("--list", action="store_true", help="print the checks and run nothing")
    options = parser.parse_args(arguments)
    import torch

    facts = look_around(torch)
    options.out.mkdir(parents=True, exist_ok=True)
    checks = plan(facts, options.out.resolve(), options.quick)
    if options.list:
        for check in checks:
            print(f"{check.name}: {check.skip or ' '.join(check.command)}")
        return 0
    if not facts.gpus:
        write_report(options.out, facts, [], [])
        print(
            f"torch {facts.torch} sees no GPU. Run it with the Python whose torch does: PYTHON=..."
        )
        return 2
    outcomes: list[Outcome] = []
    rows: list[Timing] = []
    for check in checks:
        print(f"{check.name} ...", flush=True)
        outcomes.append(run(check))
        print(f"  {outcomes[-1].status}: {outcomes[-1].detail}", flush=True)
        if check.name == "bench" and (options.out / "bench.json").exists():
            rows = timings(json.loads((options.out / "bench.json").read_text()), facts)
        write_report(options.out, facts, outcomes, rows)
    print(f"\nPlease send {options.out}/report.md and report.json.")
    return int(any(o.status == "failed" for o in outcomes) or any(row.is_wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
