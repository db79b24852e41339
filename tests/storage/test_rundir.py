"""Only a run's own files are ever removed, and only while nobody uses it."""

from __future__ import annotations

import pytest
from storage.storage_rig import UNITS, make_spec

from infinity.errors import ConfigError, LockError
from infinity.kinds import Tier
from infinity.storage.rundir import discard, run_directory, run_files


def publish(open_store, *paths, run="test"):
    store = open_store(*paths, run=run)
    store.build([make_spec(0, chunk, 2048, Tier.NVME) for chunk in range(4)], UNITS)
    store.publish(1, {})
    return store


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "-x", "x\n"])
def test_run_names_are_plain_file_names(disk, name):
    with pytest.raises(ConfigError, match="store.run"):
        run_directory(disk, name)


def test_removing_a_run_leaves_everything_else(open_store, disk):
    paths = [disk / "a", disk / "b"]
    publish(open_store, *paths).close()
    publish(open_store, *paths, run="other").close()
    mine = paths[0] / "infinity" / "test" / "notes.txt"
    mine.write_text("not ours")
    kept = run_files(paths, "other")

    listed = run_files(paths, "test")
    assert {file.suffix for file in listed.files} == {".safetensors", ".json"}
    assert listed.nbytes == sum(file.stat().st_size for file in listed.files)
    assert discard(paths, "test") == listed
    assert [path.name for path in mine.parent.iterdir()] == ["notes.txt"]
    assert not (paths[1] / "infinity" / "test").exists()
    assert run_files(paths, "other") == kept


def test_a_run_in_use_is_not_removed(open_store, disk):
    publish(open_store, disk)
    before = run_files([disk], "test")
    with pytest.raises(LockError):
        discard([disk], "test")
    assert run_files([disk], "test") == before
