"""The cause of an exception: by its type first, by its message second.

Knows torch, requests, httpx and the like by the names of their classes only: nothing is imported.
The order of the rules matters. A collective that timed out must never pass for a slow network, nor
an NCCL failure that mentions memory for one that a smaller batch would cure: other ranks are
waiting in the same collective and a retry would hang them.
"""

import builtins
import errno
import re
from typing import NamedTuple

from heal.causes import Cause

Match = tuple[Cause, float, str]
"""Cause, confidence, and what gave it away."""

BY_TYPE, BY_MESSAGE, GUESS = 0.95, 0.8, 0.5


class Rule(NamedTuple):
    """How exceptions of one cause are recognised: by type, else by message, else by errno."""

    cause: Cause
    types: str = ""  # pattern of the full name of the class, or of one that it is derived from
    text: str = ""  # pattern that is searched for in the message, ignoring case
    speakers: tuple[type[BaseException], ...] = (RuntimeError,)  # a ValueError may mention it
    errnos: tuple[int, ...] = ()  # of an OSError

    def match(self, exc: BaseException, text: str) -> Match | None:
        """Return what gives this cause away, None if nothing does."""
        for kind in type(exc).__mro__ if self.types else ():
            if re.fullmatch(self.types, f"{kind.__module__}.{kind.__name__}"):
                return self.cause, BY_TYPE, kind.__name__
        if self.text and isinstance(exc, self.speakers):
            found = re.search(self.text, text, re.IGNORECASE | re.DOTALL)
            if found:
                return self.cause, BY_MESSAGE, found.group()
        if isinstance(exc, OSError) and exc.errno in self.errnos:
            return self.cause, BY_TYPE, errno.errorcode[exc.errno]
        return None


COLLECTIVE = Rule(
    Cause.COLLECTIVE_ERROR,
    types=r".*\.(Dist(Backend|Network|Store)?|Rendezvous(Timeout|Connection|Closed)?)Error",
    text=r"nccl|\bgloo\b|c10d|\bprocess ?group|\bcollective\b|all_?reduce|all_?gather"
    r"|reduce_?scatter|monitored_?barrier|tcp_?store|rendezvous",
    speakers=(RuntimeError, OSError),  # gloo and the store raise errors of the network
)
FATAL_RULES = (
    COLLECTIVE,
    Rule(
        Cause.DEVICE_ERROR,
        text=r"device-side assert|illegal memory access|unspecified launch failure"
        r"|uncorrectable ECC|illegal instruction|misaligned address|NVLink|\bXid\b"
        r"|hardware stack error|device (?:not ready|is lost|unavailable)|fell off the bus"
        r"|HSA_STATUS_ERROR",
    ),
    Rule(
        Cause.OUT_OF_MEMORY,
        types=r".*\.OutOfMemory(Error|Exception)|builtins\.MemoryError",
        text=r"(?:CUDA|HIP|XPU|MPS|NPU)\b.{0,40}?out of memory|out of memory\. Tried to allocate"
        r"|CU(?:BLAS|DNN|SOLVER)_STATUS_ALLOC_FAILED|DefaultCPUAllocator: (?:can't|not enough)"
        r"|can't allocate memory|RESOURCE_EXHAUSTED|unable to (?:mmap|allocate)"
        # What oneDNN says when it finds no memory for a kernel or for its scratch space.
        r"|could not (?:create|execute) a primitive(?! desc)|could not initialize a memory object",
        errnos=(errno.ENOMEM,),
    ),
)
"""Errors that no retry of the same step cures; looked for first."""

NETWORK_LIBRARIES = (
    "requests|urllib3|httpx|httpcore|aiohttp|botocore|boto3|openai|anthropic|grpc|google"
    "|huggingface_hub|websockets|fsspec|s3fs|gcsfs|http|urllib|socket|ssl"
)
NETWORK_NAMES = (
    "Timeout|Timed|Connect|Network|Protocol|ChunkedEncoding|RateLimit|Overloaded"
    "|ServiceUnavailable|InternalServer|Throttl|RemoteDisconnected|IncompleteRead|NameResolution"
    "|ServerDisconnected|ClientOSError|ReadError|WriteError|URLError|gaierror|herror|MaxRetry"
    "|SSLEOF|SSLZeroReturn"
)
DATA = Rule(
    Cause.DATA_ERROR,
    types=r".*\.(UnidentifiedImageError|DecompressionBombError|UnpicklingError|JSONDecodeError"
    r"|UnicodeDecodeError|BadZipFile|BadGzipFile|ArrowInvalid|ParserError|SafetensorError|EOFError"
    r"|IndexError|KeyError|FileNotFoundError)|(zlib|struct)\.error|lzma\.LZMAError|_csv\.Error",
    text=r"\bshapes?\b|\bdimensions?\b|\bsize mismatch|size of tensor|sizes? of tensors|equal size"
    r"|index(?:es)? out of|out of range|out of bounds|inhomogeneous|too many dimensions"
    r"|must match the size|batch[_ ]size|expected scalar type|found dtype|must have the same dtype"
    r"|default_collate|\bcollate|DataLoader worker|DataLoader timed out|Expected (?:input|target)"
    r"|input size per channel|kernel size can't|output size is too small|optional 0 dim batch size"
    r"|only batches of spatial targets|Target \d+ is out|invalid for input of size",
    speakers=(RuntimeError, ValueError, TypeError),
)
RULES = (
    Rule(
        Cause.NETWORK_ERROR,
        types=rf"builtins\.(ConnectionError|TimeoutError)"
        rf"|({NETWORK_LIBRARIES})\.(\w+\.)*\w*({NETWORK_NAMES})\w*",
        errnos=(
            *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH),
            *(errno.ETIMEDOUT, errno.ECONNREFUSED),
        ),
    ),
    Rule(
        Cause.STORAGE_ERROR,
        types=r".*\.CheckpointException",
        errnos=(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE),
    ),
    Rule(Cause.NONFINITE_LOSS, types=r"builtins\.FloatingPointError"),
    Rule(
        Cause.NONFINITE_GRADIENT,
        text=r"returned nan values|for gradients from .{0,40} is non-finite|loss is (?:nan|inf)",
        speakers=(RuntimeError, ValueError),
    ),
)
HOST_MEMORY_TEXT = re.compile(r"DefaultCPUAllocator|unable to mmap", re.IGNORECASE)
RETRY_STATUS = {408, 425, 429, *range(500, 600)}
BUG_OR_SAMPLE_TYPES = (AttributeError, AssertionError, PermissionError)
"""Those that a dataset raises for a bad sample, too: an image that is None, a check that fails."""

BUG_TYPES = (
    *(NameError, ImportError, SyntaxError, NotImplementedError, RecursionError),
    *BUG_OR_SAMPLE_TYPES,
)
"""Errors of the program: they come again with every batch, so that skipping one hides them."""

LOADER_PHASES = ("data", "open")

FROM_WORKER = re.compile(r"Caught \w+ in DataLoader worker process")
"""How torch begins what a worker has raised; the rest is its traceback, with paths in it."""


def qualified_name(exc: BaseException) -> str:
    """Return the class as a person would import it; builtins by their bare name."""
    kind = type(exc)
    if kind.__module__ == builtins.__name__:
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def message_of(exc: BaseException) -> str:
    """Return what an exception says; a broken ``__str__`` must not take the healer down."""
    try:
        return str(exc)
    except Exception:
        return ""


def classify(exc: BaseException, phase: str = "", *, is_alone: bool = False) -> Match:
    """Return the cause of an exception; that of what it was raised from if its own is unknown.

    Phases are those of :func:`heal.diagnose.diagnose_exception`. ``is_alone`` means that a loader
    has no other process to share a collective with.
    """
    match = _classify(exc, phase, is_alone)
    origin = exc.__cause__
    seen = {id(exc)}
    while match[0] is Cause.UNKNOWN and origin is not None and id(origin) not in seen:
        seen.add(id(origin))
        found = _classify(origin, phase, is_alone)
        if found[0] is not Cause.UNKNOWN:
            return found[0], min(found[1], BY_MESSAGE), f"raised from {found[2]}"
        origin = origin.__cause__
    return match


def _classify(exc: BaseException, phase: str, is_alone: bool) -> Match:
    if isinstance(exc, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        return Cause.UNKNOWN, BY_TYPE, type(exc).__name__
    text = message_of(exc)
    for rule in FATAL_RULES:
        match = rule.match(exc, text)
        is_by_word = match is not None and match[1] == BY_MESSAGE
        if rule is COLLECTIVE and is_by_word and not _may_be_collective(exc, text, phase, is_alone):
            continue
        if match is not None:
            return _of_one_sample(exc, text, match, phase)
    rest = (rule.match(exc, text) for rule in RULES)
    match = _http(exc) or next(filter(None, rest), None) or _data(exc, text, phase)
    return _of_one_sample(exc, text, match or (Cause.UNKNOWN, GUESS, type(exc).__name__), phase)


def _may_be_collective(exc: BaseException, text: str, phase: str, is_alone: bool) -> bool:
    """Whether a word in the text is enough: a file may lie in /data/collective."""
    is_of_file = isinstance(exc, OSError) and exc.filename is not None
    is_of_lone_loader = is_alone and phase in LOADER_PHASES
    return not (is_of_file or is_of_lone_loader or FROM_WORKER.match(text))


def _of_one_sample(exc: BaseException, text: str, match: Match, phase: str) -> Match:
    """Attribute to the data what the loader raised, as for a header that asks for terabytes."""
    cause, confidence, matched = match
    is_of_host = isinstance(exc, (MemoryError, OSError)) or HOST_MEMORY_TEXT.search(text)
    is_dead_link = cause is Cause.UNKNOWN and _http_status(exc) is not None
    is_bad_sample = cause is Cause.UNKNOWN and isinstance(exc, BUG_OR_SAMPLE_TYPES)
    is_of_sample = (cause is Cause.OUT_OF_MEMORY and is_of_host) or is_dead_link or is_bad_sample
    if phase == "data" and is_of_sample:
        return Cause.DATA_ERROR, min(confidence, BY_MESSAGE), matched
    return match


def _http(exc: BaseException) -> Match | None:
    status = _http_status(exc)
    if status is None:
        return None
    cause = Cause.NETWORK_ERROR if status in RETRY_STATUS else Cause.UNKNOWN
    return cause, BY_TYPE, f"HTTP status {status}"


def _http_status(exc: BaseException) -> int | None:
    """Return the status of an HTTP error, wherever its library keeps it."""
    for owner in (getattr(exc, "response", None), exc):
        for attribute in ("status_code", "status", "code"):
            status = getattr(owner, attribute, None)
            if isinstance(status, int) and not isinstance(status, bool) and 400 <= status < 600:
                return status
    return None


def _data(exc: BaseException, text: str, phase: str) -> Match | None:
    if isinstance(exc, BUG_TYPES) or not isinstance(exc, Exception):
        return None
    by_loader = (Cause.DATA_ERROR, GUESS, "raised by the loader") if phase == "data" else None
    return DATA.match(exc, text) or by_loader
