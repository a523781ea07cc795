"""The kinds of device, with a stand-in for torch_npu: what is found, what is called, what is refused."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hyper_parallel import platform
from hyper_parallel.platform import Platform, detect

ROOT = Path(__file__).parents[2]


class Device(SimpleNamespace):
    """What torch_npu adds to torch as ``torch.npu``: two devices, and a record of what was asked of them."""

    def __init__(self, available: bool = True) -> None:
        super().__init__(available=available, calls=[], state=torch.arange(16, dtype=torch.uint8))

    def is_available(self) -> bool:
        return self.available

    def device_count(self) -> int:
        return 2

    def set_device(self, index: int) -> None:
        self.calls.append(("set_device", index))

    def synchronize(self) -> None:
        self.calls.append(("synchronize",))

    def max_memory_allocated(self) -> int:
        return 12345

    def get_rng_state(self) -> torch.Tensor:
        return self.state.clone()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state.clone()


class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An installed torch_npu whose import raises ``error``."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == "torch_npu" else None

    def exec_module(self, module: ModuleType) -> None:
        raise self.error


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """A machine without accelerators, whatever this one has, and no variable set."""
    # setenv first, so that what a test sets is taken back too.
    monkeypatch.setenv(platform.REPORTED_VARIABLE, "")
    monkeypatch.delenv(platform.PLATFORM_VARIABLE, raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # what import does then is what it does for an absent package
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def npu(monkeypatch) -> Device:
    """A machine with two NPUs."""
    device = Device()
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.setattr(torch, "npu", device, raising=False)
    return device


def test_npu_is_found_and_used(npu, monkeypatch):
    monkeypatch.setattr(torch, "device", lambda kind, index: (kind, index))  # torch knows no npu before torch_npu renames one
    here = detect()
    assert (here.device_type, here.backend) == ("npu", "hccl")
    assert here.device(1) == ("npu", 1)
    here.synchronize()
    assert npu.calls == [("set_device", 1), ("synchronize",)]
    assert here.peak_memory() == 12345


def test_device_rng_state_returns(npu):
    here = detect()
    saved = here.rng_state()
    assert saved is not None
    npu.set_rng_state(torch.zeros(16, dtype=torch.uint8))
    here.set_rng_state(saved)
    assert torch.equal(npu.state, torch.arange(16, dtype=torch.uint8))


@pytest.mark.parametrize("local_rank", [2, -1])
def test_local_rank_without_a_device_is_refused(npu, local_rank):
    with pytest.raises(ValueError, match=f"local rank {local_rank} has no npu device, 2 are visible"):
        detect().device(local_rank)
    assert npu.calls == []


def test_npu_goes_before_gpu(npu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert detect().device_type == "npu"
    npu.available = False
    assert detect().device_type == "cuda"


def test_cpu(capsys):
    here = detect()
    assert (here.device_type, here.backend, here.device(3)) == ("cpu", "gloo", torch.device("cpu"))
    here.synchronize()
    assert here.peak_memory() > 2**20
    assert here.rng_state() is None
    with pytest.raises(ValueError, match="another kind of device"):
        here.set_rng_state(torch.zeros(16, dtype=torch.uint8))
    assert capsys.readouterr() == ("", "")  # an absent torch_npu is no news


def test_seed_covers_python_and_torch():
    import random

    draws = []
    for _ in range(2):
        Platform("cpu").seed(3)
        draws.append((random.random(), torch.rand(1).item()))
    assert draws[0] == draws[1]


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libhccl.so: cannot open shared object file:\nNo such file or directory"),
        OSError("libascendcl.so: undefined symbol"),
        ModuleNotFoundError("No module named 'acl'", name="acl"),
    ],
    ids=["import", "os", "module"],
)
def test_broken_cann_is_one_line_once(monkeypatch, capsys, error):
    monkeypatch.delitem(sys.modules, "torch_npu")
    monkeypatch.setattr(sys, "meta_path", [Broken(error), *sys.meta_path])
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert detect().device_type == "cpu"
    assert capsys.readouterr().err == ""  # another process of this machine says it
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert detect().device_type == "cpu"
    assert detect().device_type == "cpu"
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("torch_npu is installed but does not load") and str(error).split()[-1] in err


def test_another_framework_is_refused(monkeypatch):
    monkeypatch.setenv(platform.PLATFORM_VARIABLE, "torch")
    assert detect().device_type == "cpu"
    monkeypatch.setenv(platform.PLATFORM_VARIABLE, "mindspore")
    with pytest.raises(ValueError, match=r"HYPER_PARALLEL_PLATFORM=mindspore: .* set HYPER_PARALLEL_PLATFORM=torch"):
        detect()


def test_torch_npu_is_imported_in_one_place():
    importers = []
    for package in ("hyper_parallel", "qwen3vl_functional", "examples", "benchmarks"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                # importlib and __import__ take the name as a string.
                names += [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
                importers += [path for name in names if name.split(".")[0] == "torch_npu" and " " not in name]
    assert {path.relative_to(ROOT).as_posix() for path in importers} == {"hyper_parallel/platform.py"}
