"""torch, the device and its link, as far as they can be computed without a GPU; on one, the whole."""

from __future__ import annotations

import pytest
import torch

from infinity.config import load_config
from infinity.doctor import gpu
from infinity.doctor.finding import Status
from infinity.doctor.system import System
from infinity.errors import CapacityError
from infinity.planner.hardware import CopyRates
from infinity.sizes import GiB

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(("version", "status"), [("2.5.1+cu121", "failure"), ("2.6.0", "ok"), ("2.13.0+cpu", "ok"), ("3.0.0a0+git12", "ok")])
def test_torch_has_to_be_2_6(version, status):
    assert gpu.check_torch(version).status == status


DRIVER = {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Wed Jan 1\nGCC version: gcc"}
OPEN_DRIVER = {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"}


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_gpu_that_is_not_there_is_a_failure_that_names_the_key(without_gpu, machine):
    device, found = gpu.check_device(load_config({"device": "cuda:3"}), machine({}))
    assert device is None and found.status is Status.FAILURE
    assert "cuda:3" in found.found and 'device = "auto"' in found.way_out


def test_no_gpu_and_none_wanted_is_ok(without_gpu, machine):
    assert gpu.check_device(load_config({}), machine({}))[1].status is Status.OK
    assert gpu.check_device(load_config({"device": "cpu"}), machine(DRIVER))[1].status is Status.OK


@pytest.mark.parametrize("files", [DRIVER, OPEN_DRIVER], ids=["closed", "open"])
@pytest.mark.parametrize(("cuda", "way_out"), [(None, "pytorch.org"), ("12.8", "CUDA_VISIBLE_DEVICES")])
def test_a_loaded_driver_that_torch_does_not_use_is_a_warning(without_gpu, machine, monkeypatch, files, cuda, way_out):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    device, found = gpu.check_device(load_config({}), machine(files))
    assert device == CPU and found.status is Status.WARNING
    assert "570.86.15" in found.found and way_out in found.way_out


@pytest.mark.parametrize(("hbm", "status"), [("auto", "ok"), (4 * GiB, "ok"), (4 * GiB + 1, "warning"), (8 * GiB + 1, "failure")])
def test_a_budget_against_the_memory_of_the_gpu(monkeypatch, hbm, status):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * GiB, 8 * GiB))
    found = gpu.check_hbm(load_config({"budgets": {"hbm": hbm}}), CUDA)
    assert found is not None and found.status == status
    assert status == "ok" or f"at most {4 * GiB}" in found.way_out


def test_without_a_gpu_its_memory_is_no_line():
    assert gpu.check_hbm(load_config({"budgets": {"hbm": "1GiB"}}), CPU) is None


@pytest.mark.parametrize(
    ("speed", "rate"),
    [("2.5 GT/s PCIe", 0.25e9), ("5.0 GT/s PCIe", 0.5e9), ("8.0 GT/s PCIe", 1e9 * 128 / 130), ("32.0 GT/s PCIe", 4e9 * 128 / 130), ("Unknown", 0)],
)
def test_what_a_lane_carries(speed, rate):
    assert gpu.lane_rate(speed) == pytest.approx(rate)


LINK = 16 * 2e9 * 128 / 130


@pytest.mark.parametrize(
    ("width", "rate", "status", "told"),
    [
        (16, LINK / 2 + 1e6, "ok", "16 lanes of 16.0 GT/s"),
        (16, LINK / 2 - 1e6, "warning", "less than half of 31.51 GB/s"),
        (8, LINK / 2, "warning", "the GPU has 16 lanes"),
        (0, 1e9, "ok", "up and down"),
    ],
)
def test_copies_are_judged_by_their_link(tmp_path, width, rate, status, told):
    for name, text in {"current_link_width": width, "max_link_width": 16, "max_link_speed": "16.0 GT/s PCIe"}.items():
        (tmp_path / name).write_text(f"{text}\n")
    found = gpu.judge_copies("up and down", rate, tmp_path)
    assert found.status == status and told in found.found


def test_without_a_link_in_sysfs_rates_are_told_and_not_judged(tmp_path):
    assert gpu.judge_copies("up and down", 1.0, tmp_path / "none").status is Status.OK


def test_memory_that_cannot_be_pinned_is_a_failure(monkeypatch, machine):
    def refuse(device: torch.device) -> None:
        raise CapacityError("cudaHostRegister refuses")

    monkeypatch.setattr(gpu, "measure_copies", refuse)
    found = gpu.check_copies(CUDA, machine({}))
    assert found is not None and found.status is Status.FAILURE and "cudaHostRegister" in found.found


def test_both_ways_are_told_and_the_slower_one_is_judged(monkeypatch, machine):
    folder = "sys/bus/pci/devices/0001:3b:05.0"
    system = machine({f"{folder}/current_link_width": 16, f"{folder}/max_link_width": 16, f"{folder}/max_link_speed": "16.0 GT/s PCIe"})
    monkeypatch.setattr(gpu, "measure_copies", lambda device: CopyRates(upload=25e9, download=5e9))
    properties = type("Properties", (), {"pci_domain_id": 1, "pci_bus_id": 0x3B, "pci_device_id": 5})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = gpu.check_copies(CUDA, system)
    assert found is not None and found.status is Status.WARNING
    assert found.found.startswith("up 25.00 GB/s, down 5.00 GB/s")


def test_without_cuda_nothing_is_copied():
    assert gpu.check_copies(CPU, System()) is None


@pytest.mark.gpu
def test_a_real_gpu_is_named_and_its_copies_are_measured():
    device, found = gpu.check_device(load_config({"device": "cuda"}), System())
    assert device is not None and torch.cuda.get_device_name(device) in found.found
    copies = gpu.check_copies(device, System())
    assert copies is not None and copies.found.startswith("up ")
