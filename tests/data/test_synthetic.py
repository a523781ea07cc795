import dataclasses

import pytest
import torch

from hyper_parallel.data.synthetic import SyntheticDataset


def dataset(spec, **changes):
    options = {"num_samples": 40, "max_seq_len": 32, "grid_thw": (2, 4, 6), "seed": 7} | changes
    return SyntheticDataset(spec, **options)


def test_every_field_as_documented(spec):
    data = dataset(spec)
    assert len(data) == 40
    sample = data[20]  # 20 % 17 = 3
    expected = torch.tensor([151643] + [151655] * 12 + list(range(203, 203 + 19)))
    assert torch.equal(sample["input_ids"], expected)
    assert torch.equal(sample["labels"], expected)
    assert sample["labels"].data_ptr() != sample["input_ids"].data_ptr()
    assert torch.equal(sample["attention_mask"], torch.ones(32, dtype=torch.int64))
    assert torch.equal(sample["mm_token_type_ids"], (expected == 151655).long())
    assert torch.equal(sample["image_grid_thw"], torch.tensor([[2, 4, 6]]))
    pixels = torch.randn(2 * 4 * 6, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(7 + 20))
    assert sample["pixel_values"].dtype == torch.float32
    assert torch.equal(sample["pixel_values"], pixels)
    assert set(sample) == {
        "input_ids",
        "labels",
        "attention_mask",
        "mm_token_type_ids",
        "pixel_values",
        "image_grid_thw",
    }


def test_long_images_lengthen_the_sample(spec):
    assert len(dataset(spec, max_seq_len=5)[0]["input_ids"]) == 12 + 4


def test_video_frames_are_separated(spec):
    sample = dataset(spec, video=True)[0]
    frame = [151656] * 6
    assert sample["input_ids"][:14].tolist() == [151643, *frame, 151652, *frame]
    assert sample["input_ids"][14:].tolist() == list(range(200, 218))
    assert torch.equal(sample["mm_token_type_ids"], 2 * (sample["input_ids"] == 151656).long())
    assert torch.equal(sample["video_grid_thw"], torch.tensor([[2, 4, 6]]))
    assert sample["pixel_values_videos"].shape == (48, 96)
    assert "pixel_values" not in sample and "image_grid_thw" not in sample


def test_text_only_model(spec):
    sample = dataset(dataclasses.replace(spec, vision=False))[0]
    assert set(sample) == {"input_ids", "labels", "attention_mask", "mm_token_type_ids"}
    assert sample["input_ids"].tolist() == [151643, *range(200, 231)]
    assert not sample["mm_token_type_ids"].any()


def test_small_vocabulary_folds_text_around_the_special_ids(spec):
    small = dataclasses.replace(
        spec,
        vocab_size=216,
        image_token_id=210,
        video_token_id=211,
        vision_start_token_id=212,
        vision_end_token_id=213,
    )
    sample = dataset(small)[0]
    ordinary = [*range(210), 214, 215]
    wanted = [i if i in ordinary else ordinary[i % len(ordinary)] for i in [151643] + [210] * 12 + list(range(200, 219))]
    wanted[1:13] = [210] * 12
    assert sample["input_ids"].tolist() == wanted
    assert sample["input_ids"].tolist().count(210) == 12


@pytest.mark.parametrize(
    ("spec_change", "change", "message"),
    [
        ({"vocab_size": 1000}, {}, "image_token_id 151655 lies outside the model's vocabulary of 1000"),
        ({"vocab_size": 151656}, {"video": True}, "video_token_id 151656"),
        ({}, {"grid_thw": (1, 3, 4)}, "spatial_merge_size 2"),
        ({}, {"grid_thw": (0, 2, 2)}, "must be positive"),
        ({}, {"num_samples": 0}, "at least one sample"),
    ],
)
def test_errors(spec, spec_change, change, message):
    with pytest.raises(ValueError, match=message):
        dataset(dataclasses.replace(spec, **spec_change), **change)


def test_index_out_of_range(spec):
    with pytest.raises(IndexError):
        dataset(spec)[40]
