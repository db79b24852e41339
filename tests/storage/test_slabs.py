"""Memory of exactly the asked size, given back when the last alias dies and not before."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import ClosedError
from infinity.sizes import MiB, align_up
from infinity.storage import slabs
from infinity.storage.slabs import SlabPool


@pytest.fixture
def pool():
    made = SlabPool(pin=False, threads=2)
    yield made
    made.close()


@pytest.mark.parametrize("nbytes", [2 * MiB, 2 * MiB + 1, 3 * MiB, 5 * MiB, 129 * MiB // 2])
def test_big_sizes_round_up_to_2_mib_and_never_to_powers_of_two(pool, nbytes):
    tensor = pool.take(nbytes)
    assert tensor.shape == (nbytes,) and tensor.dtype == torch.uint8
    assert pool.allocated_bytes == align_up(nbytes, 2 * MiB)
    assert tensor.data_ptr() % (2 * MiB) == 0


def test_small_sizes_take_whole_4_kib_pages_and_do_not_overlap(pool):
    sizes = [1, 4096, 4097, 100_000] * 4
    tensors = [pool.take(nbytes).fill_(index) for index, nbytes in enumerate(sizes)]
    assert pool.allocated_bytes == sum(align_up(nbytes, 4096) for nbytes in sizes)
    assert all(tensor.data_ptr() % 4096 == 0 for tensor in tensors)
    assert all(bool((tensor == index).all()) for index, tensor in enumerate(tensors))


def test_nothing_is_a_size_too(pool):
    assert pool.take(0).numel() == 0


ALIASES = {
    "view": lambda tensor: tensor[100:200].view(10, 10),
    "other dtype": lambda tensor: tensor.view(torch.float32),
    "data": lambda tensor: tensor.data,
    "detached": lambda tensor: tensor.view(torch.bfloat16).detach(),
    "set_": lambda tensor: torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), 8, (4,), (1,)),
    "storage": lambda tensor: tensor.untyped_storage(),
    "parameter": lambda tensor: torch.nn.Parameter(tensor.view(torch.float32)),
    "numpy": lambda tensor: tensor.numpy()[10:20],
}


@pytest.mark.parametrize("alias", ALIASES)
def test_memory_is_lent_again_when_the_last_alias_dies_and_not_before(pool, alias):
    tensor = pool.take(4 * MiB)
    address = tensor.data_ptr()
    other = ALIASES[alias](tensor)
    del tensor
    gc.collect()
    assert pool.take(4 * MiB).data_ptr() != address
    del other
    gc.collect()
    first, second = pool.take(4 * MiB), pool.take(4 * MiB)
    assert address in (first.data_ptr(), second.data_ptr())
    assert pool.allocated_bytes == 8 * MiB


def test_a_parameter_whose_data_is_replaced_lets_go(pool):
    parameter = torch.nn.Parameter(pool.take(2 * MiB).view(torch.float32))
    address = parameter.data_ptr()
    parameter.data = torch.empty(1)
    assert pool.take(2 * MiB).data_ptr() == address


def test_trim_frees_only_what_is_idle(pool):
    kept, dropped = pool.take(4 * MiB).fill_(7), pool.take(6 * MiB)
    small = pool.take(1000)
    assert pool.allocated_bytes == 10 * MiB + 4096
    del dropped
    pool.trim()
    assert pool.allocated_bytes == 4 * MiB + 4096
    del small
    pool.trim()
    assert pool.allocated_bytes == 4 * MiB
    assert int(kept.sum()) == 7 * 4 * MiB


def test_a_pool_gives_idle_memory_back_before_it_grows_past_its_limit():
    pool = SlabPool(pin=False, threads=1, limit_bytes=20 * MiB)
    kept = pool.take(6 * MiB).fill_(7)
    older, newer = pool.take(4 * MiB), pool.take(8 * MiB)
    address = newer.data_ptr()
    del older
    del newer
    larger = pool.take(6 * MiB)  # 18 MiB are mapped: the one that was idle longest makes room
    assert pool.allocated_bytes == 20 * MiB and pool.take(8 * MiB).data_ptr() == address
    del larger
    assert pool.take(12 * MiB).numel() and pool.peak_bytes == 20 * MiB
    assert int(kept.sum()) == 7 * 6 * MiB


def test_what_is_in_use_may_exceed_the_limit():
    pool = SlabPool(pin=False, threads=1, limit_bytes=4 * MiB)
    tensors = [pool.take(4 * MiB) for _ in range(3)]
    assert pool.allocated_bytes == pool.peak_bytes == 12 * MiB
    tensors.clear()
    assert pool.take(2 * MiB).numel() and pool.allocated_bytes <= 4 * MiB


@given(steps=st.lists(st.tuples(st.integers(1, 9 * MiB), st.integers(0, 5)), max_size=40))
def test_no_more_is_mapped_than_was_ever_in_use_at_once(steps):
    """The limit that a plan computes, the largest sum of what is in use, is enough whatever the sizes and the order."""
    limit, lent = 0, {}
    for nbytes, place in steps:
        lent[place] = 0
        limit = max(limit, sum(lent.values()) + slabs.slab_bytes(nbytes))
        lent[place] = slabs.slab_bytes(nbytes)
    pool = SlabPool(pin=False, threads=1, limit_bytes=limit)
    tensors = {}
    for nbytes, place in steps:
        tensors.pop(place, None)
        tensors[place] = pool.take(nbytes)
        assert pool.allocated_bytes <= limit
    pool.close()


def test_after_close_tensors_live_on_and_take_refuses():
    pool = SlabPool(pin=False, threads=1)
    tensor = pool.take(2 * MiB).fill_(3)
    idle = pool.take(2 * MiB)
    del idle
    pool.close()
    assert pool.allocated_bytes == 2 * MiB
    assert int(tensor[-1]) == 3
    with pytest.raises(ClosedError):
        pool.take(1)
    del tensor
    assert pool.allocated_bytes == 0


@given(sizes=st.lists(st.integers(1, 3 * MiB), max_size=12), drops=st.sets(st.integers(0, 11)))
def test_live_tensors_never_overlap(sizes, drops):
    pool = SlabPool(pin=False, threads=1)
    tensors = {index: pool.take(nbytes) for index, nbytes in enumerate(sizes)}
    for index in drops:
        tensors.pop(index, None)
    tensors |= {100 + index: pool.take(nbytes) for index, nbytes in enumerate(sizes)}
    runs = sorted((tensor.data_ptr(), align_up(tensor.numel(), 4096)) for tensor in tensors.values())
    assert all(start + nbytes <= after for (start, nbytes), (after, _) in zip(runs, runs[1:], strict=False))
    tensors.clear()
    pool.close()
    assert pool.allocated_bytes == 0


def test_pinning_covers_each_mapping_once_and_ends_with_it(monkeypatch):
    registered: dict[int, int] = {}

    class Cudart:
        def cudaHostRegister(self, address, nbytes, flags):
            assert address not in registered and flags == 1
            registered[address] = nbytes
            return 0

        def cudaHostUnregister(self, address):
            del registered[address]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    pool = SlabPool(pin=True, threads=1)
    tensor = pool.take(3 * MiB)
    assert registered == {tensor.data_ptr(): 4 * MiB}
    address = tensor.data_ptr()
    del tensor
    again = pool.take(3 * MiB)
    assert again.data_ptr() == address and len(registered) == 1
    del again
    pool.close()
    assert registered == {}


def test_a_refused_pin_is_a_capacity_error(monkeypatch):
    class Cudart:
        def cudaHostRegister(self, address, nbytes, flags):
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    pool = SlabPool(pin=True, threads=1)
    with pytest.raises(slabs.CapacityError, match="CUDA error 2"):
        pool.take(1)
    assert pool.allocated_bytes == 0


def test_threads_may_take_and_drop_at_once(pool):
    def churn() -> None:
        for index in range(200):
            pool.take(4096 * (1 + index % 5)).fill_(1)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    pool.trim()
    assert pool.allocated_bytes == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_lives_without_the_slabs(pool):
    """What a DataLoader worker does: it inherits the tensors, never touches them, makes its own and exits."""
    tensor = pool.take(4 * MiB).fill_(5)
    pid = os.fork()
    if not pid:
        held = tensor
        del held
        os._exit(0 if int(torch.ones(1000).sum()) == 1000 else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert int(tensor.sum()) == 5 * 4 * MiB


@pytest.mark.gpu
def test_slabs_are_pinned_for_cuda():
    pool = SlabPool(pin=True, threads=4)
    tensor = pool.take(3 * MiB)
    assert tensor.is_pinned() and tensor[4096:].is_pinned()
    moved = torch.empty(3 * MiB, dtype=torch.uint8, device="cuda")
    moved.copy_(tensor.fill_(9), non_blocking=True)
    torch.cuda.synchronize()
    assert int(moved.long().sum()) == 9 * 3 * MiB
    del tensor
    pool.close()
    assert pool.allocated_bytes == 0
