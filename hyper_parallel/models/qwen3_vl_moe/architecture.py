"""The architecture that a configuration asks for: published values, config.json, size keys, overrides."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from qwen3vl_functional import Qwen3VLMoeConfig
from qwen3vl_functional.hf import read_config_dict

from ...config import Config
from ...core.distributed_checkpoint.chunks import hugging_face_directory

SMOKE = "examples/qwen3_vl_30b_a3b_instruct/smoke.yaml"
SIZE_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)


def resolve(config: Config) -> Qwen3VLMoeConfig:
    """Built-in 30B-A3B <- ``<weights_path>/config.json`` <- ``model.<size key>`` <- ``model.config_overrides``.

    A width that is given for the text alone is taken over by the tower's output; ``vl`` true keeps the tower, false or
    absent drops it. Raises ValueError naming the key.
    """
    overrides: dict[str, Any] = dict(config.model.config_overrides or {})
    vl = overrides.pop("vl", False)
    if not isinstance(vl, bool):
        raise ValueError(f"model.config_overrides.vl = {vl!r}: true or false")
    text = {name: value for name in SIZE_KEYS if (value := getattr(config.model, name)) is not None}
    text |= overrides.pop("text_config", None) or {}
    vision = dict(overrides.pop("vision_config", None) or {})

    weights = config.model.weights_path
    if weights is not None and not Path(weights).is_dir():
        raise ValueError(
            f"model.weights_path = {weights}: no such directory; set it, here or with --model.weights_path=DIR, to one with "
            f"config.json and safetensors files; without weights, try: python -m hyper_parallel.trainer.launch --config {SMOKE}"
        )
    described = hugging_face_directory(weights) if weights is not None else None
    if described is None:
        ids = {"image_token_id": config.data.image_token_id, "video_token_id": config.data.video_token_id}
        raw: dict[str, Any] = {**ids, "text_config": {}, "vision_config": {}}
    else:
        raw = read_config_dict(described)
    published = Qwen3VLMoeConfig()
    base_vision = raw.get("vision_config") or {}
    if "hidden_size" in text:
        vision.setdefault("out_hidden_size", text["hidden_size"])
    merged = {
        **raw,
        **overrides,
        "text_config": {**raw.get("text_config", {}), **text},
        "vision_config": {**base_vision, **vision} if vl else None,
    }
    if not vl:
        # Without a tower the ids of image tokens mean nothing and need not fit the vocabulary.
        published = dataclasses.replace(published, vision=None)
    source = "model" if described is None else f"model (over {described}/config.json)"
    return Qwen3VLMoeConfig.from_dict(merged, base=published, source=source)
