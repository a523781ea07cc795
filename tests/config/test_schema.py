"""The declared keys: every default against a table typed by hand, documentation, and the rank arithmetic."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.config import (
    AcceleratorConfig,
    Config,
    Topology,
    TrainConfig,
    VisionParallelConfig,
    iter_keys,
    micro_batches_per_step,
    resolve_topology,
    section_class,
)

MODEL = {
    "name": "qwen3_vl_moe",
    "weights_path": None,
    "tokenizer_path": None,
    "freeze_modules": None,
    "vision_parallel": None,
    "num_hidden_layers": None,
    "hidden_size": None,
    "intermediate_size": None,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "vocab_size": None,
    "max_position_embeddings": None,
    "config_overrides": None,
    "expert_layout": None,
}
DATA = {
    "type": "vl_dummy",
    "train_path": None,
    "eval_path": None,
    "train_size": None,
    "train_on_prompt": False,
    "shuffle": True,
    "num_workers": 0,
    "prefetch_factor": None,
    "pin_memory": True,
    "max_seq_len": 2048,
    "packing": False,
    "text_key": "text",
    "image_key": "image",
    "messages_key": "messages",
    "processor_path": None,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vl_grid_t": 2,
    "vl_grid_h": 2,
    "vl_grid_w": 2,
    "vl_video": False,
}
TRAIN = {
    "max_steps": 100,
    "num_train_epochs": 1,
    "global_batch_size": 8,
    "micro_batch_size": 1,
    "seed": 42,
    "backend": "torch",
    "init_device": "meta",
    "comm_backend": None,
    "local_rank": None,
    "accelerator": {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "reshard_after_forward": True, "comm_fusion": True},
    "mixed_precision": {
        "enabled": False,
        "param_dtype": "bfloat16",
        "reduce_dtype": "float32",
        "output_dtype": None,
    },
    "gradient_checkpointing": {"activation_checkpoint": "off"},
    "compile": False,
    "optimizer": {
        "type": "adamw",
        "lr": 1e-4,
        "lr_min": 1e-5,
        "lr_decay_style": "cosine",
        "lr_warmup_ratio": 0.1,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "eps": 1e-8,
        "betas": [0.9, 0.999],
        "foreach": None,
        "loss_aggregation": "token_weighted",
    },
    "checkpoint": {
        "output_dir": "outputs",
        "save_steps": 500,
        "load_path": None,
        "save_hf_weights": True,
        "save_async": False,
        "keep_last": None,
        "on_save_error": "stop",
    },
    "logging": {
        "log_steps": 10,
        "report_throughput": True,
        "report_global_loss": False,
        "model_flops_per_token": None,
        "peak_tflops": None,
    },
    "tensorboard": {"enabled": False, "output_dir": "tb_traces", "log_steps": 1},
    "debug": {"deterministic": False, "check_nan_inf": False, "gc_steps": 0},
    "eval": {"eval_steps": 0},
}
UNSUPPORTED = {
    "model.tp_plan": None,
    "model.cp_modules": None,
    "model.ep_modules": None,
    "model.vision_parallel.cp": 1,
    "model.vision_parallel.ulysses_degree": None,
    "model.vision_parallel.reuse_dp_shard_mesh": None,
    "model.vision_parallel.share_samples_across_dp": None,
    "model.vision_parallel.async_cp": None,
    "data.streaming": None,
    "data.megatron_seed": None,
    "data.pad_token_id": None,
    "data.eod_token_id": None,
    "data.eod_mask_loss": None,
    "data.mmap_bin_files": None,
    "data.subset": None,
    "data.template": None,
    "train.accelerator.cp": 1,
    "train.accelerator.ep": 1,
    "train.accelerator.pp": 1,
    "train.accelerator.etp": 1,
    "train.accelerator.pp_micro_batch_num": 1,
    "train.accelerator.pp_schedule": None,
    "train.accelerator.pp_vpp": 1,
    "train.accelerator.pp_layer_split": None,
    "train.accelerator.moe_token_dispatcher_type": "all_to_all",
    "train.accelerator.npu_nums_per_device": 8,
    "train.accelerator.zero_stage": None,
    "train.accelerator.async_cp": None,
    "train.accelerator.ulysses_degree": None,
    "train.accelerator.cpu_offload": None,
    "train.wandb": None,
    "train.profile": None,
    "train.memory_monitor": None,
    "train.monitor": None,
    "train.moe_monitor": None,
}


def test_defaults():
    assert Config().to_dict() == {"model": MODEL, "data": DATA, "train": TRAIN}
    assert Config().train.optimizer.betas == (0.9, 0.999)
    assert VisionParallelConfig().dp_shard == 0


def test_unsupported_keys():
    found = {path: declared.default for path, declared in iter_keys() if "accepts" in declared.metadata}
    assert found == UNSUPPORTED


@pytest.mark.parametrize("path,declared", [pytest.param(*item, id=item[0]) for item in iter_keys()])
def test_every_key_has_one_line_of_documentation(path, declared):
    doc = declared.metadata["doc"]
    assert doc and "\n" not in doc and doc == doc.strip(), path


def test_sections_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().train.seed = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_section_class():
    assert section_class(VisionParallelConfig | None) is VisionParallelConfig
    assert section_class(TrainConfig) is TrainConfig
    assert section_class(int | None) is None


sizes = st.integers(1, 6)


@given(dp_replicate=sizes, dp_shard=sizes, tp=sizes, left=st.booleans())
def test_topology(dp_replicate, dp_shard, tp, left):
    accelerator = AcceleratorConfig(dp_replicate=dp_replicate, dp_shard=-1 if left else dp_shard, tp=tp)
    topology = resolve_topology(accelerator, dp_replicate * dp_shard * tp)
    assert topology == Topology(dp_replicate=dp_replicate, dp_shard=dp_shard, ep=1, cp=1, tp=tp)
    assert topology.data_parallel_size == dp_replicate * dp_shard


@pytest.mark.parametrize("dp_shard,world_size", [(2, 6), (2, 8), (-1, 10), (-1, 2)])
def test_topology_error_has_all_factors(dp_shard, world_size):
    with pytest.raises(ValueError) as error:
        resolve_topology(AcceleratorConfig(dp_replicate=2, dp_shard=dp_shard, tp=3), world_size)
    shards = "2" if dp_shard == 2 else "-1 (what is left)"
    factors = f"world size {world_size} is not dp_replicate 2 x dp_shard {shards} x ep 1 x cp 1 x tp 3"
    assert factors in str(error.value)


@given(micro=sizes, data_parallel=sizes, count=sizes)
def test_micro_batches(micro, data_parallel, count):
    train = TrainConfig(global_batch_size=micro * data_parallel * count, micro_batch_size=micro)
    assert micro_batches_per_step(train, data_parallel) == count


@pytest.mark.parametrize("data_parallel", [3, 8])
def test_micro_batches_error_has_three_numbers(data_parallel):
    train = TrainConfig(global_batch_size=8, micro_batch_size=2)
    with pytest.raises(ValueError) as error:
        micro_batches_per_step(train, data_parallel)
    assert str(error.value) == (
        f"train.global_batch_size = 8 is not a multiple of train.micro_batch_size = 2 x data-parallel size {data_parallel}"
    )
