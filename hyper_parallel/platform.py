"""Everything that depends on the kind of device: which one, its memory, its generators, waiting for it."""

from __future__ import annotations

import os
import random
import resource
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

PLATFORM_VARIABLE = "HYPER_PARALLEL_PLATFORM"


class Platform:
    """One kind of device: ``cpu``, ``cuda`` or ``npu``."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        # torch.cuda and torch.npu share their interface; a CPU has none of it.
        self._module: ModuleType | Any | None = None if device_type == "cpu" else getattr(torch, device_type)

    def device(self, local_rank: int = 0) -> torch.device:
        """This process's device, made current."""
        if self._module is None:
            return torch.device("cpu")
        if local_rank >= self._module.device_count():
            raise ValueError(f"local rank {local_rank} has no {self.device_type} device: {self._module.device_count()} visible")
        self._module.set_device(local_rank)
        return torch.device(self.device_type, local_rank)

    @property
    def backend(self) -> str:
        """The collective library that belongs to this kind of device."""
        return {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[self.device_type]

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self._module is not None:
            self._module.synchronize()

    def peak_memory(self) -> int:
        """Bytes: the most that tensors have taken on the device; on a CPU, that the process has taken."""
        if self._module is not None:
            return self._module.max_memory_allocated()
        return _process_peak()

    def seed(self, seed: int) -> None:
        """Seed Python's and torch's generators, all devices included."""
        random.seed(seed)
        torch.manual_seed(seed)


def _process_peak() -> int:
    """Bytes of memory this process has held at most. getrusage alone would count what its parent held before exec."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def detect() -> Platform:
    """The platform of this process: NPU, else GPU, else CPU. ValueError if the environment asks for another framework."""
    wanted = os.environ.get(PLATFORM_VARIABLE, "torch")
    if wanted != "torch":
        raise ValueError(f"{PLATFORM_VARIABLE}={wanted}: this Trainer runs on torch alone; set {PLATFORM_VARIABLE}=torch")
    if _npu_available():
        return Platform("npu")
    return Platform("cuda" if torch.cuda.is_available() else "cpu")


def _npu_available() -> bool:
    """Whether torch_npu is installed and works; a broken CANN installation (ImportError or OSError) is reported."""
    try:
        import torch_npu  # pyright: ignore[reportMissingImports]  # noqa: F401
    except ModuleNotFoundError:
        return False
    except (ImportError, OSError) as error:
        print(f"torch_npu is installed but does not load, NPUs are not used: {error}", file=sys.stderr)
        return False
    return torch.npu.is_available()  # pyright: ignore[reportAttributeAccessIssue]
