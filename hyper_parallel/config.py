"""The YAML contract: every key that a run's configuration may hold, with its type, default, limits and meaning.

A file has the root keys ``model``, ``data`` and ``train``; one dataclass below stands for one mapping of the file, one
field for one key. ``hyper_parallel.config_loader`` reads files and command lines into these classes, strictly.
"""

# ruff: noqa: RUF009 (key() and unsupported() return dataclass fields)
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Literal, get_args, get_type_hints

# --- how a key is declared -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A limit on one value; ``text`` completes the sentence "must be ..."."""

    text: str
    holds: Callable[[Any], bool]


POSITIVE = Rule("greater than 0", lambda value: value > 0)
NOT_NEGATIVE = Rule("at least 0", lambda value: value >= 0)
RATIO = Rule("between 0 and 1", lambda value: 0 <= value <= 1)
BETAS = Rule("at least 0 and below 1, both of them", lambda values: all(0 <= value < 1 for value in values))
SHARDS = Rule("greater than 0, or -1 for what is left", lambda value: value == -1 or value > 0)

DType = Literal["bfloat16", "float16", "float32"]
DTYPE_SPELLINGS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def key(
    default: Any,
    doc: str,
    *,
    valid: Rule | None = None,
    spellings: Mapping[Any, str] | None = None,
    old_name: str | None = None,
) -> Any:
    """One key: its default, one line of documentation, a limit, other spellings of its values, its former name."""
    metadata = {"doc": doc, "valid": valid, "spellings": spellings or {}, "old_name": old_name}
    return field(default=default, metadata=metadata)


def unsupported(default: Any, doc: str, *, also: tuple[Any, ...] = ()) -> Any:
    """A key that existing files carry and this Trainer does not act on: ``default`` and ``also`` are all it may hold.

    ``also`` has the existing Trainer's own way of saying "off" where the default is null. The field keeps the default.
    """
    return field(default=default, metadata={"doc": doc, "accepts": (default, *also)})


OFF = {"enabled": False}  # in `also`: any mapping with `enabled: false`, whatever its other keys


# --- model -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VisionParallelConfig:
    """``model.vision_parallel``: how the vision tower is distributed where it differs from the text model."""

    dp_shard: int = key(0, "0: sharded as the text; 1: tower replicated; else the full data-parallel size", valid=NOT_NEGATIVE)
    cp: int = unsupported(1, "split the tower's patches over this many ranks")
    ulysses_degree: int | None = unsupported(None, "the part of cp that splits heads", also=(1,))
    reuse_dp_shard_mesh: bool | None = unsupported(None, "let cp run over the dp_shard ranks", also=(False,))
    share_samples_across_dp: bool | None = unsupported(None, "same samples on all ranks that share cp", also=(False,))
    async_cp: bool | None = unsupported(None, "overlap cp's communication", also=(False,))


@dataclass(frozen=True)
class ModelConfig:
    """``model``: which model, its weights and its architecture.

    Architecture, later wins: built-in values, ``<weights_path>/config.json``, the size keys here, ``config_overrides``.
    """

    name: str = key("qwen3_vl_moe", "without a dot: package hyper_parallel.models.<name>; with one: an import path")
    weights_path: str | None = key(None, "Hugging Face directory or a step_<N> directory; null: random weights")
    tokenizer_path: str | None = key(None, "tokenizer and processor directory; null: weights_path")
    freeze_modules: list[str] | None = key(None, "subtrees that are not trained, such as model.visual; each must exist")
    vision_parallel: VisionParallelConfig | None = key(None, "how the vision tower is distributed; null: as the text")
    num_hidden_layers: int | None = key(None, "text decoder layers", valid=POSITIVE)
    hidden_size: int | None = key(None, "text width", valid=POSITIVE)
    intermediate_size: int | None = key(None, "width of the dense feed-forward", valid=POSITIVE)
    num_attention_heads: int | None = key(None, "text query heads", valid=POSITIVE)
    num_key_value_heads: int | None = key(None, "text key/value heads", valid=POSITIVE)
    vocab_size: int | None = key(None, "vocabulary size", valid=POSITIVE)
    max_position_embeddings: int | None = key(None, "longest position the text model is built for", valid=POSITIVE)
    config_overrides: dict[str, Any] | None = key(
        None, "vl: true for vision and text, else text only; text_config, vision_config and token ids as in config.json"
    )
    expert_layout: Literal["hub", "transposed"] | None = key(
        None, "layout of the expert tensors on disk; needed only when they are square, so that shapes cannot tell"
    )
    tp_plan: None = unsupported(None, "per-model tensor-parallel plan")
    cp_modules: None = unsupported(None, "per-model context-parallel plan")
    ep_modules: None = unsupported(None, "per-model expert-parallel plan")


# --- data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataConfig:
    """``data``: where samples come from and how they are read."""

    type: Literal["vl_dummy", "json_file", "hf_datasets"] = key(
        "vl_dummy", "vl_dummy: synthetic; json_file: JSONL conversations with images; hf_datasets: a saved dataset"
    )
    train_path: str | None = key(None, "training file (json_file) or directory (hf_datasets)")
    eval_path: str | None = key(None, "held-out data of the same type; null: no evaluation")
    train_size: int | None = key(None, "use only the first samples; null: all", valid=POSITIVE)
    train_on_prompt: bool = key(False, "also train on the tokens that are not the assistant's")
    shuffle: bool = key(True, "new order in every epoch")
    num_workers: int = key(0, "loader processes per rank", valid=NOT_NEGATIVE)
    prefetch_factor: int | None = key(None, "batches that each loader process reads ahead", valid=POSITIVE)
    pin_memory: bool = key(True, "page-locked host memory for faster copies to the device")
    max_seq_len: int = key(2048, "tokens per sample", valid=POSITIVE)
    packing: bool = key(False, "fill max_seq_len with several samples, which stay apart; batch sizes then count packs")
    text_key: str = key("text", "column with plain text")
    image_key: str = key("image", "column with images")
    messages_key: str = key("messages", "column with conversations")
    processor_path: str | None = key(None, "processor directory; null: tokenizer_path, then weights_path")
    image_token_id: int = key(151655, "image placeholder; the model's config.json wins", valid=NOT_NEGATIVE)
    video_token_id: int = key(151656, "video placeholder; the model's config.json wins", valid=NOT_NEGATIVE)
    vl_grid_t: int = key(2, "vl_dummy: temporal patches", valid=POSITIVE)
    vl_grid_h: int = key(2, "vl_dummy: patch rows", valid=POSITIVE)
    vl_grid_w: int = key(2, "vl_dummy: patch columns", valid=POSITIVE)
    vl_video: bool = key(False, "vl_dummy: a video instead of an image")
    streaming: bool | None = unsupported(None, "read the dataset as a stream", also=(False,))
    megatron_seed: int | None = unsupported(None, "shuffling seed of Megatron datasets")
    pad_token_id: int | None = unsupported(None, "padding id of Megatron datasets", also=(0,))
    eod_token_id: int | None = unsupported(None, "end-of-document id of Megatron datasets")
    eod_mask_loss: bool | None = unsupported(None, "no loss on end-of-document tokens", also=(False,))
    mmap_bin_files: bool | None = unsupported(None, "memory-map Megatron datasets", also=(True,))
    subset: str | None = unsupported(None, "named part of a dataset")
    template: str | None = unsupported(None, "chat template by name", also=("empty",))


# --- train -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AcceleratorConfig:
    """``train.accelerator``: world size = dp_replicate x dp_shard x ep x cp x tp, in this order in the mesh."""

    unsupported_prefix: ClassVar[str] = "linear_attention_"

    dp_replicate: int = key(1, "data-parallel replicas of the whole model", valid=POSITIVE)
    dp_shard: int = key(1, "data-parallel ranks that share one replica; -1: what is left", valid=SHARDS, old_name="dp")
    tp: int = key(1, "tensor-parallel ranks", valid=POSITIVE)
    cp: int = unsupported(1, "context-parallel ranks")
    ep: int = unsupported(1, "expert-parallel ranks")
    pp: int = unsupported(1, "pipeline stages")
    etp: int = unsupported(1, "tensor-parallel ranks inside an expert")
    pp_micro_batch_num: int = unsupported(1, "micro-batches per pipeline step", also=(None,))
    pp_schedule: str | None = unsupported(None, "pipeline schedule")
    pp_vpp: int = unsupported(1, "virtual pipeline stages per rank", also=(None,))
    pp_layer_split: list[int] | None = unsupported(None, "layers of each pipeline stage")
    reshard_after_forward: bool = key(True, "free a block's gathered weights after its forward, gather again backward")
    comm_fusion: bool = key(True, "one collective per block instead of one per tensor")
    moe_token_dispatcher_type: str = unsupported("all_to_all", "how tokens travel to their experts")
    npu_nums_per_device: int = unsupported(8, "inner degree of hierarchical expert parallelism")
    zero_stage: int | None = unsupported(None, "ZeRO stage", also=(0,))
    async_cp: bool | None = unsupported(None, "overlap cp's communication", also=(False,))
    ulysses_degree: int | None = unsupported(None, "the part of cp that splits heads")
    cpu_offload: bool | None = unsupported(None, "keep shards in host memory", also=(False,))


@dataclass(frozen=True)
class MixedPrecisionConfig:
    """``train.mixed_precision``: dtypes in flight; parameters at rest and optimizer moments stay float32."""

    enabled: bool = key(False, "false: everything in float32")
    param_dtype: DType = key("bfloat16", "dtype of weights and activations in a block", spellings=DTYPE_SPELLINGS)
    reduce_dtype: DType = key("float32", "dtype in which gradients are summed over ranks", spellings=DTYPE_SPELLINGS)
    output_dtype: DType | None = key(None, "dtype of a block's output; null: param_dtype", spellings=DTYPE_SPELLINGS)


@dataclass(frozen=True)
class GradientCheckpointingConfig:
    """``train.gradient_checkpointing``: memory against recomputation."""

    # YAML 1.1 reads an unquoted `off` as false.
    activation_checkpoint: Literal["off", "full", "selective"] = key(
        "off", "what the backward recomputes: nothing, whole blocks, or selected operations", spellings={False: "off"}
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """``train.optimizer``: AdamW, learning-rate schedule, clipping and how the loss is averaged."""

    type: Literal["adamw"] = key("adamw", "AdamW is the only optimizer")
    lr: float = key(1e-4, "highest learning rate", valid=POSITIVE)
    lr_min: float = key(1e-5, "learning rate at the end of the decay", valid=NOT_NEGATIVE)
    lr_decay_style: Literal["cosine", "constant", "linear"] = key("cosine", "shape of the decay after the warm-up")
    lr_warmup_ratio: float = key(0.1, "part of all steps that warms up, rounded up to whole steps", valid=RATIO)
    weight_decay: float = key(0.01, "decoupled weight decay; none on biases and norms", valid=NOT_NEGATIVE)
    max_grad_norm: float = key(1.0, "global gradient-norm limit; 0 or less: no clipping, the norm is still reported")
    eps: float = key(1e-8, "AdamW's epsilon", valid=POSITIVE)
    betas: tuple[float, float] = key((0.9, 0.999), "AdamW's decay rates of the two moments", valid=BETAS)
    foreach: bool | None = key(None, "fused multi-tensor update; null: decided by torch")
    loss_aggregation: Literal["token_weighted", "rank_average"] = key(
        "token_weighted", "token_weighted: loss sum / target tokens of the global batch; rank_average: mean of means"
    )

    def __post_init__(self) -> None:
        if self.lr_decay_style != "constant" and self.lr_min > self.lr:
            raise ValueError(f"train.optimizer.lr_min = {self.lr_min} is above train.optimizer.lr = {self.lr}: lower lr_min")


@dataclass(frozen=True)
class CheckpointConfig:
    """``train.checkpoint``: what is saved, when, and what the run starts from."""

    output_dir: str = key("outputs", "directory of the step_<N> directories")
    save_steps: int = key(500, "steps between saves; 0 or less: never")
    load_path: str | None = key(None, 'step directory to resume from, or "latest" in output_dir; null: start fresh')
    save_hf_weights: bool = key(True, "also export the weights in the Hugging Face layout")
    save_async: bool = key(False, "write files in the background")
    keep_last: int | None = key(None, "keep this many of the newest checkpoints; null: all", valid=POSITIVE)
    on_save_error: Literal["stop", "continue"] = key("stop", "what a run does when a checkpoint cannot be written")


@dataclass(frozen=True)
class LoggingConfig:
    """``train.logging``: the console and the metrics."""

    log_steps: int = key(10, "steps between log lines", valid=POSITIVE)
    report_throughput: bool = key(True, "log tokens per second")
    report_global_loss: bool = key(False, "log the loss of all ranks instead of this rank's")
    model_flops_per_token: float | None = key(None, "FLOPs per token, for the utilisation", valid=POSITIVE)
    peak_tflops: float | None = key(None, "the device's peak TFLOP/s, for the utilisation", valid=POSITIVE)


@dataclass(frozen=True)
class TensorboardConfig:
    """``train.tensorboard``: event files written by rank 0."""

    enabled: bool = key(False, "write event files")
    output_dir: str = key("tb_traces", "directory of the event files")
    log_steps: int = key(1, "steps between points", valid=POSITIVE)


@dataclass(frozen=True)
class DebugConfig:
    """``train.debug``: reproducibility and checks."""

    deterministic: bool = key(False, "deterministic kernels, or an error where there is none")
    check_nan_inf: bool = key(False, "stop at the first loss or gradient norm that is not finite")
    gc_steps: int = key(0, "steps between Python garbage collections; 0: Python's own schedule", valid=NOT_NEGATIVE)


@dataclass(frozen=True)
class EvalConfig:
    """``train.eval``: evaluation on ``data.eval_path``."""

    eval_steps: int = key(0, "steps between evaluations; 0: only at the end", valid=NOT_NEGATIVE)


@dataclass(frozen=True)
class TrainConfig:
    """``train``: the loop, and everything around it."""

    max_steps: int | None = key(100, "optimizer steps, exactly; 0 or less, or null: num_train_epochs over the data")
    num_train_epochs: int = key(1, "passes over the data when max_steps does not decide", valid=POSITIVE)
    global_batch_size: int = key(8, "samples per optimizer step over all data-parallel ranks", valid=POSITIVE)
    micro_batch_size: int = key(1, "samples per rank and forward pass", valid=POSITIVE)
    seed: int = key(42, "seed of weights, data order and synthetic data", valid=NOT_NEGATIVE)
    backend: Literal["torch"] = key("torch", "torch is the only backend")
    init_device: Literal["meta", "cpu"] = key("meta", "where parameters are created; meta: straight as shards")
    comm_backend: Literal["gloo", "nccl", "hccl"] | None = key(None, "torch.distributed backend; null: by device")
    local_rank: int | None = key(None, "device index on this machine; null: LOCAL_RANK", valid=NOT_NEGATIVE)
    accelerator: AcceleratorConfig = key(AcceleratorConfig(), "how ranks share the work")
    mixed_precision: MixedPrecisionConfig = key(MixedPrecisionConfig(), "dtypes in flight")
    gradient_checkpointing: GradientCheckpointingConfig = key(GradientCheckpointingConfig(), "recomputation")
    compile: bool = key(False, "torch.compile the blocks: faster steps after a minute of compiling; not with tp")
    optimizer: OptimizerConfig = key(OptimizerConfig(), "optimizer and learning rate")
    checkpoint: CheckpointConfig = key(CheckpointConfig(), "saving and resuming")
    logging: LoggingConfig = key(LoggingConfig(), "console and metrics")
    tensorboard: TensorboardConfig = key(TensorboardConfig(), "event files")
    debug: DebugConfig = key(DebugConfig(), "reproducibility and checks")
    eval: EvalConfig = key(EvalConfig(), "evaluation")
    wandb: None = unsupported(None, "Weights & Biases", also=(OFF,))
    profile: None = unsupported(None, "profiler traces", also=(OFF,))
    memory_monitor: None = unsupported(None, "device-memory reports", also=(OFF,))
    monitor: None = unsupported(None, "training monitor", also=(OFF,))
    moe_monitor: None = unsupported(None, "expert-load monitor", also=(OFF,))

    def __post_init__(self) -> None:
        if self.compile and self.accelerator.tp > 1:
            raise ValueError(
                f"train.compile: true with train.accelerator.tp = {self.accelerator.tp}: the blocks of a tensor-parallel model "
                "communicate, and are not compiled; shard with dp_shard instead, or leave train.compile out"
            )
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"train.global_batch_size = {self.global_batch_size} is not a multiple of "
                f"train.micro_batch_size = {self.micro_batch_size}"
            )


# --- the whole -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """A whole configuration file."""

    model: ModelConfig = key(ModelConfig(), "the model")
    data: DataConfig = key(DataConfig(), "the data")
    train: TrainConfig = key(TrainConfig(), "the run")

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict of every supported key, as YAML can hold it; ``config_from_dict`` is the inverse."""
        return _plain(self)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value) if "accepts" not in f.metadata}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def section_class(hint: Any) -> type | None:
    """The dataclass in a field's type (``X`` or ``X | None``); None for a key that holds a plain value."""
    return next((kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)), None)


def iter_keys(section: type = Config, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """Dotted path and declaration of every key, mappings before what they hold."""
    hints = get_type_hints(section)
    for declared in fields(section):
        yield prefix + declared.name, declared
        inner = section_class(hints[declared.name])
        if inner is not None:
            yield from iter_keys(inner, f"{prefix}{declared.name}.")


# --- checks that need the number of ranks ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Topology:
    """Sizes of the mesh axes, in mesh order; their product is the world size."""

    dp_replicate: int
    dp_shard: int
    ep: int
    cp: int
    tp: int

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard * self.ep


def resolve_topology(accelerator: AcceleratorConfig, world_size: int) -> Topology:
    """Mesh sizes for ``world_size`` ranks, ``dp_shard: -1`` filled in; ValueError if they do not multiply to it."""
    a = accelerator
    others = a.dp_replicate * a.ep * a.cp * a.tp
    dp_shard = world_size // others if a.dp_shard == -1 else a.dp_shard
    if others * dp_shard != world_size:
        left = " (what is left)" if a.dp_shard == -1 else ""
        raise ValueError(
            f"world size {world_size} is not dp_replicate {a.dp_replicate} x dp_shard {a.dp_shard}{left} x ep {a.ep} x "
            f"cp {a.cp} x tp {a.tp}: change train.accelerator or start another number of ranks"
        )
    return Topology(dp_replicate=a.dp_replicate, dp_shard=dp_shard, ep=a.ep, cp=a.cp, tp=a.tp)


def micro_batches_per_step(train: TrainConfig, data_parallel_size: int) -> int:
    """Forward passes per rank and optimizer step: global batch / (micro-batch x data-parallel size), exactly."""
    count, rest = divmod(train.global_batch_size, train.micro_batch_size * data_parallel_size)
    if rest:
        raise ValueError(
            f"train.global_batch_size = {train.global_batch_size} is not a multiple of train.micro_batch_size = "
            f"{train.micro_batch_size} x data-parallel size {data_parallel_size}"
        )
    return count
