"""Train healthy set-ups bare and healed, and print which of them the healer changed.

python -m benchmarks.healthy                                # all, three seeds: a quarter of an hour
python -m benchmarks.healthy --setups GAN,DDPG --seeds 1    # those with these words in their names
python -m benchmarks.healthy --mode run                     # healer.run where a set-up allows it
python -m benchmarks.healthy --clip                         # default settings, which clip: then
                                                            # bits differ, and only changes count
"""

import argparse
import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.healthy.zoo import SETUPS, Looked, look_at

MODES = ("loop", "run")
SEEDS = 3


def page(found: Sequence[Looked]) -> Iterator[str]:
    """Yield the lines of the table: a row for each set-up."""
    yield "| set-up | left alone | same bits | rollbacks | LR | halts | experiments | reports |"
    yield "|---|---:|---:|---:|---:|---:|---:|---|"
    for name in dict.fromkeys(one.setup for one in found):
        rows = [one for one in found if one.setup == name]
        causes: Counter[str] = sum((Counter(one.causes) for one in rows), Counter())
        halts = [one.halted for one in rows if one.halted]
        told = [f"{cause} x {count}" for cause, count in causes.items()]
        told += [f"*{halt[:90]}*" for halt in halts[:1]]
        yield (
            f"| {name} | {sum(one.ok for one in rows)}/{len(rows)} "
            f"| {sum(one.identical for one in rows)}/{len(rows)} "
            f"| {sum(one.rollbacks for one in rows)} | {sum(one.lr_changes for one in rows)} "
            f"| {len(halts)} | {sum(one.experiments for one in rows)} | {', '.join(told)} |"
        )
    good = sum(one.ok for one in found)
    names = {one.setup for one in found}
    clean = [n for n in names if all(one.ok for one in found if one.setup == n)]
    seeds = ", ".join(map(str, sorted({one.seed for one in found})))
    yield ""
    yield (
        f"{good} of {len(found)} runs and {len(clean)} of {len(names)} set-ups were left alone; "
        f"{sum(one.experiments for one in found)} experiments; seeds {seeds}."
    )


def main() -> None:
    """Run, print the table, and write the file if one is wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setups", default="", help="words of names, by commas")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--fresh", type=int, default=0, help="the first seed")
    parser.add_argument("--mode", choices=MODES, default="loop")
    parser.add_argument("--clip", action="store_true", help="leave clipping on")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every run to this file")
    parser.add_argument("--read", type=Path, help="run nothing; take what --json wrote")
    parser.add_argument("--page", type=Path, help="write the table to this file as well")
    parser.add_argument("--list", action="store_true", help="print all names and leave")
    parsed = parser.parse_args()
    words = [word.strip() for word in parsed.setups.split(",") if word.strip()]
    names = [name for name in SETUPS if not words or any(word in name for word in words)]
    if parsed.list:
        print("\n".join(names))
        return
    found = run_all(names, parsed) if parsed.read is None else read(parsed.read)
    if parsed.json is not None:
        parsed.json.write_text(json.dumps([one.to_json() for one in found], indent=1) + "\n")
    lines = "\n".join(page(found))
    print(lines)
    if parsed.page is not None:
        parsed.page.write_text(lines + "\n")


def read(path: Path) -> list[Looked]:
    """Return the runs that ``--json`` wrote."""
    rows = json.loads(path.read_text())
    return [Looked(**{name: row[name] for name in row if name != "ok"}) for row in rows]


def run_all(names: Sequence[str], parsed: argparse.Namespace) -> list[Looked]:
    """Look at every set-up with every seed."""
    keys = [
        (name, seed, parsed.mode, parsed.clip)
        for name in names
        for seed in range(parsed.fresh, parsed.fresh + parsed.seeds)
    ]
    found: list[Looked] = []
    method = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(parsed.processes, method) as pool:
        for one in pool.map(look_at, keys):
            found.append(one)
            mark = "" if one.ok else "  changed"
            print(f"{len(found)} of {len(keys)}: {one.setup}{mark}", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main()
