import torch

from hyper_parallel.data.collator import collate


def sample(length, images=0, videos=0):
    ids = torch.arange(1, length + 1)
    out = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    out["mm_token_type_ids"] = torch.ones_like(ids)
    if images:
        out["pixel_values"] = torch.full((images, 3), float(length))
        out["image_grid_thw"] = torch.full((images, 3), length)
    if videos:
        out["pixel_values_videos"] = torch.full((videos, 3), -float(length))
        out["video_grid_thw"] = torch.full((videos, 3), -length)
    return out


def test_pads_right_and_concatenates_in_batch_order():
    batch = collate([sample(2, images=1), sample(4), sample(3, images=2, videos=1)])
    assert batch["input_ids"].tolist() == [[1, 2, 0, 0], [1, 2, 3, 4], [1, 2, 3, 0]]
    assert batch["labels"].tolist() == [[1, 2, -100, -100], [1, 2, 3, 4], [1, 2, 3, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["mm_token_type_ids"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["pixel_values"][:, 0].tolist() == [2, 3, 3]
    assert batch["image_grid_thw"].tolist() == [[2] * 3, [3] * 3, [3] * 3]
    assert batch["pixel_values_videos"].tolist() == [[-3] * 3]
    assert batch["video_grid_thw"].tolist() == [[-3] * 3]
    assert all(batch[key].dtype == torch.int64 for key in ("input_ids", "labels", "attention_mask", "image_grid_thw"))


def test_absent_modalities_stay_absent():
    assert set(collate([sample(2), sample(1)])) == {"input_ids", "labels", "attention_mask", "mm_token_type_ids"}


def test_no_samples_give_one_token_without_target():
    batch = collate([])
    assert {key: value.tolist() for key, value in batch.items()} == {
        "input_ids": [[0]],
        "labels": [[-100]],
        "attention_mask": [[1]],
        "mm_token_type_ids": [[0]],
    }
    assert all(value.dtype == torch.int64 for value in batch.values())
