"""Placement: the matcher and its errors without processes; sharding, resharding and loading on 2, 3 and 4 gloo ranks."""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import mesh, ranks
from safetensors.torch import save_file

from qwen3vl_functional import Qwen3VLMoeConfig, hf, init_params, load_params, param_specs, save_params
from qwen3vl_functional.sharding import (
    AXES,
    TABLE,
    Layout,
    Placement,
    as_dtensor,
    chunk_range,
    default_rules,
    layouts,
    local_slices,
    local_view,
    place,
    shard,
    unshard,
)
from qwen3vl_functional.spec import ParamSpec, leaves, matches, to_tensordict, unflatten

WORLDS = (2, 3, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
RULES = {"heads": ("tp",), "experts": ("ep", "tp"), "length": ("cp",), "wide": (), "long": ()}


def flat(tree):
    return dict(leaves(tree))


def ways(axes, sizes):
    return math.prod(sizes[axis] for axis in axes)


def coordinates(shape):
    return list(itertools.product(*map(range, shape)))


@st.composite
def mesh_shapes(draw, world):
    """Axis sizes whose product is ``world``."""
    shape = [1] * len(AXES)
    while world > 1:
        factor = min(n for n in range(2, world + 1) if world % n == 0)
        shape[draw(st.integers(0, len(AXES) - 1))] *= factor
        world //= factor
    return tuple(shape)


@st.composite
def trees(draw, *shapes):
    """Specs by path that RULES can place on meshes of all these shapes; scalars and dims of size 0 and 1 included."""
    per_mesh = [dict(zip(AXES, shape, strict=True)) for shape in shapes]
    specs = {}
    for i in range(draw(st.integers(1, 5))):
        dims = draw(st.lists(st.sampled_from(sorted(RULES)), max_size=3, unique=True))
        if {"heads", "experts"} <= set(dims):  # both would be cut by tp
            dims.remove("heads")
        unit = draw(st.integers(1, 2))
        parts = {dim: math.lcm(*(ways(RULES[dim], sizes) for sizes in per_mesh)) * unit if RULES[dim] else 1 for dim in dims}
        shape = tuple(parts[dim] * draw(st.integers(0, 3 if RULES[dim] else 5)) for dim in dims)
        specs[f"{draw(st.sampled_from(('', 'a.', 'a.b.')))}{i}"] = ParamSpec(shape, tuple(dims), unit=unit)
    return unflatten(specs)


def placed(specs, shape, replicated=()):
    used = {dim for _, spec in leaves(specs) for dim in spec.dims}
    rules = {dim: axes for dim, axes in RULES.items() if dim in used}
    return layouts(specs, dict(zip(AXES, shape, strict=True)), rules, replicated=replicated)


# Without processes.


@given(st.data())
@settings(max_examples=60)
def test_every_element_lies_once_in_each_set_of_replicas(data):
    shape = data.draw(mesh_shapes(data.draw(st.integers(1, 12))))
    specs = data.draw(trees(shape))
    replicated = data.draw(st.sampled_from([(), ("a",), ("a.b",)]))
    table = placed(specs, shape, replicated)
    for path, spec in leaves(specs):
        layout = table[path]
        held, owned = np.zeros(spec.shape, dtype=int), np.zeros(spec.shape, dtype=int)
        for coordinate in coordinates(shape):
            part = local_slices(layout, shape, coordinate)
            held[part] += 1
            stub = SimpleNamespace(shape=shape, get_coordinate=lambda coordinate=coordinate: coordinate)
            placement = Placement(stub, table)  # type: ignore[arg-type]
            assert placement.part(path) == part
            owned[part] += placement.owns(path)
            for dim, where in zip(spec.dims, part, strict=True):
                assert not RULES[dim] or (where.start % spec.unit == where.stop % spec.unit == 0)
        repeats = math.prod(size for size, dim in zip(shape, layout.cut, strict=True) if dim is None)
        assert (held == repeats).all() and (owned == 1).all()


@given(st.data())
def test_which_dim_each_axis_cuts(data):
    shape = data.draw(mesh_shapes(data.draw(st.integers(1, 12))))
    specs, sizes = data.draw(trees(shape)), dict(zip(AXES, shape, strict=True))
    replicated = data.draw(st.sampled_from([(), ("a",), ("a.b",)]))
    for path, layout in placed(specs, shape, replicated).items():
        spec, cut = dict(leaves(specs))[path], dict(zip(AXES, layout.cut, strict=True))
        for axis in ("ep", "cp", "tp"):
            expected = [dim for dim, name in enumerate(spec.dims) if axis in RULES[name] and sizes[axis] > 1]
            assert cut[axis] == (expected[0] if expected else None)
        free = [dim for dim in range(len(spec.shape)) if dim not in (cut["ep"], cut["cp"], cut["tp"])]
        fsdp = free and sizes["dp_shard"] > 1 and not matches(path, replicated)
        assert layout.fsdp_dim == cut["dp_shard"] == (free[0] if fsdp else None)
        assert cut["dp_replicate"] is None


@given(st.integers(0, 20), st.integers(1, 8))
def test_chunk_range_is_torch_chunk(size, parts):
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(parts)] if size else []
    ours = [list(range(*chunk_range(size, parts, index))) for index in range(parts)]
    assert ours == chunks + [[]] * (parts - len(chunks))


def test_the_model_uses_every_row_of_the_table(cfg):
    specs = {"moe": param_specs(cfg), "dense": param_specs(Qwen3VLMoeConfig(text=cfg.text.__class__(decoder_sparse_step=2)))}
    assert default_rules(specs) == TABLE


def spec(**dims):
    return {"block": {"weight": ParamSpec(tuple(dims.values()), tuple(dims))}}


@pytest.mark.parametrize(
    ("specs", "sizes", "rules", "message"),
    [
        (spec(embed=4, heeds=6), {}, None, r"block\.weight: dim 'heeds' \(size 6\) has no rule"),
        (spec(heads=6, wide=3), {"tp": 2}, {"heads": ("tp",)}, r"block\.weight: dim 'wide' \(size 3\) has no rule"),
        (spec(embed=4), {}, {"embed": (), "vocab": ("tp",)}, r"rules for \['vocab'\] match no dim"),
        (
            spec(embed=4),
            {},
            {"embed": ("tp", "pp")},
            r"rule 'embed' -> \('tp', 'pp'\): unknown mesh axes \['pp'\]; known: .*'tp'",
        ),
        (spec(q_heads=4, mlp=6), {"tp": 2}, None, r"block\.weight: mesh axis 'tp' would cut both dim 'q_heads' and dim 'mlp'"),
        (spec(heads=8), {"tp": 2}, {"heads": ("tp", "tp")}, r"block\.weight: mesh axis 'tp' would cut both dim 'heads' and"),
        (spec(mlp=7), {"tp": 2}, None, r"block\.weight: dim 'mlp' has 7 units, which tp = 2 ranks do not divide"),
        (spec(experts=12), {"ep": 4, "tp": 2}, None, r"'experts' has 12 units, which ep x tp = 8 ranks do not divide"),
    ],
)
def test_what_the_matcher_refuses(specs, sizes, rules, message):
    with pytest.raises(ValueError, match=message):
        layouts(specs, sizes, rules)


def test_an_axis_of_size_one_may_be_named_twice():
    (layout,) = layouts(spec(q_heads=4, mlp=6), {"tp": 1, "dp_shard": 2}).values()
    assert layout.cut == (None, 0, None, None, None)


def test_heads_that_do_not_divide():
    """4 key-value heads: the message counts heads, not rows, and the head dim would divide."""
    specs = param_specs(Qwen3VLMoeConfig())
    assert len(layouts(specs, {"tp": 4})) == len(list(leaves(specs)))
    with pytest.raises(ValueError, match=r"k_proj\.weight: dim 'kv_heads' has 4 units, which tp = 8 ranks do not divide"):
        layouts(specs, {"tp": 8})


# On gloo ranks: each function runs on every rank, and raises where something is wrong.


def whole_tree(specs, dtypes, seed):
    """The same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {path: torch.randn(spec.shape, generator=generator) * 100 for path, spec in leaves(specs)}
    return to_tensordict({path: leaf.to(dtype) for (path, leaf), dtype in zip(drawn.items(), dtypes, strict=True)})


def assert_bit_equal(ours, expected, path):
    assert ours.shape == expected.shape and ours.dtype == expected.dtype and torch.equal(ours, expected), path


def round_trip(specs, dtypes, seed, shape, replicated):
    tree, table = whole_tree(specs, dtypes, seed), placed(specs, shape, replicated)
    sharded = shard(tree, mesh(shape), table)
    for path, leaf in flat(sharded).items():
        part = flat(tree)[path][local_slices(table[path], shape, tuple(mesh(shape).get_coordinate()))]
        assert leaf.shape == flat(tree)[path].shape and leaf.placements == table[path].placements
        assert_bit_equal(local_view(leaf), part, path)
    for path, leaf in flat(unshard(sharded)).items():
        assert_bit_equal(leaf, flat(tree)[path], path)


def pads_empty() -> bool:
    """Whether torch pads tensors without elements, as its own redistribution needs (torch 2.6 does not)."""
    try:
        torch.nn.functional.pad(torch.empty(1, 0), (0, 0, 0, 1))
    except RuntimeError:
        return False
    return True


def reshard(specs, dtypes, seed, shape, other_layouts, order):
    """From each leaf's placement to others on the same mesh and back; full values and local parts stay what they are."""
    tree, table = flat(whole_tree(specs, dtypes, seed)), placed(specs, shape)
    if not pads_empty():
        tree = {path: leaf for path, leaf in tree.items() if leaf.numel()}
    coordinate = tuple(mesh(shape).get_coordinate())
    for path, leaf in tree.items():
        chain = [table[path], *(other_layouts[path][i] for i in order), table[path]]
        current = as_dtensor(leaf[local_slices(chain[0], shape, coordinate)].clone(), chain[0], mesh(shape))
        for layout in chain[1:]:
            current = current.redistribute(placements=layout.placements)
            assert_bit_equal(current.to_local(), leaf[local_slices(layout, shape, coordinate)], path)
            assert_bit_equal(current.full_tensor(), leaf, path)


@pytest.mark.parametrize("world", WORLDS)
@given(data=st.data())
@settings(max_examples=40)
def test_unshard_is_the_inverse_of_shard(world, data):
    shape = data.draw(mesh_shapes(world))
    specs = data.draw(trees(shape))
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in leaves(specs)]
    replicated = data.draw(st.sampled_from([(), ("a",), ("a.b",)]))
    ranks(world).call(round_trip, specs, dtypes, data.draw(st.integers(0, 9)), shape, replicated)


@pytest.mark.parametrize("world", WORLDS)
@given(data=st.data())
@settings(max_examples=30)
def test_resharding_keeps_every_value(world, data):
    shape = data.draw(mesh_shapes(world))
    specs = data.draw(trees(shape))
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in leaves(specs)]
    other = {}
    for path, leaf in leaves(specs):
        # Uneven pieces of one dim are cut by one axis at most, as our tables do it.
        other[path] = []
        for _ in range(2):
            dims = data.draw(st.permutations([*range(len(leaf.shape)), *[None] * len(AXES)]))[: len(AXES)]
            other[path].append(Layout(leaf.shape, tuple(dims)))
    order = data.draw(st.sampled_from([(0,), (0, 1), (0, 1, 0)]))
    ranks(world).call(reshard, specs, dtypes, data.draw(st.integers(0, 9)), shape, other, order)


def initialise(cfg, shape, replicated, dtype):
    specs, placement = param_specs(cfg), place(param_specs(cfg), mesh(shape), replicated=replicated)
    whole, ours = (
        flat(init_params(specs, seed=5, dtype=dtype)),
        flat(init_params(specs, seed=5, dtype=dtype, placement=placement)),
    )
    assert ours.keys() == whole.keys()
    for path, leaf in ours.items():
        local = local_view(leaf)
        assert_bit_equal(local, whole[path][placement.part(path)], path)
        assert local.untyped_storage().nbytes() == local.nbytes, path  # no view of the whole leaf


def load(cfg, directory, shape, dtype):
    """Compare with the whole directory, and count what was read."""
    placement = place(param_specs(cfg), mesh(shape))
    whole = flat(load_params(directory, cfg, dtype=dtype))
    read, original = {}, hf.WeightFiles.read

    def counted(files, path, part=()):
        leaf = original(files, path, part)
        read[path] = read.get(path, 0) + leaf.numel()  # its storage is the mapped file, whose pages are read when copied
        return leaf

    hf.WeightFiles.read = counted
    try:
        ours = flat(load_params(directory, cfg, dtype=dtype, placement=placement))
    finally:
        hf.WeightFiles.read = original
    expected = flat(shard(to_tensordict(whole), mesh(shape), placement.layouts))
    assert ours.keys() == expected.keys() == read.keys()
    for path, leaf in ours.items():
        assert leaf.placements == expected[path].placements
        assert_bit_equal(local_view(leaf), local_view(expected[path]), path)
        assert local_view(leaf).is_contiguous() and read[path] == local_view(leaf).numel(), path
    return sum(read.values())


MODEL_MESHES = [(1, 2, 1, 1, 1), (1, 1, 1, 1, 2), (1, 3, 1, 1, 1), (1, 2, 1, 1, 2), (2, 2, 1, 1, 1), (1, 4, 1, 1, 1)]


@pytest.mark.parametrize("shape", MODEL_MESHES)
@pytest.mark.parametrize(("replicated", "dtype"), [((), torch.float32), (("model.visual",), torch.bfloat16)])
def test_initialised_parts_are_parts_of_the_whole(cfg, shape, replicated, dtype):
    ranks(math.prod(shape)).call(initialise, cfg, shape, replicated, dtype)


@pytest.fixture(scope="module")
def directories(cfg, make_params, tmp_path_factory):
    """One model as the hub keeps it, and with the experts as transformers 5 writes them."""
    root = tmp_path_factory.mktemp("weights")
    params = make_params(cfg)
    hub = save_params(params, cfg, root / "hub", max_shard_bytes=150_000)
    (root / "transposed").mkdir()
    (root / "transposed" / hf.CONFIG).write_text(json.dumps(cfg.to_dict()))
    tensors = {path: (leaf.mT if ".experts." in path else leaf).contiguous() for path, leaf in flat(params).items()}
    save_file(tensors, root / "transposed" / hf.SINGLE)
    return {"hub": hub, "transposed": root / "transposed"}


@pytest.mark.parametrize("shape", MODEL_MESHES)
@pytest.mark.parametrize("layout", ["hub", "transposed"])
def test_a_rank_reads_what_it_holds(cfg, directories, shape, layout):
    dtype = torch.bfloat16 if layout == "transposed" else torch.float32
    read = ranks(math.prod(shape)).call(load, cfg, directories[layout], shape, dtype)
    total = sum(spec.numel for _, spec in leaves(param_specs(cfg)))
    copies = shape[0] if shape[4] == 1 else None  # under tp the norms and the vision tower are held several times
    assert sum(read) == total * copies if copies else total < sum(read) < total * math.prod(shape)
