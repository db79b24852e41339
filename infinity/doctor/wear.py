"""How much of a drive's life is used up, where it tells: sysfs for flash cards, SMART data through smartctl for others."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

from infinity.doctor.drive import Drive
from infinity.doctor.finding import Finding, failure, ok, warning
from infinity.doctor.system import read_text

WEAR = "drive wear"

WORN_PERCENT = 80
"""A run writes 12 bytes and more per element and step: what is left of a drive past this goes in days, so plan its successor."""

_SMARTCTL_S = 10


def check_wear(drive: Drive, path: str) -> Finding | None:
    """Used endurance in percent. None for what has none to tell: memory, virtual and network devices.

    From 80 a warning. A drive that says of itself that it fails is a failure: `critical_warning` of the NVMe SMART log (NVM Express
    Base Specification, log page 02h), or a failed self-assessment (smartctl(8), --health).
    """
    if drive.kind == "flash card":
        return _card(drive, path)
    if drive.kind in ("NVMe", "SSD", "USB disk", "rotating disk"):
        return _smart(drive, path)
    return None


def _card(drive: Drive, path: str) -> Finding | None:
    """`0x02 0x01` in life_time: tenths of the life of two kinds of cells that are used up, 0x0b for all of it (JEDEC eMMC 5.0, EXT_CSD)."""
    tenths = [int(word, 16) for word in read_text(drive.folder / "device" / "life_time").split()]
    if not any(tenths):
        return None
    return _judged(drive, 10 * max(tenths), f"up to {10 * max(tenths)}% of its life used (sysfs)", path)


def _smart(drive: Drive, path: str) -> Finding:
    table, problem = _ask_smartctl(drive.name)
    log = table.get("nvme_smart_health_information_log", {})
    used = log.get("percentage_used", table.get("endurance_used", {}).get("current_percent"))
    passed = table.get("smart_status", {}).get("passed")
    if log.get("critical_warning") or passed is False:
        found = f"{drive.name} reports that it fails (critical_warning {log.get('critical_warning', 'unknown')})"
        return failure(WEAR, found, f"copy what is on it and replace it; look: sudo smartctl --all /dev/{drive.name}", path)
    if used is None:
        return ok(WEAR, f"{drive.name}: not told ({problem or 'its SMART data has none'})", path)
    written = log.get("data_units_written")
    told = f", {written * 512_000 / 1e12:.1f} TB written" if written is not None else ""
    return _judged(drive, used, f"{used}% of its endurance used{told} (SMART)", path)


def _judged(drive: Drive, used_percent: int, told: str, path: str) -> Finding:
    if used_percent < WORN_PERCENT:
        return ok(WEAR, f"{drive.name}: {told}", path)
    way_out = 'keep more in memory (budgets.cpu, placement.optimizer = "cpu"), or name another drive in nvme.paths'
    return warning(WEAR, f"{drive.name}: {told}", way_out, path)


def _ask_smartctl(name: str) -> tuple[dict[str, Any], str]:
    """What `smartctl --json` says of a drive, and why it says less than all. Its exit status is a set of bits, not a verdict."""
    if shutil.which("smartctl") is None:
        return {}, "smartctl is not installed: package smartmontools"
    try:
        command = ["smartctl", "--json", "--health", "--attributes", f"/dev/{name}"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SMARTCTL_S, check=False).stdout
        table = json.loads(answer)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return {}, f"smartctl: {error}"
    messages = table.get("smartctl", {}).get("messages", [])
    return table, "; ".join(str(message.get("string", "")) for message in messages)
