"""What a drive tells of its life: sysfs of a flash card, and a smartctl that says what we let it say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinity.doctor.drive import Drive
from infinity.doctor.finding import Status
from infinity.doctor.wear import check_wear


def drive(kind: str, folder: Path = Path("/nowhere")) -> Drive:
    return Drive(name="nvme0n1", kind=kind, model="", folder=folder, numa_node=None)


@pytest.fixture
def smartctl(tmp_path, monkeypatch):
    """smartctl(answer): from now on the command prints it, whatever it is asked."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def say(answer: object) -> None:
        text = answer if isinstance(answer, str) else json.dumps(answer)
        (tmp_path / "answer").write_text(f"{text}\n")
        command = tmp_path / "smartctl"
        command.write_text(f'#!/bin/sh\nwhile read -r line; do echo "$line"; done < {tmp_path}/answer\nexit 4\n')
        command.chmod(0o755)

    return say


def log(**values: int) -> dict[str, object]:
    return {"smart_status": {"passed": True}, "nvme_smart_health_information_log": {"critical_warning": 0, **values}}


@pytest.mark.parametrize(("used", "status"), [(0, "ok"), (79, "ok"), (80, "warning"), (130, "warning")])
def test_an_nvme_drive_tells_its_used_endurance(smartctl, used, status):
    smartctl(log(percentage_used=used, data_units_written=2_000_000) | {"more": 1})
    found = check_wear(drive("NVMe"), "/disk")
    assert found is not None and found.status == status and found.path == "/disk"
    assert f"{used}% of its endurance used, 1.0 TB written" in found.found  # units of 1000 blocks of 512 bytes
    assert status == "ok" or "nvme.paths" in found.way_out


@pytest.mark.parametrize("answer", [log(critical_warning=4, percentage_used=3), {"smart_status": {"passed": False}}])
def test_a_drive_that_says_it_fails_is_a_failure(smartctl, answer):
    smartctl(answer)
    found = check_wear(drive("SSD"), "/disk")
    assert found is not None and found.status is Status.FAILURE and "smartctl --all /dev/nvme0n1" in found.way_out


def test_a_sata_drive_that_tells_its_endurance(smartctl):
    smartctl({"smart_status": {"passed": True}, "endurance_used": {"current_percent": 91}})
    found = check_wear(drive("SSD"), "/disk")
    assert found is not None and found.status is Status.WARNING and "91%" in found.found


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"smartctl": {"messages": [{"string": "open device: /dev/nvme0n1 failed: Permission denied"}]}}, "Permission denied"),
        ({"smart_status": {"passed": True}}, "its SMART data has none"),
        ("not json", "smartctl: "),
    ],
)
def test_what_is_not_told_is_ok_with_the_reason(smartctl, answer, told):
    smartctl(answer)
    found = check_wear(drive("NVMe"), "/disk")
    assert found is not None and found.status is Status.OK and told in found.found


def test_without_smartctl_the_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = check_wear(drive("NVMe"), "/disk")
    assert found is not None and found.status is Status.OK and "smartmontools" in found.found


@pytest.mark.parametrize(("text", "status"), [("0x02 0x01", "ok"), ("0x01 0x08", "warning"), ("0x0b 0x00", "warning")])
def test_a_flash_card_counts_tenths_of_its_life(tmp_path, text, status):
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "life_time").write_text(f"{text}\n")
    found = check_wear(drive("flash card", tmp_path), "/disk")
    assert found is not None and found.status == status
    assert f"{max(int(word, 16) for word in text.split()) * 10}%" in found.found


@pytest.mark.parametrize("kind", ["virtual disk", "memory", "loop device", "flash card", "NVMe over tcp"])
def test_what_has_no_wear_to_tell_says_nothing(tmp_path, kind):
    assert check_wear(drive(kind, tmp_path), "/disk") is None
