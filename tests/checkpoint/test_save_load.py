"""A checkpoint comes back to the bit, appears whole or not at all, and says what is wrong with it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint.arrays import Arrays, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from infinity.checkpoint import Manifest, load, save, staged
from infinity.errors import CheckpointError, StorageError
from infinity.kinds import State

TRAINED = {"h.0.weight": (7, 5), "h.0.bias": (5,), "scalar": (), "none": (0, 3), "large": (300, 41)}
FROZEN = {"base": (torch.bfloat16, (33, 3)), "flags": (torch.bool, (9,)), "half": (torch.float16, (1,)), "ids": (torch.int64, (4,))}


def saved(directory: Path, **options: int) -> Arrays:
    source = Arrays(TRAINED, FROZEN).fill()
    save(directory, source, {"note": "x", "rng": torch.arange(5, dtype=torch.uint8)}, 12, **options)
    return source


def assert_same(a: Arrays, b: Arrays) -> None:
    assert a.values.keys() == b.values.keys()
    for key, values in a.values.items():
        assert same_bits(values, b.values[key]), key


@pytest.mark.parametrize("piece_bytes", [1, 100, 4096, 1 << 30])
@pytest.mark.parametrize("file_bytes", [1, 2000, 1 << 30])
def test_states_come_back_to_the_bit(piece_bytes: int, file_bytes: int, tmp_path: Path) -> None:
    source = saved(tmp_path / "c", piece_bytes=max(piece_bytes, 100), file_bytes=file_bytes)
    sink = Arrays(TRAINED, FROZEN)
    extra = load(tmp_path / "c", sink, piece_bytes=max(piece_bytes, 100))
    assert_same(source, sink)
    assert extra["note"] == "x" and same_bits(extra["rng"], torch.arange(5, dtype=torch.uint8))
    assert Manifest.read(tmp_path / "c").step == 12


@settings(max_examples=30)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=6),
    piece_bytes=st.integers(1, 3000),
    file_bytes=st.integers(1, 5000),
)
def test_any_shapes_in_any_pieces_come_back(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], piece_bytes: int, file_bytes: int
) -> None:
    directory = tmp_path_factory.mktemp("any") / "c"
    trained = {f"p{i}|{shape}": shape for i, shape in enumerate(shapes)}
    source, sink = Arrays(trained).fill(), Arrays(trained)
    save(directory, source, {}, 0, piece_bytes=piece_bytes, file_bytes=file_bytes)
    load(directory, sink, piece_bytes=3001 - piece_bytes)
    assert_same(source, sink)
    assert source.largest_piece <= max(piece_bytes, 4)
    shutil.rmtree(directory)


def test_every_safetensors_reader_opens_the_files(tmp_path: Path) -> None:
    source = saved(tmp_path / "c", file_bytes=2000)
    seen = {}
    for path in (tmp_path / "c").glob("states-*.safetensors"):
        with safe_open(path, framework="pt") as tensors:
            seen.update({key: tensors.get_tensor(key) for key in tensors.keys()})  # noqa: SIM118
    assert seen.keys() == {f"{state}|{name}" for name, state in source.values}
    for (name, state), values in source.values.items():
        assert same_bits(seen[f"{state}|{name}"], values)


def test_files_stay_below_their_limit_unless_one_tensor_is_larger(tmp_path: Path) -> None:
    saved(tmp_path / "c", file_bytes=2000)
    manifest = Manifest.read(tmp_path / "c")
    assert max(len(entries) for entries in manifest.files.values()) > 1
    for entries in manifest.files.values():
        assert sum(entry.nbytes for entry in entries) <= 2000 or len(entries) == 1


def test_there_is_no_pickle_and_nothing_else(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["c", "extra.safetensors", "manifest.json", "states-00001-of-00001.safetensors"]


def test_a_directory_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    source = saved(tmp_path / "c")
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'c'} exists.*another name"):
        save(tmp_path / "c", Arrays({"w": (2,)}), {}, 13)
    sink = Arrays(TRAINED, FROZEN)
    load(tmp_path / "c", sink)
    assert_same(source, sink)
    assert os.listdir(tmp_path) == ["c"]


def test_an_empty_directory_and_missing_parents_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    saved(tmp_path / "c")
    saved(tmp_path / "deep" / "er" / "c")
    assert Manifest.read(tmp_path / "c").step == Manifest.read(tmp_path / "deep" / "er" / "c").step == 12


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("mine")
    with pytest.raises(CheckpointError, match="exists"):
        saved(tmp_path / "c")
    assert (tmp_path / "c").read_text() == "mine"


@pytest.mark.parametrize("name", ["manifest.json", "extra.safetensors", "states-00001-of-00001.safetensors"])
@pytest.mark.parametrize("damage", ["remove", "cut", "grow", "flip_first", "flip_middle", "flip_last"])
def test_a_damaged_file_is_named_before_anything_changes(name: str, damage: str, tmp_path: Path) -> None:
    saved(tmp_path / "c")
    path = tmp_path / "c" / name
    data = bytearray(path.read_bytes())
    if damage.startswith("flip"):
        at = {"flip_first": 9, "flip_middle": len(data) // 2, "flip_last": len(data) - 1}[damage]
        data[at] ^= 0x11
    elif damage == "cut":
        del data[-1]
    else:
        data += b"}"
    path.unlink()
    if damage != "remove":
        path.write_bytes(data)
    sink = Arrays(TRAINED, FROZEN)
    with pytest.raises(CheckpointError, match=str(path)):
        load(tmp_path / "c", sink)
    assert sink.writes == 0


def test_another_model_is_refused_with_a_list_of_differences(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    trained = {**TRAINED, "h.0.weight": (5, 7), "added": (2,)}
    del trained["h.0.bias"]
    sink = Arrays(trained, {**FROZEN, "base": (torch.float32, (33, 3))})
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "c", sink)
    text = str(caught.value)
    assert "missing in the checkpoint: master|added, exp_avg|added, exp_avg_sq|added;" in text
    assert "unexpected in the checkpoint: master|h.0.bias, exp_avg|h.0.bias, exp_avg_sq|h.0.bias;" in text
    assert "master|h.0.weight is torch.float32 [7, 5], the model has torch.float32 [5, 7]" in text
    assert "param|base is torch.bfloat16 [33, 3], the model has torch.float32 [33, 3]" in text
    assert sink.writes == 0


def test_a_newer_version_is_refused_by_its_number(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    path = tmp_path / "c" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    with pytest.raises(CheckpointError, match="version 99; this program reads 'infinity-checkpoint' version 1"):
        load(tmp_path / "c", Arrays(TRAINED, FROZEN))


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match=f"{directory}.*not a complete checkpoint"):
            load(directory, Arrays(TRAINED))


def test_a_failing_source_leaves_nothing(tmp_path: Path) -> None:
    class Failing(Arrays):
        def read(self, name: str, state: State, start: int, stop: int) -> torch.Tensor:
            raise StorageError(5, "/mnt/nvme0/x", 4096, 512)

    with pytest.raises(StorageError, match="byte 4096") as caught:
        save(tmp_path / "c", Failing(TRAINED), {}, 0)
    assert caught.value.filename == "/mnt/nvme0/x" and os.listdir(tmp_path) == []


def test_a_value_that_cannot_be_kept_is_named_before_anything_is_written(tmp_path: Path) -> None:
    extra = {"registered": {"loader": {"state": [1, object()]}}}
    with pytest.raises(CheckpointError, match=r"registered\.loader\.state\.1 is a builtins\.object"):
        save(tmp_path / "c", Arrays(TRAINED), extra, 0)
    assert os.listdir(tmp_path) == []


SLOW_SAVE = """
import sys, time, torch
from checkpoint.arrays import Arrays
from infinity.checkpoint import save

class Slow(Arrays):
    def read(self, name, state, start, stop):
        if name == "last":
            print("under way", flush=True)
            time.sleep(100)
        return super().read(name, state, start, stop)

save(sys.argv[1], Slow({"first": (1000, 1000), "last": (3,)}).fill(), {}, 2)
"""


def start_slow_save(target: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", SLOW_SAVE, str(target)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "under way\n"
    return process


def test_a_killed_save_leaves_the_old_checkpoint_and_no_trace_after_the_next(tmp_path: Path) -> None:
    old = saved(tmp_path / "old")
    with start_slow_save(tmp_path / "new") as process:
        with pytest.raises(CheckpointError, match="another process is writing it now"):
            saved(tmp_path / "new")
        process.send_signal(signal.SIGKILL)
    assert sorted(os.listdir(tmp_path)) == ["new.tmp", "old"]
    sink = Arrays(TRAINED, FROZEN)
    load(tmp_path / "old", sink)
    assert_same(old, sink)
    saved(tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]
    assert sorted(os.listdir(tmp_path / "new")) == sorted(os.listdir(tmp_path / "old"))


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small file system: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_small_disk_is_refused_with_needed_and_free_bytes(small_disk: Path) -> None:
    with pytest.raises(StorageError, match=r"Needed 12\d{5} bytes .*, free 1\d{6} ") as caught:
        save(small_disk / "c", Arrays({"w": (100, 1000)}), {}, 0)  # 3 states of 400 kB
    assert caught.value.errno == 28 and os.listdir(small_disk) == []


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "check_room", lambda folder, nbytes: None)
    with pytest.raises(StorageError, match=r"states-00001-of-00001.*|12\d{5} bytes wanted") as caught:
        save(small_disk / "c", Arrays({"w": (100, 1000)}), {}, 0)
    assert caught.value.errno == 28 and os.listdir(small_disk) == []


def test_a_folder_that_no_save_left_is_not_emptied(tmp_path):
    mine = tmp_path / "weights.tmp" / "thesis.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(CheckpointError, match=r"weights\.tmp exists and was not left by an interrupted save"):
        save(tmp_path / "weights", Arrays({}), {}, 0)
    assert mine.read_text() == "mine" and not (tmp_path / "weights").exists()
