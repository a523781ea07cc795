"""From logical dims to mesh axes: the rules table, the strict matcher, and trees of DTensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as AxisPlacement

from .collectives import Groups
from .spec import ParamSpec, SpecTree, init_leaf, leaves, matches, to_tensordict

AXES = ("dp_replicate", "dp_shard", "ep", "cp", "tp")
FSDP_AXIS = "dp_shard"

Rules = Mapping[str, tuple[str, ...]]

# One row per logical dim: the mesh axes that cut it, at rest and in flight. FSDP is no row: at rest it cuts the leading
# dim that no model axis took. Changing the parallel strategy means changing rows.
TABLE: Rules = {
    "vocab": ("tp",),
    "q_heads": ("tp",),  # whole heads: a spec's unit is the head dim
    "kv_heads": ("tp",),
    "mlp": ("tp",),
    "experts": ("ep", "tp"),  # whole experts
    # Never cut by a model axis. Fused dims (qkv, gate_up) hold several tensors end to end.
    "embed": (),
    "router": (),
    "gate_up": (),
    "expert_mlp": (),
    "head_dim": (),
    "vision_embed": (),
    "vision_heads": (),
    "vision_mlp": (),
    "vision_merged": (),
    "vision_merged_in": (),
    "qkv": (),
    "positions": (),
    "channels": (),
    "patch_time": (),
    "patch_height": (),
    "patch_width": (),
}


class Axes(NamedTuple):
    """Process groups of the data-parallel axes: ``shard`` cuts the leaves, ``replicate`` repeats them; None: size 1."""

    shard: dist.ProcessGroup | None = None
    replicate: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of ranks that read different samples."""
        return math.prod(dist.get_world_size(group) for group in self if group is not None)

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all data-parallel ranks, in place."""
        for group in self:
            if group is not None:
                dist.all_reduce(x, group=group)
        return x


class Layout(NamedTuple):
    """Where one leaf lies: for each mesh axis, in mesh order, the tensor dim that it cuts (None: replicated)."""

    shape: tuple[int, ...]
    cut: tuple[int | None, ...]

    @property
    def fsdp_dim(self) -> int | None:
        """The dim that is cut at rest alone."""
        return self.cut[AXES.index(FSDP_AXIS)]

    @property
    def placements(self) -> tuple[AxisPlacement, ...]:
        """The same in DTensor's words."""
        return tuple(Replicate() if dim is None else Shard(dim) for dim in self.cut)


def default_rules(specs: SpecTree) -> dict[str, tuple[str, ...]]:
    """The table's rows for the dims that occur in ``specs``; a dim without a row is left to the matcher to refuse."""
    used = {dim for _, spec in leaves(specs) for dim in spec.dims}
    return {dim: axes for dim, axes in TABLE.items() if dim in used}


def layouts(
    specs: SpecTree, sizes: Mapping[str, int], rules: Rules | None = None, *, replicated: tuple[str, ...] = ()
) -> dict[str, Layout]:
    """Match every leaf against the rules, for a mesh of the given axis sizes; no process is needed.

    Leaves in the subtrees ``replicated`` are not cut by FSDP. Raises ValueError with the leaf, the dim and the sizes for a
    dim without a row, a row without a dim, an unknown axis, an axis twice on one leaf, or units that do not divide.
    """
    rules = default_rules(specs) if rules is None else rules
    for dim, axes in rules.items():
        if unknown := [axis for axis in axes if axis not in AXES]:
            raise ValueError(f"rule {dim!r} -> {axes}: unknown mesh axes {unknown}; known: {AXES}")
    flat = dict(leaves(specs))
    if unused := sorted(rules.keys() - {dim for spec in flat.values() for dim in spec.dims}):
        raise ValueError(f"rules for {unused} match no dim of any parameter")
    return {path: _layout(path, spec, sizes, rules, fsdp=not matches(path, replicated)) for path, spec in flat.items()}


def _layout(path: str, spec: ParamSpec, sizes: Mapping[str, int], rules: Rules, *, fsdp: bool) -> Layout:
    cut: dict[str, int] = {}
    for index, dim in enumerate(spec.dims):
        if dim not in rules:
            raise ValueError(f"{path}: dim {dim!r} (size {spec.shape[index]}) has no rule")
        ways = 1
        for axis in rules[dim]:
            if axis in cut:
                raise ValueError(f"{path}: mesh axis {axis!r} would cut both dim {spec.dims[cut[axis]]!r} and dim {dim!r}")
            if sizes.get(axis, 1) > 1:
                cut[axis] = index
                ways *= sizes[axis]
        units = spec.shape[index] // (spec.unit if rules[dim] else 1)
        if units % ways:
            raise ValueError(
                f"{path}: dim {dim!r} has {units} units, which {' x '.join(rules[dim])} = {ways} ranks do not divide"
            )
    taken = set(cut.values())
    free = [index for index in range(len(spec.shape)) if index not in taken]
    if fsdp and free and sizes.get(FSDP_AXIS, 1) > 1:
        cut[FSDP_AXIS] = free[0]
    return Layout(spec.shape, tuple(cut.get(axis) for axis in AXES))


def chunk_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """Begin and end of piece ``index`` when ``size`` rows are cut into ``parts`` as torch.chunk does: the last may be
    shorter, or empty."""
    chunk = -(-size // parts)
    return min(index * chunk, size), min((index + 1) * chunk, size)


def local_slices(layout: Layout, sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[slice, ...]:
    """The part of a leaf that the rank at ``coordinate`` of a mesh of ``sizes`` (both in mesh order) holds."""
    ranges = [(0, size) for size in layout.shape]
    for dim, parts, index in zip(layout.cut, sizes, coordinate, strict=True):
        if dim is not None:
            begin, end = ranges[dim]
            low, high = chunk_range(end - begin, parts, index)
            ranges[dim] = (begin + low, begin + high)
    return tuple(slice(begin, end) for begin, end in ranges)


def mesh_slices(layout: Layout, mesh: DeviceMesh) -> tuple[slice, ...]:
    """The part of a leaf that this rank holds."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the mesh"
    return local_slices(layout, tuple(mesh.shape), tuple(coordinate))


def as_dtensor(local: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    """Wrap this rank's part as a DTensor; no communication, no copy."""
    shape, stride = torch.Size(layout.shape), contiguous_stride(layout.shape)
    return DTensor.from_local(local, mesh, layout.placements, run_check=False, shape=shape, stride=stride)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor without gaps."""
    return torch.empty(shape, device="meta").stride()


def shard(params: TensorDict, mesh: DeviceMesh, placed: Mapping[str, Layout]) -> TensorDict:
    """Keep this rank's part of every leaf of a tree that all ranks hold whole; the inverse of ``unshard``."""
    flat = dict(leaves(params))
    local = {path: leaf[mesh_slices(placed[path], mesh)].clone() for path, leaf in flat.items()}
    return to_tensordict({path: as_dtensor(leaf, placed[path], mesh) for path, leaf in local.items()})


def unshard(params: TensorDict) -> TensorDict:
    """Every leaf whole on every rank; all ranks must call it."""
    return to_tensordict({path: _whole(leaf) for path, leaf in leaves(params)})


def _whole(leaf: torch.Tensor) -> torch.Tensor:
    if not isinstance(leaf, DTensor):
        return leaf
    # torch 2.6 cannot pad a part without elements, which gathering does where parts are uneven.
    return leaf.full_tensor() if leaf.numel() else torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)


def local_view(leaf: torch.Tensor) -> torch.Tensor:
    """This rank's part of a leaf, sharing its storage."""
    return leaf.to_local() if isinstance(leaf, DTensor) else leaf


class Placement(NamedTuple):
    """How a model lies on this process: the mesh and its groups, and every leaf's layout. Without a mesh: whole."""

    mesh: DeviceMesh | None = None
    layouts: Mapping[str, Layout] = {}
    axes: Axes = Axes()
    groups: Groups = Groups()

    def part(self, path: str) -> tuple[slice, ...]:
        """The slices of a leaf that this rank holds."""
        return () if self.mesh is None else mesh_slices(self.layouts[path], self.mesh)

    def wrap(self, path: str, local: torch.Tensor) -> torch.Tensor:
        """A local part as the leaf of a tree at rest."""
        return local if self.mesh is None else as_dtensor(local, self.layouts[path], self.mesh)

    def owns(self, path: str) -> bool:
        """Whether this rank speaks for its part of a leaf: one rank of each set that hold the same part."""
        if self.mesh is None:
            return True
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        repeated = zip(self.layouts[path].cut, coordinate, strict=True)
        return all(dim is not None or index == 0 for dim, index in repeated)


def place(specs: SpecTree, mesh: DeviceMesh | None, *, replicated: tuple[str, ...] = ()) -> Placement:
    """Place a model on a mesh whose axes are named as in ``AXES``; None: one process that holds everything."""
    if mesh is None:
        return Placement()
    names = mesh.mesh_dim_names
    assert names == AXES, names
    sizes: dict[str, int] = dict(zip(AXES, mesh.shape, strict=True))
    group = {axis: mesh.get_group(axis) if sizes[axis] > 1 else None for axis in AXES}
    axes = Axes(shard=group["dp_shard"], replicate=group["dp_replicate"])
    return Placement(mesh, layouts(specs, sizes, replicated=replicated), axes, Groups(tp=group["tp"]))


def init_params(
    specs: SpecTree,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    placement: Placement = Placement(),
) -> TensorDict:
    """Initialise a tree leaf by leaf; a rank keeps its part of each, and holds one whole leaf in passing."""
    flat = {}
    for path, spec in leaves(specs):
        leaf = init_leaf(path, spec, seed=seed, dtype=dtype, device=device)
        flat[path] = placement.wrap(path, leaf if placement.mesh is None else leaf[placement.part(path)].clone())
    return to_tensordict(flat)
