"""The architecture, as the hub's config.json names it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Keys of config.json that describe files, inference or another library's bookkeeping, not the architecture.
# fmt: off
_NOT_ARCHITECTURE = {
    "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id", "_name_or_path", "sliding_window", "rope_parameters", "rope_scaling",
    "norm_topk_prob", "_experts_implementation", "_attn_implementation", "is_encoder_decoder", "return_dict",
    "output_hidden_states", "output_attentions", "id2label", "label2id", "problem_type", "chunk_size_feed_forward",
}
# fmt: on


@dataclass(frozen=True)
class TextConfig:
    """The text decoder; defaults are Qwen3-VL-30B-A3B's published values."""

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 48
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    head_dim: int = 128
    hidden_act: str = "silu"
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float = 0.0
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    max_position_embeddings: int = 262144
    rope_theta: float = 5_000_000.0
    mrope_section: tuple[int, int, int] = (24, 20, 20)

    def __post_init__(self) -> None:
        _positive(
            self,
            "text_config",
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "decoder_sparse_step",
            "intermediate_size",
            "max_position_embeddings",
        )
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"text_config: num_attention_heads={self.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={self.num_key_value_heads}",
        )
        _require(self.head_dim % 2 == 0, f"text_config.head_dim={self.head_dim} is odd; rotary needs pairs")
        _require(
            self.num_experts_per_tok <= self.num_experts,
            f"text_config: num_experts_per_tok={self.num_experts_per_tok} exceeds num_experts={self.num_experts}",
        )
        _require(self.hidden_act == "silu", f"text_config.hidden_act={self.hidden_act!r}: only 'silu' is implemented")
        _require(not self.attention_bias, "text_config.attention_bias=true: the published model has no biases here")
        _require(self.attention_dropout == 0.0, f"text_config.attention_dropout={self.attention_dropout}: only 0.0")
        _require(
            all(0 <= layer < self.num_hidden_layers for layer in self.mlp_only_layers),
            f"text_config.mlp_only_layers={self.mlp_only_layers} exceed num_hidden_layers={self.num_hidden_layers}",
        )
        _require(len(self.mrope_section) == 3, f"text_config.mrope_section={self.mrope_section} needs three entries")

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer ``layer`` (0-based) routes to experts rather than running one dense MLP."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower; defaults are Qwen3-VL-30B-A3B's published values."""

    depth: int = 27
    hidden_size: int = 1152
    hidden_act: str = "gelu_pytorch_tanh"
    initializer_range: float = 0.02
    intermediate_size: int = 4304
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    out_hidden_size: int = 2048
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)

    def __post_init__(self) -> None:
        _positive(
            self,
            "vision_config",
            "depth",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "in_channels",
            "patch_size",
            "spatial_merge_size",
            "temporal_patch_size",
            "out_hidden_size",
            "num_position_embeddings",
        )
        _require(
            self.hidden_size % (4 * self.num_heads) == 0,
            f"vision_config: hidden_size={self.hidden_size} must be a multiple of 4 x num_heads={self.num_heads} "
            "(2-D rotary needs quarters of a head)",
        )
        _require(
            self.grid_side**2 == self.num_position_embeddings,
            f"vision_config.num_position_embeddings={self.num_position_embeddings} is not a square",
        )
        _require(
            self.hidden_act == "gelu_pytorch_tanh",
            f"vision_config.hidden_act={self.hidden_act!r}: only 'gelu_pytorch_tanh' is implemented",
        )
        _require(
            list(self.deepstack_visual_indexes) == sorted(set(self.deepstack_visual_indexes)),
            f"vision_config.deepstack_visual_indexes={self.deepstack_visual_indexes} must rise",
        )
        _require(
            all(0 <= i < self.depth for i in self.deepstack_visual_indexes),
            f"vision_config.deepstack_visual_indexes={self.deepstack_visual_indexes} exceed depth={self.depth}",
        )

    @property
    def grid_side(self) -> int:
        """Side of the square table of learned positions."""
        return round(self.num_position_embeddings**0.5)

    @property
    def patch_values(self) -> int:
        """Values per patch (C): channels x temporal patch x patch x patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """Width of one merged vision token before its projection: ``spatial_merge_size**2`` patches side by side."""
        return self.hidden_size * self.spatial_merge_size**2


@dataclass(frozen=True)
class Qwen3VLMoeConfig:
    """Text decoder, vision tower (None: text only) and the token ids that join them."""

    text: TextConfig = field(default_factory=TextConfig)
    vision: VisionConfig | None = field(default_factory=VisionConfig)
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.vision is None:
            return
        _require(
            self.vision.out_hidden_size == self.text.hidden_size,
            f"vision_config.out_hidden_size={self.vision.out_hidden_size} differs from "
            f"text_config.hidden_size={self.text.hidden_size}",
        )
        _require(
            len(self.vision.deepstack_visual_indexes) <= self.text.num_hidden_layers,
            f"vision_config.deepstack_visual_indexes={self.vision.deepstack_visual_indexes} names more features "
            f"than text_config.num_hidden_layers={self.text.num_hidden_layers} layers can take",
        )
        for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
            _require(
                0 <= getattr(self, name) < self.text.vocab_size,
                f"{name}={getattr(self, name)} lies outside text_config.vocab_size={self.text.vocab_size}",
            )

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], *, base: Qwen3VLMoeConfig | None = None, source: str = "config.json"
    ) -> Qwen3VLMoeConfig:
        """Read a config.json mapping over ``base`` (default: the published 30B-A3B).

        Accepts what transformers 4.57 and 5.x write: ``num_local_experts`` for ``num_experts``, ``rope_parameters``
        for ``rope_theta`` + ``rope_scaling``. Raises ValueError with ``source`` and the field for an unknown field.
        """
        base = base or cls()
        raw = _mapping(raw, source)
        if (kind := raw.get("model_type", "qwen3_vl_moe")) != "qwen3_vl_moe":
            raise ValueError(f"{source}: model_type={kind!r}; this model is 'qwen3_vl_moe'")
        text = _text_fields(raw.pop("text_config", {}), f"{source}: text_config")
        vision = raw.pop("vision_config", {} if base.vision else None)
        if vision is not None:
            vision = _known(vision, VisionConfig, f"{source}: vision_config")
            vision = dataclasses.replace(base.vision or VisionConfig(), **vision)
        for name in ("text", "vision"):  # fields of ours, not of config.json
            if name in raw:
                raise ValueError(f"{source}: unknown field {name!r}; did you mean {name}_config?")
        top = _known(raw, cls, source)
        return dataclasses.replace(base, text=dataclasses.replace(base.text, **text), vision=vision, **top)

    def to_dict(self) -> dict[str, Any]:
        """The mapping for config.json, in the hub's own form, every field written."""
        text = dataclasses.asdict(self.text)
        section = list(text.pop("mrope_section"))
        text["rope_scaling"] = {"rope_type": "default", "mrope_section": section, "mrope_interleaved": True}
        text["mlp_only_layers"] = list(self.text.mlp_only_layers)
        out: dict[str, Any] = {
            "architectures": ["Qwen3VLMoeForConditionalGeneration"],
            "model_type": "qwen3_vl_moe",
            "text_config": {"model_type": "qwen3_vl_moe_text", **text, "norm_topk_prob": True},
            "tie_word_embeddings": self.tie_word_embeddings,
        }
        out |= {
            name: getattr(self, name)
            for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        }
        if self.vision is None:
            out["vision_config"] = None
        else:
            vision = dataclasses.asdict(self.vision)
            vision["deepstack_visual_indexes"] = list(self.vision.deepstack_visual_indexes)
            out["vision_config"] = {"model_type": "qwen3_vl_moe", **vision}
        return out


def _text_fields(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Fold the spellings of different transformers versions into TextConfig's fields."""
    raw = _mapping(raw, source)
    rope = {}
    for name in ("rope_scaling", "rope_parameters"):
        rope |= _mapping(raw.get(name) or {}, f"{source}.{name}")
    if (kind := rope.get("rope_type", "default")) != "default":
        raise ValueError(f"{source}: rope_type={kind!r}; only 'default' is implemented")
    if not rope.get("mrope_interleaved", True):
        raise ValueError(f"{source}: mrope_interleaved=false; this model always interleaves")
    if not raw.get("norm_topk_prob", True):
        raise ValueError(f"{source}: norm_topk_prob=false; this model always renormalises the chosen experts")
    for name in ("rope_theta", "mrope_section"):
        if name in rope:
            raw[name] = rope[name]
    if "num_local_experts" in raw:
        count = raw.pop("num_local_experts")
        if raw.setdefault("num_experts", count) != count:
            raise ValueError(f"{source}: num_experts={raw['num_experts']} and num_local_experts={count} disagree")
    raw.pop("tie_word_embeddings", None)  # only the top-level flag counts, as in the reference
    return _known(raw, TextConfig, source)


def _known(raw: Mapping[str, Any], cls: type, source: str) -> dict[str, Any]:
    """Keep the dataclass's fields, lists as tuples; refuse anything that is neither a field nor bookkeeping."""
    names = {f.name: f for f in dataclasses.fields(cls)}
    out = {}
    for key, value in _mapping(raw, source).items():
        if key in names:
            out[key] = _typed(value, names[key].type, f"{source}.{key}")
        elif key not in _NOT_ARCHITECTURE:
            raise ValueError(f"{source}: unknown field {key!r}; known: {', '.join(sorted(names))}")
    return out


def _mapping(raw: Any, source: str) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise ValueError(f"{source} is not a mapping but {raw!r}")
    return dict(raw)


def _typed(value: Any, declared: Any, where: str) -> Any:
    """Check a JSON value against a field's annotation (a string here): int, float, bool, str or a tuple of ints."""
    if declared.startswith("tuple"):
        if isinstance(value, (list, tuple)) and all(type(v) is int for v in value):
            return tuple(value)
    elif declared == "float":
        if type(value) in (int, float):
            return float(value)
    elif type(value).__name__ == declared:
        return value
    raise ValueError(f"{where}={value!r} is not {declared}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _positive(cfg: Any, where: str, *names: str) -> None:
    for name in names:
        _require(getattr(cfg, name) > 0, f"{where}.{name}={getattr(cfg, name)} must be positive")
