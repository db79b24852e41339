"""A shard file is a safetensors file without holes, whose chunks start on sector boundaries."""

from __future__ import annotations

import errno
import json
import os
import subprocess

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from storage.storage_rig import make_spec

from infinity.errors import StorageError
from infinity.kinds import Group, Tier
from infinity.sizes import MIN_FILE_BYTES, MiB
from infinity.storage import shardfile
from infinity.storage.chunks import ChunkKey, ChunkSpec, Part
from infinity.storage.shardfile import ShardFile, file_bytes, header_entry_bytes, lay_out

METADATA = {"format": "infinity-shard", "version": "1"}
dtypes = st.sampled_from(list(shardfile.DTYPE_NAMES))
_any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)
names = _any_text.filter(lambda name: name != "__metadata__")


@st.composite
def chunk_lists(draw):
    """Chunks of parts of any dtype and length, whole sectors or not."""
    taken = draw(st.lists(names, unique=True, min_size=1, max_size=12))
    specs, rest = [], [f"{index}{name}" for index, name in enumerate(taken)]
    while rest:
        count = draw(st.integers(1, min(4, len(rest))))
        parts = tuple(Part(name, draw(dtypes), draw(st.integers(1, 3000))) for name in rest[:count])
        rest = rest[count:]
        specs.append(ChunkSpec(ChunkKey(0, 0, Group.OPTIMIZER, len(specs)), sum(part.nbytes for part in parts), Tier.NVME, parts))
    return specs


@given(specs=chunk_lists())
def test_layouts_have_no_holes_and_whole_sectors(specs):
    layout = lay_out(specs, METADATA)
    length = int.from_bytes(layout.header[:8], "little")
    assert len(layout.header) == 8 + length and len(layout.header) % 4096 == 0
    table = json.loads(layout.header[8:])
    assert table.pop("__metadata__") == METADATA
    at = 0
    for entry in table.values():
        assert entry["data_offsets"][0] == at, "tensors lie end to end, in the order in which they are listed"
        at = entry["data_offsets"][1]
    assert len(layout.header) + at == layout.nbytes >= MIN_FILE_BYTES
    for spec, offset in zip(specs, layout.offsets, strict=True):
        assert offset % 4096 == 0
        assert table[spec.parts[0].name]["data_offsets"][0] == offset - len(layout.header)


@given(specs=chunk_lists())
def test_the_size_is_known_before_the_layout(specs):
    entries, data = sum(header_entry_bytes(spec) for spec in specs), sum(spec.padded_nbytes for spec in specs)
    assert lay_out(specs, METADATA).nbytes == file_bytes(entries, data, METADATA)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(specs=chunk_lists())
def test_safetensors_reads_every_part(disk, specs):
    path = disk / "shard.safetensors"
    layout = lay_out(specs, METADATA)
    file = ShardFile.create(path, layout)
    file.close()
    written = {}
    with path.open("r+b") as raw:
        for spec, offset in zip(specs, layout.offsets, strict=True):
            raw.seek(offset)
            for part in spec.parts:
                data = torch.randint(0, 2, (part.nbytes,), dtype=torch.uint8)  # valid as booleans too
                raw.write(data.numpy().tobytes())
                written[part.name] = data
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == METADATA
        for spec in specs:
            for part in spec.parts:
                tensor = opened.get_tensor(part.name)
                assert tensor.dtype == part.dtype and tensor.shape == (part.numel,)
                assert torch.equal(tensor.view(torch.uint8), written[part.name])
        assert all(name in written or name.startswith(shardfile.PADDING) for name in opened.keys())
    path.unlink()


def one_layout(numel: int = 2048):
    return lay_out([make_spec(0, 0, numel, Tier.NVME)], METADATA)


def test_a_file_is_preallocated_in_full(disk):
    layout = one_layout(MiB)
    file = ShardFile.create(disk / "a.safetensors", layout)
    found = os.stat(file.path)
    assert found.st_size == layout.nbytes and found.st_blocks * 512 >= layout.nbytes
    file.close()


def test_where_fallocate_is_missing_zeros_are_written(disk, monkeypatch):
    monkeypatch.setattr(shardfile, "fallocate", lambda fd, nbytes: errno.EOPNOTSUPP)
    layout = one_layout(MiB)
    file = ShardFile.create(disk / "a.safetensors", layout)
    assert os.stat(file.path).st_blocks * 512 >= layout.nbytes
    file.close()


def test_where_direct_io_is_refused_it_is_said_once(disk, monkeypatch, caplog):
    real_open = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            os.close(real_open(path, flags & ~os.O_DIRECT, *rest))  # as file systems do: the file is there all the same
            raise OSError(errno.EINVAL, "no direct I/O", path)
        return real_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    for name in ("a.safetensors", "b.safetensors"):
        ShardFile.create(disk / name, one_layout()).close()
    assert sum("takes no O_DIRECT" in record.message for record in caplog.records) == 1


def test_an_existing_file_is_not_overwritten(disk):
    path = disk / "a.safetensors"
    path.write_bytes(b"someone else's")
    with pytest.raises(StorageError, match="never overwritten") as caught:
        ShardFile.create(path, one_layout())
    assert caught.value.errno == errno.EEXIST and path.read_bytes() == b"someone else's"


def test_missing_and_truncated_files_are_named(disk):
    layout = one_layout()
    path = disk / "a.safetensors"
    with pytest.raises(StorageError, match="The file is missing") as caught:
        ShardFile.open(path, layout.nbytes)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(path))
    ShardFile.create(path, layout).close()
    os.truncate(path, 5000)
    with pytest.raises(StorageError, match=f"has 5000 bytes, it was made with {layout.nbytes}"):
        ShardFile.open(path, layout.nbytes)


@pytest.mark.parametrize("loss", ["truncated", "removed"])
def test_a_sync_does_not_vouch_for_a_file_that_is_gone(disk, loss):
    file = ShardFile.create(disk / "a.safetensors", one_layout())
    os.truncate(file.path, 4096) if loss == "truncated" else file.path.unlink()
    with pytest.raises(StorageError):
        file.sync()
    file.close()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("has_fallocate", [True, False])
def test_a_full_disk_names_needed_and_free_bytes_and_leaves_nothing(small_disk, monkeypatch, has_fallocate):
    if not has_fallocate:
        monkeypatch.setattr(shardfile, "fallocate", lambda fd, nbytes: errno.EOPNOTSUPP)
    layout = one_layout(MiB)
    with pytest.raises(StorageError, match=rf"needs {layout.nbytes} bytes, \d+ bytes are free") as caught:
        ShardFile.create(small_disk / "a.safetensors", layout)
    assert caught.value.errno == errno.ENOSPC
    assert list(small_disk.iterdir()) == []
