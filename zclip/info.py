"""``python -m zclip.info``: what is active on this machine, why, and what to do about the rest."""

import os
import platform
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import zclip
from zclip import backends, config
from zclip.backends import native
from zclip.extras import extras, version

DEVICES = ("cpu", "cuda")


@dataclass
class Info:
    """Everything the page shows, as data."""

    versions: dict[str, str]
    machine: dict[str, str]
    settings: dict[str, str]
    backends: dict[str, str]
    """Backend to the reason why it is active or not."""
    answers: dict[str, dict[str, str]]
    """Operator to device type to the backend that serves it."""
    extras: dict[str, str] = field(default_factory=dict)
    """Extra to the packages it consists of, and which of them are here."""
    advice: list[str] = field(default_factory=list)


def collect() -> Info:
    """Look around. Touches no device and loads nothing that is not loaded already."""
    features = torch.ops.zclip.native_features()
    info = Info(
        versions={
            "zclip-heal": zclip.__version__,
            "torch": torch.__version__,
            "triton": version("triton") or "not installed",
            "python": platform.python_version(),
        },
        machine={
            "cpu": f"{platform.machine()}, torch uses {torch.backends.cpu.get_cpu_capability()}",
            "threads": str(torch.get_num_threads()),
            "cpu path": native.cpu_path(),
            "extension has CUDA": "yes" if features & native.HAS_CUDA else "no",
            "torch has CUDA": torch.version.cuda or torch.version.hip or "no",
            "GPUs": str(torch.cuda.device_count()),
        },
        settings={
            name: os.environ.get(name, f"{default} (default)")
            for name, default in (("ZCLIP_BACKEND", "auto"), ("ZCLIP_CPU", "auto"))
        },
        backends=dict(zclip.BACKEND_REASONS),
        answers={
            op: {device: backends.answering(op, device) for device in DEVICES}
            for op in backends.OPS
        },
        extras={name: _extra(name, packages) for name, packages in extras().items()},
    )
    info.advice = _advice(info)
    return info


def _extra(name: str, packages: dict[str, str | None]) -> str:
    """Say what is there of an extra and how to get the rest."""
    here = [f"{package} {found}" for package, found in packages.items() if found]
    missing = [package for package, found in packages.items() if not found]
    if missing:
        here.append(f"no {', no '.join(missing)}: pip install 'zclip-heal[{name}]'")
    return ", ".join(here)


def _advice(info: Info) -> list[str]:
    advice = []
    if not native.is_loaded() and config.wanted_backend() == "auto":
        advice.append(f"{info.backends['native']}.")
    if config.wanted_backend() != "auto":
        advice.append("A backend is forced by ZCLIP_BACKEND; unset it for the automatic choice.")
    if torch.cuda.is_available() and info.answers["grad_stats"]["cuda"] == "reference":
        advice.append(
            "This machine has a GPU but no GPU kernels are active: pip install "
            "'zclip-heal[triton]', or put nvcc on the path and run: python -m zclip.build"
        )
    return advice or ["Nothing is missing."]


def summary(info: Info) -> str:
    """Return in one line who measures gradients here: what most people want to know."""
    names = {
        "native": f"compiled kernels ({info.machine['cpu path']})",
        "triton": "Triton kernels",
        "foreach": "torch's foreach operators",
        "reference": "plain torch",
    }
    served = info.answers["grad_stats"]
    cuda = "compiled CUDA kernels" if served["cuda"] == "native" else names[served["cuda"]]
    return f"Gradients on the CPU: {names[served['cpu']]}. On a GPU: {cuda}."


def show(info: Info, console: Console) -> None:
    """Print the page."""
    console.print(summary(info), soft_wrap=True)
    for title, rows in (
        ("Versions", info.versions),
        ("Machine", info.machine),
        ("Settings", info.settings),
        ("Backends", info.backends),
        ("Extras of zclip and heal; all are optional", info.extras),
    ):
        table = Table(title=title, title_justify="left", show_header=False, min_width=60)
        for name, value in rows.items():
            table.add_row(name, Text(value))  # not markup: [hf] would be taken for a style
        console.print(table)
    table = Table(title="Who answers", title_justify="left", min_width=60)
    for column in ("operator", *DEVICES):
        table.add_column(column)
    for op, answers in info.answers.items():
        table.add_row(op, *(answers[device] for device in DEVICES))
    console.print(table)
    for line in info.advice:
        console.print(Text(f"-> {line}"), soft_wrap=True)


if __name__ == "__main__":
    show(collect(), Console())
