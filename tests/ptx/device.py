"""The CUDA backend as nvcc compiled it: its host code launches, and every kernel runs as PTX.

Arguments of kernels are the bytes that the compiled host code handed to the runtime, and memory is
that of the tensors: see :mod:`tests.ptx.interpreter`.
"""

import ctypes
import functools
import subprocess
from types import SimpleNamespace

import torch

from tests import cuda_toolkit
from tests.built_once import built_once
from tests.ptx.interpreter import Launch
from tests.ptx.program import parse
from zclip import reference
from zclip.layout import NUM_STATS, NUM_VERDICT, ZERO
from zclip.reference.rules import find_rule

HAS_NVCC = cuda_toolkit.HAS_NVCC
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
HERE = cuda_toolkit.ROOT / "tests/ptx"


@functools.cache
def kernels(architecture: str):
    """Every kernel that nvcc made of csrc/cuda for a virtual architecture."""
    return parse(text(architecture))


def text(architecture: str) -> str:
    """Return the PTX."""
    command = ["nvcc", *cuda_toolkit.FLAGS, f"-arch={architecture}", "-ptx"]
    target = cuda_toolkit.OUTPUT / f"launchers-{cuda_toolkit._digest(*command)}.ptx"
    if not target.exists():
        with built_once(target) as unfinished:
            if unfinished is not None:
                source = str(cuda_toolkit.SOURCE)
                subprocess.run([*command, source, "-o", str(unfinished)], check=True)
    return target.read_text()


@functools.cache
def library():
    """The host code, with the hook that runs kernels."""
    compiled = cuda_toolkit.compile_object()[0]
    sources = [HERE / "host.cpp", cuda_toolkit.ROOT / "tests/fake_cudart.cpp"]
    text = "".join(path.read_text() for path in sources)
    target = compiled.with_suffix(f".ptx-{cuda_toolkit._digest(text)}.so")
    if not target.exists():
        command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", *map(str, sources)]
        with built_once(target) as unfinished:
            if unfinished is not None:
                subprocess.run([*command, str(compiled), "-o", str(unfinished)], check=True)
    loaded = ctypes.CDLL(str(target))
    loaded.ptx_scratch_bytes.restype = ctypes.c_int64
    return loaded


HOOK = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p)
)


class Machine:
    """Runs launches; raises in the caller what went wrong inside the hook."""

    def __init__(self, architecture="compute_90", change=None):
        self.kernels = (
            kernels(architecture) if change is None else parse(change(text(architecture)))
        )
        self.ran = []  # names of the kernels, in order
        self._error = None
        self._buffers = []
        self._hook = HOOK(self._launched)

    def call(self, function, *arguments, buffers):
        """Call a function of host.cpp whose kernels may use these tensors and no other memory."""
        self._buffers = [
            (t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in buffers
        ]
        self._buffers = sorted(set(self._buffers))
        self._error = None
        loaded = library()
        loaded.fake_on_launch(self._hook)
        error = getattr(loaded, function)(*arguments)
        if self._error is not None:
            raise self._error
        assert error == 0

    def _launched(self, name, grid, threads, arguments):
        if self._error is not None:
            return
        try:
            kernel = self.kernels[name.decode()]
            self.ran.append(cuda_toolkit.plain_name(kernel.name))
            given = [
                ctypes.string_at(arguments[i], size) for i, (_, size, _) in enumerate(kernel.params)
            ]
            Launch(kernel, given, self._buffers).run(grid, threads)
        except Exception as error:
            self._error = error


def _listed(tensors, by_rows=False):
    count = len(tensors)
    rows = [t.shape[0] if by_rows and t.dim() > 1 else 1 for t in tensors]
    lens = [t.numel() // r if r else 0 for t, r in zip(tensors, rows, strict=True)]
    return (
        (ctypes.c_void_p * count)(*[t.data_ptr() for t in tensors]),
        (ctypes.c_int64 * count)(*rows),
        (ctypes.c_int64 * count)(*lens),
        (ctypes.c_int * count)(*[FORMATS.get(t.dtype, 0) for t in tensors]),
        ctypes.c_int64(count),
    )


def _at(tensor):
    return ctypes.c_void_p(None if tensor is None or not tensor.numel() else tensor.data_ptr())


def backend(machine: Machine) -> SimpleNamespace:
    """The operators, as an entry of tests/backends.py has them, for contiguous CPU tensors."""

    def scratch_for(listed):
        size = library().ptx_scratch_bytes(*listed)
        # Of any content; behind it nothing may be written.
        return torch.full((size // 8,), -(2**62) + 12345, dtype=torch.int64)

    def wide(*shape):
        return torch.full(shape, float("nan"), dtype=torch.float64)

    def grad_stats(grads):
        listed, stats = _listed(grads), wide(len(grads), NUM_STATS)
        scratch = scratch_for(listed)
        machine.call(
            "ptx_grad_stats", *listed, _at(scratch), _at(stats), buffers=[*grads, scratch, stats]
        )
        return stats

    def power_stats(grads, p):
        listed, stats = _listed(grads), wide(len(grads), NUM_STATS)
        scratch = scratch_for(listed)
        arguments = (*listed, _at(scratch), _at(stats), ctypes.c_double(p))
        machine.call("ptx_power_stats", *arguments, buffers=[*grads, scratch, stats])
        return stats

    def rule_arguments(state, rule, settings, loss):
        values = (ctypes.c_double * len(settings))(*map(float, settings))
        given = loss if loss is not None and loss.numel() else None
        code = FORMATS[given.dtype] if given is not None else 0
        return rule, _at(state), values, ctypes.c_int64(len(settings)), _at(given), code

    def present(*tensors):
        return [t for t in tensors if t is not None and t.numel()]

    def rule_(state, stats, rule, settings, loss=None):
        coefs, verdict = wide(len(stats)), torch.full((NUM_VERDICT,), float("nan"))
        told = rule_arguments(state, rule, settings, loss)
        rest = _at(stats), ctypes.c_int64(len(stats)), _at(coefs), _at(verdict)
        buffers = present(state, stats, loss, coefs, verdict)
        machine.call("ptx_rule", *told, *rest, buffers=buffers)
        return coefs, verdict

    def clip_by_(grads, state, rule, settings, loss=None):
        listed, stats, coefs = _listed(grads), wide(len(grads), NUM_STATS), wide(len(grads))
        scratch, verdict = scratch_for(listed), torch.full((NUM_VERDICT,), float("nan"))
        is_double = any(g.dtype == torch.float64 for g in grads)
        norm = torch.zeros((), dtype=torch.float64 if is_double else torch.float32)
        drops = find_rule(rule).typed(settings).get("nonfinite") == ZERO
        told = rule_arguments(state, rule, settings, loss)
        rest = _at(coefs), _at(verdict), _at(norm), int(is_double), int(drops)
        buffers = present(*grads, state, stats, loss, coefs, verdict, norm, scratch)
        machine.call(
            "ptx_clip_by", *listed, _at(scratch), _at(stats), *told, *rest, buffers=buffers
        )
        return norm, stats, coefs, verdict

    def scale_(grads, coefs):
        machine.call("ptx_scale", *_listed(grads), _at(coefs), buffers=[*grads, coefs])

    def zero_nonfinite_(grads, stats):
        machine.call("ptx_zero_nonfinite", *_listed(grads), _at(stats), buffers=[*grads, stats])

    def clamp_(grads, limit):
        machine.call("ptx_clamp", *_listed(grads), ctypes.c_double(limit), buffers=grads)

    def fingerprint(tensors):
        as_bytes = [t.contiguous().view(-1).view(torch.uint8) for t in tensors]
        listed, hashes = _listed(as_bytes), torch.zeros(len(tensors), dtype=torch.int64)
        scratch = scratch_for(listed)
        arguments = (*listed, _at(scratch), _at(hashes))
        machine.call("ptx_fingerprint", *arguments, buffers=present(*as_bytes, scratch, hashes))
        return hashes

    def agc_(grads, params, state, clip, eps, on_nonfinite):
        listed, weights = _listed(grads, by_rows=True), _listed(params, by_rows=True)
        count, rows = len(grads), sum(listed[1])
        stats, coefs, verdict = wide(count, NUM_STATS), wide(count), torch.zeros(NUM_VERDICT)
        per_tensor, row_coefs = wide(2 * count), wide(max(rows, 1))
        scratches = scratch_for(listed), scratch_for(weights)
        is_double = any(g.dtype == torch.float64 for g in grads)
        norm = torch.zeros((), dtype=torch.float64 if is_double else torch.float32)
        arguments = (*listed, weights[0], weights[3], *map(_at, scratches))
        arguments += (ctypes.c_double(clip), ctypes.c_double(eps), on_nonfinite, _at(state))
        arguments += (_at(stats), _at(per_tensor), _at(row_coefs), _at(coefs), _at(verdict))
        buffers = present(*grads, *params, state, stats, per_tensor, row_coefs, coefs, verdict)
        buffers += [norm, *scratches]
        machine.call("ptx_agc", *arguments, _at(norm), int(is_double), buffers=buffers)
        return norm, stats, coefs, verdict

    def watch_loss_(state, loss, verdict, factor, rising_steps, decay, warmup_steps):
        arguments = (_at(loss), FORMATS[loss.dtype], ctypes.c_double(factor))
        arguments += (ctypes.c_int64(rising_steps), ctypes.c_double(decay))
        arguments += (ctypes.c_int64(warmup_steps), _at(state), _at(verdict))
        machine.call("ptx_watch_loss", *arguments, buffers=[loss, state, verdict])

    return SimpleNamespace(
        **{**vars(reference), **{k: v for k, v in locals().items() if callable(v)}}
    )
