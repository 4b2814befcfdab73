"""Gradients are read where they lie, natively; what cannot be read so takes the way of lists."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import zclip
from zclip import layout
from zclip.reading import Reader, native

op = torch.ops.zclip
needs_reading = pytest.mark.skipif(
    not native.is_loaded, reason="nothing is read without the extension"
)
GLOBAL_NORM = zclip.reference.IDS["global_norm"]


class Sub(torch.Tensor):
    pass


def negative():
    """One number whose memory holds its negative: what autograd can leave in a gradient."""
    return torch.tensor([1.0 + 2.0j]).conj().imag


def moved_away():
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


UNREADABLE = {
    "a negative": negative,
    "a negative without dimensions": lambda: torch.tensor(1.0 + 2.0j).conj().imag,
    "negatives": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "a subclass": lambda: torch.ones(3).as_subclass(Sub),
    "a parameter": lambda: nn.Parameter(torch.ones(3)),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "int": lambda: torch.ones(3, dtype=torch.int64),
    "8 bits": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "meta": lambda: torch.ones(3, device="meta"),
    "expanded": lambda: torch.ones(1).expand(3),
    "with gaps": lambda: torch.ones(6)[::2],
    "zeros without memory": lambda: torch._efficientzerotensor((3,)),
    "no memory": moved_away,
    "functional": lambda: torch._to_functional_tensor(torch.ones(3)),
    "None": lambda: None,
    "a number": lambda: 1.0,
}


def read(reader, tensors):
    reader.tensors = tensors  # a reading holds addresses: whoever uses it keeps the tensors
    return native.read_to_write(reader.number, tensors, False)


def norm_of(number, state=None):
    state = torch.zeros(3, dtype=torch.float64) if state is None else state
    return float(op.clip_read_(number, state, GLOBAL_NORM, [1e9, layout.SKIP])[0])


@needs_reading
@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_not_plain_dense_memory_is_not_read(name, is_first):
    reader, plain = Reader(), [torch.ones(3), torch.ones(3)]
    if not is_first:
        assert read(reader, plain)
    assert read(reader, [plain[0], UNREADABLE[name]()]) == 0
    assert norm_of(read(reader, plain)) == pytest.approx(6**0.5)


@needs_reading
def test_an_optimizer_steps_on_what_cannot_be_read():
    """By the way of lists, in the middle of a run."""
    ours, theirs = (nn.Linear(1, 1, bias=False) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizers = zclip.optim.AdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters())
    for grad in (torch.ones(1, 1), torch.ones(1, 1), negative().reshape(1, 1), torch.ones(1, 1)):
        ours.weight.grad, theirs.weight.grad = grad, grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(ours.weight, theirs.weight)


@needs_reading
def test_a_clipper_does_not_take_a_negative_for_what_its_memory_holds():
    model, clipper = nn.Linear(1, 1, bias=False), zclip.GlobalNorm(0.5)
    for _ in range(3):
        model.weight.grad = torch.ones(1, 1)
        clipper.step(model)
    model.weight.grad = negative().reshape(1, 1)
    with pytest.raises(RuntimeError, match="negation"):  # torch's own, of operators that write
        clipper.step(model)
    assert float(model.weight.grad) == -2.0


@needs_reading
@pytest.mark.parametrize(
    "change",
    [
        lambda g: g.t(),
        lambda g: g.double(),
        lambda g: g.bfloat16(),
        lambda g: g[:2].clone(),
        lambda g: g.reshape(-1),
        lambda g: g.unsqueeze(0),
        lambda g: torch.empty(0),
    ],
)
def test_a_reading_follows_the_list(change):
    reader, plain = Reader(), [torch.ones(5), torch.randn(3, 4)]
    for tensors in (plain, [plain[0], change(plain[1])], plain, plain[:1], plain):
        expected = sum(float(t.double().square().sum()) for t in tensors) ** 0.5
        assert norm_of(read(reader, tensors)) == pytest.approx(expected, rel=1e-6)


@needs_reading
def test_a_reading_serves_one_call():
    reader = Reader()
    number = read(reader, [torch.ones(3)])
    norm_of(number)
    with pytest.raises(RuntimeError, match="reading: expected the newest"):
        norm_of(number)
    ones = [torch.ones(3)]
    older, newer = read(reader, ones), read(reader, ones)
    with pytest.raises(RuntimeError, match="reading: expected the newest"):
        norm_of(older)
    norm_of(newer)
    last = read(reader, [torch.ones(3)])
    read(reader, [None])
    with pytest.raises(RuntimeError, match="reading: expected the newest"):
        norm_of(last)
    del reader
    with pytest.raises(RuntimeError, match="reading: expected one of"):
        norm_of(newer)


@needs_reading
def test_missing_ones_count_as_empty_where_they_may():
    reader, ones = Reader(), torch.ones(3)
    for tensors in ([ones, None], [None, ones], [None, torch.ones(4)], [ones, torch.ones(3)]):
        present = [t for t in tensors if t is not None]
        number = native.read(reader.number, tensors, True)
        assert norm_of(number) == pytest.approx(sum(t.numel() for t in present) ** 0.5)
    assert native.read(reader.number, [None, None], True) == 0
    assert native.read(reader.number, [], True) == 0
    assert read(reader, [ones, ones]) == 0  # two parameters share it: it counts once


@needs_reading
def test_copies_have_readings_of_their_own():
    reader = Reader()
    read(reader, [torch.ones(3)])
    for other in (copy.deepcopy(reader), pickle.loads(pickle.dumps(reader)), copy.copy(reader)):
        assert norm_of(read(other, [torch.ones(4)])) == 2.0


@needs_reading
def test_threads_have_readers_of_their_own():
    params = [[nn.Parameter(torch.ones(n)) for _ in range(50)] for n in (4, 9)]
    norms: list[set] = [set(), set()]

    def clip(which):
        for _ in range(200):
            for p in params[which]:
                p.grad = torch.ones_like(p)
            norms[which].add(float(zclip.clip_grad_norm_(params[which], 1e9)))

    threads = [threading.Thread(target=clip, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert norms == [{float(torch.tensor(n).sqrt())} for n in (200.0, 450.0)]


def test_gradients_come_in_order_and_an_odd_one_is_an_error():
    with_grad, without = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with_grad.grad = torch.ones(2)
    assert native.gradients([with_grad, without])[0] is with_grad.grad
    assert native.gradients([with_grad, without])[1] is None
    with pytest.raises(AttributeError, match="grad"):
        native.gradients([with_grad, 5])
    assert native.are_same([with_grad], [with_grad])
    assert not native.are_same([with_grad], [without])
    assert not native.are_same([with_grad], [])


@needs_reading
def test_the_list_of_gradients_is_as_python_makes_it():
    """Enough entries for the loops to look ahead, with strangers among them."""
    params = [nn.Parameter(torch.randn(3)) for _ in range(200)]
    for p in params[::2]:
        p.grad = torch.randn(3)
    params[60] = Sub(torch.ones(3))
    params[61] = torch.ones(3)
    assert native.are_same(native.gradients(params), [p.grad for p in params])


@needs_reading
def test_a_step_of_a_wrapped_optimizer_hands_over_no_list():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizers = [
        zclip.wrap(torch.optim.AdamW(model.parameters(), fused=True), "zclip"),
        zclip.optim.AdamW(model.parameters(), clipper="zclip"),
    ]
    for optimizer in optimizers:
        for step in range(3):
            model(torch.randn(8, 4)).square().mean().backward()
            with torch.profiler.profile() as profile:
                optimizer.step()
            names = {event.name for event in profile.events() if event.name.startswith("zclip::")}
            if step == 2:
                assert names == {"zclip::clip_read_"} or names == {"zclip::fused_step_"}
