"""Streams and events of CUDA devices that are not there, with who has waited for whom.

Under :func:`fake_streams` every operator on a fake tensor is work on the current stream of that
tensor's device, as on a GPU, and every device has a current stream of its own. Work and the host
have vector clocks: what reads memory must come after what wrote it, by the order of one stream, by
an event, or because the host waited. Otherwise it raises, where a GPU would read what was there
before.
"""

import contextlib
import itertools
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves, tree_leaves

from tests.fake_cuda import fake_cuda


class ReadTooEarly(RuntimeError):
    """Memory was read, or written over, before the work that writes it was known to be done."""


class Clock(dict):
    """Of each stream the last piece of work that is known to be done."""

    def learn(self, other):
        for stream, tick in other.items():
            self[stream] = max(tick, self.get(stream, 0))

    def knows(self, write):
        stream, tick = write
        return self.get(stream, 0) >= tick


class Stream:
    """A queue of work on one device."""

    numbers = itertools.count(1)

    def __init__(self, device=None, priority=0, *, layer=None):
        self.layer = layer or Layer.active
        self.device = torch.device("cuda", self.layer.index_of(device))
        self.number = next(self.numbers)
        self.clock = Clock()

    def work(self):
        """Enqueue something: it runs behind all that the host had waited for by now."""
        self.clock.learn(self.layer.host)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.number, self.clock[self.number]

    def record_event(self, event=None):
        event = event or Event(self.device)
        event.record(self)
        return event

    def wait_event(self, event):
        self.clock.learn(event.done)

    def wait_stream(self, other):
        self.clock.learn(other.clock)

    def synchronize(self):
        self.layer.host.learn(self.clock)


class Event:
    """Of a device it keeps only the type, as ``torch.Event`` does."""

    def __init__(self, device=None, **options):
        self.layer = Layer.active
        self.done = Clock()

    def record(self, stream=None):
        stream = stream or self.layer.current_stream()  # of the current device, whatever ours is
        self.done = Clock(stream.clock)
        self.layer.records.append(stream)

    def wait(self, stream=None):
        (stream or self.layer.current_stream()).wait_event(self)

    def synchronize(self):
        self.layer.host.learn(self.done)

    def query(self):
        return self.layer.host.items() >= self.done.items()


class Layer(TorchDispatchMode):
    """Notes which stream writes what.

    Attributes:
        records: the stream of every event that was recorded, in order.
        host: what the host has waited for.
    """

    active = None

    def __init__(self):
        super().__init__()
        self.host = Clock()
        self.records = []
        self.device = 0
        self.writes = {}  # of a storage: the work that wrote it last
        self.kept = []  # storages, so that no address is used twice
        self.pinned = set()
        self.streams = {}

    def index_of(self, device):
        device = torch.device("cuda", device) if isinstance(device, int) else device
        device = torch.device(device) if isinstance(device, str) else device
        index = getattr(device, "index", None)
        return self.device if index is None else index

    def current_stream(self, device=None):
        index = self.index_of(device)
        if index not in self.streams:
            self.streams[index] = Stream(index, layer=self)
        return self.streams[index]

    @contextlib.contextmanager
    def on_stream(self, stream):
        before = self.current_stream(stream.device), self.device
        self.streams[stream.device.index], self.device = stream, stream.device.index
        try:
            yield
        finally:
            self.streams[stream.device.index], self.device = before

    @contextlib.contextmanager
    def on_device(self, device):
        before, self.device = self.device, self.index_of(device)
        try:
            yield
        finally:
            self.device = before

    def read_by_host(self, tensor):
        """Raise unless the host may look at this memory now."""
        if tensor.device.type != "cpu":
            raise ReadTooEarly(f"the host reads memory of {tensor.device}, which waits")
        self._check("the host", self.host, [tensor])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func._schema.name == "aten::_local_scalar_dense":
            self.read_by_host(args[0])
            return 0.0 if args[0].is_floating_point() else 0
        wants_pinned = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        given = [t for t in arg_tree_leaves(*args, **kwargs) if isinstance(t, torch.Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if wants_pinned:
            self.pinned |= {self._memory(t) for t in made}
        queues = {self.current_stream(t.device) for t in given + made if t.device.type == "cuda"}
        written = [*_written(func, args, kwargs), *(t for t in made if self._is_new(t, given))]
        if func._schema.name in ("aten::empty_like", "aten::detach") or not func._schema.arguments:
            return result
        if not queues:  # on the host, at once
            self._check("the host", self.host, given)
            return result
        for one in queues:  # a copy between devices is ordered on both
            for other in queues - {one}:
                one.wait_stream(other)
        for stream in queues:
            moment = stream.work()
            self._check(func, stream.clock, given)
        for tensor in written:
            if tensor.device.type == "cpu" and self._memory(tensor) not in self.pinned:
                raise ReadTooEarly(f"{func} copies into memory that is not pinned, which waits")
            self.writes[self._memory(tensor)] = moment
        return result

    def _check(self, who, clock, tensors):
        for tensor in tensors:
            write = self.writes.get(self._memory(tensor))
            if write is not None and not clock.knows(write):
                raise ReadTooEarly(
                    f"{who} touches memory that stream {write[0]} writes, without having waited"
                )

    def _memory(self, tensor):
        storage = tensor.untyped_storage()
        self.kept.append(storage)
        return storage._cdata

    def _is_new(self, tensor, given):
        return self._memory(tensor) not in {self._memory(t) for t in given}


def _written(func, args, kwargs):
    """The arguments that the schema says are written."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        yield from (t for t in tree_leaves(value) if isinstance(t, torch.Tensor))


@contextlib.contextmanager
def fake_streams():
    """Fake CUDA with streams; yields the layer. Host memory reads as zeros, if it may be read."""
    layer = Layer()

    patches = {
        "torch.Event": Event,
        "torch.cuda.Event": Event,
        "torch.cuda.Stream": Stream,
        "torch.cuda.stream": layer.on_stream,
        "torch.cuda.device": layer.on_device,
        "torch.cuda.current_stream": layer.current_stream,
        "torch.cuda.current_device": lambda: layer.device,
        "torch.accelerator.current_stream": layer.current_stream,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_cuda())
        Layer.active = layer
        for name, stand_in in patches.items():
            stack.enter_context(mock.patch(name, stand_in))
        stack.enter_context(layer)
        try:
            yield layer
        finally:
            Layer.active = None
