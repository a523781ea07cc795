"""Where every leaf of the tiny and of the published 30B-A3B config lies on stated meshes, against golden files.

After a change that is meant, rewrite the golden files with

    REWRITE_GOLDEN=1 python -m pytest tests/torch/qwen3_vl_moe/test_qwen3_vl_moe_placements.py

and review their diff.
"""

import math
import os
from pathlib import Path

import pytest
from reference import tiny_config

from qwen3vl_functional import Qwen3VLMoeConfig, param_specs
from qwen3vl_functional.sharding import AXES, Layout, layouts, local_slices
from qwen3vl_functional.spec import ParamSpec, leaves

GOLDEN = Path(__file__).with_name("golden")
CONFIGS = {"tiny": tiny_config(), "30b": Qwen3VLMoeConfig()}
MESHES = [
    ("tiny", {"dp_shard": 2}),
    ("tiny", {"tp": 2}),
    ("tiny", {"dp_shard": 2, "tp": 2}),
    ("30b", {"dp_shard": 8}),
    ("30b", {"dp_shard": 2, "tp": 4}),
    ("30b", {"dp_replicate": 2, "dp_shard": 32}),
    ("30b", {"dp_shard": 16, "tp": 4}),
]


def file_name(name: str, sizes: dict[str, int]) -> str:
    return f"placements_{name}_{'_'.join(f'{axis}{size}' for axis, size in sizes.items())}.txt"


def line(path: str, spec: ParamSpec, layout: Layout, local: tuple[int, ...], sizes: dict[str, int]) -> str:
    """Path, named dims, what each axis of the mesh cuts, and what rank 0 holds."""
    dims = " ".join(f"{name}={size}" for name, size in zip(spec.dims, spec.shape, strict=True))
    cuts = ((axis, dim) for axis, dim in zip(AXES, layout.cut, strict=True) if axis in sizes)
    cut = " ".join(f"{axis}:{'-' if dim is None else spec.dims[dim]}" for axis, dim in cuts)
    return f"{path} [{dims}] {cut} {'x'.join(map(str, local))}"


@pytest.mark.parametrize(("name", "sizes"), MESHES)
def test_placements_are_golden(name: str, sizes: dict[str, int]) -> None:
    specs = param_specs(CONFIGS[name])
    placed, shape = layouts(specs, sizes), tuple(sizes.get(axis, 1) for axis in AXES)
    lines, held = [], 0
    for path, spec in leaves(specs):
        local = tuple(part.stop - part.start for part in local_slices(placed[path], shape, (0,) * len(AXES)))
        lines.append(line(path, spec, placed[path], local, sizes))
        held += math.prod(local)
    lines.append(f"rank 0 holds {held}")
    file = GOLDEN / file_name(name, sizes)
    if os.environ.get("REWRITE_GOLDEN") == "1":
        file.write_text("\n".join(lines) + "\n")
        pytest.skip(f"{file.name} rewritten; review the diff and run again without REWRITE_GOLDEN")
    assert file.read_text().splitlines() == lines


def test_no_golden_file_is_left_over() -> None:
    assert {file.name for file in GOLDEN.glob("placements_*.txt")} == {file_name(name, sizes) for name, sizes in MESHES}


@pytest.mark.parametrize(("name", "sizes"), MESHES)
def test_what_no_axis_cuts_is_repeated(name: str, sizes: dict[str, int]) -> None:
    """FSDP cuts every leaf; tp cuts embedding, heads and experts, and leaves norms, routers and the vision tower whole."""
    for path, layout in layouts(param_specs(CONFIGS[name]), sizes).items():
        whole = path.startswith("model.visual.") or "norm" in path or path.endswith(".gate.weight")
        cut = dict(zip(AXES, layout.cut, strict=True))
        assert (cut["tp"] is not None) == (not whole and "tp" in sizes), path
        assert (cut["dp_shard"] is not None) == ("dp_shard" in sizes), path
        assert cut["dp_replicate"] is cut["ep"] is cut["cp"] is None
