"""Tensors and moments written on any mesh and read on any other; what is missing or contradictory is named."""

import itertools
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from saved import ADAMW, coordinates, cut

from hyper_parallel.core.distributed_checkpoint.chunks import (
    ChunkedTensors,
    Part,
    hugging_face_directory,
    is_checkpoint,
    rank_metadata,
    tensor_file,
)
from hyper_parallel.core.distributed_checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
    merge,
    metadata_bytes,
)
from hyper_parallel.core.distributed_checkpoint.optimizer import ParamGroup, StoredMoments, optimizer_file, optimizer_state_dict
from hyper_parallel.core.distributed_checkpoint.storage import StorageInfo, write_bytes, write_pt, write_tensors
from qwen3vl_functional.sharding import AXES, layouts, local_slices
from qwen3vl_functional.spec import ParamSpec, leaves, unflatten

RULES = {"heads": ("tp",), "experts": ("ep", "tp"), "length": ("cp",), "wide": ()}
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
MOMENTS = ("exp_avg", "exp_avg_sq")


@st.composite
def meshes(draw):
    """Axis sizes of up to 8 ranks."""
    shape = [1] * len(AXES)
    for _ in range(draw(st.integers(0, 3))):
        shape[draw(st.integers(0, len(AXES) - 1))] *= draw(st.sampled_from((2, 3)))
    return tuple(shape) if math.prod(shape) <= 8 else (1, 3, 1, 1, 2)


@st.composite
def trees(draw, *shapes):
    """Specs that can be placed on all of these meshes: scalars, dims of size 0 and 1, and FSDP dims that do not divide."""
    sizes = [dict(zip(AXES, shape, strict=True)) for shape in shapes]
    specs = {}
    for number in range(draw(st.integers(1, 4))):
        dims = draw(st.lists(st.sampled_from(sorted(RULES)), max_size=3, unique=True))
        if {"heads", "experts"} <= set(dims):  # both would be cut by tp
            dims.remove("heads")
        ways = {dim: math.lcm(*(math.prod(size[axis] for axis in RULES[dim]) for size in sizes)) for dim in dims}
        shape = tuple(ways[dim] * draw(st.integers(0, 2 if RULES[dim] else 7)) for dim in dims)
        specs[f"{draw(st.sampled_from(('', 'a.', 'a.b.')))}{number}"] = ParamSpec(shape, tuple(dims))
    return unflatten(specs)


def placed(specs, shape):
    used = {dim for _, spec in leaves(specs) for dim in spec.dims}
    rules = {dim: axes for dim, axes in RULES.items() if dim in used}
    return layouts(specs, dict(zip(AXES, shape, strict=True)), rules)


def random_tensors(specs, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return {path: torch.randn(spec.shape, generator=generator).mul(100).to(dtype) for path, spec in leaves(specs)}


def write_model(directory, ranks, *, collected=True, each=True):
    """Every rank's tensors, and the metadata of each rank, of all together, or both."""
    for rank, parts in enumerate(ranks):
        write_tensors(directory / tensor_file(rank), {name: part.tensor for name, part in parts.items()})
        if each:
            write_bytes(directory / f"{rank}.metadata", metadata_bytes(rank_metadata(rank, parts)))
    if collected:
        whole = merge({rank: rank_metadata(rank, parts) for rank, parts in enumerate(ranks)})
        write_bytes(directory / ".metadata", metadata_bytes(whole))


# --- any mesh to any mesh -------------------------------------------------------------------------------------------


@given(data=st.data(), before=meshes(), after=meshes(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 9))
def test_parts_of_one_mesh_are_read_on_any_other(tmp_path_factory, data, before, after, dtype, seed):
    specs = data.draw(trees(before, after))
    tensors, directory = random_tensors(specs, dtype, seed), tmp_path_factory.mktemp("tensors")
    collected, each = data.draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    write_model(directory, cut(tensors, placed(specs, before), before), collected=collected, each=each)
    stored, table = ChunkedTensors(directory), placed(specs, after)
    assert stored.shape_of == {path: spec.shape for path, spec in leaves(specs)}
    for name, tensor in tensors.items():
        assert stored.dtype_of[name] == dtype
        assert torch.equal(stored.read(name), tensor)
        for coordinate in coordinates(after):
            box = local_slices(table[name], after, coordinate)
            part = stored.read(name, box)
            assert part.dtype == dtype and torch.equal(part, tensor[box])


@given(data=st.data(), before=meshes(), after=meshes(), seed=st.integers(0, 9), by_torch=st.booleans(), collected=st.booleans())
def test_moments_of_one_mesh_are_read_on_any_other(tmp_path_factory, data, before, after, seed, by_torch, collected):
    """``by_torch``: the files are those of torch's own AdamW, over the local shards, and name no parameters."""
    specs = data.draw(trees(before, after))
    tensors, directory = random_tensors(specs, torch.float32, seed), tmp_path_factory.mktemp("moments")
    frozen = {name for name in tensors if data.draw(st.booleans())}
    trained = [name for name in tensors if name not in frozen]
    decayed = {name for name in trained if data.draw(st.booleans())}
    groups = [tuple(name for name in trained if name in decayed), tuple(name for name in trained if name not in decayed)]
    parts = cut(tensors, placed(specs, before), before)
    write_model(directory, parts, collected=collected)
    grads = {name: tensor.sin() + 1 for name, tensor in tensors.items()}
    local_grads = cut(grads, placed(specs, before), before)
    for rank, (mine, gradient) in enumerate(zip(parts, local_grads, strict=True)):
        write_pt(directory / optimizer_file(rank), optimizer_of(mine, gradient, groups, by_torch))
    expected = {"exp_avg": {n: 0.1 * g for n, g in grads.items()}, "exp_avg_sq": {n: 0.001 * g * g for n, g in grads.items()}}

    stored, table = StoredMoments(ChunkedTensors(directory), groups), placed(specs, after)
    assert stored.step == (1 if trained else 0)
    for name, moment in itertools.product(trained, MOMENTS):
        for coordinate in coordinates(after):
            box = local_slices(table[name], after, coordinate)
            assert torch.allclose(stored.read(moment, name, box), expected[moment][name][box], rtol=1e-5, atol=0)
        whole = put_together(directory, placed(specs, before)[name], before, groups, name, moment)
        assert torch.equal(stored.read(moment, name), whole)


def optimizer_of(parts, gradients, groups, by_torch):
    """A rank's optimizer state after one step of torch's AdamW, in torch's words or in ours."""
    leaves_of = {name: torch.nn.Parameter(parts[name].tensor.clone()) for group in groups for name in group}
    for name, parameter in leaves_of.items():
        parameter.grad = gradients[name].tensor.clone()
    torch_groups = [{"params": [leaves_of[name] for name in group]} for group in groups]
    optimizer = torch.optim.AdamW(torch_groups, lr=1e-3, foreach=False)
    optimizer.step()
    if by_torch:
        return optimizer.state_dict()
    moments = [{name: optimizer.state[parameter][moment] for name, parameter in leaves_of.items()} for moment in MOMENTS]
    return optimizer_state_dict([ParamGroup(group, ADAMW) for group in groups], *moments, step=1)


def put_together(directory, layout, shape, groups, name, moment):
    """A moment out of all ranks' files, by hand."""
    number = [name for group in groups for name in group].index(name)
    whole = torch.full(layout.shape, math.nan)
    for rank, coordinate in enumerate(coordinates(shape)):
        saved = torch.load(directory / optimizer_file(rank), weights_only=True)
        whole[local_slices(layout, shape, coordinate)] = saved["state"][number][moment]
    return whole


@given(data=st.data(), shape=meshes())
def test_a_missing_chunk_is_named(tmp_path_factory, data, shape):
    specs = data.draw(trees(shape))
    tensors, directory = random_tensors(specs, torch.float32, 0), tmp_path_factory.mktemp("missing")
    write_model(directory, cut(tensors, placed(specs, shape), shape))
    whole = ChunkedTensors(directory)
    name = data.draw(st.sampled_from(sorted(tensors)))
    lost = data.draw(st.sampled_from(whole.chunks_of[name]))
    whole.chunks_of[name].remove(lost)
    if 0 in lost.sizes:
        assert torch.equal(whole.read(name), tensors[name])
        return
    count, size = tensors[name].numel(), math.prod(lost.sizes)
    with pytest.raises(ValueError) as refusal:
        whole.read(name)
    assert str(refusal.value).startswith(f"{directory}: {name} is incomplete: {count - size} of {count} elements")
    with pytest.raises(ValueError, match=f"{re.escape(name)} is incomplete: 0 of {size} elements"):
        whole.read(name, tuple(slice(begin, begin + size) for begin, size in zip(lost.offsets, lost.sizes, strict=True)))


# --- what a directory may hold --------------------------------------------------------------------------------------


def test_a_rank_without_its_metadata_is_missed_where_its_part_is_read(tmp_path):
    tensor = torch.arange(12.0).view(6, 2)
    ranks = [{"w": Part(tensor[3 * rank : 3 * rank + 3], (3 * rank, 0), (6, 2))} for rank in range(2)]
    write_model(tmp_path, ranks, collected=False)
    (tmp_path / "1.metadata").unlink()
    stored = ChunkedTensors(tmp_path)
    assert torch.equal(stored.read("w", (slice(1, 3), slice(0, 2))), tensor[1:3])
    with pytest.raises(ValueError, match=r"w is incomplete: 2 of 6 elements of \[3, 2\] at \(2, 0\)"):
        stored.read("w", (slice(2, 5), slice(0, 2)))


def test_the_keys_of_several_chunks_in_one_file(tmp_path):
    tensor = torch.arange(8.0)
    chunks = [ChunkStorageMetadata((begin,), torch.Size((4,))) for begin in (0, 4)]
    keys = ["w.__dcp_chunk_0", "w.__dcp_chunk_1"]
    places = {
        MetadataIndex("w", chunk.offsets, number): StorageInfo("_rank0_.safetensors", 0, -1, key)
        for number, (chunk, key) in enumerate(zip(chunks, keys, strict=True))
    }
    entry = TensorStorageMetadata(TensorProperties("torch.float32"), (8,), chunks)
    write_bytes(tmp_path / ".metadata", metadata_bytes(Metadata({"w": entry}, storage_data=places)))
    save_file({keys[0]: tensor[:4].clone(), keys[1]: tensor[4:].clone()}, tmp_path / "_rank0_.safetensors")
    assert torch.equal(ChunkedTensors(tmp_path).read("w", (slice(2, 7),)), tensor[2:7])


def test_the_later_layout_names_the_model_twice(tmp_path):
    """There the optimizer's tensors lie beside the model's, each under the name of its part."""
    names = ("model.model.visual.w", "model.lm_head.weight", "optimizer.state.exp_avg.model.visual.w")
    write_model(tmp_path, [{name: Part(torch.full((2,), float(i)), (0,), (2,)) for i, name in enumerate(names)}], each=False)
    stored = ChunkedTensors(tmp_path)
    assert {name: stored.read(name).tolist() for name in stored.shape_of} == {"model.visual.w": [0, 0], "lm_head.weight": [1, 1]}


def test_what_is_a_checkpoint_and_where_its_export_lies(tmp_path):
    checkpoint, export = tmp_path / "step_1", tmp_path / "hf"
    export.mkdir()
    checkpoint.mkdir()
    for name in (".metadata", "0.metadata"):
        assert not is_checkpoint(checkpoint)
        (checkpoint / name).touch()
        assert is_checkpoint(checkpoint)
        (checkpoint / name).unlink()
    assert hugging_face_directory(export) == export
    (checkpoint / ".metadata").touch()
    assert hugging_face_directory(checkpoint) is None
    (checkpoint / "hf_ckpt").mkdir()
    assert hugging_face_directory(str(checkpoint)) == checkpoint / "hf_ckpt"


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a directory"):
        ChunkedTensors(tmp_path / "nowhere")
    (tmp_path / "x.metadata").touch()
    with pytest.raises(ValueError, match=r"is no checkpoint: it holds neither \.metadata nor <rank>\.metadata"):
        ChunkedTensors(tmp_path)


# --- contradictions -------------------------------------------------------------------------------------------------


def one_tensor(directory, *, chunks=None, place="_rank0_.safetensors", dtype="torch.float32", stored=None, key=None):
    """A checkpoint of one tensor ``w`` of shape (4,), with one thing about it changed."""
    boxes = [ChunkStorageMetadata(offsets, torch.Size(sizes)) for offsets, sizes in (chunks or [((0,), (4,))])]
    places = {MetadataIndex("w", box.offsets): StorageInfo(place, 0, -1, key) for box in boxes}
    entry = TensorStorageMetadata(TensorProperties(dtype), (4,), boxes)
    write_bytes(directory / ".metadata", metadata_bytes(Metadata({"w": entry}, storage_data=places)))
    write_tensors(directory / "_rank0_.safetensors", {"w": torch.arange(4.0) if stored is None else stored})
    return directory


@pytest.mark.parametrize(
    "place", ["../_rank0_.safetensors", "/etc/passwd", "sub/_rank0_.safetensors", "./x", "..", "", "a/..", "x/"]
)
def test_no_place_outside_the_directory(tmp_path, place):
    (tmp_path / "step_1").mkdir()
    write_tensors(tmp_path / "_rank0_.safetensors", {"w": torch.zeros(4)})
    one_tensor(tmp_path / "step_1", place=place)
    with pytest.raises(ValueError, match=f"step_1: w points outside the directory, to {place!r}|step_1.* cannot be read"):
        ChunkedTensors(tmp_path / "step_1").read("w")


def test_a_file_of_another_shape_is_refused(tmp_path):
    one_tensor(tmp_path, stored=torch.zeros(2, 2))
    message = rf"{re.escape(str(tmp_path / tensor_file(0)))}: w has shape \[2, 2\], the metadata says \[4\]"
    with pytest.raises(ValueError, match=message):
        ChunkedTensors(tmp_path).read("w")


def test_a_file_of_another_dtype_is_refused(tmp_path):
    one_tensor(tmp_path, stored=torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"_rank0_\.safetensors: w"):
        ChunkedTensors(tmp_path).read("w")


def test_an_overlap_is_refused(tmp_path):
    """Beside a gap of the same size, counting elements alone would not tell."""
    one_tensor(tmp_path, chunks=[((0,), (2,)), ((1,), (2,))], stored=torch.zeros(2))
    with pytest.raises(ValueError, match="chunks of w overlap"):
        ChunkedTensors(tmp_path).read("w")


@pytest.mark.parametrize("dtype", ["torch.float33", "float", "torch.nn", "torch.Tensor", ""])
def test_a_dtype_that_torch_lacks_is_refused(tmp_path, dtype):
    one_tensor(tmp_path, dtype=dtype)
    if dtype == "float":
        assert ChunkedTensors(tmp_path).dtype_of["w"] == torch.float32
        return
    with pytest.raises(ValueError, match=f"names a dtype {dtype!r} that torch does not have"):
        ChunkedTensors(tmp_path)


@pytest.mark.parametrize("file", [".metadata", "0.metadata"])
def test_a_chunk_without_a_place_is_refused(tmp_path, file):
    whole = rank_metadata(0, {"w": Part(torch.zeros(4), (0,), (4,))})
    whole.storage_data = None
    write_bytes(tmp_path / file, metadata_bytes(whole))
    with pytest.raises(ValueError, match=r"the metadata does not say where w at \(0,\) is stored"):
        ChunkedTensors(tmp_path)


def test_a_chunk_without_its_file_or_key_is_refused(tmp_path):
    one_tensor(tmp_path, key="v")
    with pytest.raises(ValueError, match=r"_rank0_\.safetensors cannot be read: .*v"):
        ChunkedTensors(tmp_path).read("w")
    (tmp_path / "_rank0_.safetensors").unlink()
    with pytest.raises(ValueError, match=r"_rank0_\.safetensors cannot be read"):
        ChunkedTensors(tmp_path).read("w")


FLOAT = TensorProperties("torch.float32")
CHUNK = ChunkStorageMetadata((0,), torch.Size((4,)))
PLACE = {MetadataIndex("w", (0,)): StorageInfo("_rank0_.safetensors", 0, -1, "w")}
NO_PATH = StorageInfo(None, 0, -1)  # type: ignore[arg-type]
MALFORMED: dict[str, Any] = {  # records of the right classes, as an unpickler makes them, around contents that are not theirs
    "entry": Metadata({"w": "x"}, storage_data=PLACE),
    "empty entry": Metadata({"w": object.__new__(TensorStorageMetadata)}, storage_data=PLACE),
    "name": Metadata({1: TensorStorageMetadata(FLOAT, (4,), [CHUNK])}, storage_data=PLACE),
    "properties": Metadata({"w": TensorStorageMetadata(None, (4,), [CHUNK])}, storage_data=PLACE),
    "dtype": Metadata({"w": TensorStorageMetadata(TensorProperties(3), (4,), [CHUNK])}, storage_data=PLACE),
    "size": Metadata({"w": TensorStorageMetadata(FLOAT, "4", [CHUNK])}, storage_data=PLACE),
    "size of floats": Metadata({"w": TensorStorageMetadata(FLOAT, (4.5,), [CHUNK])}, storage_data=PLACE),
    "dims": Metadata({"w": TensorStorageMetadata(FLOAT, (4, 1), [CHUNK])}, storage_data=PLACE),
    "chunks": Metadata({"w": TensorStorageMetadata(FLOAT, (4,), None)}, storage_data=PLACE),
    "chunk": Metadata({"w": TensorStorageMetadata(FLOAT, (4,), ["x"])}, storage_data=PLACE),
    "places": Metadata({"w": TensorStorageMetadata(FLOAT, (4,), [CHUNK])}, storage_data=[1]),
    "place": Metadata({"w": TensorStorageMetadata(FLOAT, (4,), [CHUNK])}, storage_data=dict.fromkeys(PLACE, "x")),
    "path": Metadata({"w": TensorStorageMetadata(FLOAT, (4,), [CHUNK])}, storage_data=dict.fromkeys(PLACE, NO_PATH)),
}


@pytest.mark.parametrize("file", [".metadata", "0.metadata"])
@pytest.mark.parametrize("whole", MALFORMED.values(), ids=MALFORMED)
def test_malformed_records_are_refused(tmp_path, whole, file):
    write_bytes(tmp_path / file, metadata_bytes(whole))
    write_tensors(tmp_path / "_rank0_.safetensors", {"w": torch.arange(4.0)})
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        ChunkedTensors(tmp_path).read("w")


# --- moments that do not fit ----------------------------------------------------------------------------------------


def save_moments(directory, names, **changes):
    """A checkpoint of vectors, one of them as long as the others together, and their moments."""
    tensors = {name: torch.arange(float(2 + i)) for i, name in enumerate(("a", "b", "c"))}
    write_model(directory, [{name: Part(tensor, (0,), tuple(tensor.shape)) for name, tensor in tensors.items()}])
    saved = optimizer_state_dict([ParamGroup(tuple(names), ADAMW), ParamGroup((), ADAMW)], tensors, tensors, 3)
    for group in saved["param_groups"]:
        group.update(changes)
    return saved


def test_moments_of_other_parameters_are_refused_by_name(tmp_path):
    write_pt(tmp_path / optimizer_file(0), save_moments(tmp_path, ["a", "b"]))
    assert StoredMoments(ChunkedTensors(tmp_path), [["b", "a"], []]).step == 3
    for groups in ([["a"], ["c"]], [["a"], []], [["a", "b"], ["c"]]):
        with pytest.raises(ValueError, match=r"holds the moments of other parameters .*\(\d differ, such as [bc]\)"):
            StoredMoments(ChunkedTensors(tmp_path), groups)


def test_named_moments_may_change_their_group(tmp_path):
    write_pt(tmp_path / optimizer_file(0), save_moments(tmp_path, ["c", "a"]))
    stored = StoredMoments(ChunkedTensors(tmp_path), [["a"], ["c"]])
    assert stored.read("exp_avg", "c").tolist() == [0, 1, 2, 3] and stored.read("exp_avg_sq", "a").tolist() == [0, 1]


def test_moments_in_another_order_are_found_out_by_their_shape(tmp_path):
    saved = save_moments(tmp_path, ["b", "a"])
    for group in saved["param_groups"]:
        del group["param_names"]
    write_pt(tmp_path / optimizer_file(0), saved)
    stored = StoredMoments(ChunkedTensors(tmp_path), [["a", "b"], []])
    with pytest.raises(ValueError, match=r"exp_avg of a has shape \[3\], its parameter \[2\]: the order"):
        stored.read("exp_avg", "a")


def test_parameters_updated_different_numbers_of_times_are_refused(tmp_path):
    saved = save_moments(tmp_path, ["a", "b"])
    saved["state"][1]["step"] = torch.tensor(2.0)
    write_pt(tmp_path / optimizer_file(0), saved)
    with pytest.raises(ValueError, match=r"updated different numbers of times \(such as \{'b': 2, 'a': 3\}\)"):
        StoredMoments(ChunkedTensors(tmp_path), [["a", "b"], []])


@pytest.mark.parametrize("value", [{}, [], {"state": {}}, {"param_groups": 1, "state": {}}, {"param_groups": [{}], "state": {}}])
def test_what_is_no_state_of_adamw_is_refused(tmp_path, value):
    save_moments(tmp_path, ["a"])
    write_pt(tmp_path / optimizer_file(0), value)
    with pytest.raises(ValueError, match=r"optimizer_rank0\.pt is not the state of torch's AdamW"):
        StoredMoments(ChunkedTensors(tmp_path), [["a"], []])
