"""The hub's directories: written, read back, loaded by transformers, and refused where they lie."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen3vl_functional import forward, load_params, read_config, save_params
from qwen3vl_functional.hf import CONFIG, INDEX, SINGLE, scan_weights
from qwen3vl_functional.spec import leaves, to_tensordict

EXPERT = "model.language_model.layers.1.mlp.experts.gate_up_proj"


def flat(params):
    return dict(leaves(params))


def assert_bit_equal(ours, expected):
    assert ours.keys() == expected.keys()
    for path in ours:
        assert ours[path].dtype == expected[path].dtype and torch.equal(ours[path], expected[path]), path


def contents(directory):
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


def write(directory, tensors, cfg, *, files=None, config=None):
    """A directory by hand: ``files`` maps a file name to the tensors' names in it."""
    directory.mkdir(exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(config or cfg.to_dict()))
    if files is None:
        save_file(tensors, directory / SINGLE)
        return directory
    for name, paths in files.items():
        save_file({path: tensors[path] for path in paths}, directory / name)
    index = {"metadata": {}, "weight_map": {path: name for name, paths in files.items() for path in paths}}
    (directory / INDEX).write_text(json.dumps(index))
    return directory


@pytest.fixture(scope="module")
def params(cfg, make_params):
    return make_params(cfg)


@pytest.fixture(scope="module")
def transformers_model(cfg, params, tmp_path_factory):
    """What transformers makes of our export."""
    from transformers import Qwen3VLMoeForConditionalGeneration

    directory = save_params(params, cfg, tmp_path_factory.mktemp("hub") / "export", max_shard_bytes=200_000)
    model, report = Qwen3VLMoeForConditionalGeneration.from_pretrained(
        directory, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    return model.eval()


@pytest.mark.parametrize("max_shard_bytes", [10**9, 150_000])
def test_round_trip(cfg, params, tmp_path, max_shard_bytes):
    directory = save_params(params, cfg, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    assert_bit_equal(flat(load_params(directory, cfg)), flat(params))
    assert read_config(directory) == cfg
    weights = sorted(directory.glob("*.safetensors"))
    if max_shard_bytes == 10**9:
        assert contents(directory).keys() == {CONFIG, SINGLE}
        return
    assert [file.name for file in weights] == [
        f"model-{i + 1:05d}-of-{len(weights):05d}.safetensors" for i in range(len(weights))
    ]
    assert len(weights) > 3
    index = json.loads((directory / INDEX).read_text())
    assert index["weight_map"].keys() == flat(params).keys()
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in flat(params).values())
    for file in weights:
        held = load_file(file)
        assert all(index["weight_map"][path] == file.name for path in held)
        assert len(held) == 1 or sum(leaf.nbytes for leaf in held.values()) <= max_shard_bytes


def test_loaded_weights_are_not_the_file(cfg, params, tmp_path):
    directory = save_params(params, cfg, tmp_path / "out")
    before = contents(directory)
    for leaf in flat(load_params(directory, cfg)).values():
        assert leaf.is_contiguous()
        leaf.zero_()
    assert contents(directory) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 150_000])
def test_untouched_export_is_byte_identical(cfg, params, tmp_path, dtype, max_shard_bytes):
    """Loaded as fp32 and written again beside its source, nothing has changed: weights, index, config, companions."""
    source = save_params(params, cfg, tmp_path / "source", dtype=dtype, max_shard_bytes=max_shard_bytes)
    raw = json.loads((source / CONFIG).read_text())
    raw["text_config"]["eos_token_id"] = 299  # bookkeeping that only the file knows
    (source / CONFIG).write_text(json.dumps(raw, separators=(",", ":")))
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja", "preprocessor_config.json"):
        (source / name).write_text(name)
    (source / "training_args.bin").write_bytes(b"stays behind")
    (source / "nested").mkdir()
    loaded = load_params(source, read_config(source))
    assert all(leaf.dtype == torch.float32 for leaf in flat(loaded).values())
    out = save_params(loaded, cfg, tmp_path / "out", source=source)
    shutil.rmtree(source / "nested")
    expected = contents(source)
    del expected["training_args.bin"]
    assert contents(out) == expected


def test_source_with_one_other_dtype(cfg, params, tmp_path):
    tensors = {path: leaf.bfloat16() for path, leaf in flat(params).items()}
    norm = "model.language_model.norm.weight"
    tensors[norm] = tensors[norm].float()
    source = write(tmp_path / "source", tensors, cfg)
    out = save_params(load_params(source, cfg), cfg, tmp_path / "out", source=source)
    assert_bit_equal(load_file(out / SINGLE), tensors)


def test_companions_and_their_precedence(cfg, params, tmp_path):
    source, other = tmp_path / "source", tmp_path / "other"
    for directory, text in ((source, "first"), (other, "second")):
        directory.mkdir()
        (directory / "tokenizer.json").write_text(text)
    (other / "vocab.txt").write_text("vocab")
    (other / CONFIG).write_text("{}")
    (other / INDEX).write_text("{}")
    out = save_params(params, cfg, tmp_path / "out", source=source, companions=[other])
    assert (out / "tokenizer.json").read_text() == "first" and (out / "vocab.txt").read_text() == "vocab"
    assert read_config(out) == cfg and not (out / INDEX).exists()


def test_export_replaces_what_stood_there(cfg, params, tmp_path):
    out = tmp_path / "out"
    save_params(params, cfg, out, max_shard_bytes=150_000)
    (out / "stale.json").write_text("{}")
    (tmp_path / "out.partial").mkdir()  # a save that was killed
    (tmp_path / "out.partial" / "model-00009.safetensors").write_text("half")
    save_params(params, cfg, out)
    assert contents(out).keys() == {CONFIG, SINGLE}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert_bit_equal(flat(load_params(out, cfg)), flat(params))


def test_export_over_its_own_source(cfg, params, tmp_path):
    out = save_params(params, cfg, tmp_path / "out", max_shard_bytes=150_000)
    (out / "tokenizer.json").write_text("kept")
    before = contents(out)
    save_params(load_params(out, cfg), cfg, out, source=out)
    assert contents(out) == before


def test_a_failed_export_leaves_the_old_one(cfg, params, tmp_path, monkeypatch):
    from qwen3vl_functional import hf

    out = save_params(params, cfg, tmp_path / "out")
    before = contents(out)

    def full_disk(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(hf, "save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_params(params, cfg, out)
    assert contents(out) == before


def test_transformers_gives_the_same_logits(cfg, params, make_batch, transformers_model):
    batch = make_batch(cfg)
    kinds = (batch["input_ids"] == cfg.image_token_id).long() + 2 * (batch["input_ids"] == cfg.video_token_id).long()
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        theirs = transformers_model(**inputs, mm_token_type_ids=kinds, use_cache=False).logits.flatten(0, 1)
    ours = forward(params, batch, cfg)
    torch.testing.assert_close(ours.logits_TV, theirs[ours.token_rows], rtol=1e-4, atol=1e-4)
    assert theirs.std() > 0.1


@pytest.mark.parametrize("shard", ["5GB", "150KB"])
def test_what_transformers_saves_is_accepted(cfg, params, tmp_path, transformers_model, shard):
    """transformers 5 saves the experts transposed and counts them as num_local_experts."""
    transformers_model.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    files = scan_weights(tmp_path / "theirs")
    assert len(set(files.file_of.values())) == 1 or shard == "150KB"
    transposed = files.shape_of[EXPERT] == (12, 80, 48)
    assert transposed or files.shape_of[EXPERT] == (12, 48, 80)
    assert read_config(tmp_path / "theirs") == cfg
    loaded = load_params(tmp_path / "theirs", cfg)
    assert_bit_equal(flat(loaded), flat(params))
    wrong, right = ("hub", "transposed") if transposed else ("transposed", "hub")
    load_params(tmp_path / "theirs", cfg, expert_layout=right)
    with pytest.raises(ValueError, match=f"is the '{right}' layout, but expert_layout='{wrong}' was given"):
        load_params(tmp_path / "theirs", cfg, expert_layout=wrong)
    out = save_params(loaded, cfg, tmp_path / "out", source=tmp_path / "theirs")  # the hub's layout, as ever
    assert scan_weights(out).shape_of[EXPERT] == (12, 48, 80)
    assert scan_weights(out).file_of == files.file_of
    assert json.loads((out / CONFIG).read_text())["text_config"]["num_experts"] == 12
    assert_bit_equal(flat(load_params(out, cfg)), flat(params))


@pytest.mark.parametrize("field", ["gate_up", "down"])
def test_square_experts(cfg, make_params, tmp_path, field):
    """A layout is never guessed from a shape that fits both ways."""
    square = dataclasses.replace(cfg, text=dataclasses.replace(cfg.text, moe_intermediate_size=24 if field == "gate_up" else 48))
    params = make_params(square)
    path = f"model.language_model.layers.0.mlp.experts.{field}_proj"
    assert flat(params)[path].shape[1:] == (48, 48)
    with pytest.raises(ValueError, match=r"is square \[12, 48, 48\]: transformers 5 takes the layout"):
        save_params(params, square, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    hub = write(tmp_path / "hub", flat(params), square)
    assert_bit_equal(flat(load_params(hub, square)), flat(params))
    assert_bit_equal(flat(load_params(hub, square, expert_layout="hub")), flat(params))
    swapped = {name: leaf.transpose(1, 2).contiguous() if "experts" in name else leaf for name, leaf in flat(params).items()}
    raw = square.to_dict()
    raw["text_config"]["num_local_experts"] = raw["text_config"].pop("num_experts")
    theirs = write(tmp_path / "theirs", swapped, square, config=raw)
    with pytest.raises(ValueError, match=r"is square .* say which it is, expert_layout='hub' or 'transposed'"):
        load_params(theirs, square)
    assert_bit_equal(flat(load_params(theirs, square, expert_layout="transposed")), flat(params))


def test_missing_and_unexpected(cfg, params, tmp_path):
    tensors = flat(params)
    tensors["model.language_model.normal.weight"] = tensors.pop("model.language_model.norm.weight")
    del tensors["lm_head.weight"]
    write(tmp_path / "d", tensors, cfg)
    with pytest.raises(ValueError) as error:
        load_params(tmp_path / "d", cfg)
    assert str(tmp_path / "d") in str(error.value)
    assert "missing 2 tensors (lm_head.weight, model.language_model.norm.weight)" in str(error.value)
    assert "unexpected 1 tensors (model.language_model.normal.weight)" in str(error.value)


def test_many_missing_are_counted(cfg, params, tmp_path):
    tensors = {path: leaf for path, leaf in flat(params).items() if ".blocks." not in path}
    write(tmp_path / "d", tensors, cfg)
    with pytest.raises(ValueError, match=r"missing 36 tensors \(model\.visual\.blocks\.0\.attn\.proj\.bias, .*, \.\.\.\)"):
        load_params(tmp_path / "d", cfg)


@pytest.mark.parametrize(
    ("path", "shape", "message"),
    [
        ("model.language_model.norm.weight", (47,), r"shape \[47\], the config asks for \[48\]"),
        ("model.language_model.layers.0.self_attn.k_proj.weight", (48, 32), r"shape \[48, 32\], the config asks for \[32, 48\]"),
        (EXPERT, (12, 40, 80), r"shape \[12, 40, 80\], .*\[12, 48, 80\] \(or \[12, 80, 48\], as transformers 5"),
        (EXPERT, (11, 48, 80), r"shape \[11, 48, 80\]"),
        (EXPERT, (48, 80), r"shape \[48, 80\]"),
    ],
)
def test_wrong_shapes(cfg, params, tmp_path, path, shape, message):
    write(tmp_path / "d", {**flat(params), path: torch.zeros(shape)}, cfg)
    with pytest.raises(ValueError, match=rf"{path} has {message}"):
        load_params(tmp_path / "d", cfg)


def halves(tensors):
    names = list(tensors)
    return {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}


def test_tensor_in_two_files(cfg, params, tmp_path):
    files = halves(flat(params))
    files["b.safetensors"] = [*files["b.safetensors"], files["a.safetensors"][0]]
    write(tmp_path / "d", flat(params), cfg, files=files)
    with pytest.raises(ValueError, match=f"tensor '{files['a.safetensors'][0]}' is in both a.safetensors and b.safetensors"):
        load_params(tmp_path / "d", cfg)


def test_missing_shard(cfg, params, tmp_path):
    write(tmp_path / "d", flat(params), cfg, files=halves(flat(params)))
    (tmp_path / "d" / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"b\.safetensors cannot be read"):
        load_params(tmp_path / "d", cfg)


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_truncated_shard(cfg, params, tmp_path, keep):
    write(tmp_path / "d", flat(params), cfg, files=halves(flat(params)))
    file = tmp_path / "d" / "b.safetensors"
    file.write_bytes(file.read_bytes()[: int(keep * file.stat().st_size)])
    with pytest.raises(ValueError, match=r"b\.safetensors cannot be read"):
        load_params(tmp_path / "d", cfg)


@pytest.mark.parametrize("lie", ["names a tensor that no file holds", "omits a tensor", "points to the other file"])
def test_index_that_lies(cfg, params, tmp_path, lie):
    files = halves(flat(params))
    write(tmp_path / "d", flat(params), cfg, files=files)
    index = json.loads((tmp_path / "d" / INDEX).read_text())
    first = files["a.safetensors"][0]
    name = "ghost.weight" if lie.startswith("names") else first
    if lie.startswith("omits"):
        del index["weight_map"][first]
    else:
        index["weight_map"][name] = "b.safetensors"
    (tmp_path / "d" / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{INDEX} disagrees with the files beside it on 1 tensors \({name}\)"):
        load_params(tmp_path / "d", cfg)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": []}'])
def test_index_that_is_no_index(cfg, params, tmp_path, text):
    write(tmp_path / "d", flat(params), cfg)
    (tmp_path / "d" / INDEX).write_text(text)
    with pytest.raises(ValueError, match=INDEX):
        load_params(tmp_path / "d", cfg)


def test_absent_directory_weights_and_config(cfg, params, tmp_path):
    with pytest.raises(ValueError, match=r"nowhere is not a directory"):
        load_params(tmp_path / "nowhere", cfg)
    with pytest.raises(ValueError, match=rf"holds neither {SINGLE} nor {INDEX}"):
        load_params(tmp_path, cfg)
    with pytest.raises(ValueError, match=rf"{CONFIG} does not exist; expected a Hugging Face qwen3_vl_moe directory"):
        read_config(tmp_path)
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(ValueError, match=rf"{CONFIG} is not valid JSON"):
        read_config(tmp_path)
    (tmp_path / CONFIG).write_text("[]")
    with pytest.raises(ValueError, match=rf"{CONFIG} holds a list"):
        read_config(tmp_path)
    (tmp_path / CONFIG).write_text('{"hidden": 3}')
    with pytest.raises(ValueError, match=rf"{tmp_path / CONFIG}: unknown field 'hidden'"):
        read_config(tmp_path)


def test_tied_embeddings(cfg, make_params, tmp_path):
    tied = dataclasses.replace(cfg, tie_word_embeddings=True)
    params = make_params(tied)
    assert "lm_head.weight" not in flat(params)
    out = save_params(params, tied, tmp_path / "out")
    assert "lm_head.weight" not in scan_weights(out).file_of
    assert_bit_equal(flat(load_params(out, tied)), flat(params))
    from transformers import Qwen3VLMoeForConditionalGeneration

    model, report = Qwen3VLMoeForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    table = flat(params)["model.language_model.embed_tokens.weight"]
    assert torch.equal(model.lm_head.weight, table)
    copied = write(tmp_path / "copied", {**flat(params), "lm_head.weight": table.clone()}, tied)
    assert_bit_equal(flat(load_params(copied, tied)), flat(params))
    differing = write(tmp_path / "differing", {**flat(params), "lm_head.weight": table + 1}, tied)
    with pytest.raises(ValueError, match=r"unexpected 1 tensors \(lm_head.weight\)"):
        load_params(differing, tied)
    headless = {path: leaf for path, leaf in flat(params).items() if "embed_tokens" not in path} | {"lm_head.weight": table}
    write(tmp_path / "headless", headless, tied)
    with pytest.raises(ValueError, match=r"missing 1 tensors \(model.language_model.embed_tokens.weight\)"):
        load_params(tmp_path / "headless", tied)


def test_text_only_from_a_vision_language_checkpoint(cfg, text_cfg, params, tmp_path):
    directory = save_params(params, cfg, tmp_path / "vl")
    loaded = flat(load_params(directory, text_cfg))
    expected = {path: leaf for path, leaf in flat(params).items() if not path.startswith("model.visual.")}
    assert_bit_equal(loaded, expected)
    bare = save_params(to_tensordict(loaded), text_cfg, tmp_path / "bare")
    with pytest.raises(ValueError, match=f"missing {len(flat(params)) - len(expected)} tensors"):
        load_params(bare, cfg)


def test_a_shallower_model_takes_the_first_layers(cfg, params, tmp_path):
    directory = save_params(params, cfg, tmp_path / "whole")
    text = dataclasses.replace(cfg.text, num_hidden_layers=cfg.text.num_hidden_layers - 1)
    shallower = dataclasses.replace(cfg, text=text)
    loaded = flat(load_params(directory, shallower))
    left_out = f"model.language_model.layers.{text.num_hidden_layers}."
    assert_bit_equal(loaded, {path: leaf for path, leaf in flat(params).items() if not path.startswith(left_out)})
    exported = save_params(to_tensordict(loaded), shallower, tmp_path / "first", source=directory)
    assert read_config(exported) == shallower
    assert_bit_equal(flat(load_params(exported, shallower)), loaded)
    with pytest.raises(ValueError, match=r"missing \d+ tensors"):
        load_params(exported, cfg)


def test_a_text_only_export_takes_the_tower_along(cfg, text_cfg, params, tmp_path):
    """transformers would build a random tower for a vision-language directory without one, and only warn."""
    directory = save_params(params, cfg, tmp_path / "vl", max_shard_bytes=300_000)
    out = save_params(load_params(directory, text_cfg), text_cfg, tmp_path / "text", source=directory)
    assert read_config(out) == cfg
    assert_bit_equal(flat(load_params(out, cfg)), flat(params))


def test_files_are_read_as_they_are(cfg, params, tmp_path):
    directory = save_params(params, cfg, tmp_path / "out", dtype=torch.bfloat16)
    files = scan_weights(directory)
    assert set(files.dtype_of.values()) == {torch.bfloat16}
    assert json.loads((directory / CONFIG).read_text())["dtype"] == "bfloat16"
    for path, leaf in flat(params).items():
        assert torch.equal(files.read(path), leaf.bfloat16()) and files.shape_of[path] == tuple(leaf.shape)
    assert all(leaf.dtype == torch.float32 for leaf in flat(load_params(directory, cfg)).values())
    assert all(leaf.dtype == torch.bfloat16 for leaf in flat(load_params(directory, cfg, dtype=torch.bfloat16)).values())
