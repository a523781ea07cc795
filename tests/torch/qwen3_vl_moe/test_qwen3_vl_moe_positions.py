"""Text positions against transformers' get_rope_index on random mixtures, and every way a batch can contradict itself."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import make_batch, tiny_config

from qwen3vl_functional.positions import prepare, text_positions

CFG = tiny_config()

sizes = st.integers(1, 5).map(lambda n: 2 * n)
grids = st.tuples(st.integers(1, 3), sizes, sizes)
text = st.integers(1, 9)
# Two images that touch are one run to the reference, which then fails; an image and a video may touch.
touching = st.tuples(grids, sizes, sizes).map(lambda x: [("bare image", x[0]), ("bare video", (1, *x[1:]))])
parts = st.one_of(
    text.map(lambda n: [n]),
    grids.map(lambda grid: [("image", grid)]),
    grids.map(lambda grid: [("video", grid)]),
    st.tuples(touching, text).map(lambda x: [*x[0], x[1]]),
)
samples = st.lists(parts, min_size=1, max_size=5).map(lambda lists: [part for parts in lists for part in parts])


@settings(max_examples=60, deadline=None)
@given(st.lists(samples, min_size=1, max_size=3), st.sampled_from(["left", "right"]), st.integers(0, 3), st.integers(0, 3))
def test_positions_match_the_reference(model, batch_of_samples, side, before, after) -> None:
    batch = make_batch(CFG, batch_of_samples, padding_side=side)
    tokens = {
        name: torch.nn.functional.pad(batch[name], (before, after))
        for name in ("input_ids", "attention_mask", "mm_token_type_ids")
    }
    images, videos = batch.get("image_grid_thw"), batch.get("video_grid_thw")
    expected_3BT, _ = model.model.get_rope_index(**tokens, image_grid_thw=images, video_grid_thw=videos)
    keep = tokens["attention_mask"].bool()
    ours = text_positions(
        tokens["mm_token_type_ids"],
        keep,
        [] if images is None else images.tolist(),
        [] if videos is None else videos.tolist(),
        CFG,
    )
    assert ours.dtype == torch.int64
    assert torch.equal(ours, expected_3BT[:, keep])


def test_token_types_are_derived_where_absent() -> None:
    batch = make_batch(CFG, [[3, ("image", (1, 4, 6)), 2, ("video", (2, 2, 4)), 5]])
    with_types = prepare(batch, CFG).text
    without = prepare({name: x for name, x in batch.items() if name != "mm_token_type_ids"}, CFG).text
    assert len(with_types.visual_rows_M) == 6 + 4
    assert torch.equal(with_types.cos_T1H, without.cos_T1H)
    assert torch.equal(with_types.visual_rows_M, without.visual_rows_M)


def test_padding_changes_nothing() -> None:
    """Left, right or as rows of nothing but padding: the packed tokens, positions and targets are the same."""
    sample = [3, ("image", (1, 4, 6)), 6]
    plain = make_batch(CFG, [sample])
    expected = prepare(plain, CFG).text
    for before, after in ((4, 0), (0, 4), (2, 3)):
        batch = dict(plain)
        for name, fill in (("input_ids", 0), ("attention_mask", 0), ("mm_token_type_ids", 0), ("labels", -100)):
            row = torch.nn.functional.pad(plain[name], (before, after), value=fill)
            batch[name] = torch.cat((torch.full_like(row, fill), row))
        ours = prepare(batch, CFG).text
        for name in ("ids_T", "cos_T1H", "sin_T1H", "visual_rows_M", "target_rows", "targets"):
            assert torch.equal(getattr(ours, name), getattr(expected, name)), name


# --- contradictions --------------------------------------------------------------------------------------------------------

IMAGE, VIDEO = ("image", (1, 4, 6)), ("video", (2, 2, 4))


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """A text sample, then one with an image of 6 tokens and a video of 2 frames of 2 tokens."""
    return make_batch(CFG, [[20], [3, IMAGE, 2, VIDEO, 5]])


def drop(batch, *names) -> dict[str, torch.Tensor]:
    return {name: x for name, x in batch.items() if name not in names}


def fails(batch, *words: str, cfg=CFG) -> None:
    with pytest.raises(ValueError) as error:
        prepare(batch, cfg)
    for word in words:
        assert word in str(error.value), (word, str(error.value))


def test_sound_batch_passes(batch) -> None:
    inputs = prepare(batch, CFG)
    assert len(inputs.text.visual_rows_M) == 10 and inputs.vision is not None and len(inputs.vision.patches_PC) == 40


@pytest.mark.parametrize(("position", "kind"), [(0, 1), (4, 0), (4, 2)])
def test_wrong_token_types(batch, position, kind) -> None:
    batch["mm_token_type_ids"][1, position] = kind
    fails(batch, "sample 1", "mm_token_type_ids", "301", "302")


def test_text_only_model_refuses_pixels(batch) -> None:
    text_only = dataclasses.replace(CFG, vision=None)
    fails(drop(batch, "image_grid_thw", "video_grid_thw"), "without a vision tower", cfg=text_only)


def test_tokens_without_features(batch) -> None:
    fails(drop(batch, "pixel_values", "image_grid_thw"), "sample 1", "6 image tokens")
    fails(drop(batch, "pixel_values_videos", "video_grid_thw"), "sample 1", "2 video tokens")


def test_features_without_tokens(batch) -> None:
    batch["image_grid_thw"] = torch.tensor([[1, 4, 6], [1, 2, 8]])
    fails(batch, "1 image grids", "(1, 1, 4)")


def test_grid_larger_than_its_run(batch) -> None:
    batch["image_grid_thw"] = torch.tensor([[1, 4, 8]])
    fails(batch, "sample 1", "1 x 2 x 4 = 8", "6 image tokens")


def test_grid_smaller_than_its_run(batch) -> None:
    batch["image_grid_thw"] = torch.tensor([[1, 4, 4]])
    fails(batch, "sample 1", "2 image tokens")


def test_frames_of_another_size_than_their_runs(batch) -> None:
    batch["video_grid_thw"] = torch.tensor([[1, 4, 4]])
    fails(batch, "sample 1", "1 x 2 x 2 = 4", "2 video tokens")


def test_more_frames_than_runs(batch) -> None:
    batch["video_grid_thw"] = torch.tensor([[3, 2, 4]])
    fails(batch, "1 video grids")


@pytest.mark.parametrize("name", ["pixel_values", "pixel_values_videos"])
def test_patches_do_not_match_the_grid(batch, name) -> None:
    expected = len(batch[name])
    batch[name] = batch[name][:-4]
    fails(batch, f"asks for {expected} patches, {name} holds {expected - 4}")
    fails(drop(batch, name), f"asks for {expected} patches, {name} holds 0")


def test_pixels_without_grid() -> None:
    batch = make_batch(CFG, [[20]])
    fails(batch | {"pixel_values": torch.zeros(8, 96)}, "asks for 0 patches, pixel_values holds 8")


@pytest.mark.parametrize("grid", [(1, 5, 6), (1, 4, 7), (1, 5, 7)])
def test_odd_grid(batch, grid) -> None:
    """The merged size still fits the tokens, and the patches the grid: only the division tells."""
    batch["image_grid_thw"] = torch.tensor([grid])
    batch["pixel_values"] = torch.zeros(grid[1] * grid[2], 96)
    fails(batch, f"{grid[1]} x {grid[2]}", "spatial_merge_size=2")


def test_truncation_inside_an_image() -> None:
    """Every length that cuts an image raises; so does one that drops it whole but keeps its features."""
    sample = [3, IMAGE, 4]
    full = make_batch(CFG, [sample])
    tokens = ("input_ids", "attention_mask", "labels", "mm_token_type_ids")
    for length in range(1, full["input_ids"].shape[1]):
        cut = {name: x[:, :length] if name in tokens else x for name, x in full.items()}
        if length >= 4 + 6:
            prepare(cut, CFG)
        elif length > 4:
            fails(cut, "sample 0", "1 x 2 x 3 = 6", f"{length - 4} image tokens")
        else:
            fails(cut, "1 image grids", "truncation")


def test_mask_inside_an_image(batch) -> None:
    first = int((batch["input_ids"][1] == CFG.image_token_id).nonzero()[0])
    batch["attention_mask"][1, first] = 0
    fails(batch, "sample 1", "5 image tokens")
