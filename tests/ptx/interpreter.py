"""Runs the PTX that nvcc made: all threads of a block at once, as arrays with one entry each.

Threads that stand at different places run in turn, the one furthest behind first; barriers and warp
shuffles hold them until all that take part are there. Blocks run one after the other. Every access
to memory has to lie inside a buffer that the caller gave, and be aligned to its size.
"""

import ctypes
from weakref import WeakKeyDictionary

import numpy as np

from tests.ptx.compile import compile_kernel
from tests.ptx.program import LOCAL_BASE, PARAM_BASE, SHARED_BASE, WARP, Kernel, PtxError

DONE = 1 << 60  # where a thread stands that has returned

_compiled: WeakKeyDictionary[Kernel, list] = WeakKeyDictionary()


class Memory:
    """Buffers by their addresses; those on the host are written in place."""

    def __init__(self):
        self.starts, self.ends, self.bytes = [], [], []

    def add_host(self, address, size):
        """Let the kernel use real memory."""
        if size == 0:
            return
        start = address & ~15
        length = (address + size + 15 & ~15) - start
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(start))
        self._add(address, address + size, start, raw)

    def add(self, base, raw):
        self._add(base, base + len(raw), base, raw)

    def _add(self, begin, end, start, raw):
        at = int(np.searchsorted(self.starts, begin)) if self.starts else 0
        self.starts.insert(at, begin)
        self.ends.insert(at, end)
        self.bytes.insert(at, (start, raw))

    def places(self, addresses, size, what):
        """Yield for each buffer its bytes, the lanes that use it and their offsets."""
        if (addresses % np.uint64(size)).any():
            raise PtxError(f"misaligned access of {size} bytes: {what}")
        which = np.searchsorted(self.starts, addresses, side="right") - 1
        for index in np.unique(which):
            lanes = np.nonzero(which == index)[0]
            here = addresses[lanes]
            if index < 0 or (here + np.uint64(size) > np.uint64(self.ends[index])).any():
                raise PtxError(f"access out of bounds at {int(here.max()):#x}: {what}")
            start, raw = self.bytes[index]
            yield raw, lanes, (here - np.uint64(start)).astype(np.int64)


class Block:
    """One block of threads."""

    def __init__(self, kernel, memory, block, grid, threads, compiled):
        self.kernel, self.memory, self.threads = kernel, memory, threads
        self.compiled = compiled
        self.registers = {n: np.zeros(threads, dtype=d) for n, d in kernel.registers.items()}
        self.pc = np.zeros(threads, dtype=np.int64)
        self.waits = np.zeros(threads, dtype=bool)
        thread = np.arange(threads, dtype="u4")
        self.special = {
            "%tid.x": thread,
            "%laneid": thread % WARP,
            "%warpid": thread // WARP,
            "%ntid.x": np.full(threads, threads, dtype="u4"),
            "%ctaid.x": np.full(threads, block, dtype="u4"),
            "%nctaid.x": np.full(threads, grid, dtype="u4"),
            "%lanemask_lt": (1 << (thread % WARP).astype("u8")).astype("u4") - np.uint32(1),
        }
        zeros, ones = np.zeros(threads, dtype="u4"), np.ones(threads, dtype="u4")
        for axis in "yz":
            self.special |= {f"%tid.{axis}": zeros, f"%ctaid.{axis}": zeros}
            self.special |= {f"%ntid.{axis}": ones, f"%nctaid.{axis}": ones}
        # Whatever shared and local memory hold at the start, it is not zero.
        shared = kernel.extent(SHARED_BASE, kernel.shared) + 15 & ~15
        memory.add(SHARED_BASE, np.full(max(shared, 16), 0xA5, dtype=np.uint8))
        local = kernel.extent(LOCAL_BASE, kernel.local) + 15 & ~15
        self.local = np.full((threads, local), 0xA5, dtype=np.uint8)

    def run(self):
        """Run until every thread has returned."""
        while True:
            free = np.where(self.waits, DONE, self.pc)
            at = int(free.min())
            if at == DONE:
                if (self.pc == DONE).all():
                    return
                raise PtxError("threads wait for others that never come")
            lanes = np.nonzero(free == at)[0]
            others = free[free != at]
            until = int(others.min()) if len(others) else DONE
            self._run_together(at, lanes, until)

    def _run_together(self, at, lanes, until):
        """Run lanes that stand at one place, until they part, wait or reach others."""
        code = self.compiled
        everyone = len(lanes) == self.threads
        while at < until:
            guard, step, kind = code[at]
            active = lanes
            if guard is not None:
                taken = self.registers[guard[0]][lanes] ^ guard[1]
                active = lanes[taken]
            if kind == "plain":
                if len(active):
                    whole = everyone and len(active) == self.threads
                    step(self, slice(None) if whole else active)
                at += 1
                continue
            self.pc[lanes] = at + 1
            if kind == "branch":
                if len(active):
                    self.pc[active] = step(self, active)
            elif kind == "ret":
                self.pc[active] = DONE
                self._let_go()
            else:  # a collective
                self.pc[active] = at
                self.waits[active] = True
                self._let_go()
            return
        self.pc[lanes] = at

    def _let_go(self):
        """Run the collectives whose members are all there."""
        waiting = np.nonzero(self.waits)[0]
        if not len(waiting):
            return
        at_barrier = waiting[[self.compiled[p][2] == "barrier" for p in self.pc[waiting]]]
        if len(at_barrier) == (self.pc != DONE).sum():
            place = self.pc[at_barrier[0]]
            if (self.pc[at_barrier] != place).any():
                raise PtxError("threads of a block wait at different barriers")
            self.compiled[place][1](self, at_barrier)
            self._go_on(at_barrier)
            return
        for warp in np.unique(waiting // WARP):
            members = waiting[waiting // WARP == warp]
            place = self.pc[members[0]]
            if self.compiled[place][2] != "warp" or (self.pc[members] != place).any():
                continue
            step = self.compiled[place][1]
            if len(members) == step.members(self, members):
                step(self, members)
                self._go_on(members)

    def _go_on(self, lanes):
        self.waits[lanes] = False
        self.pc[lanes] += 1


class Launch:
    """A kernel with its arguments, ready to run."""

    def __init__(self, kernel, arguments, buffers):
        self.kernel, self.buffers = kernel, buffers
        sizes = {name: size for name, size, _ in kernel.params}
        raw = bytearray(kernel.extent(PARAM_BASE, sizes) + 15 & ~15)
        for (name, size, _), given in zip(kernel.params, arguments, strict=True):
            if len(given) != size:
                raise PtxError(f"{name} has {size} bytes, got {len(given)}")
            at = kernel.addresses[name] - PARAM_BASE
            raw[at : at + size] = given
        self.raw = np.frombuffer(bytes(raw), dtype=np.uint8).copy()

    def run(self, grid, threads):
        """Run all blocks, one after the other."""
        if self.kernel not in _compiled:
            _compiled[self.kernel] = compile_kernel(self.kernel)
        for index in range(grid):
            memory = Memory()
            for address, size in self.buffers:
                memory.add_host(address, size)
            memory.add(PARAM_BASE, self.raw)
            with np.errstate(all="ignore"):
                Block(self.kernel, memory, index, grid, threads, _compiled[self.kernel]).run()
