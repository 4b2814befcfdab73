"""The interpreter itself: what opcodes do, and that it notices what a GPU would not forgive."""

import ctypes
import struct

import numpy as np
import pytest

from tests.ptx.interpreter import Launch
from tests.ptx.program import PtxError, parse

HEAD = """
.visible .entry k(.param .u64 k_param_0, .param .align 8 .b8 k_param_1[16])
{
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<20>; .reg .f32 %f<9>;
    .reg .b64 %rd<20>; .reg .f64 %fd<9>;
    .shared .align 8 .b8 room[512];
    ld.param.u64 %rd1, [k_param_0];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 8;
    add.s64 %rd3, %rd1, %rd2;
"""


def run(body, threads=32, grid=1, data=None, second=bytes(16)):
    """Run a kernel with one output of 8 bytes per thread, address in %rd3; return those."""
    out = np.zeros(threads, dtype="u8") if data is None else data
    address = out.ctypes.data
    kernel = parse(HEAD + body + "\n    ret;\n}\n")["k"]
    arguments = [struct.pack("<Q", address), second]
    Launch(kernel, arguments, [(address, out.nbytes)]).run(grid, threads)
    return out


def one(instructions, bits=64):
    """The result of some instructions in %rd9 (or %r9), of thread 0."""
    store = "st.global.u64 [%rd3], %rd9;" if bits == 64 else "st.global.u32 [%rd3], %r9;"
    return int(run(instructions + store, threads=1)[0])


@pytest.mark.parametrize(
    ("instructions", "want"),
    [
        ("mov.b32 %r1, -7; shr.s32 %r9, %r1, 1;", 2**32 - 4),
        ("mov.b32 %r1, -8; shr.u32 %r9, %r1, 28;", 15),
        ("mov.b32 %r1, 1; shl.b32 %r9, %r1, 40;", 0),
        ("mov.b32 %r1, -7; rem.s32 %r9, %r1, 4;", 2**32 - 3),
        ("mov.b32 %r1, -7; div.s32 %r9, %r1, 4;", 2**32 - 1),
        ("mov.b32 %r1, 0x12345678; mov.b32 %r2, 0xABCDEF01; prmt.b32 %r9, %r1, %r2, 0x7610;",
         0xABCD5678 & 0xFF00FFFF | 0x00CD0000),
        ("mov.b32 %r1, 0x80; prmt.b32 %r9, %r1, %r1, 0x8888;", 0xFFFFFFFF),
        ("mov.f32 %f1, 0f3F800001; cvt.rn.bf16.f32 %rs1, %f1; cvt.u32.u16 %r9, %rs1;", 0x3F80),
        ("mov.f32 %f1, 0f7F800001; cvt.rn.bf16.f32 %rs1, %f1; cvt.u32.u16 %r9, %rs1;", 0x7FFF),
        ("mov.f32 %f1, 0f477FF000; cvt.rn.f16.f32 %rs1, %f1; cvt.u32.u16 %r9, %rs1;", 0x7C00),
        ("mov.f32 %f1, 0f33000000; cvt.rn.f16.f32 %rs1, %f1; cvt.u32.u16 %r9, %rs1;", 0),
        ("mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f40000000; cvt.rn.bf16x2.f32 %r9, %f1, %f2;",
         0x3F804000),
        ("mov.f64 %fd1, 0dC008000000000000; cvt.rzi.s32.f64 %r9, %fd1;", 2**32 - 3),
        ("mov.f64 %fd1, 0d7FF8000000000000; cvt.rzi.s32.f64 %r9, %fd1;", 0),
        ("mov.f64 %fd1, 0d41F0000000000000; cvt.rzi.u32.f64 %r9, %fd1;", 2**32 - 1),
        ("mov.b32 %r1, 0xF0; popc.b32 %r9, %r1;", 4),
        ("mov.b32 %r1, 0xF0; clz.b32 %r9, %r1;", 24),
        ("mov.b32 %r1, 0xABCD; bfe.u32 %r9, %r1, 4, 8;", 0xBC),
        ("mov.b32 %r1, 0xF; mov.b32 %r2, 0; bfi.b32 %r9, %r1, %r2, 4, 4;", 0xF0),
        ("mov.b32 %r1, 0xC; mov.b32 %r2, 0xA; lop3.b32 %r9, %r1, %r2, 0, 0x3C;", 0x6),
        ("mov.b32 %r1, 5; mov.b32 %r2, 7; mad.lo.s32 %r9, %r1, %r2, 3;", 38),
        ("mov.b32 %r1, -1; mul.hi.u32 %r9, %r1, %r1;", 2**32 - 2),
        ("mov.f32 %f1, 0f7FC00000; setp.ltu.f32 %p1, %f1, 0f00000000; selp.u32 %r9, 1, 0, %p1;", 1),
        ("mov.f32 %f1, 0f7FC00000; setp.ne.f32 %p1, %f1, 0f00000000; selp.u32 %r9, 1, 0, %p1;", 0),
        ("mov.b32 %r1, -1; setp.hi.u32 %p1, %r1, 5; not.pred %p2, %p1; selp.u32 %r9, 1, 2, %p2;",
         2),
    ],
)  # fmt: skip
def test_what_an_opcode_gives(instructions, want):
    assert one(instructions, bits=32) == want


def test_a_product_and_a_sum_are_rounded_once():
    bits = one(
        "mov.f64 %fd1, 0d3FF0000000000001; mov.f64 %fd2, 0dBFF0000000000002;"
        "fma.rn.f64 %fd3, %fd1, %fd1, %fd2; mov.b64 %rd9, %fd3;"
    )
    assert struct.unpack("<d", struct.pack("<Q", bits))[0] == 2.0**-104


def test_threads_that_part_meet_again():
    out = run(
        """
    setp.lt.u32 %p1, %r1, 5;
    @%p1 bra LOW;
    mov.u64 %rd9, 100;
    bra.uni END;
LOW: mov.u64 %rd9, 7;
END: st.global.u64 [%rd3], %rd9;"""
    )
    assert out.tolist() == [7] * 5 + [100] * 27


def test_a_loop_of_different_lengths():
    out = run(
        """
    mov.u64 %rd9, 0; cvt.u64.u32 %rd8, %r1;
AGAIN: setp.ge.u64 %p1, %rd9, %rd8;
    @%p1 bra END;
    add.s64 %rd9, %rd9, 1;
    bra AGAIN;
END: st.global.u64 [%rd3], %rd9;"""
    )
    assert out.tolist() == list(range(32))


def test_shared_memory_a_barrier_and_a_count():
    out = run(
        """
    mov.u64 %rd4, room; shl.b32 %r2, %r1, 2; cvt.u64.u32 %rd5, %r2; add.s64 %rd6, %rd4, %rd5;
    st.shared.u32 [%rd6], %r1;
    bar.sync 0;
    xor.b32 %r3, %r1, 63; shl.b32 %r4, %r3, 2; cvt.u64.u32 %rd7, %r4; add.s64 %rd8, %rd4, %rd7;
    ld.shared.u32 %r5, [%rd8];
    setp.gt.u32 %p1, %r5, 40;
    bar.red.popc.u32 %r6, 0, %p1;
    add.s32 %r7, %r5, %r6; cvt.u64.u32 %rd9, %r7; st.global.u64 [%rd3], %rd9;""",
        threads=64,
    )
    assert out.tolist() == [63 - i + 23 for i in range(64)]


def test_a_butterfly_of_shuffles_adds_up_a_warp():
    steps = "".join(
        f"shfl.sync.bfly.b32 %r2|%p1, %r1, {d}, 31, -1; add.s32 %r1, %r1, %r2;"
        for d in (16, 8, 4, 2, 1)
    )
    out = run(steps + "cvt.u64.u32 %rd9, %r1; st.global.u64 [%rd3], %rd9;", threads=64)
    assert out.tolist() == [sum(range(32))] * 32 + [sum(range(32, 64))] * 32


def test_atomics_and_blocks():
    data = np.zeros(64, dtype="u8")
    run("mov.u64 %rd9, 3; atom.global.add.u64 %rd8, [%rd1], %rd9;", grid=4, data=data)
    assert data[0] == 3 * 32 * 4
    run("mov.u64 %rd8, 5; atom.global.cas.b64 %rd9, [%rd3], 0, %rd8;", data=(zeros := data * 0))
    assert zeros[:32].tolist() == [5] * 32


def test_parameters_are_read_by_address_and_in_vectors():
    second = struct.pack("<IIII", 1, 2, 3, 4)
    body = """
    mov.b64 %rd4, k_param_1; cvta.param.u64 %rd5, %rd4;
    ld.param.v2.u32 {%r2, %r3}, [k_param_1+8];
    ld.param.u32 %r4, [%rd4+4];
    mad.lo.s32 %r5, %r2, %r3, %r4; cvt.u64.u32 %rd9, %r5; st.global.u64 [%rd3], %rd9;"""
    assert run(body, threads=1, second=second)[0] == 3 * 4 + 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("st.global.u64 [%rd3+8], %rd1;", "out of bounds"),
        ("ld.global.u64 %rd9, [%rd3+-8];", "out of bounds"),
        ("ld.global.u64 %rd9, [%rd3+4];", "misaligned"),
        ("mov.u64 %rd9, 64; ld.global.u32 %r9, [%rd9];", "out of bounds"),
        ("setp.eq.s32 %p1, %r1, 0; @%p1 bra X; bar.sync 0; bra Y; X: bar.sync 0; Y:", "different"),
        ("setp.eq.s32 %p1, %r1, 0; @%p1 bra X; shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; X:",
         "never come"),
        ("frobnicate.u32 %r1, %r2;", "not in the table: 'frobnicate"),
    ],
)  # fmt: skip
def test_what_a_gpu_would_not_forgive(body, message):
    with pytest.raises(PtxError, match=message):
        run(body)


def test_an_argument_of_the_wrong_size_is_noticed():
    kernel = parse(HEAD + "ret; }")["k"]
    with pytest.raises(PtxError, match="k_param_1 has 16 bytes, got 8"):
        Launch(kernel, [bytes(8), bytes(8)], [])


def test_shared_memory_is_not_zero_at_the_start():
    value = run("mov.u64 %rd4, room; ld.shared.u64 %rd9, [%rd4]; st.global.u64 [%rd3], %rd9;")
    assert (value == int.from_bytes(b"\xa5" * 8, "little")).all()


def test_memory_is_written_in_place():
    buffer = (ctypes.c_uint64 * 4)()
    data = np.frombuffer(buffer, dtype="u8")
    run("mov.u64 %rd9, 9; st.global.u64 [%rd3], %rd9;", threads=4, data=data)
    assert list(buffer) == [9] * 4
