"""The table of exceptions: what each is taken for, traps included. No library is imported."""

import errno
import http.client
import json
import pickle
import socket
import ssl
import struct
import urllib.error
import zlib

import pytest

from heal.causes import Cause, Family, Severity
from heal.diagnose import diagnose_exception


def made_in(module, name, *bases):
    """A class that says it comes from a library that need not be installed."""
    return type(name, bases or (Exception,), {"__module__": module})


TorchOOM = made_in("torch", "OutOfMemoryError", RuntimeError)
Accelerator = made_in("torch", "AcceleratorError", RuntimeError)
Dist = made_in("torch.distributed", "DistBackendError", RuntimeError)
DistNetwork = made_in("torch.distributed", "DistNetworkError", RuntimeError)
DistStore = made_in("torch.distributed", "DistStoreError", RuntimeError)
RequestsTimeout = made_in("requests.exceptions", "ReadTimeout", OSError)
RequestsConnection = made_in("requests.exceptions", "ConnectionError", OSError)
HttpxConnect = made_in("httpx", "ConnectError", Exception)
RateLimit = made_in("openai", "RateLimitError", Exception)
Aio = made_in("aiohttp.client_exceptions", "ServerDisconnectedError", Exception)
Boto = made_in("botocore.exceptions", "EndpointConnectionError", Exception)
HttpStatus = made_in("httpx", "HTTPStatusError", Exception)
BadImage = made_in("PIL", "UnidentifiedImageError", OSError)
Arrow = made_in("pyarrow.lib", "ArrowInvalid", ValueError)
Checkpoint = made_in("torch.distributed.checkpoint.api", "CheckpointException", BaseException)
UserTimeout = made_in("my_project", "ConnectTimeoutConfigError", Exception)


def with_status(exc, status):
    exc.response = type("Response", (), {"status_code": status})()
    return exc


def raised_from(outer, inner):
    outer.__cause__ = inner
    return outer


OOM, NET, DATA = Cause.OUT_OF_MEMORY, Cause.NETWORK_ERROR, Cause.DATA_ERROR
COLLECTIVE, DEVICE, UNKNOWN = Cause.COLLECTIVE_ERROR, Cause.DEVICE_ERROR, Cause.UNKNOWN
STORAGE = Cause.STORAGE_ERROR
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
WATCHDOG = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE)"
SHAPES = "mat1 and mat2 shapes cannot be multiplied (4x10 and 8x2)"
NCCL_OOM = "NCCL error: unhandled cuda error. Cuda failure 2 'out of memory'"
BACKWARD_TWICE = "Trying to backward through the graph a second time"
TWO_DEVICES = "Expected all tensors to be on the same device, but found cuda:0 and cpu!"

TABLE = [
    # Out of memory, by type and by every text that allocators have.
    (TorchOOM("CUDA out of memory. Tried to allocate 2.00 GiB"), OOM),
    (MemoryError(), OOM),
    (RuntimeError("CUDA error: out of memory"), OOM),
    (Accelerator("CUDA error: out of memory\nCUDA kernel errors might be reported later"), OOM),
    (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0)"), OOM),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), OOM),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), OOM),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 80 GB"), OOM),
    (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9"), OOM),
    (RuntimeError("MPS backend out of memory (MPS allocated: 5 GB)"), OOM),
    (RuntimeError("HIP out of memory. Tried to allocate 2 GiB"), OOM),
    (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes"), OOM),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), OOM),
    # Traps: talk about memory that no smaller batch cures.
    (ValueError("out of memory budget for the replay buffer"), UNKNOWN),
    (RuntimeError("Kernel size can't be greater than actual input size"), Cause.DATA_ERROR),
    (RuntimeError("Given input size: (8x1x1). Output size is too small"), Cause.DATA_ERROR),
    (Dist(NCCL_OOM), COLLECTIVE),
    (RuntimeError(NCCL_OOM), COLLECTIVE),
    # Collectives: never the network's fault, whatever type they come in.
    (Dist("NCCL error in: ProcessGroupNCCL.cpp:1691"), COLLECTIVE),
    (DistNetwork("The client socket has timed out after 60000ms"), COLLECTIVE),
    (DistStore("Timed out after 31 seconds waiting for clients. 1/2 clients joined."), COLLECTIVE),
    (RuntimeError(WATCHDOG), COLLECTIVE),
    (RuntimeError(GLOO), COLLECTIVE),
    (TimeoutError("NCCL timeout in all_reduce"), COLLECTIVE),
    (ConnectionError("gloo: rank 3 is gone"), COLLECTIVE),
    (TimeoutError("TCPStore: wait timeout after 300s"), COLLECTIVE),
    (RuntimeError("Rank 1 failed to pass monitoredBarrier in 30000 ms"), COLLECTIVE),
    # The device is of no more use to this process.
    (RuntimeError("CUDA error: device-side assert triggered"), DEVICE),
    (Accelerator("CUDA error: an illegal memory access was encountered"), DEVICE),
    (RuntimeError("CUDA error: uncorrectable ECC error encountered"), DEVICE),
    (RuntimeError("CUDA error: unspecified launch failure"), DEVICE),
    # Network and services.
    (ConnectionError("refused"), NET),
    (ConnectionResetError(errno.ECONNRESET, "reset"), NET),
    (TimeoutError("timed out"), NET),
    (socket.gaierror(-2, "Name or service not known"), NET),
    (ssl.SSLEOFError(8, "EOF occurred in violation of protocol"), NET),
    (http.client.IncompleteRead(b""), NET),
    (http.client.RemoteDisconnected("closed"), NET),
    (urllib.error.URLError("unreachable"), NET),
    (urllib.error.HTTPError("u", 503, "Service Unavailable", None, None), NET),
    (RequestsTimeout("read timed out"), NET),
    (RequestsConnection("max retries"), NET),
    (HttpxConnect("all connection attempts failed"), NET),
    (with_status(RateLimit("slow down"), 429), NET),
    (with_status(HttpStatus("bad gateway"), 502), NET),
    (Aio("Server disconnected"), NET),
    (Boto("Could not connect to the endpoint URL"), NET),
    (OSError(errno.ENETUNREACH, "Network is unreachable"), NET),
    (raised_from(ValueError("cannot load the dataset"), ConnectionError("down")), NET),
    # Traps: waiting does not cure these.
    (urllib.error.HTTPError("u", 404, "Not Found", None, None), UNKNOWN),
    (with_status(HttpStatus("unauthorized"), 401), UNKNOWN),
    (UserTimeout("bad value of timeout"), UNKNOWN),
    (ValueError("api_key and timeout must be given"), UNKNOWN),
    # Storage.
    (OSError(errno.ENOSPC, "No space left on device"), STORAGE),
    (OSError(errno.EROFS, "Read-only file system"), STORAGE),
    (Checkpoint("CheckpointException ranks: [0]"), STORAGE),
    # Data.
    (RuntimeError(SHAPES), DATA),
    (RuntimeError("stack expects each tensor to be equal size, but got [3] at entry 0"), DATA),
    (RuntimeError("The size of tensor a (4) must match the size of tensor b (3)"), DATA),
    (RuntimeError("expected scalar type Float but found Double"), DATA),
    (RuntimeError("DataLoader worker (pid 9) is killed by signal: Killed."), DATA),
    (IndexError("index out of range in self"), DATA),
    (IndexError("Target 11 is out of bounds."), DATA),
    (KeyError("input_ids"), DATA),
    (ValueError("Expected input batch_size (4) to match target batch_size (3)."), DATA),
    (TypeError("default_collate: batch must contain tensors; found <class 'NoneType'>"), DATA),
    (EOFError("Ran out of input"), DATA),
    (FileNotFoundError(errno.ENOENT, "No such file", "img_17.png"), DATA),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), DATA),
    (json.JSONDecodeError("Expecting value", "", 0), DATA),
    (pickle.UnpicklingError("invalid load key"), DATA),
    (zlib.error("Error -3 while decompressing data"), DATA),
    (struct.error("unpack requires a buffer of 4 bytes"), DATA),
    (BadImage("cannot identify image file"), DATA),
    (Arrow("Could not convert"), DATA),
    # Traps: errors of the program come again with every batch.
    (AttributeError("'NoneType' object has no attribute 'shape'"), UNKNOWN),
    (ImportError("cannot import name 'shape'"), UNKNOWN),
    (NameError("name 'index' is not defined"), UNKNOWN),
    (NotImplementedError("shape inference"), UNKNOWN),
    (AssertionError("shape"), UNKNOWN),
    (PermissionError(errno.EACCES, "Permission denied"), UNKNOWN),
    (RuntimeError(BACKWARD_TWICE), UNKNOWN),
    (RuntimeError(TWO_DEVICES), UNKNOWN),
    (RecursionError("maximum recursion depth exceeded"), UNKNOWN),
    # NaN told by an exception.
    (
        RuntimeError("Function 'LogBackward0' returned nan values in its 0th output."),
        Cause.NONFINITE_GRADIENT,
    ),
    (
        RuntimeError("The total norm of order 2.0 for gradients from `parameters` is non-finite"),
        Cause.NONFINITE_GRADIENT,
    ),
    (FloatingPointError("overflow"), Cause.NONFINITE_LOSS),
    # Not ours to judge.
    (KeyboardInterrupt(), UNKNOWN),
    (SystemExit(3), UNKNOWN),
]


@pytest.mark.parametrize(
    ("exc", "cause"), TABLE, ids=[f"{type(e).__name__}-{str(e)[:40]}" for e, _ in TABLE]
)
def test_an_exception_is_taken_for(exc, cause):
    diagnosis = diagnose_exception(exc, step=7)
    assert diagnosis.cause is cause
    assert (diagnosis.step, diagnosis.bad_step) == (7, 7)
    assert 0.0 < diagnosis.confidence <= 1.0
    is_fatal = diagnosis.severity is Severity.FATAL
    assert is_fatal == (diagnosis.family is Family.STOP)
    assert diagnosis.evidence["type"].endswith(type(exc).__name__)


def test_in_the_loader_an_error_that_is_nobody_elses_is_the_datas():
    odd = made_in("my_dataset", "OddSample")("?")
    assert diagnose_exception(odd).cause is Cause.UNKNOWN
    assert diagnose_exception(odd, phase="data").cause is Cause.DATA_ERROR
    assert diagnose_exception(TorchOOM("x"), phase="data").cause is Cause.OUT_OF_MEMORY
    assert diagnose_exception(NameError("x"), phase="data").cause is Cause.UNKNOWN


ALLOCATOR = "[enforce fail] DefaultCPUAllocator: can't allocate memory: 80 TB"
BY_WORKER = "Caught FileNotFoundError in DataLoader worker process 0.\n{}: /data/collective/1.jpg"

OF_ONE_SAMPLE = [
    MemoryError("Unable to allocate 291. TiB for an array"),
    RuntimeError(ALLOCATOR),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    urllib.error.HTTPError("u", 404, "Not Found", None, None),
    with_status(HttpStatus("forbidden"), 403),
    AssertionError("bad image"),
    AttributeError("'NoneType' object has no attribute 'shape'"),
    PermissionError(errno.EACCES, "Permission denied", "img_17.png"),
    FileNotFoundError(errno.ENOENT, "No such file", "/data/collective/17.png"),
    FileNotFoundError(BY_WORKER.format("FileNotFoundError")),
    RuntimeError(BY_WORKER.format("RuntimeError")),
]


@pytest.mark.parametrize("exc", OF_ONE_SAMPLE, ids=lambda e: f"{type(e).__name__}-{str(e)[:30]}")
def test_in_the_loader_what_one_sample_may_raise_is_the_datas(exc):
    assert diagnose_exception(exc, phase="data").cause is DATA


def test_what_waiting_or_room_on_the_device_cures_is_not_the_datas_in_the_loader_either():
    gone = urllib.error.HTTPError("u", 503, "Service Unavailable", None, None)
    assert diagnose_exception(gone, phase="data").cause is NET
    on_device = RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0)")
    assert diagnose_exception(on_device, phase="data").cause is OOM
    assert diagnose_exception(RuntimeError(WATCHDOG), phase="data").cause is COLLECTIVE


@pytest.mark.parametrize("phase", ["", "data", "forward"])
def test_a_file_fails_in_no_collective(phase):
    lost = FileNotFoundError(errno.ENOENT, "No such file", "/data/nccl/17.png")
    assert diagnose_exception(lost, phase=phase).cause is DATA


def test_the_loader_of_a_process_without_others_fails_in_no_collective():
    torn = RuntimeError("no annotation of the collective 17")
    assert diagnose_exception(torn, phase="data").cause is COLLECTIVE
    assert diagnose_exception(torn, phase="data", is_alone=True).cause is DATA
    assert diagnose_exception(torn, phase="open", is_alone=True).cause is UNKNOWN
    assert diagnose_exception(torn, phase="forward", is_alone=True).cause is COLLECTIVE
    assert diagnose_exception(Dist("NCCL"), phase="data", is_alone=True).cause is COLLECTIVE


def test_types_outrank_messages():
    assert (
        diagnose_exception(TorchOOM("x")).confidence
        > diagnose_exception(RuntimeError("CUDA error: out of memory")).confidence
    )


def test_a_chain_of_causes_may_be_a_ring():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert diagnose_exception(first).cause is Cause.UNKNOWN


def test_an_exception_that_cannot_speak_is_unknown():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    diagnosis = diagnose_exception(Mute())
    assert (diagnosis.cause, diagnosis.evidence["message"]) == (Cause.UNKNOWN, "")


def test_long_messages_are_cut():
    assert len(diagnose_exception(TorchOOM("x" * 10_000)).evidence["message"]) == 500
