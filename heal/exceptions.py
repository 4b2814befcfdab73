"""Which cause an exception speaks of: by its type first, by its message second.

Knows torch, requests, httpx and the like by the names of their classes only: nothing is imported.
The order of the rules matters. A collective that timed out must never pass for a slow network, nor
an NCCL failure that mentions memory for one that a smaller batch would cure: other ranks are
waiting in the same collective and a retry would hang them.
"""

import builtins
import errno
import re

from heal.causes import Cause

Match = tuple[Cause, float, str]
"""Cause, confidence, and what gave it away."""

BY_TYPE, BY_MESSAGE, GUESS = 0.95, 0.8, 0.5

COLLECTIVE_TYPES = {
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "DistError",
    "RendezvousError",
    "RendezvousTimeoutError",
    "RendezvousConnectionError",
    "RendezvousClosedError",
}
COLLECTIVE_TEXT = re.compile(
    r"nccl|\bgloo\b|c10d|\bprocess ?group|\bcollective\b|all_?reduce|all_?gather|reduce_?scatter"
    r"|monitored_?barrier|tcp_?store|rendezvous",
    re.IGNORECASE,
)
DEVICE_TEXT = re.compile(
    r"device-side assert|illegal memory access|unspecified launch failure|uncorrectable ECC"
    r"|illegal instruction|misaligned address|NVLink|\bXid\b|hardware stack error"
    r"|device (?:not ready|is lost|unavailable)|fell off the bus|HSA_STATUS_ERROR",
    re.IGNORECASE,
)
MEMORY_TYPES = {"OutOfMemoryError", "OutOfMemoryException"}
MEMORY_TEXT = re.compile(
    r"(?:CUDA|HIP|XPU|MPS|NPU)\b.{0,40}?out of memory|out of memory\. Tried to allocate"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUSOLVER_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: (?:can't|not enough)|can't allocate memory|RESOURCE_EXHAUSTED"
    r"|unable to (?:mmap|allocate)"
    # What oneDNN says when it finds no memory for a kernel or for its scratch space.
    r"|could not (?:create|execute) a primitive(?! desc)|could not initialize a memory object",
    re.IGNORECASE | re.DOTALL,
)
HOST_MEMORY_TEXT = re.compile(r"DefaultCPUAllocator|unable to mmap", re.IGNORECASE)
NONFINITE_TEXT = re.compile(
    r"returned nan values|for gradients from .{0,40} is non-finite|loss is (?:nan|inf)",
    re.IGNORECASE,
)
NETWORK_MODULES = {
    "requests",
    "urllib3",
    "httpx",
    "httpcore",
    "aiohttp",
    "botocore",
    "boto3",
    "openai",
    "anthropic",
    "grpc",
    "google",
    "huggingface_hub",
    "websockets",
    "fsspec",
    "s3fs",
    "gcsfs",
    "http",
    "urllib",
    "socket",
    "ssl",
}
NETWORK_NAMES = re.compile(
    r"Timeout|Timed|Connect|Network|Protocol|ChunkedEncoding|RateLimit|Overloaded"
    r"|ServiceUnavailable|InternalServer|Throttl|RemoteDisconnected|IncompleteRead|NameResolution"
    r"|ServerDisconnected|ClientOSError|ReadError|WriteError|URLError|gaierror|herror|MaxRetry"
    r"|SSLEOF|SSLZeroReturn",
)
RETRY_STATUS = {408, 425, 429, *range(500, 600)}
STORAGE_ERRNO = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}
NETWORK_ERRNO = {
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.ETIMEDOUT,
    errno.ECONNREFUSED,
}
STORAGE_TYPES = {"CheckpointException"}
DATA_TYPES = {
    "UnidentifiedImageError",
    "DecompressionBombError",
    "UnpicklingError",
    "JSONDecodeError",
    "UnicodeDecodeError",
    "BadZipFile",
    "BadGzipFile",
    "ArrowInvalid",
    "ParserError",
    "SafetensorError",
    "EOFError",
    "IndexError",
    "KeyError",
    "FileNotFoundError",
}
DATA_ROOTS = {("zlib", "error"), ("struct", "error"), ("lzma", "LZMAError"), ("_csv", "Error")}
DATA_TEXT = re.compile(
    r"\bshapes?\b|\bdimensions?\b|\bsize mismatch|size of tensor|sizes? of tensors|equal size"
    r"|index(?:es)? out of|out of range|out of bounds|inhomogeneous|too many dimensions"
    r"|must match the size|batch[_ ]size|expected scalar type|found dtype|must have the same dtype"
    r"|default_collate|\bcollate|DataLoader worker|DataLoader timed out|Expected (?:input|target)"
    r"|input size per channel|kernel size can't|output size is too small|optional 0 dim batch size"
    r"|only batches of spatial targets|Target \d+ is out|invalid for input of size",
    re.IGNORECASE,
)
BUG_TYPES = (
    AttributeError,
    NameError,
    ImportError,
    SyntaxError,
    NotImplementedError,
    AssertionError,
    RecursionError,
    PermissionError,
)
"""Errors of the program: they come again with every batch, so that skipping one hides them."""

BUG_OR_SAMPLE_TYPES = (AttributeError, AssertionError, PermissionError)
"""Those that a dataset raises for a bad sample, too: an image that is None, a check that fails."""

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

    Args:
        exc: what was raised.
        phase: where, see :func:`heal.diagnose.diagnose_exception`.
        is_alone: whether there is no other process that a loader could share a collective with.
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
    match = (
        _stopping(exc, text, may_speak=not (is_alone and phase in LOADER_PHASES))
        or _memory(exc, text)
        or _waiting(exc)
        or _nonfinite(exc, text)
        or _data(exc, text, phase)
        or (Cause.UNKNOWN, GUESS, type(exc).__name__)
    )
    return _of_one_sample(exc, text, match) if phase == "data" else match


def _of_one_sample(exc: BaseException, text: str, match: Match) -> Match:
    """Blame the data for what the loader raised, where elsewhere it would be something else.

    A torn header may ask for terabytes, which no smaller micro-batch makes room for; one link may
    be dead. If it is not one sample, too many fail in a row.
    """
    cause, confidence, matched = match
    is_of_host = isinstance(exc, (MemoryError, OSError)) or HOST_MEMORY_TEXT.search(text)
    is_dead_link = cause is Cause.UNKNOWN and _http_status(exc) is not None
    is_bad_sample = cause is Cause.UNKNOWN and isinstance(exc, BUG_OR_SAMPLE_TYPES)
    if (cause is Cause.OUT_OF_MEMORY and is_of_host) or is_dead_link or is_bad_sample:
        return Cause.DATA_ERROR, min(confidence, BY_MESSAGE), matched
    return match


def _names(exc: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(exc).__mro__}


def _first(names: set[str], known: set[str]) -> str:
    return min(names & known, default="")


def _stopping(exc: BaseException, text: str, may_speak: bool) -> Match | None:
    """Errors after which the process, or its group, is of no more use.

    Args:
        exc: what was raised.
        text: what it says.
        may_speak: whether a word in the text is enough to tell of a collective.
    """
    name = _first(_names(exc), COLLECTIVE_TYPES)
    if name:
        return Cause.COLLECTIVE_ERROR, BY_TYPE, name
    # Errors of the network are looked at too: gloo and the store raise them by these types. But a
    # file may lie in /data/collective, and workers of a loader take part in nothing.
    is_of_file = isinstance(exc, OSError) and exc.filename is not None
    may_speak = may_speak and not (is_of_file or FROM_WORKER.match(text))
    if may_speak and isinstance(exc, (RuntimeError, OSError)):
        found = COLLECTIVE_TEXT.search(text)
        if found:
            return Cause.COLLECTIVE_ERROR, BY_MESSAGE, found.group()
    if isinstance(exc, RuntimeError):
        found = DEVICE_TEXT.search(text)
        if found:
            return Cause.DEVICE_ERROR, BY_MESSAGE, found.group()
    return None


def _memory(exc: BaseException, text: str) -> Match | None:
    name = _first(_names(exc), MEMORY_TYPES)
    if name or isinstance(exc, MemoryError):
        return Cause.OUT_OF_MEMORY, BY_TYPE, name or "MemoryError"
    if isinstance(exc, RuntimeError):  # no other type: a ValueError may talk about memory
        found = MEMORY_TEXT.search(text)
        if found:
            return Cause.OUT_OF_MEMORY, BY_MESSAGE, found.group()
    if isinstance(exc, OSError) and exc.errno == errno.ENOMEM:
        return Cause.OUT_OF_MEMORY, BY_TYPE, "ENOMEM"
    return None


def _waiting(exc: BaseException) -> Match | None:
    """Errors that time may cure."""
    status = _http_status(exc)
    if status is not None:
        cause = Cause.NETWORK_ERROR if status in RETRY_STATUS else Cause.UNKNOWN
        return cause, BY_TYPE, f"HTTP status {status}"
    if isinstance(exc, (ConnectionError, TimeoutError)):
        return Cause.NETWORK_ERROR, BY_TYPE, type(exc).__name__
    for kind in type(exc).__mro__:
        from_network = kind.__module__.split(".")[0] in NETWORK_MODULES
        if from_network and NETWORK_NAMES.search(kind.__name__):
            return Cause.NETWORK_ERROR, BY_TYPE, kind.__name__
    name = _first(_names(exc), STORAGE_TYPES)
    if name:
        return Cause.STORAGE_ERROR, BY_TYPE, name
    if isinstance(exc, OSError):
        number = exc.errno
        if number in STORAGE_ERRNO:
            return Cause.STORAGE_ERROR, BY_TYPE, errno.errorcode[number]
        if number in NETWORK_ERRNO:
            return Cause.NETWORK_ERROR, BY_TYPE, errno.errorcode[number]
    return None


def _http_status(exc: BaseException) -> int | None:
    """Return the status of an HTTP error, wherever its library keeps it."""
    response = getattr(exc, "response", None)
    for owner, attribute in (
        (response, "status_code"),
        (response, "status"),
        (exc, "status_code"),
        (exc, "status"),
        (exc, "code"),
    ):
        status = getattr(owner, attribute, None)
        if isinstance(status, int) and not isinstance(status, bool) and 400 <= status < 600:
            return status
    return None


def _nonfinite(exc: BaseException, text: str) -> Match | None:
    if isinstance(exc, FloatingPointError):
        return Cause.NONFINITE_LOSS, BY_TYPE, "FloatingPointError"
    if isinstance(exc, (RuntimeError, ValueError)):
        found = NONFINITE_TEXT.search(text)
        if found:
            return Cause.NONFINITE_GRADIENT, BY_MESSAGE, found.group()
    return None


def _data(exc: BaseException, text: str, phase: str) -> Match | None:
    if isinstance(exc, BUG_TYPES) or not isinstance(exc, Exception):
        return None
    name = _first(_names(exc), DATA_TYPES)
    if name:
        return Cause.DATA_ERROR, BY_TYPE, name
    for kind in type(exc).__mro__:
        if (kind.__module__, kind.__name__) in DATA_ROOTS:
            return Cause.DATA_ERROR, BY_TYPE, f"{kind.__module__}.{kind.__name__}"
    if isinstance(exc, (RuntimeError, ValueError, TypeError)):
        found = DATA_TEXT.search(text)
        if found:
            return Cause.DATA_ERROR, BY_MESSAGE, found.group()
    if phase == "data":
        return Cause.DATA_ERROR, GUESS, "raised by the loader"
    return None
