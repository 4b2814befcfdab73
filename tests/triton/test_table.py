"""The pointer table: kept while nothing moves, noticed when something does."""

import pytest
import torch

from tests.backends import BACKENDS
from tests.grads import DTYPES, dtype_name, exact_sumsq, make_grads
from zclip.backends.triton import table as tables
from zclip.backends.triton.row_table import RowList
from zclip.backends.triton.table import ALIGNMENT, CHUNK, table_of
from zclip.backends.triton.tensor_list import READ, WRITE, TensorList
from zclip.layout import SUMSQ


@pytest.fixture(autouse=True)
def no_tables():
    tables.forget_tables()
    yield
    tables.forget_tables()


@pytest.fixture
def built(monkeypatch):
    """The number of tensors of every table that is built."""
    counts = []
    build = tables._cut_into_chunks

    def count_and_build(tensors):
        counts.append(len(tensors))
        return build(tensors)

    monkeypatch.setattr(tables, "_cut_into_chunks", count_and_build)
    return counts


def chunks_of(table):
    """(address, length, tensor) of every chunk, as the kernels see them."""
    columns = (table.addresses, table.lengths, table.tensors)
    return list(zip(*(c[: table.num_chunks].tolist() for c in columns), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("numel", [0, 1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 50_001])
@pytest.mark.parametrize("skipped", [0, 1, 3])
def test_chunks_cover_every_element_once_and_full_ones_are_aligned(dtype, numel, skipped):
    tensor = torch.zeros(numel + skipped, dtype=dtype)[skipped:]
    table = table_of([tensor])
    address = tensor.data_ptr()
    for start, length, owner in chunks_of(table):
        assert (start, owner) == (address, 0)
        assert 0 < length <= CHUNK
        assert length < CHUNK or start % ALIGNMENT == 0
        address += length * tensor.element_size()
    assert address == tensor.data_ptr() + numel * tensor.element_size()


def test_dtypes_stand_together_and_rows_find_their_tensors():
    grads = [make_grads([(n,)], d)[0] for n, d in zip([5, 0, 40_000, 9], DTYPES * 2, strict=False)]
    grads += [g.clone() for g in grads]
    table = table_of(grads)
    assert len(table.groups) == 3  # the bfloat16 ones are empty
    assert sum(group.num_chunks for group in table.groups) == table.num_chunks
    for group in table.groups:
        for _, _, owner in chunks_of(table)[group.first_chunk :][: group.num_chunks]:
            assert grads[owner].dtype == group.dtype
    starts = table.tensor_chunks.tolist()
    for member, owner in enumerate(table.owners.tolist()[: len(grads)]):
        chunks = chunks_of(table)[starts[member] : starts[member + 1]]
        assert {c[2] for c in chunks} <= {owner}
        assert sum(c[1] for c in chunks) == grads[owner].numel()


def test_parts_are_aligned_whatever_the_number_of_tensors():
    for count in (1, 2, 3):
        table = table_of(make_grads([(5,)] * count))
        for part in (table.lengths, table.tensors, table.tensor_chunks, table.owners):
            assert part.data_ptr() % ALIGNMENT == table.addresses.data_ptr() % ALIGNMENT


def test_a_table_is_kept_while_nothing_moves(built):
    grads = make_grads([(30,), (20_000,)])
    first = table_of(grads)
    assert table_of(list(grads)) is first
    assert built == [2]


def test_a_reused_address_with_another_size_is_noticed(built):
    memory = make_grads([(40_000,)])[0]
    for size in (40_000, 17, 40_000):
        grads = [memory[:size]]
        stats = BACKENDS["triton-interpret"].grad_stats(grads)
        torch.testing.assert_close(stats[:, SUMSQ], exact_sumsq(grads), rtol=1e-6, atol=0)
    assert len(built) == 3


def test_a_reused_address_with_another_dtype_is_noticed(built):
    memory = make_grads([(600,)], torch.float16)[0]
    for dtype in (torch.float16, torch.bfloat16):
        grads = [memory.view(dtype)]
        stats = BACKENDS["triton-interpret"].grad_stats(grads)
        torch.testing.assert_close(stats[:, SUMSQ], exact_sumsq(grads), rtol=1e-6, atol=0)
    assert len(built) == 2


def test_gradients_that_moved_are_noticed(built):
    grads = make_grads([(600,), (700,)])
    stats = BACKENDS["triton-interpret"].grad_stats(grads)
    grads[1].data = grads[1].clone() * 2  # the same tensor object, elsewhere
    moved = BACKENDS["triton-interpret"].grad_stats(grads)
    assert moved[0, SUMSQ] == stats[0, SUMSQ]
    assert moved[1, SUMSQ] == 4 * stats[1, SUMSQ]
    assert len(built) == 2


def test_a_smaller_tensor_over_the_same_strided_memory_is_noticed():
    memory = make_grads([(32, 64)])[0]
    for view in (memory.t(), memory[:, :32].t(), memory[:, ::2]):
        stats = BACKENDS["triton-interpret"].grad_stats([view])
        torch.testing.assert_close(stats[:, SUMSQ], exact_sumsq([view]), rtol=1e-6, atol=0)


def test_dense_strides_are_served_where_they_lie():
    base = make_grads([(24, 36)])[0]
    image = make_grads([(2, 3, 8, 8)])[0].contiguous(memory_format=torch.channels_last)
    table = TensorList([base.t(), image], WRITE).table
    assert [c[0] for c in chunks_of(table)] == [base.data_ptr(), image.data_ptr()]


def test_the_same_memory_cut_into_other_rows_is_noticed():
    """A gradient that was two rows of twelve comes back as six rows of four."""
    weights = torch.ones(24)
    for shape in ((2, 12), (6, 4)):
        grad = torch.ones(24)
        table = RowList([grad.view(shape)], [weights.view(shape)]).table
        assert table.num_rows == shape[0]
        again = RowList([grad.view(3, 8)], [weights.view(3, 8)]).table
        assert (again.num_rows, again.lengths[0]) == (3, 8)
        assert RowList([grad.view(shape)], [weights.view(shape)]).table is table


def test_rows_are_read_where_they_lie_if_each_is_one_run():
    image = make_grads([(4, 3, 8, 8)])[0].contiguous(memory_format=torch.channels_last)
    matrix = make_grads([(5, 6)])[0]
    table = RowList([image, matrix.t()], [image.clone(), matrix.t().clone()]).table
    assert table.grads[0] == image.data_ptr()
    assert table.grads[1] != matrix.data_ptr()  # rows of a transposed matrix are columns


def test_old_tables_are_forgotten(monkeypatch):
    tables.forget_tables()
    kept = [make_grads([(5,)]) for _ in range(5)]
    monkeypatch.setattr(tables, "MAX_BYTES", 3 * table_of(kept[0]).nbytes)
    for grads in kept:
        table_of(grads)
        table_of(kept[0])
    assert len(tables._tables) == 3
    assert tuple(g.data_ptr() for g in kept[0]) in tables._tables


def test_a_list_that_takes_all_the_memory_is_kept_alone(monkeypatch):
    """Addresses that wander must not fill the device: a table of 7B parameters has 10 MB."""
    tables.forget_tables()
    small = [make_grads([(5,)]) for _ in range(3)]
    for grads in small:
        table_of(grads)
    large = [torch.empty(300 * tables.CHUNK)]
    monkeypatch.setattr(tables, "MAX_BYTES", 6000)
    assert table_of(large).nbytes > tables.MAX_BYTES
    assert len(tables._tables) == 1
    assert table_of(large) is table_of(large)
    assert len(tables._tables) == 1
    table_of(small[0])
    assert len(tables._tables) == 1, "the large one is the oldest now, and too large"


def test_bad_tensors_are_refused_by_name():
    good = torch.ones(3)
    with pytest.raises(TypeError, match=r"grads\[1\]: .*, got torch.int64"):
        TensorList([good, torch.ones(3, dtype=torch.int64)], READ)
    with pytest.raises(TypeError, match=r"grads\[1\]: .*, got torch.sparse_coo"):
        TensorList([good, torch.eye(3).to_sparse()], READ)
    with pytest.raises(ValueError, match=r"grads\[1\] of shape \(3, 3\): .* elements that share"):
        TensorList([good, good.expand(3, 3)], WRITE)
    TensorList([good, good.expand(3, 3)], READ)


class Capturing:
    """What table.py asks of a CUDA device while a graph is being captured."""

    def __init__(self, monkeypatch):
        self.is_capturing = False
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(tables, "_current_stream", lambda device: self)
        monkeypatch.setattr(tables, "_has_graphs", lambda device: True)

    def record_event(self):
        return None


def test_nothing_is_uploaded_during_a_capture(monkeypatch):
    cuda = Capturing(monkeypatch)
    warmed_up, new = make_grads([(5,), (6,)])
    table_of([warmed_up])
    cuda.is_capturing = True
    table_of([warmed_up])
    with pytest.raises(RuntimeError, match="Run one warm-up step outside the capture"):
        table_of([new])


def test_a_captured_table_is_never_freed(monkeypatch):
    cuda = Capturing(monkeypatch)
    grads = make_grads([(5,)])
    table_of(grads)
    cuda.is_capturing = True
    captured = table_of(grads)
    tables.forget_tables()
    assert captured in tables._captured
    tables._captured.remove(captured)
