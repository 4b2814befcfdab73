"""Runs recipes one after another in the ranks that torchrun has started: starting them is slow."""

import runpy
import sys

if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(f"recipe: {path}", flush=True)
        runpy.run_path(path, run_name="__main__")
