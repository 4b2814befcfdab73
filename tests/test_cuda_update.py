"""The CUDA kernel of optimizer updates, as nvcc compiles it."""

import re
import subprocess

import pytest

from tests import cuda_toolkit

pytestmark = pytest.mark.skipif(not cuda_toolkit.HAS_NVCC, reason="there is no nvcc")

SOURCE = cuda_toolkit.ROOT / "csrc/cuda/update_launcher.cu"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    target = tmp_path_factory.mktemp("update") / "update.o"
    command = ["nvcc", *cuda_toolkit.FLAGS, "-gencode=arch=compute_90,code=sm_90"]
    command += ["-Xptxas", "-v", "-c", str(SOURCE), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return target, done.stderr


def test_nothing_spills_and_a_whole_block_fits(compiled):
    log = compiled[1]
    assert set(re.findall(r"(\d+) bytes spill stores", log)) == {"0"}
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    assert len(registers) == 2  # for small and for large tables
    assert max(registers) * 512 <= 65536


def test_tensors_are_read_16_bytes_at_a_time(compiled):
    sass = cuda_toolkit.cuobjdump("-sass", str(compiled[0]))
    assert len(re.findall(r"\bLDG\.E\.128", sass)) >= 2 * 4  # p, g, m and v, in each kernel
