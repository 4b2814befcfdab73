"""Compiles every Triton kernel for GPUs that need not be here, and says what came out.

``python -m tests.triton.kernels`` prints it as JSON; with ``--write`` it writes the table of
docs/triton-kernels.md. Must run without TRITON_INTERPRET: the interpreter compiles nothing.
"""

import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

PAGE = Path(__file__).parents[2] / "docs" / "triton-kernels.md"

TARGETS = ["sm_80", "sm_90", "sm_100", "gfx942"]
DTYPES = ["float32", "bfloat16", "float16", "float64"]
UPDATES = [f"update_chunks, {kind}" for kind in ("adam", "amsgrad", "nesterov", "lion")]
PER_DTYPE = [
    "grad_stats_partials",
    "power_stats_partials",
    "scale_chunks",
    "scale_chunks, dropping",
    "clamp_chunks",
    "agc_rows",
    "agc_scale",
    *UPDATES,
]
RULES = ["zclip", "adagc", "spike_skip", "auto_clip", "watch_loss", "agc_tensors", "agc"]
HASHES = ["fingerprint_partials", "fingerprint_finish"]
FINISHES = ["grad_stats_finish", "clip_by_global_norm_finish", "update_finish", "update_summary"]
PER_LIST = [*FINISHES, "global_norm", *RULES, *HASHES]
BY_FLOAT64 = ["power_stats_partials", "agc_rows", "agc_scale"]
VECTORISED = [name for name in PER_DTYPE if name not in [*BY_FLOAT64, *UPDATES]]
"""Kernels whose full-chunk path must move 16 bytes at a time; the others are bound by float64, or
go by rows, which begin anywhere."""

CASES = [
    (kernel, dtype, target)
    for target in TARGETS
    for kernel in PER_DTYPE + PER_LIST
    for dtype in (DTYPES if kernel in PER_DTYPE else ["-"])
]

# The types of the arguments, which have one name in all kernels.
TYPES = {
    **dict.fromkeys(["addresses", "lengths", "tensors", "tensor_chunks", "owners"], "*i64"),
    **dict.fromkeys(["grads", "weights", "first_rows"], "*i64"),
    **dict.fromkeys(["hashes", "fingerprints", "first_words", "tensor_parts", "sizes"], "*i64"),
    **dict.fromkeys(["slots", "stats", "coefs", "state", "squares"], "*fp64"),
    **dict.fromkeys(["verdict", "norm"], "*fp32"),
    **dict.fromkeys(["first_chunk", "num_chunks", "num_tensors", "nonfinite"], "i32"),
    **dict.fromkeys(["warmup_steps", "clip_mode", "seed", "on_nonfinite", "rising_steps"], "i32"),
    **dict.fromkeys(["skip_update_on_spike", "skip_step_on_spike"], "i32"),
    **dict.fromkeys(["window", "enough", "history", "first_row", "num_rows"], "i32"),
    **dict.fromkeys(["max_norm_bits", "limit_bits", "p_bits", "eps_bits", "loss_address"], "i64"),
    "clip_bits": "i64",
    **dict.fromkeys(["alpha_bits", "z_thresh_bits", "clip_factor_bits"], "i64"),
    **dict.fromkeys(["lambda_rel_bits", "beta_bits", "lambda_abs_bits"], "i64"),
    **dict.fromkeys(["sigma_bits", "percentile_bits", "factor_bits", "decay_bits"], "i64"),
    "ticket": "*i32",
    **dict.fromkeys(["firsts", "seconds", "maxima", "steps", "begins"], "*i64"),
    **dict.fromkeys(["takes_part", "is_double", "is_wide", "ledger", "words"], "*i64"),
    **dict.fromkeys(["grad_scale", "rates", "sums", "rows"], "*fp64"),
    **dict.fromkeys(["blocked", "summary"], "*fp32"),
    **dict.fromkeys(["group", "flags", "skip_flags"], "i32"),
    **dict.fromkeys(["lr_bits", "beta1_bits", "beta2_bits", "weight_decay_bits"], "i64"),
    "seed_bits": "i64",
}


def kind_of(name, update_table):
    return getattr(update_table, name.removeprefix("update_chunks, ").upper() + "_KIND")


def _kernel_and_constants(name, dtype):
    import torch

    from zclip.backends.triton import (
        adagc,
        agc_,
        agc_rows,
        auto_clip,
        chunk,
        clamp_,
        fingerprint,
        global_norm,
        grad_stats,
        optim_update_,
        power_stats,
        report,
        scale_,
        spike_skip,
        update_table,
        watch_loss_,
        zclip,
    )

    shape = chunk.shape_for(getattr(torch, dtype)) if dtype != "-" else {}
    constants = {k: v for k, v in shape.items() if k.isupper()}
    block, rule = {"BLOCK": 1024}, {"BLOCK": report.RULE_BLOCK}
    lanes = {"LANES": chunk.LANES, **rule}
    row = {"DTYPE": constants.get("DTYPE"), **lanes}
    loss = {"DTYPE": chunk.FORMAT_OF[torch.bfloat16]}
    step = {"BLOCKED_BY": optim_update_.VERDICT, "TELEMETRY": True}
    update = {
        **step,
        **dict.fromkeys(["HAS_COEFS", "HAS_SCALE", "HAS_RATES"], True),
        "STOCHASTIC": dtype == "bfloat16",
        "DTYPE": constants.get("DTYPE"),
        "GRAD_DTYPE": constants.get("DTYPE"),
        "CHUNK": constants.get("CHUNK"),
        "LANES": optim_update_.LANES_OF.get(getattr(torch, dtype, None)),
    }
    updates = {
        name: (optim_update_.update_chunks, {"KIND": kind_of(name, update_table), **update})
        for name in UPDATES
    }
    return {
        **updates,
        "update_finish": (optim_update_.update_finish, {**step, **rule}),
        "update_summary": (optim_update_.update_summary, {**step, **rule}),
        "grad_stats_partials": (grad_stats.grad_stats_partials, constants),
        "power_stats_partials": (power_stats.power_stats_partials, {"KIND": 2, **constants}),
        "scale_chunks": (scale_.scale_chunks, {"DROP_NONFINITE": False, **constants}),
        "scale_chunks, dropping": (scale_.scale_chunks, {"DROP_NONFINITE": True, **constants}),
        "clamp_chunks": (clamp_.clamp_chunks, constants),
        "grad_stats_finish": (grad_stats.grad_stats_finish, {"FIRST_IS_MAX": False, **block}),
        "global_norm": (global_norm.global_norm, {"HAS_STATE": True, **block}),
        "clip_by_global_norm_finish": (
            global_norm.clip_by_global_norm_finish,
            {"HAS_STATE": True, **block},
        ),
        "zclip": (zclip.zclip, rule),
        "adagc": (adagc.adagc, rule),
        "spike_skip": (spike_skip.spike_skip, {"HAS_LOSS": True, **loss, **rule}),
        "auto_clip": (auto_clip.auto_clip, rule),
        "watch_loss": (watch_loss_.watch_loss, loss),
        "agc_rows": (agc_rows.agc_rows, {"WEIGHT_DTYPE": row["DTYPE"], **row}),
        "agc_scale": (agc_rows.agc_scale, row),
        "agc_tensors": (agc_.agc_tensors, rule),
        "agc": (agc_.agc, rule),
        "fingerprint_partials": (fingerprint.fingerprint_partials, fingerprint.SHAPE),
        "fingerprint_finish": (fingerprint.fingerprint_finish, block),
    }[name]


def compile_case(case):
    """Return what the compiler made of one (kernel, dtype, target)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    name, dtype, target = case
    kernel, constants = _kernel_and_constants(name, dtype)
    signature = {a: "constexpr" if a in constants else TYPES[a] for a in kernel.arg_names}
    # As at run time: every pointer handed to a kernel is 16-byte aligned.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, a in enumerate(kernel.arg_names)
        if signature[a].startswith("*")
    }
    is_amd = target.startswith("gfx")
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("hip", target, 64) if is_amd else GPUTarget("cuda", int(target[3:]), 32),
        options={"num_warps": 4 if is_amd else 8, "enable_fp_fusion": False},
    )
    return (_read_amd if is_amd else _read_nvidia)(compiled)


def _read_nvidia(compiled):
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    field = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    ptx = compiled.asm["ptx"]
    return {
        "registers": field["REG"],
        "spilled_bytes": field["STACK"] + field["LOCAL"],
        "shared_bytes": compiled.metadata.shared,
        "wide_loads": len(re.findall(r"ld\.global[\w.:]*\.(?:v4\.b32|v8\.b32|v[24]\.b64)", ptx)),
        "wide_stores": len(re.findall(r"st\.global[\w.:]*\.(?:v4\.b32|v8\.b32|v[24]\.b64)", ptx)),
        "fused_multiply_adds": len(re.findall(r"\bfma\.rn\.f32\b", ptx)),
        "float_atomics": len(re.findall(r"\b(?:atom|red)\.[\w.:]*\.f(?:32|64)\b", ptx)),
        "acquire_release": len(re.findall(r"atom\.[\w.:]*acq_rel", ptx)),
    }


def _read_amd(compiled):
    assembly = compiled.asm["amdgcn"]

    def number(key):
        return int(re.search(rf"\.{key}:\s*(\d+)", assembly)[1])

    def count(pattern):
        return len(re.findall(pattern, assembly))

    return {
        "registers": number("vgpr_count"),
        # Scalar registers spill into lanes of vector registers, not into memory.
        "spilled_bytes": 4 * number("vgpr_spill_count") + number("private_segment_fixed_size"),
        "shared_bytes": compiled.metadata.shared,
        "wide_loads": count(r"\b(?:global|buffer|flat)_load_dwordx4\b"),
        "wide_stores": count(r"\b(?:global|buffer|flat)_store_dwordx4\b"),
        "fused_multiply_adds": count(r"\bv_(?:pk_)?fma(?:c|mk|ak)?_f32\b"),
        "float_atomics": count(r"\b\w+_atomic_(?:pk_)?add_f(?:16|32|64)\b"),
        "acquire_release": count(r"\b\w+_atomic_add\b"),
    }


def compile_all(workers=2):
    """Return {"kernel/dtype/target": what came out} of every case."""
    with ProcessPoolExecutor(workers) as pool:
        results = pool.map(compile_case, CASES)
        return {"/".join(case): result for case, result in zip(CASES, results, strict=True)}


def launched():
    """Return {kernel: [types and alignments of its arguments]} as launches would bind them.

    One entry per variant that Triton would compile; calls differ in sizes, counts and settings.
    """
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import jit

    from zclip.backends.triton import MODULE_OF, implementation_of

    variants = {}
    backend = CUDABackend(GPUTarget("cuda", 90, 32))

    def bind(kernel, *args, grid, warmup, **kwargs):
        binder = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, _ = binder(*args, **kwargs)
        types = {
            name: f"{kind} {note or ''}".strip()
            for name, (kind, note) in zip(kernel.arg_names, specialization, strict=True)
            if kind != "constexpr"
        }
        known = variants.setdefault(kernel.__name__, [])
        known += [types] * (types not in known)

    run, jit.JITFunction.run = jit.JITFunction.run, bind
    ops = SimpleNamespace(**{name: implementation_of(name, "CUDA") for name in MODULE_OF})
    for count, setting in ((1, 0.0), (2, 1.0), (3, 0.1), (17, 16.0)):
        grads = [torch.zeros(count * 9000) for _ in range(count)]
        state = torch.zeros(3, dtype=torch.float64)
        stats = ops.grad_stats(grads)
        ops.power_stats(grads, setting + 2.0)
        coefs, _ = ops.rule_(state, stats, 0, (setting, count % 4))
        ops.scale_(grads, coefs)
        ops.clamp_(grads, setting)
        ops.clip_by_(grads, state, 0, (setting, count % 4))
        _launch_rules(ops, grads, setting)
    jit.JITFunction.run = run
    return variants


def _launch_rules(ops, grads, setting):
    """Call every rule, alone and fused, with settings that differ from call to call."""
    import torch

    from zclip.reference import IDS

    count = len(grads)
    stats = ops.grad_stats(grads)
    losses = torch.zeros(18)

    def state(size):
        return torch.zeros(size, dtype=torch.float64)

    zclip_settings = [setting] * 4 + [count, count % 3, setting, count % 2 == 0, count == 1, 0]
    calls = [
        ("zclip", state(6 + count), zclip_settings),
        ("adagc", state(3 + count), [setting] * 4 + [count, count % 3, 1]),
        ("spike_skip", state(5 + 2 * count), [count, setting, count, 0]),
        ("auto_clip", state(4 + count), [setting, count, 1]),
    ]
    for rule, memory, settings in calls:
        which = IDS[rule], settings, losses[count] if rule == "spike_skip" else None
        ops.rule_(memory, stats, *which)
        ops.clip_by_(grads, memory, *which)
    ops.watch_loss_(state(8), losses[count], torch.zeros(14), setting, count, setting, count)
    ops.agc_(grads, [g.clone() for g in grads], state(3), setting, setting, count % 2)
    ops.fingerprint(grads)
    _launch_update(ops, grads, setting)


def _launch_update(ops, grads, setting):
    """Call an update with learning rates, scales, seeds and numbers of tensors that differ."""
    import torch

    from zclip.layout import ADAM, NUM_LEDGER

    count = len(grads)
    ledger = torch.zeros(count, NUM_LEDGER, dtype=torch.int64)
    coefs, scale = torch.zeros(count + 2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    state = [[torch.zeros_like(g) for g in grads] for _ in range(3)]
    steps = [torch.zeros(()) for _ in grads]
    numbers = [setting] * 5 + [float(count)]
    tail = (coefs[:count], torch.zeros(14), scale[:1], scale[:0], ADAM, [count], numbers)
    ops.optim_update_(grads, state[0], state[1], state[2], [], steps, ledger, *tail, count, True, 3)


def page(results, version):
    """Return docs/triton-kernels.md."""
    lines = [
        "# Triton kernels, compiled",
        "",
        f"Registers per thread / bytes of shared memory, with Triton {version}; 256 threads per",
        "program. Nothing spills, and where a ¹ stands, full chunks move in 128-bit accesses.",
        "Written by `python -m tests.triton.kernels --write`; a test compares.",
        "",
        "| kernel | dtype | " + " | ".join(TARGETS) + " |",
        "|---|---|" + "---|" * len(TARGETS),
    ]
    for kernel, dtype, target in CASES:
        if target != TARGETS[0]:
            break
        row = [results[f"{kernel}/{dtype}/{t}"] for t in TARGETS]
        cells = [f"{r['registers']} / {r['shared_bytes']}" for r in row]
        mark = "¹" if kernel in VECTORISED and all(r["wide_loads"] for r in row) else ""
        lines.append(f"| `{kernel}`{mark} | {dtype} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    import triton

    results = compile_all()
    if "--write" in sys.argv:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(results, triton.__version__))
    else:
        found = {"version": triton.__version__, "results": results, "launched": launched()}
        print(json.dumps(found))


if __name__ == "__main__":
    main()
