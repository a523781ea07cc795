import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from hyper_parallel.data.processor import Processor


def picture(pictures, name):
    return Image.open(pictures / f"{name}.png")


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_images_are_the_reference_processors(processor, digits, pictures, name):
    reference = Qwen2VLImageProcessorPil.from_pretrained(digits / "model")
    expected = reference(images=[picture(pictures, name)], return_tensors="pt")
    patches = processor.image(picture(pictures, name))
    assert torch.equal(patches.values, expected["pixel_values"])
    assert list(patches.grid_thw) == expected["image_grid_thw"][0].tolist()


def test_patches_by_hand(processor, pictures):
    """24x16 is not resized. Columns are (channel, slot, row, column), rows go in 2x2 merge blocks."""
    pixels = np.asarray(picture(pictures, "b"), dtype=np.float32).transpose(2, 0, 1) / 255 * 2 - 1
    order = [(r + i, c + j) for r in (0, 2, 4) for c in (0, 2) for i in (0, 1) for j in (0, 1)]
    expected = [np.stack([pixels[:, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4]] * 2, axis=1).ravel() for r, c in order]
    patches = processor.image(picture(pictures, "b"))
    assert patches.grid_thw == (1, 6, 4)
    np.testing.assert_allclose(patches.values.numpy(), np.stack(expected), atol=1e-6)


def test_video_slots_come_from_neighbouring_frames(processor, pictures):
    frames = [picture(pictures, f"f{i}") for i in range(3)]
    video = processor.video(frames)
    assert video.grid_thw == (2, 6, 4)
    values = video.values.view(2, 24, 3, 2, 16)
    stills = [processor.image(frame).values.view(24, 3, 2, 16) for frame in frames]
    for patch, slot, frame in ((0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 2)):
        assert torch.equal(values[patch, :, :, slot], stills[frame][:, :, slot])


def test_video_of_one_repeated_frame_is_the_image(processor, pictures):
    frame = picture(pictures, "f0")
    assert torch.equal(processor.video([frame, frame]).values, processor.image(frame).values)


def test_frames_must_agree(processor, pictures):
    with pytest.raises(ValueError, match="differ in size"):
        processor.video([picture(pictures, "a"), picture(pictures, "b")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 16}, "patch_size is 4 .* patch_size is 16"),
        ({"temporal_patch_size": 1}, "temporal_patch_size is 2 .* is 1"),
        ({"spatial_merge_size": 4}, "merge_size is 2 .* spatial_merge_size is 4"),
        ({"in_channels": 1}, "makes 3 channels, the model takes 1"),
        ({"image_token_id": 5}, r"<\|image_pad\|> is 151655 .* image_token_id is 5"),
        ({"vision_end_token_id": 6}, "vision_end_token_id is 6"),
        ({"vocab_size": 151668}, "151669 tokens, more than the model's vocab_size 151668"),
    ],
)
def test_disagreement_with_the_model(digits, spec, change, message):
    with pytest.raises(ValueError, match=message):
        Processor(digits / "model", dataclasses.replace(spec, **change))


def test_missing_files(digits, spec, tmp_path):
    with pytest.raises(ValueError, match=r"holds no image processor: expected preprocessor_config\.json"):
        Processor(tmp_path, spec)
    shutil.copy(digits / "model" / "preprocessor_config.json", tmp_path)
    with pytest.raises(ValueError, match=r"holds no tokenizer: expected tokenizer\.json"):
        Processor(tmp_path, spec)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(digits / "model" / name, tmp_path)
    text_only = Processor(tmp_path, dataclasses.replace(spec, vision=False))
    assert text_only.encode("hi") == [6023]
    with pytest.raises(ValueError, match="no vision tower"):
        text_only.image(Image.new("RGB", (16, 16)))


def test_nested_processor_config(digits, spec, tmp_path):
    """transformers 5 saves a whole processor as one file, with the image processor inside."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(digits / "model" / name, tmp_path)
    nested = {"image_processor": json.loads((digits / "model" / "preprocessor_config.json").read_text())}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert Processor(tmp_path, spec).image(Image.new("RGB", (16, 16))).grid_thw == (1, 4, 4)


def test_another_family_of_tokenizer(spec, tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ValueError, match=r"lacks <\|im_start\|>"):
        Processor(tmp_path, dataclasses.replace(spec, vision=False))


def test_without_transformers(tmp_path, spec, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r'pip install "hyper-parallel\[hf\]"'):
        Processor(tmp_path, spec)


def test_the_loader_does_not_import_transformers():
    code = "import sys, hyper_parallel.data.loader; sys.exit('transformers' in sys.modules or 'PIL' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
