"""config.json read and written back; every refusal names its field."""

import dataclasses
import json

import pytest
import transformers

from qwen3vl_functional import Qwen3VLMoeConfig, TextConfig, VisionConfig

PUBLISHED = Qwen3VLMoeConfig()


def test_round_trip(cfg, text_cfg, balanced_cfg):
    mixed = dataclasses.replace(cfg, text=dataclasses.replace(cfg.text, mlp_only_layers=(1,)), tie_word_embeddings=True)
    for config in (cfg, text_cfg, balanced_cfg, mixed, PUBLISHED):
        raw = json.loads(json.dumps(config.to_dict()))
        assert Qwen3VLMoeConfig.from_dict(raw) == config
        # Every field is written, so the base cannot show through.
        assert Qwen3VLMoeConfig.from_dict(raw, base=cfg) == config


def test_absent_fields_come_from_the_base(cfg):
    assert Qwen3VLMoeConfig.from_dict({}) == PUBLISHED
    assert Qwen3VLMoeConfig.from_dict({}, base=cfg) == cfg
    changed = Qwen3VLMoeConfig.from_dict({"text_config": {"num_hidden_layers": 5}, "vision_config": {"depth": 7}}, base=cfg)
    assert changed == dataclasses.replace(
        cfg, text=dataclasses.replace(cfg.text, num_hidden_layers=5), vision=dataclasses.replace(cfg.vision, depth=7)
    )
    assert Qwen3VLMoeConfig.from_dict({"vision_config": None}, base=cfg) == dataclasses.replace(cfg, vision=None)


def test_published_sizes():
    """The 30B-A3B of the hub, from its own config.json's values."""
    text, vision = PUBLISHED.text, PUBLISHED.vision
    assert (text.num_hidden_layers, text.num_experts, text.num_experts_per_tok, text.moe_intermediate_size) == (48, 128, 8, 768)
    assert (text.head_dim, text.num_attention_heads, text.num_key_value_heads, text.rope_theta) == (128, 32, 4, 5e6)
    assert (vision.depth, vision.hidden_size, vision.grid_side, vision.patch_values, vision.merged_size) == (
        27,
        1152,
        48,
        1536,
        4608,
    )


def test_transformers_writes_what_we_read(cfg):
    """The installed transformers' own spelling (5.x: rope_parameters, num_local_experts) reads back equal."""
    theirs = transformers.Qwen3VLMoeConfig(**cfg.to_dict())
    raw = json.loads(json.dumps(theirs.to_dict()))
    assert Qwen3VLMoeConfig.from_dict(raw, base=PUBLISHED) == cfg
    assert Qwen3VLMoeConfig.from_dict(json.loads(theirs.to_json_string(use_diff=False))) == cfg


def test_expert_count_has_two_names(cfg):
    assert Qwen3VLMoeConfig.from_dict({"text_config": {"num_local_experts": 16}}).text.num_experts == 16
    both = {"num_local_experts": 16, "num_experts": 16}
    assert Qwen3VLMoeConfig.from_dict({"text_config": both}).text.num_experts == 16
    with pytest.raises(ValueError, match="num_experts=8 and num_local_experts=16 disagree"):
        Qwen3VLMoeConfig.from_dict({"text_config": {**both, "num_experts": 8}})


def test_only_the_top_flag_ties():
    assert not Qwen3VLMoeConfig.from_dict({"text_config": {"tie_word_embeddings": True}}).tie_word_embeddings
    assert Qwen3VLMoeConfig.from_dict({"tie_word_embeddings": True}).tie_word_embeddings


def test_moe_layers():
    text = TextConfig(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=(3,))
    assert [i for i in range(6) if text.is_moe_layer(i)] == [1, 5]


TEXT, VISION = "text_config", "vision_config"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"hidden_sizes": 4}, r"somewhere: unknown field 'hidden_sizes'; known: .*image_token_id"),
        ({TEXT: {"num_expert": 4}}, r"somewhere: text_config: unknown field 'num_expert'; known: .*num_experts"),
        ({VISION: {"deptth": 4}}, r"somewhere: vision_config: unknown field 'deptth'; known: .*depth"),
        ({"model_type": "qwen2_vl"}, "somewhere: model_type='qwen2_vl'"),
        ({"image_token_id": "7"}, "somewhere.image_token_id='7' is not int"),
        ({"tie_word_embeddings": 1}, "somewhere.tie_word_embeddings=1 is not bool"),
        ({TEXT: {"hidden_size": 2048.0}}, "text_config.hidden_size=2048.0 is not int"),
        ({TEXT: {"hidden_size": True}}, "text_config.hidden_size=True is not int"),
        ({TEXT: {"rms_norm_eps": "1e-6"}}, "text_config.rms_norm_eps='1e-6' is not float"),
        ({TEXT: {"hidden_act": None}}, "text_config.hidden_act=None is not str"),
        ({TEXT: {"mlp_only_layers": 3}}, "text_config.mlp_only_layers=3 is not tuple"),
        ({TEXT: {"mlp_only_layers": [1.0]}}, r"text_config.mlp_only_layers=\[1.0\] is not tuple"),
        ({VISION: {"deepstack_visual_indexes": [True]}}, r"deepstack_visual_indexes=\[True\] is not tuple"),
        ({TEXT: {"rope_scaling": {"rope_type": "yarn"}}}, "rope_type='yarn'"),
        ({TEXT: {"rope_parameters": {"rope_type": "linear"}}}, "rope_type='linear'"),
        ({TEXT: {"rope_scaling": {"mrope_interleaved": False}}}, "mrope_interleaved=false"),
        ({TEXT: {"norm_topk_prob": False}}, "norm_topk_prob=false"),
        ({TEXT: {"hidden_size": 0}}, "text_config.hidden_size=0 must be positive"),
        ({TEXT: {"num_key_value_heads": 5}}, "num_attention_heads=32 is not a multiple of num_key_value_heads=5"),
        ({TEXT: {"head_dim": 7}}, "text_config.head_dim=7 is odd"),
        ({TEXT: {"num_experts_per_tok": 129}}, "num_experts_per_tok=129 exceeds num_experts=128"),
        ({TEXT: {"hidden_act": "gelu"}}, "text_config.hidden_act='gelu'"),
        ({TEXT: {"attention_bias": True}}, "text_config.attention_bias=true"),
        ({TEXT: {"attention_dropout": 0.1}}, "text_config.attention_dropout=0.1"),
        ({TEXT: {"mrope_section": [24, 40]}}, r"text_config.mrope_section=\(24, 40\) needs three"),
        ({VISION: {"depth": -1}}, "vision_config.depth=-1 must be positive"),
        ({VISION: {"num_heads": 10}}, "hidden_size=1152 must be a multiple of 4 x num_heads=10"),
        ({VISION: {"num_position_embeddings": 2300}}, "num_position_embeddings=2300 is not a square"),
        ({VISION: {"hidden_act": "gelu"}}, "vision_config.hidden_act='gelu'"),
        ({VISION: {"deepstack_visual_indexes": [8, 27]}}, r"deepstack_visual_indexes=\(8, 27\) exceed depth=27"),
        ({VISION: {"out_hidden_size": 99}}, "out_hidden_size=99 differs from text_config.hidden_size=2048"),
        ({TEXT: {"num_hidden_layers": 2}}, "more features than text_config.num_hidden_layers=2"),
        ({TEXT: {"vocab_size": 151655}}, "image_token_id=151655 lies outside text_config.vocab_size=151655"),
        ({"video_token_id": -1}, "video_token_id=-1 lies outside"),
        ({TEXT: None}, "text_config"),
        ({TEXT: [1]}, "text_config"),
        ({VISION: "none"}, "vision_config"),
        ({TEXT: {"rope_scaling": "default"}}, "rope_scaling"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_refusals(raw, message):
    with pytest.raises(ValueError, match=message):
        Qwen3VLMoeConfig.from_dict(raw, source="somewhere")


def test_bookkeeping_is_ignored():
    raw = {
        "architectures": ["X"],
        "transformers_version": "4.57.0",
        TEXT: {"dtype": "bfloat16", "use_cache": True, "eos_token_id": 3},
    }
    assert Qwen3VLMoeConfig.from_dict(raw) == PUBLISHED


def test_configs_are_frozen(cfg):
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.text.hidden_size = 3
    assert isinstance(cfg.vision, VisionConfig) and hash(cfg) == hash(Qwen3VLMoeConfig.from_dict(cfg.to_dict()))
