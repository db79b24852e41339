"""torch and the GPU: versions, the device that the configuration names, its memory, how fast it is reached."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch

from infinity.config import Config
from infinity.device import choose_device
from infinity.doctor.finding import Finding, failure, ok, warning
from infinity.doctor.system import System, read_number, read_text
from infinity.errors import CapacityError, ConfigError
from infinity.planner.hardware import measure_copies
from infinity.sizes import format_bytes, format_rate

TORCH = "torch"
DEVICE = "device"
HBM = "GPU memory"
COPIES = "pinned copies"

OLDEST_TORCH = (2, 6)


def check_torch(version: str = torch.__version__) -> Finding:
    """Version of torch, of the CUDA it was built for, and of Python. Older than 2.6 is a failure: the engine's hooks need what came then."""
    cuda = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    found = f"{version}, built {cuda}; Python {platform.python_version()}"
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    return failure(TORCH, found, "pip install --upgrade 'torch>=2.6'") if numbers < OLDEST_TORCH else ok(TORCH, found)


def check_device(config: Config, system: System) -> tuple[torch.device | None, Finding]:
    """The device of the configuration, None where it is not there: a failure. A GPU that torch cannot use is a warning."""
    try:
        device = choose_device(config.device)
    except (ConfigError, RuntimeError) as error:
        return None, failure(DEVICE, str(error), 'set device = "auto", "cpu" or another number; nvidia-smi -L lists GPUs')
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found = f"{device}, {properties.name}, compute capability {properties.major}.{properties.minor}, driver {_driver(system) or 'unknown'}"
        return device, ok(DEVICE, found)
    if config.device == "auto" and _driver(system):
        return device, warning(DEVICE, *_unused(f"driver {_driver(system)}"))
    wanted = "no GPU here" if config.device == "auto" else 'device = "cpu"'
    return device, ok(DEVICE, f"cpu ({wanted})")


def _driver(system: System) -> str:
    """`NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  ...`: the driver's README, appendix on /proc."""
    found = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", read_text(system.proc / "driver" / "nvidia" / "version"))
    return found[1] if found else ""


def _unused(driver: str) -> tuple[str, str]:
    if torch.version.cuda is None:
        return f"cpu: {driver} is loaded, but this torch has no CUDA", "install a build with CUDA: https://pytorch.org/get-started/locally"
    found = f"cpu: {driver} is loaded, but torch (CUDA {torch.version.cuda}) sees no GPU"
    return found, "look at CUDA_VISIBLE_DEVICES, at docker run --gpus all, and whether the driver is too old: nvidia-smi"


def check_hbm(config: Config, device: torch.device) -> Finding | None:
    """Free and total bytes (cudaMemGetInfo) against budgets.hbm: more than the device has is a failure, more than is free a
    warning. None without CUDA."""
    budget = config.budgets.hbm
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    found = f"{format_bytes(free)} free of {format_bytes(total)}"
    if budget == "auto":
        return ok(HBM, found)
    found += f"; budgets.hbm = {format_bytes(int(budget))}"
    if int(budget) > total:
        return failure(HBM, found, f"set budgets.hbm to at most {free}")
    return warning(HBM, found, f"end what else uses it (nvidia-smi), or set budgets.hbm to at most {free}") if int(budget) > free else ok(HBM, found)


def check_copies(device: torch.device, system: System) -> Finding | None:
    """Rates from and to pinned memory, 64 MiB, three copies each way; None without CUDA.

    Memory that cannot be pinned is a failure. Fewer lanes than the device has, or less than half of what the link carries, is a
    warning. Source: current_link_width and max_link_width, Documentation/ABI/testing/sysfs-bus-pci.
    """
    if device.type != "cuda":
        return None
    try:
        rates = measure_copies(device)
    except CapacityError as error:
        return failure(COPIES, str(error), "free CPU memory, or raise the limit of the container: docker run --memory, --ulimit memlock=-1")
    found = f"up {format_rate(rates.upload)}, down {format_rate(rates.download)}"
    return judge_copies(found, min(rates.upload, rates.download), system.sys / "bus" / "pci" / "devices" / pci_address(device))


def pci_address(device: torch.device) -> str:
    """`0000:3b:00.0`, as sysfs names it; "" where torch does not tell."""
    properties = torch.cuda.get_device_properties(device)
    numbers = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if any(number is None for number in numbers):
        return ""
    domain, bus, slot = numbers
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def judge_copies(found: str, rate: float, folder: Path) -> Finding:
    """`folder`: the PCI device in sysfs; without one, as in many virtual machines, the rates are told and not judged."""
    width, most = (read_number(folder / f"{name}_link_width") or 0 for name in ("current", "max"))
    carried = lane_rate(read_text(folder / "max_link_speed")) * width
    if width:
        found += f", over {width} lanes of {read_text(folder / 'max_link_speed')}"
    if 0 < width < most:
        way_out = "put it into a slot with all its lanes, or look at the riser: sudo lspci -vv | grep LnkSta"
        return warning(COPIES, f"{found}: the GPU has {most} lanes", way_out)
    if carried and rate < carried / 2:
        way_out = "look for a GPU far from this node (nvidia-smi topo -m), for an IOMMU that translates (iommu=pt at boot) and for other traffic"
        return warning(COPIES, f"{found}: less than half of {format_rate(carried)}", way_out)
    return ok(COPIES, found)


def lane_rate(speed: str) -> float:
    """Bytes per second of one lane one way: `16.0 GT/s PCIe` less its encoding, 8b/10b up to 5 GT/s, 128b/130b above. 0 when unknown."""
    found = re.match(r"([\d.]+) GT/s", speed)
    if found is None:
        return 0.0
    transfers = float(found[1]) * 1e9
    return transfers / 8 * (0.8 if transfers <= 5e9 else 128 / 130)
