"""Say what is wrong with checkpoints, settings or the cluster, and what to do about it.

heal doctor checkpoints/
heal doctor --config heal.toml
heal doctor checkpoints/ --cluster

Every byte of every checkpoint is read; --quick looks at the manifests only. Exit code: 0 if all is
well, 1 if there are warnings, 2 if there are errors.
"""

import argparse
import sys
from pathlib import Path

from heal.doctor.finding import Finding

SIGNS = {"ok": "ok   ", "warn": "WARN ", "error": "ERROR"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("checkpoints", nargs="?", type=Path, help="folder of checkpoints")
    parser.add_argument("--quick", action="store_true", help="do not read the tensors")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a heal.toml to look at")
    parser.add_argument(
        "--cluster", action="store_true", help="look at launcher, network, GPU, folder and clock"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; return the exit code of the gravest."""
    found = check_all(arguments)
    if found is None:
        wanted = "a folder of checkpoints, --config heal.toml or --cluster"
        print(f"heal doctor: nothing to look at; give {wanted}", file=sys.stderr)
        return 2
    for finding in found:
        print(f"{SIGNS[finding.level]} {finding.what}")
        if finding.todo:
            print(f"      {finding.todo}")
    levels = {finding.level for finding in found}
    return 2 if "error" in levels else 1 if "warn" in levels else 0


def check_all(arguments: argparse.Namespace) -> list[Finding] | None:
    """Return the findings of every check that was asked for; None if none was."""
    found: list[Finding] = []
    asked = False
    if arguments.checkpoints is not None:
        from heal.doctor.checkpoint import check_checkpoints

        asked = True
        found += check_checkpoints(arguments.checkpoints, quick=arguments.quick)
    if arguments.config is not None:
        from heal.doctor.config import check_config

        asked = True
        found += check_config(arguments.config)
    if arguments.cluster:
        from heal.doctor.cluster import check_cluster

        asked = True
        found += check_cluster(shared_dir=arguments.checkpoints)
    return found if asked else None
