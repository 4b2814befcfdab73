"""Show one damaged run in trackio and W&B, beside our own report.

``python -m tools.compare_trackers FOLDER`` trains the damaged run of :mod:`tools.make_gallery`
once, with both trackers attached and W&B offline. Then it photographs trackio's dashboard and our
page at 1280 and 390 pixels, and prints the alerts in the file that W&B has written, read by W&B's
own viewer. It needs Chromium and playwright (``make browser``), and ``pip install trackio wandb``.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from heal.integrations.trackers import make_trackers
from heal.report.collect import read_run
from heal.report.page import make_page
from tools.make_gallery import RUNS, browser, train

WIDTHS = (1280, 390)  # pixels
PROJECT = "compared"
SETTLE = 4000  # milliseconds until a dashboard has drawn its curves


def photograph(view: Any, address: str, folder: Path, name: str, tab: str = "") -> None:
    """Write the first screen of a page at both widths, and print how much there is to scroll."""
    for width in WIDTHS:
        page = view.new_page(viewport={"width": width, "height": 900}, color_scheme="light")
        page.goto(address)
        page.wait_for_timeout(SETTLE)
        if tab:
            page.click(f"text={tab}")
            page.wait_for_timeout(SETTLE)
        page.screenshot(path=str(folder / f"{name}-{width}.png"))
        root = "document.documentElement"
        size = page.evaluate(f"[{root}.scrollWidth, {root}.scrollHeight]")
        print(f"{name} at {width} px: {size[0]} x {size[1]} pixels")
        page.close()


def main() -> int:
    """Train, photograph, print; 1 without a browser."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where runs and pictures go")
    folder = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {"TRACKIO_DIR": str(folder / "trackio"), "WANDB_DIR": str(folder)}
    os.environ |= {"WANDB_MODE": "offline"}
    import trackio

    damage, faults = RUNS["damaged"]
    train(folder / "run", damage, faults, make_trackers("trackio,wandb", project=PROJECT))
    ours = folder / "report.html"
    ours.write_text(make_page(read_run(folder / "run")), encoding="utf-8")
    _, address, _, _ = trackio.show(PROJECT, open_browser=False, block_thread=False)
    try:
        with browser() as view:
            photograph(view, ours.as_uri(), folder, "report")
            photograph(view, f"{address}?project={PROJECT}", folder, "trackio")
            photograph(view, f"{address}?project={PROJECT}", folder, "alerts", "Alerts & Reports")
    except RuntimeError as error:
        print(f"compare_trackers: {error}", file=sys.stderr)
        return 1
    viewer = ["wandb", "leet", "inspect", "--json", str(next(folder.glob("wandb/*/*.wandb")))]
    lines = subprocess.run(viewer, check=True, capture_output=True, text=True).stdout.splitlines()
    print(*[line for line in lines if '"type":"alert"' in line], sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
