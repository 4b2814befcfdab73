"""Make the screenshots of docs/gallery.md: train small models, break them, photograph the reports.

``python -m tools.make_gallery`` needs Chromium and playwright (``make browser``), and takes about a
minute. Pages are those that ``heal report`` writes; nothing on them is edited.
"""

import argparse
import contextlib
import io
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heal import Healer
from heal.integrations.trackers import Tracker
from heal.report.collect import read_run
from heal.report.live import LiveRun
from heal.report.page import make_page
from heal.testing import Chaos, Fault

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
STEPS = 160
WIDE, PHONE = 1120, 390  # pixels
FLAGS = ("--no-sandbox", "--disable-gpu", "--hide-scrollbars")


def train(
    folder: Path,
    damage: Callable[[nn.Module, int], None],
    faults: list[Fault],
    trackers: Sequence[Tracker] = (),
) -> None:
    """Train a small regression under a healer, with damage and faults."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    model.append(nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    inputs = torch.randn(STEPS, 32, 16)
    batches = [(x, x.sin().sum(dim=1, keepdim=True)) for x in inputs]
    calls = itertools.count()

    def train_step(batch: tuple[Tensor, Tensor]) -> Tensor:
        damage(model, next(calls))
        x, y = batch
        return nn.functional.mse_loss(model(x), y)

    with Healer(model, optimizer, run_dir=folder, trackers=trackers) as healer:
        healer.run(Chaos(healer, faults).wrap(train_step), batches, STEPS, progress=False)


def huge_weight(model: nn.Module, call: int) -> None:
    """Make one weight huge, as a bit flip in an exponent does: finite, and the loss is not."""
    if call == 90:
        model.get_parameter("2.weight").data.mul_(1e30)


def quiet(model: nn.Module, call: int) -> None:
    """Damage nothing."""


RUNS: dict[str, tuple[Callable[[nn.Module, int], None], list[Fault]]] = {
    "healthy": (quiet, []),
    "skipped": (quiet, [Fault("nan_gradient", at=60), Fault("nan_gradient", at=110)]),
    "damaged": (huge_weight, []),
}


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Start Chromium.

    Raises:
        RuntimeError: there is no browser, or nothing to drive it with.
    """
    path = os.environ.get("HEAL_TEST_BROWSER") or shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise RuntimeError("expected playwright, got none; pip install playwright") from None
    if path is None:
        raise RuntimeError("expected Chromium, got none; run make browser")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield started
        started.close()


def photograph(view: Any, page: Path, name: str, width: int, part: str) -> Path:
    """Write one part of a page as an image of few colours."""
    tab = view.new_page(viewport={"width": width, "height": 900}, color_scheme="light")
    tab.goto(page.as_uri())
    tab.wait_for_selector("svg.panel .axis", state="attached")
    path = IMAGES / f"{name}.png"
    tab.locator(part).screenshot(path=str(path))
    tab.close()
    _shrink(path)
    return path


def _shrink(path: Path) -> None:
    """Keep 64 colours: a third of the bytes, and text stays sharp."""
    from PIL import Image

    with Image.open(path) as image:
        image.convert("RGB").quantize(64).save(path, optimize=True)


def watch_screen(folder: Path) -> str:
    """Return what ``heal watch`` shows of a run, as text."""
    from rich.console import Console

    from heal.report.live import screen_of

    run = LiveRun(folder)
    run.poll()
    console = Console(width=78, file=io.StringIO(), record=True)
    console.print(screen_of(run))
    return console.export_text()


SHOTS = (
    ("gallery-damaged", "damaged", WIDE, "main > section:first-child"),
    ("gallery-charts", "damaged", WIDE, "#charts-section"),
    ("gallery-incident", "damaged", WIDE, "#incidents"),
    ("gallery-phone", "damaged", PHONE, "#incidents"),
    ("gallery-skipped", "skipped", WIDE, "#incidents"),
    ("gallery-healthy", "healthy", WIDE, "main > section:first-child"),
)
"""Name of the image, run, width in pixels, and the part of the page."""


def main() -> int:
    """Train, photograph, and print what was written; 1 without a browser."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, (damage, faults) in RUNS.items():
            train(Path(folder, name), damage, faults)
            page = make_page(read_run(Path(folder, name)))
            Path(folder, f"{name}.html").write_text(page, encoding="utf-8")
        try:
            with browser() as view:
                for image, run, width, part in SHOTS:
                    path = photograph(view, Path(folder, f"{run}.html"), image, width, part)
                    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
        except RuntimeError as error:
            print(f"make_gallery: {error}", file=sys.stderr)
            return 1
        print(watch_screen(Path(folder, "damaged")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
