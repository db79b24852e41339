"""A manifest is replaced whole, and believed only where it makes sense."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity.errors import StorageError
from infinity.kinds import Group
from infinity.storage.chunks import ChunkKey
from infinity.storage.manifest import ChunkEntry, FileEntry, Manifest, PathEntry, manifest_name

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def manifest(**changes):
    chunks = (ChunkEntry(key=ChunkKey(0, 0, Group.PARAM, 0), file=0, offset=4096, nbytes=100, crc32c=7),)
    fields = dict(
        run="r",
        rank=0,
        serial=1,
        generation=0,
        step=5,
        is_clean=True,
        fingerprint="f",
        identity={"optimizer": "adamw"},
        units=("h.0",),
        paths=(PathEntry(id="a", directory="/mnt/a"),),
        files=(FileEntry(name="x.safetensors", path=0, nbytes=8192),),
        chunks=chunks,
        extra={},
    )
    return Manifest(**(fields | changes))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(extra=st.dictionaries(st.text(), json_values, max_size=4), step=st.integers(0, 2**40), crc=st.none() | st.integers(0, 2**32 - 1))
def test_what_is_saved_is_loaded(disk, extra, step, crc):
    chunks = (ChunkEntry(key=ChunkKey(3, 1, Group.OPTIMIZER, 2), file=0, offset=0, nbytes=8192, crc32c=crc),)
    saved = manifest(extra=extra, step=step, chunks=chunks)
    assert Manifest.load(saved.save(disk)) == saved


def test_a_crash_before_the_rename_leaves_the_old_one(tmp_path, monkeypatch):
    manifest(step=5).save(tmp_path)

    def die(descriptor: int) -> None:
        raise OSError(5, "the power went")

    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(StorageError):
        manifest(step=6).save(tmp_path)
    assert Manifest.load(tmp_path / manifest_name(0)).step == 5


def damage(table, where):
    match where:
        case "version":
            table["version"] = 99
        case "outside":
            table["chunks"][0]["offset"] = 8192
        case "unaligned":
            table["chunks"][0]["offset"] = 100
        case "unlisted":
            table["chunks"][0]["file"] = 1
        case "path":
            table["files"][0]["path"] = 1
        case "escape":
            table["files"][0]["name"] = "../../etc/passwd"
        case "missing":
            del table["step"]
    return json.dumps(table)


@pytest.mark.parametrize("where", ["version", "outside", "unaligned", "unlisted", "path", "escape", "missing"])
def test_a_damaged_manifest_is_named(tmp_path, where):
    path = manifest().save(tmp_path)
    path.write_text(damage(json.loads(path.read_text()), where))
    with pytest.raises(StorageError, match="Not a manifest of format version 1") as caught:
        Manifest.load(path)
    assert caught.value.filename == str(path)


def test_half_a_manifest_is_named(tmp_path):
    path = manifest().save(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StorageError, match="Not a manifest"):
        Manifest.load(path)
