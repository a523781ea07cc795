"""A pickle is code: only the records of the format are ever made of one. Damaged and contradictory files are refused by name."""

import io
import os
import pickle
import random
import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hyper_parallel.core.distributed_checkpoint import metadata, storage
from hyper_parallel.core.distributed_checkpoint.chunks import ChunkedTensors, Part, rank_metadata
from hyper_parallel.core.distributed_checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
    merge,
    metadata_bytes,
    read_metadata,
)
from hyper_parallel.core.distributed_checkpoint.storage import StorageInfo, read_pt, write_tensors

PACKAGE = "hyper_parallel.core.distributed_checkpoint"
RECORDS = {
    "metadata": (BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata),
    "storage": (StorageInfo,),
}


class Reduced:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class Stranger:
    """A class that is no record of the format."""


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def asking_for(module: str, name: str, *, protocol: int = 4) -> bytes:
    """A pickle that asks for one global and is that global."""
    if protocol == 0:
        return b"c" + f"{module}\n{name}\n".encode() + b"."
    return b"\x80\x04" + text(module) + text(name) + b"\x93."


def small() -> Metadata:
    return rank_metadata(0, {"w": Part(torch.arange(6.0).view(2, 3), (0, 0), (2, 3)), "b": Part(torch.zeros(2), (0,), (2,))})


def write(tmp_path, data: bytes):
    path = tmp_path / ".metadata"
    path.write_bytes(data)
    return path


# --- hostile --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda target: Reduced(os.system, f"touch {target}"), "posix.system"),
        (lambda target: Reduced(eval, f"open({str(target)!r}, 'w')"), "builtins.eval"),
        (lambda target: Reduced(exec, f"open({str(target)!r}, 'w')"), "builtins.exec"),
        (lambda target: Reduced(open, str(target), "w"), "io.open"),
        (lambda target: Reduced(getattr, Stranger(), "x"), "builtins.getattr"),
        (lambda target: Stranger(), f"{__name__}.Stranger"),
        (lambda target: Reduced(torch.load, str(target)), "torch.serialization.load"),
        (lambda target: torch.zeros(2), "torch._utils._rebuild_tensor_v2"),
        (lambda target: torch.float32, "torch.float32"),
        (lambda target: Metadata({"w": Stranger()}), f"{__name__}.Stranger"),
        (lambda target: Metadata({}, planner_data=Reduced(os.system, f"touch {target}")), "posix.system"),
    ],
)
def test_nothing_but_the_records_is_loaded_or_run(tmp_path, make, name, protocol):
    target = tmp_path / "executed"
    path = write(tmp_path, pickle.dumps(make(target), protocol, fix_imports=False))
    with pytest.raises(ValueError, match=re.escape(f"{path} asks for {name}, which is no part of checkpoint metadata")):
        read_metadata(path)
    assert not target.exists()


@pytest.mark.parametrize("protocol", [0, 4])
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "load"),
        ("torch", "Size.count"),
        ("torch", "serialization.os.system"),
        ("torch.Size", "__new__"),
        ("builtins", "dict"),
        ("collections", "OrderedDict"),
        ("copyreg", "_reconstructor"),
        (f"{PACKAGE}.metadata", "io"),
        (f"{PACKAGE}.metadata", "io.open"),
        (f"{PACKAGE}.metadata", "pickle.loads"),
        (f"{PACKAGE}.metadata", "Metadata.__init__"),
        (f"{PACKAGE}.metadata", "MetadataIndex.__init__.__globals__"),
        (f"{PACKAGE}.metadata", "StorageInfo"),
        (f"{PACKAGE}.storage", "Metadata"),
        (f"{PACKAGE}.storage", "os.system"),
        (f"{PACKAGE}.chunks", "Part"),
        (f"{PACKAGE}", "metadata"),
        (f"{PACKAGE}.metadata.Metadata", "__init__"),
        ("hyper_parallel.core.checkpoint.metadata", "io.open"),
        ("hyper_parallel.core.checkpoint", "Metadata"),
    ],
)
def test_names_that_lead_elsewhere_are_refused(tmp_path, module, name, protocol):
    with pytest.raises(ValueError, match=re.escape(f"asks for {module}.{name}, which is no part")):
        read_metadata(write(tmp_path, asking_for(module, name, protocol=protocol)))


def test_every_other_name_in_our_modules_is_refused(tmp_path):
    for module, records in RECORDS.items():
        names = set(dir({"metadata": metadata, "storage": storage}[module])) - {record.__name__ for record in records}
        assert len(names) > 10
        for name in names:
            with pytest.raises(ValueError, match="no part of checkpoint metadata"):
                read_metadata(write(tmp_path, asking_for(f"{PACKAGE}.{module}", name)))


@given(module=st.text(max_size=20), name=st.text(max_size=20))
def test_any_other_name_is_refused(tmp_path_factory, module, name):
    path = write(tmp_path_factory.getbasetemp(), asking_for(module, name))
    with pytest.raises(ValueError, match=r"\.metadata"):
        read_metadata(path)


def test_an_extension_code_and_a_persistent_id_are_refused(tmp_path):
    import copyreg

    copyreg.add_extension("os", "system", 240)
    try:
        for data in (b"\x80\x02\x82\xf0.", b"\x80\x02" + text("x") + b"Q."):
            with pytest.raises(ValueError, match=r"\.metadata"):
                read_metadata(write(tmp_path, data))
    finally:
        copyreg.remove_extension("os", "system", 240)


def test_the_records_themselves_are_not_changed(tmp_path):
    """BUILD sets attributes of whatever stands on the stack: here of the class, for the whole process."""
    changed = asking_for(f"{PACKAGE}.metadata", "BytesStorageMetadata")[:-1] + b"N}" + text("poison") + b"K\x01s\x86b."
    try:
        with pytest.raises(ValueError, match=r"\.metadata"):
            read_metadata(write(tmp_path, changed))
        assert not hasattr(BytesStorageMetadata, "poison")
    finally:
        if hasattr(BytesStorageMetadata, "poison"):
            del BytesStorageMetadata.poison


def test_a_hostile_pt_file_is_refused(tmp_path):
    target, path = tmp_path / "executed", tmp_path / "optimizer_rank0.pt"
    torch.save({"state": Reduced(os.system, f"touch {target}")}, path)
    with pytest.raises(ValueError, match=re.escape(f"{path} cannot be read: ")):
        read_pt(path)
    path.write_bytes(pickle.dumps(Reduced(os.system, f"touch {target}")))
    with pytest.raises(ValueError, match=re.escape(f"{path} cannot be read: ")):
        read_pt(path)
    assert not target.exists()


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x80\x02}q\x00.", random.Random(0).randbytes(4096)])
def test_a_damaged_pt_file_is_refused(tmp_path, data):
    path = tmp_path / "scheduler.pt"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(f"{path} cannot be read: ")):
        read_pt(path)
    with pytest.raises(ValueError, match=r"nothing\.pt does not exist"):
        read_pt(tmp_path / "nothing.pt")


# --- damaged or of another kind -------------------------------------------------------------------------------------


def test_a_truncated_file_is_refused(tmp_path):
    data = metadata_bytes(small())
    for length in (*range(0, len(data), 5), len(data) - 1):
        path = write(tmp_path, data[:length])
        with pytest.raises(ValueError, match=re.escape(str(path))):
            read_metadata(path)
    assert read_metadata(write(tmp_path, data)) == small()


@given(data=st.binary(max_size=200))
@example(data=b"\x82\x01")  # an extension code that nobody registered
def test_random_bytes_are_refused(tmp_path_factory, data):
    path = write(tmp_path_factory.getbasetemp(), data)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        read_metadata(path)


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
@example(at=0, bit=1)  # an extension code
@example(at=12, bit=2)  # no UTF-8
def test_flipped_bits_are_refused_or_change_values_alone(tmp_path_factory, at, bit):
    whole = bytearray(metadata_bytes(small()))
    whole[at % len(whole)] ^= 1 << bit
    path = write(tmp_path_factory.getbasetemp(), bytes(whole))
    try:
        assert isinstance(read_metadata(path), Metadata)
    except ValueError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize("value", [None, 1, [], {"w": 1}, small().state_dict_metadata["w"], torch.Size([1])])
def test_another_kind_of_value_is_refused(tmp_path, value):
    with pytest.raises(ValueError, match=rf"\.metadata is not checkpoint metadata: it holds a {type(value).__name__}"):
        read_metadata(write(tmp_path, pickle.dumps(value)))


def test_metadata_without_its_contents_is_refused(tmp_path):
    for state in (None, [], "x"):
        with pytest.raises(ValueError, match=r"\.metadata is not checkpoint metadata"):
            read_metadata(write(tmp_path, pickle.dumps(Metadata(state))))  # type: ignore[arg-type]
    bare = asking_for(f"{PACKAGE}.metadata", "Metadata")[:-1] + b")\x81."  # made, but never filled
    with pytest.raises(ValueError, match=r"\.metadata is not checkpoint metadata"):
        read_metadata(write(tmp_path, bare))


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'none'} does not exist")):
        read_metadata(tmp_path / "none")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        read_metadata(tmp_path)


# --- earlier versions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_the_earlier_module_path_is_read(tmp_path, protocol):
    class Earlier(pickle._Pickler):  # the pure Python pickler: its classes' module can be written otherwise
        def save_global(self, obj, name=None):
            if getattr(obj, "__module__", "").startswith(PACKAGE):
                module = obj.__module__.replace("distributed_checkpoint", "checkpoint")
                self.write(b"c" + f"{module}\n{obj.__qualname__}\n".encode())
                self.memoize(obj)
            else:
                super().save_global(obj, name)

    buffer = io.BytesIO()
    pickler = Earlier(buffer, protocol)
    pickler.dispatch = {**pickler.dispatch, type: Earlier.save_global}
    pickler.dump(small())
    assert b"hyper_parallel.core.checkpoint.metadata" in buffer.getvalue() and b"distributed" not in buffer.getvalue()
    found = read_metadata(write(tmp_path, buffer.getvalue()))
    assert found == small()
    assert type(found) is Metadata


def test_a_place_without_a_key_is_that_of_the_parameters_name(tmp_path):
    whole = small()
    assert whole.storage_data is not None
    for place in whole.storage_data.values():
        del place.tensor_key
    write(tmp_path, metadata_bytes(whole))
    assert b"tensor_key" not in (tmp_path / ".metadata").read_bytes()
    write_tensors(tmp_path / "_rank0_.safetensors", {"w": torch.arange(6.0).view(2, 3), "b": torch.zeros(2)})
    assert torch.equal(ChunkedTensors(tmp_path).read("w"), torch.arange(6.0).view(2, 3))


def test_an_index_is_found_whatever_its_place():
    assert MetadataIndex("w", (0, 0), 0) == MetadataIndex("w", (0, 0)) == MetadataIndex("w", (0, 0), 7)
    assert len({MetadataIndex("w", (0,), 0), MetadataIndex("w", (0,), 1), MetadataIndex("w", (1,), 0)}) == 2


# --- all ranks together ---------------------------------------------------------------------------------------------


def test_ranks_that_disagree_are_refused():
    for other in (torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(3, 3)):
        with pytest.raises(ValueError, match=r"rank 1 stores w as torch\.(bfloat16|float32) \[[23], 3\], another rank as"):
            merge({0: small(), 1: rank_metadata(1, {"w": Part(other, (0, 0), tuple(other.shape))})})


def test_replicas_are_stored_once_in_the_lowest_rank():
    parts = {rank: rank_metadata(rank, {"w": Part(torch.zeros(2), (2 * (rank // 2),), (4,))}) for rank in (3, 2, 1, 0)}
    whole = merge(parts)
    places = {index.offset: place.relative_path for index, place in (whole.storage_data or {}).items()}
    assert places == {(0,): "_rank0_.safetensors", (2,): "_rank2_.safetensors"}


def test_entries_that_are_no_tensors_are_passed_over(tmp_path):
    for rank in range(2):
        part = rank_metadata(rank, {"w": Part(torch.full((2,), float(rank)), (2 * rank,), (4,))})
        part.state_dict_metadata["extra"] = BytesStorageMetadata()
        assert part.storage_data is not None
        part.storage_data[MetadataIndex("extra")] = StorageInfo(f"_rank{rank}_.bytes", 0, 3)
        (tmp_path / f"{rank}.metadata").write_bytes(metadata_bytes(part))
        write_tensors(tmp_path / f"_rank{rank}_.safetensors", {"w": torch.full((2,), float(rank))})
    tensors = ChunkedTensors(tmp_path)
    assert tensors.shape_of == {"w": (4,)}
    assert tensors.read("w").tolist() == [0, 0, 1, 1]


def test_entries_that_are_no_tensors_are_passed_over_in_the_file_for_all(tmp_path):
    whole = small()
    whole.state_dict_metadata["extra"] = BytesStorageMetadata()
    write(tmp_path, metadata_bytes(whole))
    assert set(ChunkedTensors(tmp_path).shape_of) == {"w", "b"}
