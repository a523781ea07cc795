"""Everything that depends on the kind of device: which one, its memory, its generators, waiting for it."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
PLATFORM_VARIABLE = "HYPER_PARALLEL_PLATFORM"
REPORTED_VARIABLE = "HYPER_PARALLEL_BROKEN_NPU_REPORTED"


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
        if not 0 <= local_rank < self._module.device_count():
            raise ValueError(
                f"local rank {local_rank} has no {self.device_type} device, {self._module.device_count()} are visible: "
                "start one process a device, or make more of them visible"
            )
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

    def keep_freed_memory(self) -> None:
        """On a CPU with glibc, keep blocks of up to 32 MiB, and 1 GiB of them, for the next tensor instead of handing each back
        to the system, which clears it anew: up to a tenth of a step."""
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if self._module is None else None
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, 32 << 20)
            mallopt(_M_TRIM_THRESHOLD, 1 << 30)

    def seed(self, seed: int) -> None:
        """Seed Python's, numpy's and torch's generators, all devices included."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def rng_state(self) -> torch.Tensor | None:
        """State of the current device's generator, bytes on the CPU; None on a CPU, which has only torch's global one."""
        return None if self._module is None else self._module.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Put back what ``rng_state`` returned on the same kind of device."""
        if self._module is None:
            raise ValueError("a CPU has no generator of its own: this state was saved on another kind of device")
        self._module.set_rng_state(state)


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
    """Whether torch_npu is installed and works; what is installed and broken is reported in one line."""
    try:
        import torch_npu  # pyright: ignore[reportMissingImports]  # noqa: F401
    except (ImportError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch_npu":
            return False
        _report(f"torch_npu is installed but does not load, NPUs are not used: {' '.join(str(error).split())}")
        return False
    return torch.npu.is_available()  # pyright: ignore[reportAttributeAccessIssue]


def _report(message: str) -> None:
    """Print once a machine: by local rank 0, unless the process that started it has; the mark is inherited."""
    if os.environ.get("LOCAL_RANK", "0") == "0" and not os.environ.get(REPORTED_VARIABLE):
        os.environ[REPORTED_VARIABLE] = "1"
        print(message, file=sys.stderr)
