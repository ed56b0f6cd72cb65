"""Which device this process measures on: its name, cores and memory."""

import os
import platform
from pathlib import Path

import torch

__all__ = ["device_name", "num_cores", "physical_memory_bytes"]


def device_name(device: torch.device) -> str:
    """As its maker calls it; for a CPU with the number of cores that this process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {num_cores()} cores"


def num_cores() -> int:
    """Cores this process may run on, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processor() -> str:
    """Linux says it in /proc; elsewhere the platform module knows."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
