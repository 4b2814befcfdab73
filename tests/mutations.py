"""Bends the CUDA kernels, one place at a time, and demands that some check fails.

Every barrier and every fence of csrc/cuda is deleted in turn; conditions at the ends of loops,
tickets and special cases are bent by the list below. A mutation that no check notices is a hole.

    python -m tests.mutations           all of them
    python -m tests.mutations ticket    those whose file or text contains "ticket"
"""

import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.simt import build

KERNELS = build.ROOT / "csrc/cuda"
TIMEOUT_SECONDS = 240  # a bent loop may never end
SEEDS = {"plain": 4, "asan": 1, "tsan": 1}
# What only TSan can see: fences and who is ordered after whom.
INVISIBLE = ("__threadfence", "atomicCAS", "atomicAdd", "slots[c] = slot")

# File, text that occurs there once, what replaces it, and the check that looks there.
BENT = [
    ("ticket.cuh", "if (is_last[0]) *ticket.word = 0;", "", "splitting"),
    ("ticket.cuh", "== gridDim.x;", "== gridDim.x - 1;", "stats"),
    ("ticket.cuh", "== gridDim.x;", ">= 1;", "stats"),
    ("ticket.cuh", "if (seen >> kCountBits != ticket.nonce) {", "if (true) {", "stats"),
    ("ticket.cuh", "if (seen >> kCountBits != ticket.nonce) {", "if (false) {", "stats"),
    ("ticket.cuh", "atomicCAS(ticket.word, seen, ", "atomicExch(ticket.word, ", "stats"),
    ("ticket.cuh", "atomicAdd(ticket.word, 1ull) + 1", "(*ticket.word += 1)", "stats"),
    ("tensor_table.cuh", "[middle].first_chunk <= chunk", "[middle].first_chunk < chunk",
     "rewriting"),
    ("tensor_table.cuh", "[index_ + 1].first_chunk <= chunk", "[index_ + 1].first_chunk < chunk",
     "stats"),
    ("tensor_table.cuh", "index_of(table_, chunk, index_ + 1)", "index_ + 1", "stats"),
    ("tensor_table.cuh", "if (chunk >= table_.chunks) return {};", "", "stats"),
    ("tensor_table.cuh", "const bool is_last = index_ + 1 == table_.count;",
     "const bool is_last = false;", "splitting"),
    ("tensor_table.cuh", "bytes > to_go ? (bytes - to_go) / kVectorBytes : 0",
     "bytes / kVectorBytes", "stats"),
    ("tensor_table.cuh", "first_row -= tensors[i].rows;", "(void)0;", "splitting"),
    ("tensor_table.cuh", "    end_row = first_row;\n", "", "splitting"),
    ("tensor_table.cuh", "rest < kDeviceChunk ? rest : kDeviceChunk", "kDeviceChunk", "stats"),
    ("tensor_table.cuh", "rest < kDeviceChunk ? rest : kDeviceChunk", "rest", "stats"),
    ("tensor_table.cuh", "(row_len + kDeviceChunk - 1) / kDeviceChunk);",
     "(row_len + kDeviceChunk) / kDeviceChunk);", "stats"),
    ("tensor_table.cuh", "table.chunks += static_cast<uint32_t>(num_chunks(tensor));",
     "table.chunks += 1;", "stats"),
    ("tensor_table.cuh", "chunks_before += table.chunks;", "", "agc"),
    ("tensor_table.cuh", "row += tensor.rows;", "row += 1;", "agc"),
    ("tensor_table.cuh", "next == count);", "true);", "splitting"),
    ("vectors.cuh", "to_go < len ? to_go : len", "to_go", "stats"),
    ("vectors.cuh", "(kVectorBytes - past) % kVectorBytes", "0", "stats"),
    ("vectors.cuh", "len - head - vectors * kWidth}", "0}", "stats"),
    ("vectors.cuh", "(len - head) / kWidth", "(len - head + kWidth - 1) / kWidth", "stats"),
    ("vectors.cuh", "if (v < run.count)", "if (v <= run.count)", "stats"),
    ("chunk_stats.cuh", "left > kRound + kToLast", "left >= kRound + kToLast", "stats"),
    ("chunk_stats.cuh", "stays = left > kRound", "stays = left >= kRound", "stats"),
    ("chunk_stats.cuh", "if (left > kToLast)", "if (left >= kToLast)", "stats"),
    ("chunk_stats.cuh", "if (left <= k * kThreads) break;", "if (left < k * kThreads) break;",
     "stats"),
    ("chunk_stats.cuh", "|| left > k * kThreads", "|| left >= k * kThreads", "stats"),
    ("chunk_stats.cuh", "pieces.head_len) {", "pieces.head_len - 1) {", "stats"),
    ("chunk_stats.cuh", "pieces.tail_len) {", "pieces.tail_len - 1) {", "stats"),
    ("chunk_stats.cuh", "if (Crew::member() < pieces.head_len) {",
     "if (Crew::member() <= pieces.head_len) {", "stats"),
    ("chunk_stats.cuh", "if (Crew::member() < pieces.tail_len) {",
     "if (Crew::member() <= pieces.tail_len) {", "stats"),
    ("chunk_stats.cuh", "if (Crew::member() < pieces.head_len) found",
     "if (false) found", "stats"),
    ("chunk_stats.cuh", "if (Crew::member() < pieces.tail_len) found",
     "if (false) found", "stats"),
    ("chunk_stats.cuh", "found |= widened<number_t>(any, i) != 0;", "(void)i;", "stats"),
    ("chunk_stats.cuh", "quick == 0.0 && is_all_zero<Crew>(data, len)", "quick == 0.0", "stats"),
    ("chunk_stats.cuh", "if (quick < kTinySum<float>)", "if (false)", "stats"),
    ("chunk_stats.cuh", "if (is_finite(huge))", "if (true)", "stats"),
    ("chunk_stats.cuh", "if (trustworthy<decltype(widen(number_t{}))>(quick)) return {quick, 0, 0};"
     "\n  const", "return {quick, 0, 0};\n  const", "stats"),
    ("chunk_stats.cuh", "if (trustworthy<decltype(widen(number_t{}))>(quick)) return {quick, 0, 0};"
     "\n  return", "return {quick, 0, 0};\n  return", "agc"),
    ("chunk_stats.cuh", "i < len; i += Crew::kSize) observe",
     "i <= len; i += Crew::kSize) observe", "stats"),
    ("chunk_stats.cuh", "i < len; i += Crew::kSize) observe",
     "i < len - 1; i += Crew::kSize) observe", "stats"),
    ("grad_stats.cuh", "after = next == 2 ? 0 : next + 1", "after = at", "stats"),
    ("grad_stats.cuh", "walk.place_of(c + 2 * gridDim.x)", "walk.place_of(c + gridDim.x)", "stats"),
    ("grad_stats.cuh", "places[1] = walk.place_of(blockIdx.x + gridDim.x);", "", "stats"),
    ("grad_stats.cuh", "c < table.chunks; c += gridDim.x", "c <= table.chunks; c += gridDim.x",
     "stats"),
    ("grad_stats.cuh", "if (threadIdx.x == 0) slots[c] = slot;",
     "if (threadIdx.x == kThreads - 1) slots[c] = slot;", "stats"),
    ("grad_stats.cuh", "c < end; c += Crew::kSize", "c <= end; c += Crew::kSize", "stats"),
    ("finish.cuh", "t < table.count; t += kWarps", "t < table.count - 1; t += kWarps", "stats"),
    ("finish.cuh", "n < num_large[0]", "n + 1 < num_large[0]", "stats"),
    ("finish.cuh", "large[atomicAdd(num_large, 1u)]", "large[num_large[0]++]", "stats"),
    ("ordered_sum.cuh", "if (next < count)", "if (next <= count)", "totals"),
    ("ordered_sum.cuh", "rest < kThreads ? rest : kThreads", "kThreads", "totals"),
    ("ordered_sum.cuh", "bad > 0 ? bad : block_join", "false ? bad : block_join", "totals"),
    ("ordered_sum.cuh", "bad = Largest::join(bad, count - i)", "bad = count - i", "totals"),
    ("ordered_sum.cuh", "worst = Largest::join(worst, count - i)", "worst = count - i", "totals"),
    ("grad_stats.cuh", "if (!ending.applies_rule) return;", "", "stats"),
    ("block_join.cuh", "lane < kWarps ? per_warp[lane] : value_t{}", "per_warp[lane]", "stats"),
    ("block_join.cuh", "distance > 0; distance /= 2", "distance > 1; distance /= 2", "stats"),
    ("apply_rule.cuh", "i < count; i += kThreads) out.coefs[i] = coef[0];\n}\n\n// grid",
     "i < count - 1; i += kThreads) out.coefs[i] = coef[0];\n}\n\n// grid", "rules"),
    ("apply_rule.cuh", "i < count; i += kThreads) out.coefs[i] = coef[0];\n}\n\n// All",
     "i < count - 1; i += kThreads) out.coefs[i] = coef[0];\n}\n\n// All", "rules"),
    ("percentile.cuh", "i < count && values[i] < bound", "i <= count && values[i] < bound",
     "percentile"),
    ("percentile.cuh", "first < count; first += kThreads", "first < 1; first += kThreads",
     "percentile"),
    ("percentile.cuh", "below <= rank", "below < rank", "percentile"),
    ("rewrite.cuh", "v + (kInFlight - 1) * kThreads < pieces.vectors",
     "v + (kInFlight - 1) * kThreads <= pieces.vectors", "rewriting"),
    ("rewrite.cuh", "for (; v < pieces.vectors; v += kThreads) {",
     "for (; v <= pieces.vectors; v += kThreads) {", "rewriting"),
    ("rewrite.cuh", "if (thread < pieces.head_len) change", "if (thread <= pieces.head_len) change",
     "rewriting"),
    ("rewrite.cuh", "if (thread < pieces.tail_len) change", "if (thread <= pieces.tail_len) change",
     "rewriting"),
    ("rewrite.cuh", "if (thread < pieces.head_len) pieces.head",
     "if (thread <= pieces.head_len) pieces.head", "rewriting"),
    ("rewrite.cuh", "if (thread < pieces.tail_len) pieces.tail",
     "if (thread <= pieces.tail_len) pieces.tail", "rewriting"),
    ("rewrite.cuh", "int v = thread; v < pieces.vectors; v += kThreads",
     "int v = thread; v <= pieces.vectors; v += kThreads", "rewriting"),
    ("rewrite.cuh", "if (coef == kRefuse)", "if (false)", "rewriting"),
    ("rewrite.cuh", "fabs(coef) < kSmallestNormalFloat && coef != 0.0", "false", "rewriting"),
    ("rewrite.cuh", "if (change.wants(place.row))", "if (true)", "rewriting"),
    ("rewrite.cuh", "row < end; row += kThreads", "row < end - 1; row += kThreads", "rewriting"),
    ("rewrite.cuh", "(c - place.first_chunk + gridDim.x)",
     "(c - place.first_chunk + gridDim.x + 1)", "rewriting"),
    ("rewrite.cuh", "else if (drops)", "else if (false)", "rewriting"),
    ("fingerprint.cuh", "byte + i < end", "byte + i <= end", "fingerprints"),
    ("fingerprint.cuh", "if (v < vectors) words[k]", "if (v <= vectors) words[k]", "fingerprints"),
    ("fingerprint.cuh", "if (v >= vectors) break;", "", "fingerprints"),
    ("fingerprint.cuh", "% kVectorBytes == 0", "% kVectorBytes < 16", "fingerprints"),
    ("fingerprint.cuh", "c < end; c += Crew::kSize", "c <= end; c += Crew::kSize", "fingerprints"),
    ("power_stats.cuh", "i < len; i += kThreads", "i <= len; i += kThreads", "powers"),
    ("power_stats.cuh", "FinishRow<Largest>", "FinishRow<Add>", "powers"),
    ("power_stats.cuh", "i < p; i += 1.0", "i <= p; i += 1.0", "powers"),
    ("agc.cuh", "r < tensor.rows; r += kThreads", "r <= tensor.rows; r += kThreads", "agc"),
    ("agc.cuh", "other = 1; other < kWarps", "other = 1; other < kWarps - 1", "agc"),
    ("agc.cuh", "place.len <= kLongestOfWarp) {", "place.len < kLongestOfWarp) {", "agc"),
    ("agc.cuh", "if (!is_long[w]) continue;", "", "agc"),
    ("agc.cuh", "clips |= !(results.least[t] >= 1.0);", "", "agc"),
    ("block_join.cuh", "__any_sync(kAllLanes, is)", "is", "agc"),
    ("apply_rule.cuh", "clips |= !(coef >= 1.0);", "", "totals"),
    ("agc.cuh", "c < count; ++c", "c < 1; ++c", "agc"),
    ("agc.cuh", "r < rows; r += kThreads) results.row_coefs[r] = kRefuse;",
     "r < rows - 1; r += kThreads) results.row_coefs[r] = kRefuse;", "agc"),
    ("launchers.cu", "this_ending.applies_rule &= is_last;", "", "splitting"),
    ("optim_update.cuh", "len - len % kWidth : 0", "len : 0", "update"),
    ("optim_update.cuh", "].first_chunk <= chunk", "].first_chunk < chunk", "update"),
    ("optim_update.cuh", "rest < kDeviceChunk ? rest : kDeviceChunk", "rest", "update"),
    ("optim_update.cuh", "is_multiple(entry.p, kWidth * param_size)", "true", "update_loops"),
    ("optim_update.cuh", "is_multiple(entry.g, kWidth * grad_size)", "true", "update_loops"),
    ("optim_update.cuh", "is_multiple(entry.m, kWidth * kSize)", "true", "update_loops"),
    ("optim_update.cuh", "is_multiple(entry.v, kWidth * kSize)", "true", "update_loops"),
    ("optim_update.cuh", "is_multiple(entry.largest, kWidth * kSize)", "true", "update_loops"),
    ("optim_update.cuh", "moved(entry.g, first * grad_size)", "moved(entry.g, first * param_size)",
     "update"),
    ("optim_update.cuh", "moved(entry.v, first * kSize)", "moved(entry.v, 0)", "update"),
    ("optim_update.cuh", "from.bad >> k * kBadBits & kMask", "from.bad & kMask", "update_loops"),
    ("optim_update.cuh", "if (param_format != grad_format) {", "if (false) {", "update_loops"),
    ("optim_update.cuh", "(work->flags & kMaximize) ? -coef : coef", "coef", "update_loops"),
    ("optim_update.cuh", "if (blockIdx.x != 0) return;", "", "update"),
    ("optim_update.cuh", "w < kWarps; ++w) total += per_warp[w].words",
     "w < kWarps - 1; ++w) total += per_warp[w].words", "update_loops"),
    ("optim_update.cuh", "w < kWarps; ++w) total += per_warp[w].numbers",
     "w < kWarps - 1; ++w) total += per_warp[w].numbers", "update_loops"),
    ("optim_update.cuh", "(sums.words[k] & mask)", "sums.words[k]", "update"),
    ("update_elements.cuh", "*static_cast<uint4*>(to) = {a, b, c, d};",
     "*static_cast<uint4*>(to) = {a, b, c, c};", "update"),
    ("update_elements.cuh", "static_cast<uint32_t>(x[3].bits) << 16", "x[3].bits", "update_loops"),
    ("update_elements.cuh", "static_cast<uint32_t>(high >> 32)", "static_cast<uint32_t>(high)",
     "update_loops"),
    ("update_elements.cuh", "p[k] = p[k] - change[k];", "p[k] = p[k] + change[k];", "update_loops"),
    ("update_elements.cuh", "i < whole; i += kThreads * kWidth",
     "i <= whole; i += kThreads * kWidth", "update_loops"),
    ("update_elements.cuh", "i < len; i += kThreads", "i <= len; i += kThreads", "update_loops"),
    ("update_elements.cuh", "drops && !is_finite(g[k])", "false", "update_loops"),
    ("update_elements.cuh", "is_tiny ? scaled : plain", "plain", "update_loops"),
    ("update_elements.cuh", "if (work.scalars.l2 != value_t{}) {", "if (false) {", "update_loops"),
    ("update_elements.cuh", "if (trustworthy<value_t>(quick)) {", "if (true) {", "update_loops"),
    ("update_elements.cuh", "suspects |= any_bad<kCount>(m);", "(void)0;", "update_loops"),
    ("update_elements.cuh", "suspects |= any_bad<kCount>(v);", "(void)0;", "update_loops"),
    ("update_elements.cuh", "sums.words[4] += store_state", "store_state", "update_loops"),
    ("update_launcher.cu", "if ((tensor.param_format == Format::kFloat64) != is_wide) break;", "",
     "update_loops"),
    ("update_launcher.cu", "if (groups == kMaxGroups) break;", "", "update"),
    ("update_launcher.cu", "arguments.is_last_table = next == count;", "", "update"),
]  # fmt: skip

# A few of each kind, for the run that everybody makes.
QUICK = (
    "ticket.cuh: delete __threadfence() 1",
    "ticket.cuh: delete __syncthreads() 1",
    "block_join.cuh: delete __syncthreads() 2",
    "chunk_stats.cuh: left > kRound + kToLast -> left >= kRound + kToLast",
    "ticket.cuh: if (is_last[0]) *ticket.word = 0; -> nothing",
)

# Which check looks at the barriers of which file.
LOOKS_AT = {
    "agc.cuh": "agc",
    "apply_rule.cuh": "rules",
    "block_join.cuh": "stats",
    "ordered_sum.cuh": "totals",
    "percentile.cuh": "percentile",
    "rewrite.cuh": "rewriting",
    "fingerprint.cuh": "fingerprints",
    "power_stats.cuh": "powers",
    "optim_update.cuh": "update",
    "update_elements.cuh": "update_loops",
}


@dataclass(frozen=True)
class Mutation:
    """One change of one file, and the check expected to notice."""

    name: str
    file: str
    text: str  # of the whole file, changed
    check: str


def mutations() -> list[Mutation]:
    """Return all mutations. Raises if one of BENT does not fit the source any more."""
    found = []
    for path in sorted(KERNELS.glob("*.cuh")):
        text = path.read_text()
        for call in ("__syncthreads()", "__threadfence()"):
            for number, match in enumerate(re.finditer(re.escape(call), text), 1):
                changed = text[: match.start()] + "(void)0" + text[match.end() :]
                name = f"{path.name}: delete {call} {number}"
                check = LOOKS_AT.get(path.name, "stats")
                if (path.name, number) == ("grad_stats.cuh", 2):
                    check = "rules"  # the barrier before a rule
                found.append(Mutation(name, path.name, changed, check))
        for vote in re.finditer(r"(__syncthreads_(?:or|count))\(", text):
            changed = text[: vote.start()] + "static_cast<int>(" + text[vote.end() :]
            check = LOOKS_AT[path.name]
            found.append(Mutation(f"{path.name}: {vote[1]} -> own", path.name, changed, check))
    for file, before, after, check in BENT:
        text = (KERNELS / file).read_text()
        if text.count(before) != 1:
            raise ValueError(f"{file} has {before!r} {text.count(before)} times; expected once")
        name = " ".join(f"{file}: {before} -> {after or 'nothing'}".split())
        found.append(Mutation(name, file, text.replace(before, after), check))
    return found


def outcome(mutation: Mutation | None, folder: Path) -> str:
    """Return what notices the mutation; an empty string if nothing does."""
    root = folder / "project"
    shutil.copytree(build.ROOT / "csrc", root / "csrc")
    shutil.copytree(build.HERE, root / "tests/simt", ignore=shutil.ignore_patterns("*.py", "__*"))
    if mutation:
        (root / "csrc/cuda" / mutation.file).write_text(mutation.text)
    sanitizers = ["plain", "asan", "tsan"]
    if mutation and any(text in mutation.name for text in INVISIBLE):
        sanitizers.reverse()
    for sanitizer in sanitizers:
        noticed = _run(root, folder / sanitizer, sanitizer, SEEDS[sanitizer], mutation)
        if noticed:
            return f"{sanitizer}: {noticed}"
    return ""


def _run(root: Path, program: Path, sanitizer: str, seeds: int, mutation: Mutation | None) -> str:
    source = root / "tests/simt/kernel_check.cpp"
    small = ["-DZCLIP_LARGE_ARGUMENTS=0", "-DZCLIP_BLOCK_THREADS=64"]
    small += ["-DZCLIP_SLOTS_PER_WARP=2", "-w"]
    # Compiling takes longer than running, so nothing is optimised.
    flags = [*build.FLAGS, *build.SANITIZERS[sanitizer], "-O0", *small, "-DZCLIP_SIMT"]
    includes = [f"-I{source.parent}"]
    compiled = subprocess.run(
        ["g++", *flags, *includes, "-x", "c++", str(source), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    if compiled.returncode:
        return "does not compile: " + compiled.stderr[:300]
    checks = [mutation.check] if mutation else []
    try:
        done = subprocess.run(
            [program, "0", str(seeds), *checks],
            capture_output=True,
            text=True,
            check=False,
            env=build.environment(sanitizer),
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "never ends"
    if done.returncode == 0:
        return ""
    report = re.search(r"(ERROR|WARNING|runtime error)[^\n]*", done.stderr)
    said = report[0] if report else done.stdout
    return " ".join(said.split())[:100] or f"ended with {done.returncode}"


def sweep(chosen: list[Mutation], workers: int = 2) -> dict[str, str]:
    """Return what noticed each mutation, by its name."""

    def judge(mutation: Mutation) -> tuple[str, str]:
        with tempfile.TemporaryDirectory() as folder:
            noticed = outcome(mutation, Path(folder))
        print(f"{'caught  ' if noticed else 'SURVIVED'} {mutation.name}  [{noticed}]", flush=True)
        return mutation.name, noticed

    with ThreadPoolExecutor(workers) as pool:
        return dict(pool.map(judge, chosen))


def main() -> int:
    words = sys.argv[1:]
    chosen = [m for m in mutations() if not words or any(w in m.name for w in words)]
    results = sweep(chosen)
    survivors = [name for name, noticed in results.items() if not noticed]
    broken = [name for name, noticed in results.items() if "does not compile" in noticed]
    print(f"{len(results)} mutations, {len(survivors)} survived, {len(broken)} did not compile")
    return 1 if survivors or broken else 0


if __name__ == "__main__":
    sys.exit(main())
