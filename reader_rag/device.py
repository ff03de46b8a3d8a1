"""What differs from device to device: how much memory is left, and waiting for it."""

from __future__ import annotations

from pathlib import Path

import torch

CAUTIOUS = 4 << 30


def free_bytes(device: torch.device) -> int:
    """Bytes that can be taken on the device without swapping; where the system does not say, a cautious 4 GiB."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + reserved)
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return CAUTIOUS


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that it was told: before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
