"""From instructions to functions: each is looked up once, and then called with lanes."""

import re

import numpy as np

from tests.ptx import opcodes
from tests.ptx.opcodes import TYPES
from tests.ptx.program import LOCAL_BASE, WARP, PtxError

SPECIAL = ("%laneid", "%warpid", "%lanemask_lt")


def compile_kernel(kernel):
    """Return for each instruction its guard, what it does, and whether it may part or hold threads.

    Raises:
        PtxError: an instruction is not in the table.
    """
    made = []
    for instruction in kernel.code:
        guard = None
        if instruction.guard:
            guard = (instruction.guard, instruction.negated)
        try:
            step, kind = _Maker(kernel, instruction).make()
        except (KeyError, IndexError, ValueError, StopIteration) as error:
            raise PtxError(f"not in the table: {instruction.text!r} ({error!r})") from error
        made.append((guard, step, kind))
    return made


def _width(dtype):
    return np.dtype(f"u{dtype.itemsize}") if dtype != TYPES["pred"] else dtype


class _Maker:
    def __init__(self, kernel, instruction):
        self.kernel, self.i = kernel, instruction
        self.root, *self.tokens = instruction.opcode.split(".")
        self.words = instruction.operands

    @property
    def type(self):
        return TYPES[next(t for t in reversed(self.tokens) if t in TYPES)]

    def make(self):
        root, tokens, words = self.root, self.tokens, self.words
        if root in opcodes.NOTHING:
            return (lambda block, lanes: None), "plain"
        if root in ("ret", "exit"):
            return None, "ret"
        if root == "trap":
            raise PtxError("trap")
        if root in ("bra", "brx"):
            return self._branch(), "branch"
        if root in ("bar", "barrier"):
            return self._barrier(), "barrier"
        if root in ("shfl", "vote", "activemask", "redux"):
            return self._warp()
        if root in ("ld", "ldu"):
            return self._load(), "plain"
        if root == "st":
            return self._store(), "plain"
        if root in ("atom", "red"):
            return self._atomic(), "plain"
        if root == "mov":
            return self._move(), "plain"
        if root == "cvta":  # one address space for all
            return self._plain(lambda a: a, 1, TYPES["u64"]), "plain"
        if root == "cvt":
            function, into, out_of = opcodes.convert(tokens)
            return self._assign(words[0], into, function, [(w, out_of) for w in words[1:]]), "plain"
        if root in ("setp", "set"):
            return self._compare(), "plain"
        return self._arithmetic(root, tokens, words), "plain"

    def _arithmetic(self, root, tokens, words):
        kind = self.type
        if (
            any(t in opcodes.DIRECTED or t in ("ftz", "sat", "cc") for t in tokens)
            and root != "rcp"
        ):
            raise ValueError("a rounding or a flag that this interpreter does not have")
        if root in ("mul", "mad") and "wide" in tokens:
            wide = np.dtype(f"{kind.kind}{kind.itemsize * 2}")
            product = lambda a, b: a.astype(wide) * b.astype(wide)  # noqa: E731
            if root == "mul":
                return self._assign(words[0], wide, product, [(w, kind) for w in words[1:]])
            return self._assign(
                words[0],
                wide,
                lambda a, b, c: product(a, b) + c,
                [(words[1], kind), (words[2], kind), (words[3], wide)],
            )
        if root == "mul" and "hi" in tokens:
            return self._plain(opcodes.multiply_high, 2, kind)
        if root == "mad":
            high = opcodes.multiply_high if "hi" in tokens else lambda a, b: a * b
            return self._plain(lambda a, b, c: high(a, b) + c, 3, kind)
        if root == "fma":
            return self._plain(opcodes.fma(kind), 3, kind)
        if root == "rcp":
            rough = "approx" in tokens and kind == TYPES["f64"]
            return self._plain(
                opcodes.rough_reciprocal if rough else lambda a: (1 / a).astype(kind), 1, kind
            )
        if root in ("shl", "shr"):
            function = opcodes.shift_left if root == "shl" else opcodes.shift_right
            return self._assign(
                words[0], kind, function, [(words[1], kind), (words[2], TYPES["u32"])]
            )
        if root == "selp":
            return self._assign(
                words[0],
                kind,
                lambda a, b, c: np.where(c, a, b).astype(a.dtype),
                [(words[1], kind), (words[2], kind), (words[3], TYPES["pred"])],
            )
        if root == "prmt":
            return self._plain(opcodes.permute, 3, TYPES["b32"])
        if root == "lop3":
            return self._plain(opcodes.logic3, 4, TYPES["b32"])
        if root == "shf":
            function = opcodes.funnel("l" in tokens, "clamp" in tokens)
            return self._plain(function, 3, TYPES["b32"])
        if root in ("bfe", "bfi"):
            count = 1 if root == "bfe" else 2
            sources = [(w, kind) for w in words[1 : 1 + count]]
            sources += [(w, TYPES["u32"]) for w in words[1 + count :]]
            function = opcodes.extract_field if root == "bfe" else opcodes.insert_field
            return self._assign(words[0], kind, function, sources)
        if root in opcodes.COUNTING:
            function = opcodes.COUNTING[root]
            return self._assign(words[0], TYPES["u32"], function, [(words[1], kind)])
        if root in opcodes.UNARY:
            return self._plain(opcodes.UNARY[root], 1, kind)
        return self._plain(opcodes.BINARY[root], 2, kind)

    def _plain(self, function, count, kind):
        words = self.words
        return self._assign(words[0], kind, function, [(w, kind) for w in words[1 : 1 + count]])

    def _assign(self, target, kind, function, sources):
        read = [self.reader(word, dtype) for word, dtype in sources]
        write = self.writer(target, kind)

        def step(block, lanes):
            write(block, lanes, function(*[one(block, lanes) for one in read]))

        return step

    def reader(self, word, dtype):
        """Return a function that gives the operand as this type, one entry per lane."""
        if word.startswith("!"):
            inner = self.reader(word[1:], dtype)
            return lambda block, lanes: ~inner(block, lanes)
        if word in self.kernel.registers:
            have = self.kernel.registers[word]
            if dtype == TYPES["pred"] or have.itemsize == dtype.itemsize:
                return lambda block, lanes: block.registers[word][lanes].view(dtype)
            raw = _width(dtype)
            return lambda block, lanes: block.registers[word][lanes].astype(raw).view(dtype)
        if word.startswith("%"):
            if not (
                word in ("%laneid", "%warpid", "%lanemask_lt") or word[-2:] in (".x", ".y", ".z")
            ):
                raise KeyError(word)
            raw = _width(dtype)
            return lambda block, lanes: block.special[word][lanes].astype(raw).view(dtype)
        value = self.number(word, dtype)
        return lambda block, lanes: np.full(
            block.threads if isinstance(lanes, slice) else len(lanes), value, dtype=dtype
        )

    def number(self, word, dtype):
        """Return a constant, or the address of a variable."""
        if word in self.kernel.addresses:
            return np.array(self.kernel.addresses[word]).astype(dtype)
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", word):
            return np.array(int(match[1], 16), dtype="u4").view("f4").astype(dtype)
        if match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", word):
            return np.array(int(match[1], 16), dtype="u8").view("f8").astype(dtype)
        if dtype.kind == "f":
            if re.fullmatch(r"0x[0-9a-fA-F]+", word):  # the bits of a half
                return np.array(int(word, 16), dtype=f"u{dtype.itemsize}").view(dtype)
            return np.array(float(word), dtype=dtype)
        bits = int(word.rstrip("U"), 0) & (1 << 8 * dtype.itemsize) - 1
        return np.array(bits, dtype=_width(dtype)).view(dtype)

    def writer(self, target, kind):
        """Return a function that stores values of this type, extended to the register's width."""
        if target == "_":
            return lambda block, lanes, values: None
        have = self.kernel.registers[target]
        if have == TYPES["pred"]:
            return lambda block, lanes, values: _put(block, target, lanes, values.astype(bool))
        if have.itemsize == kind.itemsize:
            return lambda block, lanes, values: _put(block, target, lanes, values.view(have))
        signed = np.dtype(f"i{have.itemsize}") if kind.kind == "i" else have
        return lambda block, lanes, values: _put(
            block, target, lanes, values.astype(signed).view(have)
        )

    def _move(self):
        target, source = self.words
        kind = self.type
        if "{" in source:  # parts become one, the first lowest
            parts = re.findall(r"[%\w$.-]+", source)
            piece = np.dtype(f"u{kind.itemsize // len(parts)}")
            readers = [self.reader(p, piece) for p in parts]
            write = self.writer(target, kind)

            def join(block, lanes):
                columns = [r(block, lanes) for r in readers]
                write(block, lanes, np.stack(columns, axis=1).copy().view(kind)[:, 0])

            return join
        if "{" in target:
            parts = re.findall(r"[%\w$.]+", target)
            piece = np.dtype(f"u{kind.itemsize // len(parts)}")
            read = self.reader(source, kind)
            writers = [self.writer(p, piece) for p in parts]

            def split(block, lanes):
                columns = np.ascontiguousarray(read(block, lanes)).view(piece)
                columns = columns.reshape(-1, len(parts))
                for i, write in enumerate(writers):
                    write(block, lanes, np.ascontiguousarray(columns[:, i]))

            return split
        return self._assign(target, kind, lambda a: a, [(source, kind)])

    def _compare(self):
        kind, tokens = self.type, self.tokens
        compare = opcodes.COMPARISONS[tokens[0]]
        if kind.kind == "i" and tokens[0] in ("lo", "ls", "hi", "hs"):
            kind = _width(kind)
        outputs = self.words[0].split("|")
        join = next((t for t in tokens[1:] if t in ("and", "or", "xor")), None)
        first, second = (self.reader(w, kind) for w in self.words[1:3])
        third = self.reader(self.words[3], TYPES["pred"]) if join else None
        writers = [self.writer(w, TYPES["pred"]) for w in outputs]

        def step(block, lanes):
            answer = compare(first(block, lanes), second(block, lanes))
            for write, value in zip(writers, (answer, ~answer), strict=False):
                if join:
                    value = opcodes.BINARY[join](value, third(block, lanes))
                write(block, lanes, value)

        return step

    def _address(self, word):
        inside = word.strip("[]").replace(" ", "")
        base, _, offset = inside.partition("+")
        shift = int(offset, 0) if offset else 0
        read = self.reader(base, TYPES["u64"])
        return lambda block, lanes: read(block, lanes) + np.uint64(shift & (1 << 64) - 1)

    def _vector(self, word):
        return re.findall(r"[%\w$.+-]+", word) if "{" in word else [word]

    def _load(self):
        kind, address = self.type, self._address(self.words[1])
        targets = self._vector(self.words[0])
        writers = [self.writer(t, kind) for t in targets]
        size, is_local, text = kind.itemsize * len(targets), "local" in self.tokens, self.i.text

        def step(block, lanes):
            where = address(block, lanes)
            values = np.empty((len(where), len(targets)), dtype=kind)
            for raw, rows, offsets in _places(block, lanes, where, size, is_local, text):
                index = offsets // kind.itemsize
                for i in range(len(targets)):
                    if raw.ndim == 2:  # each lane has its own
                        values[:, i] = raw.view(kind)[rows, index + i]
                    else:
                        values[rows, i] = raw.view(kind)[index + i]
            for i, write in enumerate(writers):
                write(block, lanes, np.ascontiguousarray(values[:, i]))

        return step

    def _store(self):
        kind, address = self.type, self._address(self.words[0])
        readers = [self.reader(w, kind) for w in self._vector(self.words[1])]
        size, is_local, text = kind.itemsize * len(readers), "local" in self.tokens, self.i.text

        def step(block, lanes):
            where = address(block, lanes)
            columns = [r(block, lanes) for r in readers]
            for raw, rows, offsets in _places(block, lanes, where, size, is_local, text):
                index = offsets // kind.itemsize
                for i, column in enumerate(columns):
                    if raw.ndim == 2:
                        raw.view(kind)[rows, index + i] = column
                    else:
                        raw.view(kind)[index + i] = column[rows]

        return step

    def _atomic(self):
        kind = self.type
        words = self.words if self.root == "atom" else ["_", *self.words]
        change = opcodes.ATOMICS[next(t for t in self.tokens if t in opcodes.ATOMICS)]
        address, write = self._address(words[1]), self.writer(words[0], kind)
        first = self.reader(words[2], kind)
        second = self.reader(words[3], kind) if len(words) > 3 else first
        text = self.i.text

        def step(block, lanes):
            where, b, c = address(block, lanes), first(block, lanes), second(block, lanes)
            old = np.empty(len(where), dtype=kind)
            for i in range(len(where)):  # one after the other
                place = where[i : i + 1]
                for raw, _, offsets in block.memory.places(place, kind.itemsize, text):
                    cell = raw.view(kind)[offsets[0] // kind.itemsize :]
                    old[i] = cell[0]
                    cell[0] = change(old[i], b[i], c[i])
            write(block, lanes, old)

        return step

    def _branch(self):
        if self.root == "bra":
            target = self.kernel.labels[self.words[0]]
            return lambda block, lanes: target
        read = self.reader(self.words[0], TYPES["u32"])
        table = [self.kernel.labels[name] for name in self.kernel.targets[self.words[1]]]
        return lambda block, lanes: np.array(table)[read(block, lanes)]

    def _barrier(self):
        if "red" not in self.tokens:
            return lambda block, lanes: None
        reduce = opcodes.REDUCTIONS[next(t for t in self.tokens if t in opcodes.REDUCTIONS)]
        counts = "popc" in self.tokens
        read = self.reader(self.words[-1], TYPES["pred"])
        write = self.writer(self.words[0], TYPES["u32"] if counts else TYPES["pred"])
        kind = np.dtype("u4") if counts else np.dtype(bool)

        def step(block, lanes):
            answer = reduce(read(block, lanes))
            write(block, lanes, np.full(len(lanes), answer, dtype=kind))

        return step

    def _warp(self):
        if self.root == "activemask":
            return self._of_warp(lambda block, lanes, votes: _mask(lanes), None, None, "b32")
        if self.root == "vote":
            mode = next(t for t in self.tokens if t in ("ballot", "all", "any", "uni"))
            functions = {
                "ballot": lambda block, lanes, votes: _mask(lanes[votes]),
                "all": lambda block, lanes, votes: votes.all(),
                "any": lambda block, lanes, votes: votes.any(),
                "uni": lambda block, lanes, votes: votes.all() or not votes.any(),
            }
            kind = "b32" if mode == "ballot" else "pred"
            read = self.reader(self.words[1], TYPES["pred"])
            return self._of_warp(functions[mode], read, self.words[2], kind)
        if self.root == "redux":
            operation = next(t for t in self.tokens if t in opcodes.BINARY)
            read, name = self.reader(self.words[1], self.type), self.tokens[-1]
            function = opcodes.BINARY[operation]

            def reduce(block, lanes, values):
                total = values[0:1]
                for i in range(1, len(values)):
                    total = function(total, values[i : i + 1])
                return total[0]

            return self._of_warp(reduce, read, self.words[2], name)
        return self._shuffle()

    def _of_warp(self, function, read, mask, kind):
        write, dtype = self.writer(self.words[0], TYPES[kind]), TYPES[kind]

        def step(block, lanes):
            values = None if read is None else read(block, lanes)
            answer = function(block, lanes, values)
            write(block, lanes, np.full(len(lanes), answer, dtype=dtype))

        step.members = self._members(mask)
        return step, "warp"

    def _members(self, mask):
        if mask is None:
            return lambda block, lanes: len(lanes)
        read = self.reader(mask, TYPES["u32"])

        def count(block, lanes):
            first = int(lanes[0]) // WARP * WARP
            wanted = int(read(block, lanes)[0])
            present = range(first, min(first + WARP, block.threads))
            return sum(wanted >> (lane - first) & 1 for lane in present)

        return count

    def _shuffle(self):
        mode = next(t for t in self.tokens if t in ("bfly", "up", "down", "idx"))
        target, _, was_inside = self.words[0].partition("|")
        source, distance, control = (self.reader(w, TYPES["b32"]) for w in self.words[1:4])
        write = self.writer(target, TYPES["b32"])
        note = self.writer(was_inside, TYPES["pred"]) if was_inside else None

        def step(block, lanes):
            values, lane = source(block, lanes), (lanes % WARP).astype("i8")
            by, how = distance(block, lanes).astype("i8"), control(block, lanes).astype("i8")
            segment, limit = (how >> 8) & 31, how & 31
            low = lane & segment
            high = low | (limit & ~segment)
            if mode == "bfly":
                other = lane ^ by
                inside = other <= high
            elif mode == "down":
                other = lane + by
                inside = other <= high
            elif mode == "up":
                other = lane - by
                inside = other >= high
            else:
                other = low | (by & ~segment)
                inside = other <= high
            other = np.where(inside, other, lane)
            place = np.full(WARP, -1)
            place[lane] = np.arange(len(lanes))
            if (place[other] < 0).any():
                raise PtxError(f"a shuffle reads a lane that does not take part: {self.i.text}")
            write(block, lanes, values[place[other]])
            if note is not None:
                note(block, lanes, inside)

        step.members = self._members(self.words[4])
        return step, "warp"


def _mask(lanes):
    return np.bitwise_or.reduce(np.uint32(1) << (lanes % WARP).astype("u4"), initial=np.uint32(0))


def _put(block, target, lanes, values):
    block.registers[target][lanes] = values


def _places(block, lanes, where, size, is_local, text):
    """Where the lanes read or write. Local memory has a row of its own for each of them."""
    is_generic = not is_local and LOCAL_BASE <= int(where[0]) < LOCAL_BASE + block.local.shape[1]
    if not (is_local or is_generic):
        return block.memory.places(where, size, text)
    rows = np.arange(block.threads) if isinstance(lanes, slice) else lanes
    return [(block.local, rows, (where - np.uint64(LOCAL_BASE)).astype(np.int64))]
