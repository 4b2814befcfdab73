"""What was measured, as data: one result per case, one document per run, never half a file."""

import csv
import io
import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from zclip.bench.work import OURS, is_ours, is_rival

SCHEMA = 2
"""Of the JSON document. Files of another number cannot be compared with."""


@dataclass
class Measured:
    """One contender of one case."""

    milliseconds: float
    spread: float
    """Distance between the quartiles, as a fraction of the median."""
    rounds: int
    gigabytes_per_second: float
    """Bytes of all gradients, counted once, over the time."""
    roofline: float | None
    """Share of what memory allows: the least time that the reads and writes take, over the time."""
    host_microseconds: float
    """What the call costs where there is nothing to read: the same number of tensors."""
    launches: int
    syncs: int
    peak_bytes: int | None
    error: float
    """Relative, against float64."""
    is_wrong: bool


@dataclass
class Result:
    """One case, measured."""

    case: str
    op: str
    shapes: str
    dtype: str
    rule: str | None
    clips: bool
    tensors: int
    bytes: int
    contenders: dict[str, Measured]
    rival: str | None
    """The fastest of the others that did the work right."""
    ratio: float | None
    """How many times as long the rival takes as we do."""
    read_gigabytes_per_second: float
    """The machine's, measured in the same rounds."""
    load: float
    others: float | None
    noise: str | None
    """Why this is no result; None if it is one."""
    values: str = "normal"
    """What kind of gradients; see :data:`zclip.bench.gradients.VALUES`."""

    @property
    def ours(self) -> Measured:
        """The contender that users get."""
        return self.contenders[OURS]


@dataclass
class Document:
    """A run: what it was made by and on, and its results so far."""

    command: list[str]
    machine: dict[str, str]
    results: list[Result] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """One line for each rival or case that took no part, and why."""
    complete: bool = False
    version: str = "0.1"
    """Of the package that was measured; 0.1 did not write it down."""

    def as_json(self) -> str:
        """Return the file."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, allow_nan=False) + "\n"

    def as_csv(self) -> str:
        """Return one line per contender."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        own = ["case", "op", "shapes", "dtype", "rule", "clips", "values"]
        own += ["tensors", "bytes", "noise"]
        measured = list(Measured.__dataclass_fields__)
        writer.writerow([*own, "contender", *measured])
        for result in self.results:
            shared = [getattr(result, name) for name in own]
            for name, contender in result.contenders.items():
                writer.writerow([*shared, name, *(getattr(contender, m) for m in measured)])
        return text.getvalue()

    def wrong(self) -> list[str]:
        """Return one line for each of our contenders whose result was not exact."""
        return [
            f"{result.case}: {name} is off by {measured.error:.1e}"
            for result in self.results
            for name, measured in result.contenders.items()
            if measured.is_wrong and is_ours(name)
        ]


def fastest_rival(contenders: dict[str, Measured]) -> str | None:
    """Return the fastest of the others that did the work right."""
    others = [n for n, m in contenders.items() if is_rival(n) and not m.is_wrong]
    return min(others, key=lambda name: contenders[name].milliseconds, default=None)


def machine(device: torch.device) -> dict[str, str]:
    """Return what the numbers depend on."""
    facts = {
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "device": device.type,
    }
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
    return facts


def read_document(path: Path) -> Document:
    """Return a document that was saved.

    Raises:
        ValueError: there is none, or it is not one of ours; says which.
    """
    try:
        loaded: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    if not isinstance(loaded, dict) or loaded.pop("schema", None) != SCHEMA:
        raise ValueError(f"{path} is not a document of this zclip-bench (schema {SCHEMA})")
    try:
        results = [
            Result(**{**r, "contenders": {n: Measured(**m) for n, m in r["contenders"].items()}})
            for r in loaded.pop("results")
        ]
        return Document(results=results, **loaded)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that at any moment it is the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    data = content.encode() if isinstance(content, str) else content
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # left only if writing was interrupted
