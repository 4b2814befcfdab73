"""``python -m zclip.build``: compile the kernels for the torch that is installed here.

For an environment that got torch, a compiler or nvcc after zclip. CUDA kernels are compiled where
torch has CUDA and nvcc is found. The library goes to a cache of the user; no reinstall is needed.
"""

import sys

from zclip.backends import local_build
from zclip.kernel_build import BuildError


def main() -> int:
    """Compile and print where the library is; return the exit code."""
    try:
        print(local_build.rebuild())
    except BuildError as error:
        print(f"zclip.build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
