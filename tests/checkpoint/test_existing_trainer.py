"""The existing Trainer's own files: read in full and in part, and the same state written by us, compared field by field."""

import json
import pickle
import pickletools
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from saved import ADAMW, ALONE, checkpointer, cut, nothing, run_ranks, save, small_config, state

from hyper_parallel import models, platform
from hyper_parallel.config import DataConfig
from hyper_parallel.config_loader import config_from_dict
from hyper_parallel.core.distributed_checkpoint import metadata, storage
from hyper_parallel.core.distributed_checkpoint.chunks import ChunkedTensors
from hyper_parallel.core.distributed_checkpoint.optimizer import ParamGroup, StoredMoments
from hyper_parallel.core.distributed_checkpoint.storage import read_pt
from hyper_parallel.data.loader import build_loader
from hyper_parallel.data.spec import DataSpec
from hyper_parallel.trainer.resume import Progress, load_position, load_progress, load_rng, problems, restore
from qwen3vl_functional import Qwen3VLMoeConfig, param_specs
from qwen3vl_functional.sharding import AXES, layouts

LAYOUTS = ("step_2", "global_step_2")
MOMENTS = ("exp_avg", "exp_avg_sq")
MESH = (1, 2, 1, 1, 1)
RECORDS = "hyper_parallel.core.distributed_checkpoint"
ALLOWED = {
    *(f"{RECORDS}.metadata {name}" for name in ("Metadata", "TensorStorageMetadata", "TensorProperties")),
    *(f"{RECORDS}.metadata {name}" for name in ("ChunkStorageMetadata", "MetadataIndex", "BytesStorageMetadata")),
    f"{RECORDS}.storage StorageInfo",
    "torch Size",
}


@pytest.fixture(scope="module")
def expected(sample):
    return load_file(sample / "expected_model.safetensors")


@pytest.fixture(scope="module")
def order(sample):
    """Names of the parameters, decayed and not, in the order of the optimizer's numbers."""
    groups = json.loads((sample / "optimizer_param_order.json").read_text())
    return [tuple(groups["decay"]), tuple(groups["no_decay"])]


@pytest.fixture(scope="module")
def moments(sample, order):
    """The moments, put together by hand: number -> name, and rank after rank along the leading dim."""
    ranks = [torch.load(sample / "step_2" / f"optimizer_rank{rank}.pt", weights_only=True)["state"] for rank in range(2)]
    names = [name for group in order for name in group]
    return {
        moment: {name: torch.cat([rank[number][moment] for rank in ranks]) for number, name in enumerate(names)}
        for moment in MOMENTS
    }


@pytest.fixture(scope="module")
def ours(sample, expected, order, moments, tiny_config, tmp_path_factory):
    """The same state, cut by the model's own layouts for 2 FSDP ranks and saved by our Trainer's writer."""
    in_order = metadata.read_metadata(sample / "step_2" / "0.metadata").state_dict_metadata
    placed = layouts(param_specs(Qwen3VLMoeConfig.from_dict(tiny_config)), dict(zip(AXES, MESH, strict=True)))
    trees = [{name: tree[name] for name in in_order} for tree in (expected, moments["exp_avg"], moments["exp_avg_sq"])]
    params, *rest = [cut(tree, placed, MESH) for tree in trees]
    groups = [ParamGroup(order[0], ADAMW), ParamGroup(order[1], {**ADAMW, "weight_decay": 0.0})]
    states = [state(*parts, groups, 2) for parts in zip(params, zip(*rest, strict=True), strict=True)]
    config = small_config(tmp_path_factory.mktemp("ours"))

    def write(ranks):
        writer = checkpointer(config, ranks, states[ranks.rank])
        directory = save(writer, 2)
        writer.close()
        return directory

    return run_ranks(MESH, write)[0]


# --- reading theirs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_is_bit_equal(sample, expected, layout):
    tensors = ChunkedTensors(sample / layout)
    assert tensors.shape_of.keys() == expected.keys()
    assert tensors.files == ["_rank0_.safetensors", "_rank1_.safetensors"]
    for name, tensor in expected.items():
        assert torch.equal(tensors.read(name), tensor), name
        assert tensors.shape_of[name] == tuple(tensor.shape) and tensors.dtype_of[name] == tensor.dtype


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_part_is_the_slice(sample, expected, layout):
    check_parts(ChunkedTensors(sample / layout), expected)


@given(data=st.data())
@settings(max_examples=80)
def check_parts(tensors, expected, data):
    name = data.draw(st.sampled_from(sorted(expected)))
    ends = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in expected[name].shape]
    box = tuple(slice(*pair) for pair in ends)
    assert torch.equal(tensors.read(name, box), expected[name][box])


def test_moments_are_those_of_the_shards_put_together(sample, order, moments):
    stored = StoredMoments(ChunkedTensors(sample / "step_2"), order)
    assert stored.step == 2
    for moment in MOMENTS:
        for name, tensor in moments[moment].items():
            assert torch.equal(stored.read(moment, name), tensor), (moment, name)
            assert tensor.abs().max() > 0


@given(data=st.data())
@settings(max_examples=8)
def test_moments_do_not_depend_on_the_order_of_our_groups(sample, order, moments, data):
    groups = [data.draw(st.permutations(group)) for group in order]
    stored = StoredMoments(ChunkedTensors(sample / "step_2"), groups)
    for name in data.draw(st.lists(st.sampled_from(sorted(moments["exp_avg"])), min_size=1, max_size=10)):
        rows = data.draw(st.tuples(*[st.integers(0, moments["exp_avg"][name].shape[0])] * 2).map(sorted))
        box = (slice(*rows), *(slice(0, size) for size in moments["exp_avg"][name].shape[1:]))
        for moment in MOMENTS:
            assert torch.equal(stored.read(moment, name, box), moments[moment][name][box])


@pytest.mark.parametrize("frozen", ["model.visual.", "lm_head.", "model.language_model.norm."])
def test_another_set_of_trained_parameters_is_refused(sample, order, frozen):
    groups = [[name for name in group if not name.startswith(frozen)] for group in order]
    held, trained = [len(group) for group in order], [len(group) for group in groups]
    with pytest.raises(ValueError, match=r"optimizer_rank0\.pt names no parameters") as refusal:
        StoredMoments(ChunkedTensors(sample / "step_2"), groups)
    assert f"holds {held} of them" in str(refusal.value) and f"trains {trained}" in str(refusal.value)
    assert "set model.freeze_modules as it was" in str(refusal.value)


def test_weights_without_an_optimizer_are_no_place_to_resume_from(sample, order):
    with pytest.raises(ValueError, match=r"global_step_2 holds no optimizer state: .* set model.weights_path to it"):
        StoredMoments(ChunkedTensors(sample / "global_step_2"), order)


def test_progress_scheduler_and_random_state(sample):
    directory = sample / "step_2"
    assert load_progress(directory) == Progress(step=2, epoch=0, consumed_tokens=0)
    assert read_pt(directory / "scheduler.pt")["last_epoch"] == 2
    before = torch.get_rng_state()
    try:
        for rank in range(2):
            torch.manual_seed(12345)
            assert load_rng(directory, rank, platform.detect()) is None
            assert torch.equal(torch.get_rng_state(), torch.load(directory / f"rng_rank{rank}.pt", weights_only=True))
        torch.manual_seed(12345)
        unchanged = torch.get_rng_state()
        assert "written by fewer ranks: rank 2 starts" in (load_rng(directory, 2, platform.detect()) or "")
        assert torch.equal(torch.get_rng_state(), unchanged)
    finally:
        torch.set_rng_state(before)


def test_data_go_on_where_this_trainer_would_be(sample):
    text_only = {"vision": False, "in_channels": 0, "patch_size": 0, "temporal_patch_size": 0, "spatial_merge_size": 1}
    spec = DataSpec(320, image_token_id=301, video_token_id=302, vision_start_token_id=303, vision_end_token_id=304, **text_only)
    sizes = {"micro_batch_size": 1, "global_batch_size": 4, "seed": 0, "max_steps": 6}
    loader = build_loader(DataConfig(type="vl_dummy"), spec, processor_path=None, rank=0, world_size=1, **sizes)
    note = load_position(sample / "step_2", loader, 2)
    assert note is not None and "another Trainer's data position: data go on where step 2" in note
    assert loader.batch_sampler.position == (0, 8, 0)


def test_it_can_be_resumed_from(sample, tmp_path):
    assert problems(sample / "step_2", ALONE) == []
    assert restore(small_config(tmp_path, load_path=str(sample / "step_2")), ALONE, print, nothing) == sample / "step_2"
    with pytest.raises(ValueError, match=r"global_step_2/extra_state.json is missing: .*set model.weights_path to it"):
        restore(small_config(tmp_path, load_path=str(sample / "global_step_2")), ALONE, print, nothing)


@pytest.mark.parametrize("name", ["_rank1_.safetensors", "optimizer_rank1.pt", "extra_state.json", "_rank0_.safetensors"])
def test_without_one_of_its_files_it_is_refused(sample, tmp_path, name):
    directory = shutil.copytree(sample / "step_2", tmp_path / "step_2")
    (directory / name).unlink()
    assert [problem for problem in problems(directory, ALONE) if f"{directory / name} is missing" in problem]


@pytest.mark.parametrize("name", ["_rank1_.safetensors", "1.metadata"])
@pytest.mark.parametrize("keep", [0, 7, 0.5, -1])
def test_a_truncated_file_is_named(sample, tmp_path, name, keep):
    directory = shutil.copytree(sample / "step_2", tmp_path / "step_2")
    data = (directory / name).read_bytes()
    (directory / name).unlink()
    (directory / name).write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    (problem,) = problems(directory, ALONE)
    assert str(directory / name) in problem


def test_a_truncated_optimizer_is_refused_when_it_is_read(sample, tmp_path, order):
    directory = shutil.copytree(sample / "step_2", tmp_path / "step_2")
    path = directory / "optimizer_rank1.pt"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])
    stored = StoredMoments(ChunkedTensors(directory), order)
    with pytest.raises(ValueError, match=r"optimizer_rank1\.pt cannot be read"):
        stored.read("exp_avg", "lm_head.weight")


# --- writing ours ---------------------------------------------------------------------------------------------------


def fields(record, *, key_of=None):
    """A pickled record as plain values, types where the format says so; ``key_of``: the fqn that stands for a missing key."""
    raw = dict(vars(record))
    if isinstance(record, storage.StorageInfo):
        raw["tensor_key"] = raw.get("tensor_key") or key_of
    return type(record).__name__, dict(sorted(raw.items()))


def flattened(whole: metadata.Metadata):
    assert set(vars(whole)) == {"state_dict_metadata", "planner_data", "storage_data", "version"}
    entries = {}
    for name, entry in whole.state_dict_metadata.items():
        kind, raw = fields(entry)
        chunks = [(fields(chunk), type(chunk.offsets), type(chunk.sizes)) for chunk in raw.pop("chunks")]
        entries[name] = kind, fields(raw.pop("properties")), raw, type(entry.size), chunks
    assert whole.storage_data is not None
    places = [(fields(index), fields(place, key_of=index.fqn)) for index, place in whole.storage_data.items()]
    return list(entries.items()), sorted(places, key=str), whole.planner_data, whole.version


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("0.metadata", "step_2/0.metadata"),
        ("1.metadata", "step_2/1.metadata"),
        (".metadata", "global_step_2/.metadata"),
    ],
)
def test_our_metadata_hold_the_same(sample, ours, mine, theirs):
    """With plain pickle, as the existing Trainer reads it: attribute by attribute, torch.Size and tuple told apart."""
    with open(ours / mine, "rb") as left, open(sample / theirs, "rb") as right:
        assert flattened(pickle.load(left)) == flattened(pickle.load(right))


def globals_of(data: bytes) -> set[str]:
    """The globals that a pickle names, as ``module name``."""
    found, strings, memo = set(), [], []
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "GLOBAL":
            found.add(str(argument))
        elif opcode.name == "STACK_GLOBAL":
            found.add(" ".join(strings[-2:]))
        elif opcode.name == "MEMOIZE":
            memo.append(strings[-1] if strings else None)
        elif "BINGET" in opcode.name:
            strings.append(memo[argument])
        elif "UNICODE" in opcode.name:
            strings.append(argument)
        elif opcode.name in ("EXT1", "EXT2", "EXT4", "INST", "OBJ", "PERSID", "BINPERSID"):
            raise AssertionError(opcode.name)
    return found


def test_our_metadata_name_only_the_records_of_the_format(sample, ours):
    for name in ("0.metadata", "1.metadata", ".metadata"):
        found = globals_of((ours / name).read_bytes())
        assert found == globals_of((sample / "step_2" / "0.metadata").read_bytes())
        assert found == ALLOWED - {f"{RECORDS}.metadata BytesStorageMetadata"}


def test_our_tensor_files_hold_the_same(sample, ours):
    for name in ("_rank0_.safetensors", "_rank1_.safetensors"):
        mine, theirs = load_file(ours / name), load_file(sample / "step_2" / name)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) and mine[key].dtype == theirs[key].dtype for key in theirs)
        with safe_open(ours / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_our_optimizer_files_hold_the_same(sample, ours):
    for name in ("optimizer_rank0.pt", "optimizer_rank1.pt"):
        mine, theirs = (torch.load(root / name, weights_only=True) for root in (ours, sample / "step_2"))
        assert mine.keys() == theirs.keys()
        assert list(mine["state"]) == list(theirs["state"])
        for number, state_of in theirs["state"].items():
            assert mine["state"][number].keys() == state_of.keys()
            assert all(torch.equal(mine["state"][number][key], value) for key, value in state_of.items())
            assert all(mine["state"][number][key].dtype == value.dtype for key, value in state_of.items())
        names = [group.pop("param_names") for group in mine["param_groups"]]
        assert mine["param_groups"] == theirs["param_groups"]
        assert [len(group) for group in names] == [len(group["params"]) for group in theirs["param_groups"]]


def test_our_small_files_hold_the_same(sample, ours):
    mine, theirs = (torch.load(root / "scheduler.pt", weights_only=True) for root in (ours, sample / "step_2"))
    assert mine == theirs
    assert (ours / "extra_state.json").read_text() == (sample / "step_2" / "extra_state.json").read_text()
    rng, other = (torch.load(root / "rng_rank0.pt", weights_only=True) for root in (ours, sample / "step_2"))
    assert (rng.dtype, rng.shape) == (other.dtype, other.shape)


def test_we_write_their_files_and_four_more(sample, ours):
    additions = {".metadata", "manifest.json", "rng_extra_rank0.pt", "rng_extra_rank1.pt"}
    assert {path.name for path in ours.iterdir()} == {path.name for path in (sample / "step_2").iterdir()} | additions


def test_torch_takes_our_optimizer_and_scheduler(ours):
    """The existing Trainer hands the files to torch's own AdamW and LambdaLR, over its own shards."""
    saved, schedule = (torch.load(ours / name, weights_only=True) for name in ("optimizer_rank1.pt", "scheduler.pt"))
    shards = [torch.zeros_like(entry["exp_avg"], requires_grad=True) for entry in saved["state"].values()]
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    named = [[(name, shards.pop(0)) for name in group["param_names"]] for group in saved["param_groups"]]
    optimizer = torch.optim.AdamW([{"params": group} for group in named], lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    optimizer.load_state_dict(saved)
    scheduler.load_state_dict(schedule)
    assert [len(group["params"]) for group in optimizer.param_groups] == sizes
    assert [group["lr"] for group in optimizer.param_groups] == [2e-5, 2e-5] and scheduler.last_epoch == 2
    numbered = (parameter for group in optimizer.param_groups for parameter in group["params"])
    assert all(
        torch.equal(optimizer.state[parameter]["exp_avg"], saved["state"][number]["exp_avg"])
        for number, parameter in enumerate(numbered)
    )


def test_the_adapter_numbers_parameters_as_the_existing_trainer_does(sample, order, tiny_config):
    """torch matches moments by number alone: in another order the existing Trainer would give them to other parameters."""
    overrides = {key: value for key, value in tiny_config.items() if key.endswith(("_config", "_token_id"))}
    raw = {"model": {"config_overrides": {"vl": True, **overrides}}, "data": {"type": "vl_dummy"}, "train": {}}
    model = models.build(config_from_dict(raw, source="test"))
    model.setup(total_steps=4, device=torch.device("cpu"), mesh=None)
    groups = model.snapshot().groups
    theirs = torch.load(sample / "step_2" / "optimizer_rank0.pt", weights_only=True)["param_groups"]
    written = {"params", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
    assert [group.options.keys() for group in groups] == [group.keys() - written for group in theirs]
    assert [group.names for group in groups] == order
