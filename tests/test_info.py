"""python -m zclip.info tells the truth about this machine."""

import io
import os
import subprocess
import sys

import pytest
import torch
from rich.console import Console

import zclip
from zclip import backends, extras, info


def page(**environment):
    done = subprocess.run(
        [sys.executable, "-m", "zclip.info"],
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_the_page_names_every_operator_backend_and_version():
    text = page()
    for word in (*backends.OPS, "native", "reference", "torch", "triton", "cpu path", "threads"):
        assert word in text


def test_it_says_which_cpu_path_is_taken():
    assert "portable" in page(ZCLIP_CPU="portable")
    assert "AVX2" in page(ZCLIP_CPU="avx2")
    widest = torch.backends.cpu.get_cpu_capability()  # by the same bits of cpuid
    path = {"AVX512": "AVX-512", "AVX2": "AVX2"}.get(widest, "portable")
    assert f"CPU path {path}" in page(ZCLIP_CPU="auto")


def test_a_forced_backend_is_said_to_be_forced():
    text = page(ZCLIP_BACKEND="reference")
    assert "not loaded: ZCLIP_BACKEND=reference" in text
    assert "A backend is forced" in text


def test_who_answers_is_what_the_dispatcher_does():
    collected = info.collect()
    assert collected.answers["grad_stats"] == {"cpu": "native", "cuda": "triton"}
    assert collected.advice == ["Nothing is missing."]


def test_the_first_line_says_who_measures():
    line = info.summary(info.collect())
    assert line.startswith("Gradients on the CPU: compiled kernels (")
    assert line.endswith("On a GPU: Triton kernels.")
    assert "plain torch" in page(ZCLIP_BACKEND="reference").splitlines()[0]


def test_a_missing_extension_comes_with_what_to_do(monkeypatch):
    reason = (
        "no compiled kernels: no C++ compiler found; install one, then run: python -m zclip.build"
    )
    monkeypatch.setattr("zclip.backends.native.is_loaded", lambda: False)
    monkeypatch.setitem(zclip.BACKEND_REASONS, "native", reason)
    assert info.collect().advice == [f"{reason}."]


def test_the_page_shows_the_extra_to_install_in_brackets(monkeypatch):
    monkeypatch.setattr(extras, "declared", lambda: {"hf": ["nowhere"]})
    collected = info.collect()
    collected.advice = ["pip install 'zclip-heal[triton]'"]
    console = Console(file=io.StringIO(), width=200)
    info.show(collected, console)
    text = console.file.getvalue()
    assert "pip install 'zclip-heal[hf]'" in text
    assert "pip install 'zclip-heal[triton]'" in text


def test_extras_are_named_with_versions_and_with_what_to_do(monkeypatch):
    monkeypatch.setattr(extras, "declared", lambda: {"hf": ["torch", "nowhere"], "dev": ["ruff"]})
    collected = info.collect()
    assert list(collected.extras) == ["hf"]
    assert f"torch {torch.__version__.split('+')[0]}" in collected.extras["hf"]
    assert "no nowhere: pip install 'zclip-heal[hf]'" in collected.extras["hf"]


def test_extras_are_those_that_the_project_declares():
    assert {"hf", "lightning", "plot"} <= set(extras.declared())
    assert "matplotlib" in extras.declared()["plot"]
    assert extras._declared_in_sources().keys() >= {"hf", "lightning", "plot"}


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_devices_without_kernels_fall_to_the_reference(device):
    assert backends.answering("grad_stats", device) == "reference"
