"""make gpu-check: what it would run on which machine, and what it makes of what comes back."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import Check, Facts, Outcome, judge_tests, look_around, page, plan, run

ROOT = Path(__file__).parent.parent


def facts(**changed):
    usual = {
        "torch": "2.13.0+cu130",
        "runtime": "cuda 13.0",
        "gpus": ["NVIDIA H100"],
        "capabilities": ["9.0"],
        "multiprocessors": 132,
        "gigabytes_per_s": 3350.0,
        "driver": "580",
        "nvcc": "13.0",
        "sanitizer": "/usr/bin/compute-sanitizer",
        "rivals": [],
    }
    return Facts(**usual | changed)


def skips(machine, tmp_path):
    return {check.name: check.skip for check in plan(machine, tmp_path)}


def test_on_an_nvidia_gpu_everything_applies(tmp_path):
    assert not any(skips(facts(), tmp_path).values())


def test_without_the_sanitizer_only_that_is_left_out(tmp_path):
    left_out = {n: why for n, why in skips(facts(sanitizer=None), tmp_path).items() if why}
    assert set(left_out) == {f"sanitizer {tool}" for tool in gpu_check.SANITIZERS}
    assert set(left_out.values()) == {"compute-sanitizer is not installed"}


def test_on_an_amd_gpu_triton_is_tested_and_nothing_is_built(tmp_path):
    checks = {c.name: c for c in plan(facts(runtime="hip 6.4", gpus=["MI300X"]), tmp_path)}
    assert "Triton serves this GPU" in checks["build"].skip
    assert checks["served"].command[-1] == "triton"
    assert not checks["tests on the device"].skip
    assert not checks["bench"].skip


def test_a_quick_run_has_a_short_benchmark_and_names_the_rivals(tmp_path):
    check = plan(facts(rivals=["apex"]), tmp_path, quick=True)[-1]
    assert check.command[-1] == "--quick"
    assert check.shows == "time beside torch, apex"


def test_every_file_and_module_that_it_calls_exists(tmp_path):
    for check in plan(facts(), tmp_path):
        for word in check.command:
            if word.startswith("tests") or word == "setup.py":
                assert (ROOT / word).exists(), word
    source = [sys.executable, "-c", gpu_check.SERVED, "native"]
    done = subprocess.run(source, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "'clip_by_'" in done.stdout, done.stderr
    for flag in ("--device", "--json", "--quick"):
        assert flag in (ROOT / "zclip/bench/arguments.py").read_text()


def test_the_machine_as_torch_tells_of_it():
    card = SimpleNamespace(
        name="A100", major=8, minor=0, multi_processor_count=108,
        memory_clock_rate=1_593_000, memory_bus_width=5120,
    )  # fmt: skip
    fake = SimpleNamespace(
        __version__="2.13",
        version=SimpleNamespace(cuda="13.0", hip=None),
        cuda=SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: 2,
            get_device_properties=lambda i: card,
        ),
    )
    found = look_around(fake, which=lambda name: None)
    assert (found.gpus, found.capabilities) == (["A100", "A100"], ["8.0", "8.0"])
    assert found.gigabytes_per_s == pytest.approx(2039, rel=1e-3)
    assert found.runtime == "cuda 13.0"
    assert found.driver == found.nvcc == "not found"
    fake.version = SimpleNamespace(cuda=None, hip="6.4")
    assert not look_around(fake, which=lambda name: None).is_nvidia
    here = look_around(torch)
    assert here.torch == torch.__version__


def check_of(source, **fields):
    return Check("a check", "that it works", [sys.executable, "-c", source], **fields)


def test_what_passes_what_fails_and_what_does_not_apply():
    assert run(check_of("print('fine')")).status == "passed"
    failed = run(check_of("import sys; print('why'); sys.exit(3)"))
    assert (failed.status, failed.detail, failed.output) == ("failed", "exit code 3", "why")
    assert run(check_of("", skip="no such thing")).status == "skipped"
    missing = run(Check("x", "y", ["/no/such/program"]))
    assert missing.status == "failed"
    assert "cannot be started" in missing.detail


def test_the_environment_of_a_check_reaches_it():
    source = "import os, sys; sys.exit(os.environ['ZCLIP_BACKEND'] != 'triton')"
    assert run(check_of(source, environment={"ZCLIP_BACKEND": "triton"})).status == "passed"


@pytest.mark.parametrize(
    ("cases", "code", "status", "detail"),
    [
        ("<testcase name='a'/><testcase name='b'><skipped/></testcase>", 0, "passed", "1 passed"),
        ("<testcase name='a' classname='m'><failure/></testcase>", 1, "failed", "m::a"),
        ("<testcase name='a' classname='m'><error/></testcase>", 1, "failed", "m::a"),
        ("<testcase name='a'><skipped/></testcase>", 0, "skipped", "nothing ran on the device"),
        ("", 5, "skipped", "nothing ran"),
        ("<testcase name='a'/>", 3, "failed", "exit code 3"),
    ],
)
def test_a_report_of_pytest_is_read(tmp_path, cases, code, status, detail):
    report = tmp_path / "r.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    found = judge_tests(report, code)
    assert found[0] == status
    assert detail in found[1]


def test_no_report_of_pytest_is_a_failure(tmp_path):
    assert judge_tests(tmp_path / "none.xml", 4) == (
        "failed",
        "pytest left no report; exit code 4",
    )


def test_a_whole_pytest_runs_and_is_read(tmp_path):
    check = gpu_check._pytest("some tests", "x", tmp_path, ["tests/test_gpu.py"])
    outcome = run(check)
    want = "passed" if torch.cuda.is_available() else "skipped"
    assert outcome.status == want, outcome


def bench():
    return json.loads((ROOT / "benchmarks/results/bench.json").read_text())


def test_times_stand_beside_the_model_and_the_others():
    rows = gpu_check.timings(bench(), facts(gigabytes_per_s=20.0))
    assert len(rows) > 5
    first = rows[0]
    assert first.rivals
    assert not first.is_wrong
    assert first.predicted == pytest.approx(
        first.gigabytes_per_s * first.milliseconds / (20.0 * 0.9), rel=0.05
    )
    assert gpu_check.timings(bench(), facts(gigabytes_per_s=0.0))[0].predicted is None
    text = page(facts(), [], gpu_check.timings(bench(), facts(gigabytes_per_s=1e5)))
    assert "slower than predicted" in text


def test_a_wrong_result_is_shown(tmp_path):
    results = bench()
    results["results"][0]["contenders"]["zclip"]["is_wrong"] = True
    rows = gpu_check.timings(results, facts())
    assert rows[0].is_wrong
    assert "**wrong result**" in page(facts(), [], rows)


def test_the_report_has_all_of_it_and_the_output_of_what_failed(tmp_path):
    outcomes = [
        Outcome("build", "b", "passed", "exit code 0", 12.0, "last line"),
        Outcome("tests", "t", "failed", "1 failed: a|b", 3.0, "Traceback"),
    ]
    gpu_check.write_report(tmp_path, facts(), outcomes, [])
    text = (tmp_path / "report.md").read_text()
    assert "| build | **passed** | exit code 0 | 12 | b |" in text
    assert "1 failed: a/b" in text
    assert "Traceback" in text
    assert "last line" not in text
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["facts"]["gpus"] == ["NVIDIA H100"]
    assert [o["status"] for o in data["outcomes"]] == ["passed", "failed"]


def command(*words, folder):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(folder), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(tmp_path):
    done = command(folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "sees no GPU" in done.stdout
    assert "gpus: none" in (tmp_path / "report.md").read_text()


def test_the_list_runs_nothing(tmp_path):
    done = command("--list", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "sanitizer racecheck" in done.stdout
    assert not (tmp_path / "report.md").exists()


@pytest.mark.parametrize("status", ["passed", "failed", "skipped"])
def test_the_exit_code_follows_what_failed(tmp_path, monkeypatch, capsys, status):
    """The whole loop, with checks that are run in our place."""

    def pretend(check):
        if check.name == "bench":
            (tmp_path / "bench.json").write_text(json.dumps(bench()))
        return Outcome(check.name, check.shows, status, "as told")

    monkeypatch.setattr(gpu_check, "look_around", lambda torch: facts())
    monkeypatch.setattr(gpu_check, "run", pretend)
    assert gpu_check.main(["--out", str(tmp_path)]) == (status == "failed")
    assert "Please send" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "report.json").read_text())["timings"]) > 5


def test_make_knows_it():
    done = subprocess.run(
        ["make", "-n", "--no-print-directory", "gpu-check", "PYTHON=python9", "GPU_CHECK=--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "python9 -m benchmarks.gpu_check --quick"
