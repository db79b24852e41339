"""Disks and threads fail under a run: it says which file and where, stops within the deadline, and nothing half-written is ever trusted."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import CPU, NVME, descriptors, files_below, known_rates, settings, small_disk, states_of, threads
from models import batches, tiny_gpt

import infinity
from infinity import native
from infinity.errors import CapacityError, ConfigError, MoverError, StorageError
from infinity.runtime.saved import top_hooks
from infinity.storage import nvme
from infinity.storage.manifest import Manifest

DEADLINE_S = 10.0


def config_of(path, placement=NVME, **sections):
    return settings(path, placement, store={"resume": "auto"}, nvme={"paths": [str(path)], "deadline_s": DEADLINE_S}, **sections)


def step(engine, count=1):
    for ids in batches(count):
        engine.model(ids).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()


@pytest.fixture
def run(tmp_path):
    """An engine on a run that was published after one step, and what is left once it is closed."""
    before = threads()[0], descriptors()
    config = config_of(known_rates(tmp_path))
    with infinity.initialize(tiny_gpt(), config) as engine:
        step(engine)
    engine = infinity.initialize(tiny_gpt(), config)
    yield engine, tmp_path
    engine.close()
    assert threads()[0] == before[0], "no thread outlives close()"
    assert not set(descriptors()) - set(before[1]), "no file stays open"


def assert_refused(path, told="mix of two steps"):
    """Whoever comes next is told, and nothing on the disk changes by that."""
    before = files_below(path)
    with pytest.raises((ConfigError, StorageError), match=told):
        infinity.initialize(tiny_gpt(), config_of(path))
    assert files_below(path) == before


def shard(path, text):
    return next(file for file in sorted((path / "infinity" / "default").iterdir()) if text in file.name)


@pytest.mark.parametrize("group", ["param", "grad", "optimizer"])
def test_a_file_truncated_under_a_run(run, group):
    engine, path = run
    step(engine)
    file = shard(path, f"u00002-{group}")
    with pytest.raises(StorageError) as caught:
        loss = engine.model(batches(1)[0])
        os.truncate(file, 8192)
        loss.backward()
        engine._parts.grads.wait()
        os.truncate(file, 8192)
        engine.optimizer.step()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(file)) and caught.value.offset >= 4096
    assert "load a checkpoint" in str(caught.value)
    with pytest.raises(StorageError):
        step(engine)
    if group == "param":
        with pytest.raises(StorageError):  # the steps were whole, but this file cannot be published
            engine.close()
    engine.close()
    assert_refused(path)


@pytest.mark.parametrize("group", ["param", "optimizer"])
def test_a_file_deleted_under_a_run_is_found_when_it_is_published(run, group):
    """The open file goes on working; what it holds can never be published."""
    engine, path = run
    file = shard(path, f"u00002-{group}")
    file.unlink()
    step(engine, 2)
    with pytest.raises(StorageError) as caught:
        engine.close()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(file))
    assert_refused(path)


class FaultyAio(native.Aio):
    """Fails the n-th request that a predicate is true of, as a drive would: with -EIO, once it is waited for."""

    should_fail = staticmethod(lambda is_write, path: False)

    def read(self, fd, *rest):
        return self._maybe(super().read(fd, *rest), False, fd)

    def write(self, fd, *rest):
        return self._maybe(super().write(fd, *rest), True, fd)

    def _maybe(self, request, is_write, fd):
        return Broken(request) if self.should_fail(is_write, os.readlink(f"/proc/self/fd/{fd}")) else request


class Broken:
    def __init__(self, request):
        self._request = request

    def __getattr__(self, name):
        return getattr(self._request, name)

    def wait(self, timeout_s=None):
        self._request.wait(timeout_s)
        return -errno.EIO


@pytest.fixture
def faulty(monkeypatch):
    monkeypatch.setattr(nvme, "Aio", FaultyAio)
    yield lambda predicate: monkeypatch.setattr(FaultyAio, "should_fail", staticmethod(predicate))


@pytest.mark.parametrize("is_write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("group", ["param", "grad", "optimizer"])
@pytest.mark.parametrize("unit", [0, 3])
def test_a_drive_that_fails_one_request(faulty, run, is_write, group, unit):
    engine, path = run
    step(engine)
    text = f"u{unit:05d}-{group}"
    faulty(lambda write, file: write is is_write and text in file)
    started = time.monotonic()
    with pytest.raises(StorageError) as caught:
        step(engine, 3)
    assert caught.value.errno == errno.EIO and text in caught.value.filename and caught.value.offset % 4096 == 0
    assert time.monotonic() - started < DEADLINE_S, "nobody waits for a deadline to hear of it"
    faulty(lambda write, file: False)
    if group == "param" and not is_write:
        step(engine)  # nothing was changed: the drive may try again
        engine.close()
        infinity.initialize(tiny_gpt(), config_of(path)).close()
        return
    with pytest.raises((StorageError, MoverError)):
        step(engine)
    engine.close()
    if group != "grad":
        assert_refused(path)


def test_a_failed_write_is_never_published_by_a_later_success(faulty, run):
    """The step's error was caught and ignored by the user; the store remembers."""
    engine, path = run
    faulty(lambda write, file: write and "u00001-param" in file)
    with pytest.raises(StorageError):
        with engine.gathered(engine.model.blocks[0]), torch.no_grad():
            engine.model.blocks[0].up.weight.zero_()
    faulty(lambda write, file: False)
    with pytest.raises(StorageError):
        engine.close()
    assert not Manifest.load(path / "infinity" / "default" / "manifest.r0.json").is_clean
    assert_refused(path)


def test_a_disk_that_fills_up_while_the_run_is_published(tmp_path):
    """What rests in memory gets its files at the first publish: no room, no run, nothing left."""
    try:
        with small_disk(tmp_path / "disk", 1 << 20) as disk:
            known_rates_of(tmp_path, disk)
            engine = infinity.initialize(tiny_gpt(), config_of(disk, CPU))
            step(engine)
            with pytest.raises(StorageError) as caught:
                engine.close()
            assert caught.value.errno == errno.ENOSPC and not files_below(disk)
            assert "1048576" in str(caught.value) or "free" in str(caught.value)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        pytest.skip(f"a file system of its own cannot be mounted here: {error}")


def known_rates_of(measured, disk):
    """The rates of the big disk for the small one, which has no room to be measured on."""
    text = (known_rates(measured) / "infinity" / "rates.json").read_text()
    device = os.stat(disk).st_dev
    old = os.stat(measured).st_dev
    (disk / "infinity").mkdir()
    (disk / "infinity" / "rates.json").write_text(text.replace(f"{os.major(old)}:{os.minor(old)}", f"{os.major(device)}:{os.minor(device)}"))


def test_two_paths_on_one_disk_do_not_have_its_room_twice(tmp_path):
    needed = sum(spec.padded_nbytes for spec in infinity.plan(tiny_gpt(), settings(known_rates(tmp_path))).specs)
    try:
        with small_disk(tmp_path / "disk", needed * 3 // 4) as disk:
            paths = [disk / "a", disk / "b"]
            for path in paths:
                path.mkdir()
            with pytest.raises(StorageError) as caught:
                infinity.plan(tiny_gpt(), settings(disk, nvme={"paths": [str(path) for path in paths]}))
            assert caught.value.errno == errno.ENOSPC
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        pytest.skip(f"a file system of its own cannot be mounted here: {error}")


@pytest.mark.parametrize("has_rates", [True, False])
def test_a_disk_too_small_for_the_plan_is_refused_with_both_numbers(tmp_path, has_rates):
    try:
        with small_disk(tmp_path / "disk", 1 << 20) as disk:
            if has_rates:
                known_rates_of(tmp_path, disk)
            needed = sum(spec.padded_nbytes for spec in infinity.plan(tiny_gpt(), settings(known_rates(tmp_path))).specs)
            with pytest.raises(StorageError) as caught:
                infinity.initialize(tiny_gpt(), config_of(disk))
            assert caught.value.errno == errno.ENOSPC and str(disk) in str(caught.value.filename)
            numbers = [int(word) for word in str(caught.value).replace(",", " ").split() if word.isdigit()]
            assert any(number >= needed for number in numbers), "the bytes that are needed"
            assert any(number <= 1 << 20 for number in numbers), "the bytes that are free"
            assert not files_below(disk)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        pytest.skip(f"a file system of its own cannot be mounted here: {error}")


class Killed(BaseException):
    """Not an Exception: nothing that catches those may swallow it."""


@pytest.mark.parametrize("error", [RuntimeError("bad pointer"), Killed("by the system")])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_mover_that_dies_raises_in_the_main_thread(run, monkeypatch, error, phase):
    engine, path = run
    step(engine)
    scheduler = engine._parts.scheduler

    def die(fetch, resting):
        raise error

    started = time.monotonic()
    with pytest.raises(MoverError) as caught:
        if phase == "forward":
            monkeypatch.setattr(scheduler._ascent, "begin", die)
        loss = engine.model(batches(1)[0])
        monkeypatch.setattr(scheduler._ascent, "begin", die)
        loss.backward()
    assert caught.value.__cause__ is error
    assert time.monotonic() - started < DEADLINE_S
    with pytest.raises(MoverError):
        step(engine)
    engine.close()
    assert infinity.initialize(tiny_gpt(), config_of(path) | {"store": {"resume": "never", "run": "other"}}).close() is None


def test_an_interrupt_between_two_units_of_the_update_is_not_saved(run, tmp_path):
    engine, _ = run

    def interrupt():
        raise KeyboardInterrupt

    engine.optimizer.on_progress = interrupt
    engine.model(batches(1)[0]).backward()
    with pytest.raises(KeyboardInterrupt):
        engine.optimizer.step()
    for use in (engine.save, engine.load):
        with pytest.raises(MoverError, match="mix of two steps"):
            use(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


def test_a_mover_that_dies_during_the_update_does_not_break_it_off(run, monkeypatch):
    engine, _ = run
    step(engine, 2)
    scheduler, pipeline, error = engine._parts.scheduler, engine._parts.pipeline, RuntimeError("gone")
    begin = pipeline.begin

    def die(fetch, resting):
        raise error

    def begin_and_die(*args):
        monkeypatch.setattr(scheduler._ascent, "begin", die)
        begin(*args)

    monkeypatch.setattr(pipeline, "begin", begin_and_die)
    engine.model(batches(1)[0]).backward()
    with pytest.raises(MoverError) as caught:
        engine.optimizer.step()
        step(engine)
    assert caught.value.__cause__ is error
    assert pipeline.is_sound, "every parameter has made the step"


def test_a_mover_that_vanishes_is_noticed(run, monkeypatch):
    engine, _ = run
    scheduler = engine._parts.scheduler
    monkeypatch.setattr(scheduler, "_fail", lambda error: None)

    def vanish(fetch, resting):
        raise SystemExit

    monkeypatch.setattr(scheduler._ascent, "begin", vanish)
    started = time.monotonic()
    with pytest.raises(MoverError, match="the mover is dead"):
        step(engine)
    assert time.monotonic() - started < DEADLINE_S


@pytest.mark.parametrize("error", [RuntimeError("bad pointer"), Killed("by the system")])
def test_a_gradient_mover_that_dies_raises_in_the_main_thread(run, monkeypatch, error):
    engine, path = run

    def die(move):
        raise error

    monkeypatch.setattr(engine._parts.grads._mover, "_start", die)
    started = time.monotonic()
    with pytest.raises(MoverError) as caught:
        step(engine)
    assert caught.value.__cause__ is error
    with pytest.raises(MoverError):
        step(engine)
    assert time.monotonic() - started < DEADLINE_S


class Late:
    """A read that takes its time."""

    def __init__(self, work, delay_s):
        self._work, self._ready = work, time.monotonic() + delay_s

    def wait(self, timeout_s=None):
        self._work.wait(timeout_s)
        time.sleep(max(0.0, self._ready - time.monotonic()))

    def is_completed(self):
        return self._work.is_completed() and time.monotonic() >= self._ready


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_slow_drive_makes_units_late_and_changes_nothing(tmp_path, monkeypatch, prefetch):
    """Also when units that were fetched ahead are still in the air while another is needed at once."""
    config = config_of(known_rates(tmp_path), prefetch={"units": prefetch}) | {"store": {"resume": "never"}}

    def train(delay_s):
        with infinity.initialize(tiny_gpt(), config) as engine:
            store = engine._parts.store
            real = store.fetch
            monkeypatch.setattr(store, "fetch", lambda key, into: Late(real(key, into), delay_s if key.group == "param" else 0.0))
            step(engine, 3)
            for block in (3, 0, 2):
                with engine.gathered(engine.model.blocks[block]):
                    pass
            return states_of(engine)

    quick, slow = train(0.0), train(0.01)
    assert all(torch.equal(quick[key], slow[key]) for key in quick)


@pytest.fixture
def heeds_interrupts():
    """A shell's background job is started with SIGINT ignored, and Python leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
def test_an_interrupt_while_a_unit_is_on_its_way(tmp_path, monkeypatch):
    """Ctrl-C in the middle of an evaluation: what was half-way here is old after the next step, and is not used."""
    config = config_of(known_rates(tmp_path)) | {"store": {"resume": "never"}}

    def train(interrupt_at):
        with infinity.initialize(tiny_gpt(), config) as engine:
            step(engine, 2)
            store = engine._parts.store
            real, timers = store.fetch, []

            class Interrupted(Late):
                """Takes two seconds from the moment that somebody waits for it, and the interrupt comes early in those."""

                def wait(self, timeout_s=None):
                    if not timers:
                        timers.append(threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)))
                        timers[0].start()
                        self._ready = time.monotonic() + 2.0
                    super().wait(timeout_s)

            def fetch(key, into):
                return real(key, into) if key.unit != interrupt_at else Interrupted(real(key, into), 2.0)

            if interrupt_at is not None:
                engine._parts.scheduler.invalidate()  # what the step has had fetched ahead is fetched again, late
                monkeypatch.setattr(store, "fetch", fetch)
                with pytest.raises(KeyboardInterrupt), torch.no_grad():
                    engine.model(batches(1)[0])
                timers[0].join()
                monkeypatch.setattr(store, "fetch", real)
            step(engine, 2)
            return states_of(engine)

    want = train(None)
    for unit in (1, 3):
        got = train(unit)
        assert all(torch.equal(want[key], got[key]) for key in want)


class Interrupts:
    """Ctrl-C at the `at`th place of the lower floors where Python looks for signals in this thread: when it enters a function of its own,
    and after one of C's."""

    FILES = tuple(str(Path(infinity.__file__).parent / floor) for floor in ("runtime", "optim", "storage")) + (threading.__file__,)

    def __init__(self, at):
        self.left = at

    def __call__(self, frame, event, arg):
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(self.FILES):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


def loss_and_norm(engine):
    """Of a whole pass, whose gradients are given up."""
    loss = engine.model(batches(1)[0])
    loss.backward()
    norm = engine.clip_grad_norm_(1e9)
    engine.optimizer.zero_grad()
    return loss.item(), norm.item()


def assert_at_rest(engine):
    """Between two passes: every byte is counted once, and nothing is live, in use, or on torch's stack."""
    scheduler, descent, units = engine._parts.scheduler, engine._parts.scheduler._movers.descent, engine._parts.hooks._live.units
    with scheduler._changed.lock:
        assert scheduler._room.used_bytes == sum(fetch.nbytes for fetch in scheduler._fetches.values() if fetch.counted)
    descent._let_go()
    assert descent._budget.used_bytes == 0
    assert not any(unit.users or unit.flats is not None for unit in units) and not engine._parts.hooks._calls
    assert all(type(seat.param) is seat.resting_class for unit in units for seat in unit.seats)
    assert top_hooks() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that comes in a finalizer goes no further
@pytest.mark.parametrize("every", [97, pytest.param(13, marks=pytest.mark.slow)])
@pytest.mark.parametrize("starts_itself", [True, False])
def test_an_interrupt_anywhere_in_a_pass_leaves_nothing_behind(tmp_path, starts_itself, every):
    """Whoever asks again starts afresh, whether a thread starts what it needs itself (what only has to be copied) or the mover does."""
    config = config_of(known_rates(tmp_path)) | {"store": {"resume": "never"}}
    with infinity.initialize(tiny_gpt(), config) as engine:
        scheduler = engine._parts.scheduler
        scheduler._resting = {index: replace(resting, is_near=starts_itself) for index, resting in scheduler._resting.items()}
        step(engine, 2)
        want = loss_and_norm(engine)
        for at in itertools.count(1, every):
            interrupts = Interrupts(at)
            sys.setprofile(interrupts)
            with suppress(KeyboardInterrupt, RuntimeError):  # "cannot release un-acquired lock" where threading.Condition.wait() is struck
                engine.model(batches(1)[0]).backward()
            sys.setprofile(None)
            engine.optimizer.zero_grad()
            with torch.no_grad():
                assert engine.model(batches(1)[0]).item() == want[0], at
            assert loss_and_norm(engine) == want, at
            assert_at_rest(engine)
            if interrupts.left > 0:
                break
        assert at > 4000, "or there were none"
    assert not threads()[0]


def test_a_failed_initialize_leaves_nothing(tmp_path, monkeypatch, faulty):
    """Neither files nor threads nor locks, wherever it fails."""
    known_rates(tmp_path)
    before = threads()[0], descriptors()
    faulty(lambda write, file: write and "u00002-optimizer" in file)
    with pytest.raises(StorageError):
        infinity.initialize(tiny_gpt(), config_of(tmp_path))
    faulty(lambda write, file: False)
    monkeypatch.setattr("infinity.assembly.Hooks", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        infinity.initialize(tiny_gpt(), config_of(tmp_path))
    monkeypatch.undo()
    gc.collect()
    assert not files_below(tmp_path)
    assert threads()[0] == before[0] and not set(descriptors()) - set(before[1])
    infinity.initialize(tiny_gpt(), config_of(tmp_path)).close()


def test_memory_that_is_not_there_is_a_capacity_error(tmp_path, monkeypatch):
    """The system refuses a mapping while the engine is built."""

    def refuse(nbytes):
        raise CapacityError(f"mmap of {nbytes} bytes: no memory left")

    monkeypatch.setattr("infinity.storage.slabs._map_small", refuse)
    with pytest.raises(CapacityError, match="budgets.cpu"):
        infinity.initialize(tiny_gpt(), config_of(known_rates(tmp_path)))
    assert not files_below(tmp_path) and not threads()[0]


def test_threads_and_files_come_and_go_with_the_engine(tmp_path):
    known_rates(tmp_path)
    gc.collect()
    before = threads(), descriptors()
    for _ in range(3):
        with infinity.initialize(tiny_gpt(), settings(tmp_path)) as engine:
            step(engine)
            assert threads()[0] and len(descriptors()) > len(before[1])
    gc.collect()
    assert (threads(), descriptors()) == before
    assert threading.active_count() >= 1 and Path(tmp_path).exists()
