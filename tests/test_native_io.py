"""Claims of memory and disk in `infinity.native`: transfers arrive or say why not. Faults of the kernel itself: tests/native."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from infinity import native
from infinity._native import lib
from infinity.errors import CapacityError, ClosedError, StorageError
from infinity.native import Aio, Mapping

# ---- memory ----


def smaps_of(address: int) -> dict[str, str]:
    """What the kernel says of the mapping that holds `address`."""
    fields: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and not head.endswith(":"):
            low, high = (int(x, 16) for x in head.split("-"))
            inside = low <= address < high
        elif inside:
            fields[head.rstrip(":")] = rest.strip()
    return fields


@pytest.mark.parametrize("nbytes", [1, 4096, (2 << 20) + 1, 10 << 20])
def test_a_mapping_is_zeroed_touched_and_kept_from_children(nbytes: int) -> None:
    mapping = Mapping(nbytes, threads=3)
    tensor = torch.frombuffer(mapping.buffer, dtype=torch.uint8)
    assert tensor.data_ptr() == mapping.address and mapping.address % (2 << 20) == 0
    assert tensor.numel() == mapping.nbytes == nbytes
    assert not tensor.any()
    flags = smaps_of(mapping.address)["VmFlags"].split()
    assert "dc" in flags  # MADV_DONTFORK
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        assert "hg" in flags  # MADV_HUGEPAGE


def test_a_mapping_lives_as_long_as_its_last_view() -> None:
    mapping = Mapping(4 << 20, threads=1)
    address = mapping.address
    view = torch.frombuffer(mapping.buffer, dtype=torch.float32)[1000:2000]
    del mapping
    gc.collect()
    view.fill_(3.0)
    assert view.sum() == 3000
    assert smaps_of(address)
    del view
    gc.collect()
    assert "dc" not in smaps_of(address).get("VmFlags", "").split()


def test_a_mapping_that_cannot_be_is_refused() -> None:
    with pytest.raises(CapacityError, match="mapping 4503599627370496 bytes"):
        Mapping(1 << 52, threads=1)
    with pytest.raises(ValueError, match="0 bytes"):
        Mapping(0, threads=1)


# ---- disk ----

BACKENDS = [name for name in ("libaio", "kernel", "threads") if lib.inf_backend_find(name.encode())]
BLOCK = 64 << 10
NBYTES = 1 << 20


def sectors(nbytes: int, seed: int | None = None) -> Tensor:
    tensor = torch.frombuffer(Mapping(nbytes, threads=1).buffer, dtype=torch.uint8)
    if seed is not None:
        tensor.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return tensor


def open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # this file system has no direct I/O


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = open_direct(tmp_path / "data")
    yield fd
    os.close(fd)


def engine(backend: str = "auto", deadline_s: float = 60.0, **counts: int) -> Aio:
    return Aio(block_bytes=BLOCK, queue_depth=4, deadline_s=deadline_s, backend=backend, **counts)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize("readers", [1, 3])
def test_bytes_survive_the_disk(file: int, backend: str, readers: int) -> None:
    sent, got = sectors(NBYTES, 1), sectors(NBYTES)
    with engine(backend, readers=readers, writers=readers) as aio:
        assert aio.backend == backend or backend == "auto"
        # pieces of uneven length, all under way at once
        cuts = [0, 4096, 4096 * 3, BLOCK * 2, BLOCK * 2 + 4096, NBYTES]
        pieces = list(zip(cuts[:-1], cuts[1:], strict=True))
        writes = [aio.write(file, a, sent.data_ptr() + a, b - a, keep=sent) for a, b in pieces]
        assert [request.wait() for request in writes] == [0] * len(pieces)
        reads = [aio.read(file, a, got.data_ptr() + a, b - a, keep=got) for a, b in reversed(pieces)]
        assert [request.wait(timeout_s=60.0) for request in reads] == [0] * len(pieces)
        assert all(r.done() and 0 < r.started_ns <= r.finished_ns and r.failed_offset == -1 for r in writes + reads)
        assert max(r.finished_ns for r in writes) <= min(r.finished_ns for r in reads)
    assert torch.equal(sent, got)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_end_of_the_file_is_an_error_at_its_place(file: int, backend: str) -> None:
    buffer = sectors(NBYTES, 2)
    with engine(backend) as aio:
        assert aio.write(file, 0, buffer.data_ptr(), NBYTES).wait() == 0
        request = aio.read(file, NBYTES - BLOCK, buffer.data_ptr(), 2 * BLOCK)
        assert request.wait() == -errno.EIO
        assert request.failed_offset == NBYTES


@pytest.mark.parametrize("backend", BACKENDS)
def test_unaligned_direct_requests_are_refused_by_the_kernel_and_reported(file: int, backend: str) -> None:
    buffer = sectors(NBYTES, 2)
    with engine(backend) as aio:
        assert aio.write(file, 0, buffer.data_ptr(), NBYTES).wait() == 0
        request = aio.read(file, 100, buffer.data_ptr(), 4096)
        error = request.wait()
    if error == 0:
        pytest.skip("this file system takes unaligned requests")
    assert error == -errno.EINVAL and request.failed_offset == 100


@pytest.mark.parametrize("backend", BACKENDS)
def test_scattered_transfers_arrive_each_with_its_timing(file: int, backend: str) -> None:
    sent, got = sectors(NBYTES, 1), sectors(NBYTES)
    transfers, timings = np.zeros(NBYTES // 4096, native.TRANSFER), np.zeros(NBYTES // 4096, native.TIMING)
    transfers["buffer"] = np.arange(len(transfers))
    transfers["offset"] = np.random.default_rng(1).permutation(len(transfers)) * 4096
    transfers["nbytes"] = 4096
    with engine(backend) as aio:
        for direction, memory in ((native.WRITE, sent), (native.READ, got)):
            transfers["direction"] = direction
            request = aio.scatter([file], transfers, timings, memory.data_ptr(), 4096, keep=memory)
            assert request.wait() == 0
            assert (0 < timings["begun_ns"]).all() and (timings["begun_ns"] <= timings["issued_ns"]).all()
            assert (timings["issued_ns"] <= timings["done_ns"]).all() and (np.diff(timings["begun_ns"]) >= 0).all()
            assert 1 <= timings["depth"].min() and timings["depth"].max() <= aio.slots()
        assert aio.scatter([file], transfers, timings, got.data_ptr(), 4096, until_ns=1, keep=got).wait() == 0
        assert not timings["begun_ns"].any()
        with pytest.raises(ValueError, match="invalid argument"):
            aio.scatter([file], transfers, timings, got.data_ptr(), 512)  # the buffers are smaller than the transfers
    assert torch.equal(sent, got)


def test_a_full_device_is_enospc() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    buffer = sectors(4096)
    with engine("threads") as aio:
        request = aio.write(fd, 4096, buffer.data_ptr(), 4096)
        assert request.wait() == -errno.ENOSPC and request.failed_offset == 4096
    os.close(fd)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_opened_for_reading_only_refuses_writes(tmp_path: Path, backend: str) -> None:
    (tmp_path / "data").write_bytes(bytes(4096))
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    buffer = sectors(4096)
    with engine(backend) as aio:
        assert aio.write(fd, 0, buffer.data_ptr(), 4096).wait() == -errno.EBADF
    os.close(fd)


def test_memory_is_kept_while_the_device_may_write_to_it(file: int) -> None:
    sent = sectors(NBYTES, 3)
    with engine() as aio:
        aio.write(file, 0, sent.data_ptr(), NBYTES, keep=sent).wait()
        for _ in range(20):  # nobody holds the buffers or the requests
            aio.read(file, 0, (target := sectors(NBYTES)).data_ptr(), NBYTES, keep=target)
            del target
        gc.collect()
        assert aio.read(file, 0, sent.data_ptr(), NBYTES, keep=sent).wait() == 0
    assert not aio._pending


def test_a_dead_drive_times_out_and_its_memory_is_never_let_go() -> None:
    """An empty pipe stands in for the drive: the kernel accepts the read and never answers."""

    class Owner:
        pass

    reader, writer = os.pipe()
    buffer, owner = sectors(4096), Owner()
    with engine("threads" if "kernel" not in BACKENDS else "kernel", deadline_s=0.3) as aio:
        request = aio.read(reader, 0, buffer.data_ptr(), 4096, keep=owner)
        code = request.wait()
        if code == -errno.ESPIPE or code == -errno.EINVAL:
            pytest.skip("this kernel reads no pipes asynchronously")
        assert code == -errno.ETIMEDOUT
        assert request in native._lost and request._keep is owner
        later = aio.read(reader, 0, buffer.data_ptr(), 4096)
        assert later.wait() == -errno.EIO  # no reader is left: it fails at once
    os.write(writer, bytes(4096))  # the drive comes back, to nobody


def test_a_wait_may_be_shorter_than_the_transfer() -> None:
    reader, writer = os.pipe()
    buffer = sectors(4096)
    with engine("kernel", deadline_s=30.0) as aio:
        request = aio.read(reader, 0, buffer.data_ptr(), 4096, keep=buffer)
        if request.done():
            pytest.skip("this kernel reads no pipes asynchronously")
        with pytest.raises(TimeoutError, match=r"still under way after 0.05 s"):
            request.wait(timeout_s=0.05)
        assert not request.done()
        os.write(writer, bytes([7]) * 4096)
        assert request.wait() == 0
    assert bool((buffer[:4096] == 7).all())


def test_many_threads_wait_for_one_request(file: int) -> None:
    buffer = sectors(NBYTES, 5)
    answers: list[int] = []
    with engine() as aio:
        request = aio.write(file, 0, buffer.data_ptr(), NBYTES, keep=buffer)
        threads = [threading.Thread(target=lambda: answers.append(request.wait())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [0] * 4


def test_close_finishes_what_is_under_way(file: int) -> None:
    sent, got = sectors(NBYTES, 6), sectors(NBYTES)
    aio = engine()
    request = aio.write(file, 0, sent.data_ptr(), NBYTES, keep=sent)
    aio.close()
    aio.close()
    assert request.wait() == 0
    with pytest.raises(ClosedError):
        aio.read(file, 0, got.data_ptr(), NBYTES)
    with pytest.raises(ClosedError):
        _ = aio.backend
    with engine() as other:
        assert other.read(file, 0, got.data_ptr(), NBYTES, keep=got).wait() == 0
    assert torch.equal(sent, got)


def test_impossible_engines_and_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="'floppy'"):
        engine("floppy")
    with pytest.raises(ValueError, match="blocks of 0 bytes"):
        Aio(block_bytes=0, queue_depth=1)
    with engine() as aio, pytest.raises(OSError, match="read of 4096 bytes at 0") as caught:
        aio.read(-1, 0, 0, 4096)
    assert caught.value.errno == errno.EBADF


def test_more_contexts_than_the_host_gives_fall_back_to_threads() -> None:
    """fs.aio-max-nr is shared by the host: "auto" takes plain calls then, a backend asked for by name says what to raise."""
    limit = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    depth = min(65536, limit)
    with Aio(block_bytes=4096, queue_depth=depth, readers=2, writers=2) as aio:
        if aio.backend != "threads":
            pytest.skip(f"the host gives four contexts of {depth}")
    with pytest.raises(StorageError, match=r"fs\.aio-max-nr"):
        Aio(block_bytes=4096, queue_depth=depth, readers=2, writers=2, backend="kernel")
