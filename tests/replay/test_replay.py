"""A replayed step moves what the plan says, as many requests at a time as training has, and leaves nothing behind."""

from __future__ import annotations

import errno
import multiprocessing
import signal
from dataclasses import replace

import pytest
import torch
from engines import CPU, NVME, mixed, settings, step
from models import tiny_gpt
from replay.replay_rig import configured, logged, opened, replay_and_die, tree, with_rates

import infinity
from infinity.cli.clean import clean_run
from infinity.config import load_config
from infinity.errors import StorageError
from infinity.kinds import Group, Lane, Tier
from infinity.optim.pipeline import buffer_count
from infinity.planner.place import Wish
from infinity.planner.plan import Rates, make_plan
from infinity.preparation import aio_options, preview
from infinity.replay import Phase, Replay, remove_leftovers
from infinity.replay.measured import PathMoved
from infinity.sizes import SECTOR_BYTES, GiB, format_bytes
from infinity.storage.lock import RunLock
from infinity.storage.store import Store


def frozen_gpt():
    """The first two blocks are not trained."""
    model = tiny_gpt()
    for param in model.blocks[:2].parameters():
        param.requires_grad_(False)
    return model


def moved_by_phase(plan):
    """{phase: (bytes read, bytes written)} as they follow from where chunks rest."""
    trained = {(spec.key.unit, spec.key.flat) for spec in plan.specs if spec.key.group is Group.OPTIMIZER}

    def resting(group, among=None):
        specs = [spec for spec in plan.specs if spec.tier is Tier.NVME and spec.key.group is group]
        return sum(spec.nbytes for spec in specs if among is None or (spec.key.unit, spec.key.flat) in among)

    param, grad, states = resting(Group.PARAM), resting(Group.GRAD), resting(Group.OPTIMIZER)
    return {
        Phase.FORWARD: (param, 0),
        Phase.BACKWARD: (param, grad),
        Phase.UPDATE: (grad + states, states + resting(Group.PARAM, trained)),
    }


def check_step(plan, step):
    """Each phase as computed above, and all of it as the plan says."""
    assert {phase: (moved.read_bytes, moved.write_bytes) for phase, moved in step.phases.items()} == moved_by_phase(plan)
    assert (step.read_bytes, step.write_bytes) == (plan.traffic[Lane.NVME_READ], plan.traffic[Lane.NVME_WRITE])


ONE = ("one",)
CASES = {
    "all on NVMe": (ONE, NVME, tiny_gpt, {}),
    "states alone": (ONE, CPU | {"optimizer": "nvme"}, tiny_gpt, {}),
    "gradients alone": (ONE, CPU | {"grad": "nvme"}, tiny_gpt, {}),
    "parameters alone": (ONE, CPU | {"param": "nvme"}, tiny_gpt, {"prefetch": {"units": 0}}),
    "accumulation": (ONE, NVME, tiny_gpt, {"train": {"accumulation": 4}, "precision": {"dtype": "bf16"}}),
    "bf16 with some fp32": (ONE, NVME, tiny_gpt, {"precision": {"dtype": "bf16", "keep_fp32": ["*norm*"]}}),
    "frozen parameters": (ONE, NVME, frozen_gpt, {}),
    "three paths": (("one", "two", "three"), NVME, tiny_gpt, {"prefetch": {"units": 3}}),
}


def opened_case(folder, case):
    """(directories, preview, replay that is to be entered) of one of the cases."""
    names, placement, build, sections = CASES[case]
    paths = [folder / name for name in names]
    for path in paths:
        path.mkdir()
    return paths, *opened(configured(*paths, placement=placement, **sections), build)


@pytest.mark.parametrize("case", CASES)
def test_a_step_moves_what_the_plan_says_and_the_files_are_gone(tmp_path, case):
    paths, found, replay = opened_case(tmp_path, case)
    with replay:
        replay.lay_out()
        for number in range(2):
            moved = replay.step(f"step {number}")
            check_step(found.plan, moved)
            assert {path for phase in moved.phases.values() for path in phase.paths} == set(paths)
    assert [list(path.iterdir()) for path in paths] == [[]] * len(paths)


def test_a_step_of_which_some_chunks_rest_in_memory_moves_the_others(tmp_path):
    config = mixed(settings(tmp_path, nvme=with_rates(tmp_path)), tiny_gpt)
    found, replay = opened(load_config(config))
    assert {spec.tier for spec in found.plan.specs if spec.key.group is Group.OPTIMIZER} == {Tier.CPU, Tier.NVME}
    with replay:
        replay.lay_out()
        check_step(found.plan, replay.step("step 1"))


def planned_for_a_gpu(found, config, *, paths=1):
    """The same model under the plan of a machine with a GPU; a plan is arithmetic and needs none."""
    wish = Wish(
        hbm_limit=0, cpu_limit=1 * GiB, param=Tier.NVME, grad=Tier.NVME, optimizer=Tier.NVME, chunk_numel=2048, prefetch_units=3, accumulates=False
    )
    device, layouts = torch.device("cuda", 0), [unit.layout for unit in found.units]
    plan = make_plan(layouts, wish, device, hbm_free=GiB, cpu_available=GiB, rates=Rates(), around=[len(layouts) - 1], num_paths=paths)
    return replace(found, plan=plan)


def test_a_gpus_parameters_come_through_upload_staging(tmp_path):
    config = configured(tmp_path)
    found = planned_for_a_gpu(preview(tiny_gpt, config), config)
    with Replay(found, aio_options(config)) as replay:
        assert replay._fetches._staging is not None and len(replay._fetches._staging._free) == found.plan.busy_paths + 3
        replay.lay_out()
        check_step(found.plan, replay.step("step 1"))


@pytest.mark.parametrize("paths", [1, 2])
def test_the_update_reads_ahead_as_far_as_trainings_ring_allows(tmp_path, paths):
    folders = [tmp_path / str(at) for at in range(paths)]
    for folder in folders:
        folder.mkdir()
    found, replay = opened(configured(*folders))
    assert found.plan.busy_paths == paths
    with replay:
        replay.lay_out()
        with logged() as log:
            replay._update.run(lambda nbytes: None)
    held, most = 0, 0
    for name, key in log:
        if key.group is Group.OPTIMIZER:
            held += 1 if name == "fetch" else -1
            most = max(most, held)
    assert (held, most) == (0, buffer_count(paths))


@pytest.mark.parametrize("ahead", [0, 2])
def test_units_are_fetched_as_far_ahead_as_planned(tmp_path, ahead):
    found, replay = opened(configured(tmp_path, prefetch={"units": ahead}))
    with replay, logged() as log:
        for at, _ in enumerate(replay._fetches.visit(replay._forward)):
            begun = list(dict.fromkeys(key.unit for _, key in list(log)))
            assert at + 1 <= len(begun) <= at + 1 + ahead
            assert begun == [unit.index for unit in replay._forward[: len(begun)]]


def test_no_sector_is_written_that_is_all_zeros(tmp_path, monkeypatch):
    real = Store.write_back

    def looked_at(self, key, source):
        sectors = source[: self.spec(key).nbytes].view(-1, SECTOR_BYTES)
        assert sectors.any(dim=1).all(), key
        return real(self, key, source)

    monkeypatch.setattr(Store, "write_back", looked_at)
    _, replay = opened(configured(tmp_path))
    with replay:
        replay.lay_out()
        replay.step("step 1")


@pytest.mark.parametrize("case", ["all on NVMe", "three paths"])
def test_a_replay_takes_no_more_memory_than_training_works_with(tmp_path, case):
    paths, found, replay = opened_case(tmp_path, case)
    with replay:
        replay.lay_out()
        for number in range(2):
            replay.step(f"step {number}")
        assert 0 < replay._slabs.peak_bytes <= found.plan.working_bytes(Tier.CPU)


# ---- how it ends ----


@pytest.mark.parametrize("group", list(Group))
@pytest.mark.parametrize("name", ["fetch", "write_back"])
def test_after_an_error_the_files_are_gone(tmp_path, monkeypatch, name, group):
    config = configured(tmp_path)
    _, replay = opened(config)
    real = getattr(Store, name)

    def fails(self, key, buffer):
        if key.group is group and key.unit == 2:
            raise StorageError(errno.EIO, str(key), 0, buffer.nbytes)
        return real(self, key, buffer)

    with pytest.raises(StorageError, match="u2"), replay:
        replay.lay_out()
        monkeypatch.setattr(Store, name, fails)
        replay.step("step 1")
    assert list(tmp_path.iterdir()) == []


def test_a_step_ends_between_phases_and_says_which_it_had(tmp_path):
    found, replay = opened(configured(tmp_path))
    asked = iter([True, True, False, False])
    with replay:
        replay.lay_out()
        moved = replay.step("step 1", lambda: next(asked))
    assert list(moved.phases) == [Phase.FORWARD, Phase.BACKWARD] and not moved.is_whole
    assert moved.read_bytes == 2 * found.plan.resting(Tier.NVME, Group.PARAM)
    assert list(tmp_path.iterdir()) == []


def test_laying_out_ends_when_nobody_wants_it(tmp_path):
    _, replay = opened(configured(tmp_path))
    asked = iter([True] * 7 + [False])
    with logged() as log, pytest.raises(KeyboardInterrupt), replay:
        replay.lay_out(lambda: next(asked))
    assert len(log) == 7 and list(tmp_path.iterdir()) == []


def test_a_full_path_is_known_before_anything_is_written(tmp_path):
    config = configured(tmp_path)
    found = preview(tiny_gpt, config)
    small = replace(found, paths=[replace(path, max_bytes=1 << 20) for path in found.paths])
    with pytest.raises(StorageError, match=f"{tmp_path}.*needs .* max_bytes left") as caught:
        Replay(small, aio_options(config))
    assert caught.value.errno == errno.ENOSPC and list(tmp_path.iterdir()) == []


def test_a_run_beside_it_stays_as_it_is_and_can_go_on(tmp_path):
    config = configured(tmp_path, store={"resume": "auto", "run": "mine"})
    with infinity.initialize(tiny_gpt(), config) as engine:
        step(engine)
    before = tree(tmp_path)
    found, replay = opened(config, tiny_gpt)
    with replay:
        replay.lay_out()
        check_step(found.plan, replay.step("step 1"))
    assert tree(tmp_path) == before
    with infinity.initialize(tiny_gpt(), config) as engine:
        assert engine.global_step == 1


# ---- what a killed one leaves ----


@pytest.fixture(scope="module")
def processes():
    """Fresh processes, forked from one that has imported everything and started no thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "infinity.replay", "engines", "models"])
    return context


@pytest.fixture
def killed(tmp_path, processes):
    """The directory that a replay left which was killed in its backward."""
    child = processes.Process(target=replay_and_die, args=(tmp_path, "backward"))
    child.start()
    child.join(120)
    (directory,) = (tmp_path / "infinity").iterdir()
    assert child.exitcode == -signal.SIGKILL and list(directory.glob("*.safetensors"))
    return directory


def test_the_next_replay_removes_what_a_killed_one_left(tmp_path, killed):
    nbytes = sum(file.stat().st_size for file in killed.glob("*.safetensors"))
    (said,) = remove_leftovers([tmp_path])
    assert said == f"removed {killed} ({format_bytes(nbytes)}), which a killed replay had left"
    assert not killed.exists() and remove_leftovers([tmp_path]) == []


def test_clean_removes_it_too(killed):
    assert clean_run(killed, [], confirm=lambda question: True).startswith("removed ")
    assert not killed.exists()


def test_what_lives_or_trains_is_left_alone(tmp_path, killed):
    files = sorted(killed.glob("*.safetensors"))
    lock = RunLock(killed)
    assert remove_leftovers([tmp_path]) == []
    lock.close()
    (killed / "manifest.r0.json").write_text("{}")
    assert remove_leftovers([tmp_path]) == []
    (killed / "manifest.r0.json").unlink()
    named = killed.rename(killed.with_name("replay-mine"))
    assert remove_leftovers([tmp_path]) == []
    assert sorted(named.glob("*.safetensors")) == [named / file.name for file in files]


def test_seconds_and_bytes_of_a_path_add_up():
    total = PathMoved(read_bytes=1, read_s=0.5) + PathMoved(read_bytes=2, write_bytes=3, read_s=0.25, write_s=1.0)
    assert total == PathMoved(read_bytes=3, write_bytes=3, read_s=0.75, write_s=1.0)
