"""Where every patch and every token stands: integer work done once per batch, outside the differentiated functions."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from .config import Qwen3VLMoeConfig, TextConfig
from .layers import Segments, segments

IGNORE_INDEX = -100
VISION_ROPE_THETA = 10000.0

Batch = Mapping[str, torch.Tensor]


class VisionInputs(NamedTuple):
    """The tower's inputs: all frames of all images, then of all videos, patch rows end to end in merge-block order."""

    patches_PC: torch.Tensor
    tap_rows_4P: torch.Tensor  # rows of the learned position table
    tap_weights_4P: torch.Tensor  # fp32, sum to 1 over the four taps
    cos_P1H: torch.Tensor  # fp32, half a head wide
    sin_P1H: torch.Tensor
    frames: Segments


class TextInputs(NamedTuple):
    """The decoder's inputs: the unmasked tokens of all samples end to end. Padding never enters the model."""

    ids_T: torch.Tensor
    cos_T1H: torch.Tensor  # fp32, half a head wide
    sin_T1H: torch.Tensor
    samples: Segments
    visual_rows_M: torch.Tensor  # rows of ids_T that the tower's M merged tokens replace, in the tower's order
    target_rows: torch.Tensor  # rows whose next token is a target
    targets: torch.Tensor  # those next tokens
    token_rows: torch.Tensor  # row of each token in the flattened (B, T) batch


class Inputs(NamedTuple):
    vision: VisionInputs | None
    text: TextInputs


def prepare(batch: Batch, cfg: Qwen3VLMoeConfig) -> Inputs:
    """Turn a Hugging Face batch into packed inputs.

    Takes ``input_ids`` (B, T) and optionally ``attention_mask``, ``labels``, ``mm_token_type_ids`` (all (B, T)),
    ``pixel_values`` (P, C) with ``image_grid_thw`` (n, 3), ``pixel_values_videos`` with ``video_grid_thw``.
    Raises ValueError, naming sample and numbers, where placeholders and features disagree.
    """
    ids_BT = batch["input_ids"]
    device = ids_BT.device
    if cfg.vision is None and ("pixel_values" in batch or "pixel_values_videos" in batch):
        raise ValueError("the batch holds images or videos, but the model was built without a vision tower")
    grids = {name: batch[f"{name}_grid_thw"].tolist() if f"{name}_grid_thw" in batch else [] for name in ("image", "video")}
    keep_BT = batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(ids_BT, dtype=torch.bool)
    kinds_BT = _token_kinds(batch, cfg)
    token_rows = keep_BT.flatten().nonzero().flatten()
    kinds_T = kinds_BT.flatten()[token_rows]
    lengths = [n for n in keep_BT.sum(1).tolist() if n]
    positions_3T = text_positions(kinds_BT, keep_BT, grids["image"], grids["video"], cfg)
    cos, sin = text_rotary(positions_3T.to(device), cfg.text)

    targets_BT = torch.full_like(ids_BT, IGNORE_INDEX)
    if "labels" in batch:
        targets_BT[:, :-1] = batch["labels"][:, 1:]
    targets_T = targets_BT.flatten()[token_rows]
    target_rows = (targets_T != IGNORE_INDEX).nonzero().flatten()
    text = TextInputs(
        ids_T=ids_BT.flatten()[token_rows],
        cos_T1H=cos[:, None],
        sin_T1H=sin[:, None],
        samples=segments(lengths, device),
        visual_rows_M=torch.cat([(kinds_T == kind).nonzero().flatten() for kind in (1, 2)]),
        target_rows=target_rows,
        targets=targets_T[target_rows],
        token_rows=token_rows,
    )
    return Inputs(_vision_inputs(batch, grids, cfg, device), text)


def _token_kinds(batch: Batch, cfg: Qwen3VLMoeConfig) -> torch.Tensor:
    """0 text, 1 image, 2 video for every token; derived from the ids where ``mm_token_type_ids`` is absent."""
    if cfg.vision is None:
        return torch.zeros_like(batch["input_ids"])
    ids = batch["input_ids"]
    derived = (ids == cfg.image_token_id).long() + 2 * (ids == cfg.video_token_id).long()
    if "mm_token_type_ids" in batch and not torch.equal(given := batch["mm_token_type_ids"].long(), derived):
        sample = int((given != derived).any(1).nonzero()[0])
        raise ValueError(
            f"sample {sample}: mm_token_type_ids disagree with the placeholders in input_ids "
            f"(image_token_id={cfg.image_token_id}, video_token_id={cfg.video_token_id})"
        )
    return derived


def text_positions(
    kinds_BT: torch.Tensor,
    keep_BT: torch.Tensor,
    image_grids: list[list[int]],
    video_grids: list[list[int]],
    cfg: Qwen3VLMoeConfig,
) -> torch.Tensor:
    """Time, height and width position of every unmasked token, (3, T) int64 on the CPU.

    Text advances all three axes together. An image of h x w merged tokens stands at one time and spreads over height and
    width, then text goes on after max(h, w). Each frame of a video counts as an image: its time is in the timestamp text.
    Grids are consumed in order of appearance; one that does not fit its run of placeholders raises ValueError.
    """
    merge = cfg.vision.spatial_merge_size if cfg.vision else 1
    # Blocks of merged tokens: an image is one block, however many frames it has; a video's frames are a block each.
    blocks = {
        1: deque((t, h // merge, w // merge) for t, h, w in image_grids),
        2: deque((1, h // merge, w // merge) for t, h, w in video_grids for _ in range(t)),
    }
    pieces: list[np.ndarray] = []
    for sample, (kinds, keep) in enumerate(zip(kinds_BT.cpu().numpy(), keep_BT.cpu().numpy(), strict=True)):
        here = 0
        for kind, length in _runs(kinds[keep]):
            if kind == 0:
                pieces.append(np.broadcast_to(np.arange(here, here + length), (3, length)))
                here += length
                continue
            while length > 0:
                name = "image" if kind == 1 else "video"
                if not blocks[kind]:
                    raise ValueError(f"sample {sample}: {length} {name} tokens are left without {name} features")
                t, h, w = blocks[kind].popleft()
                if t * h * w > length:
                    raise ValueError(
                        f"sample {sample}: a {name} grid of {t} x {h} x {w} = {t * h * w} merged tokens "
                        f"meets a run of {length} {name} tokens"
                    )
                pieces.append(np.indices((t, h, w)).reshape(3, -1) + here)
                here += max(h, w)
                length -= t * h * w
    for kind, name in ((1, "image"), (2, "video")):
        if blocks[kind]:
            raise ValueError(
                f"{len(blocks[kind])} {name} grids have no {name} tokens in input_ids (first unused, "
                f"merged: {blocks[kind][0]}); truncation must never cut inside an image or a video"
            )
    return torch.from_numpy(np.concatenate(pieces, axis=1) if pieces else np.zeros((3, 0), dtype=np.int64))


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    """(value, length) of each run of equal values."""
    if len(values) == 0:
        return []
    begins = np.flatnonzero(np.diff(values, prepend=values[0] - 1))
    return list(zip(values[begins].tolist(), np.diff(begins, append=len(values)).tolist(), strict=True))


def text_rotary(positions_3T: torch.Tensor, cfg: TextConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (T, H/2) in fp32 of the interleaved three-axis rotary embedding.

    Frequency slots 1, 4, 7, ... take the height, 2, 5, 8, ... the width (up to three times their section), the rest time.
    """
    axis, frequency = _text_frequencies(cfg.head_dim, cfg.rope_theta, tuple(cfg.mrope_section), positions_3T.device)
    angles = positions_3T.float()[axis].T * frequency
    return angles.cos(), angles.sin()


@functools.cache
def _text_frequencies(
    head_dim: int, theta: float, section: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which axis each slot takes, and its frequency; remembered, because they are the same in every step."""
    slot = torch.arange(head_dim // 2, device=device)
    axis = torch.where(slot < 3 * torch.tensor(section, device=device)[slot % 3], slot % 3, 0)
    return axis, 1.0 / theta ** (2 * slot.float() / head_dim)


def vision_rotary(rows_cols_P2: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (P, H/2) in fp32 of the two-axis rotary embedding: a quarter of the head for rows, then for columns."""
    quarter = head_dim // 4
    slot = torch.arange(quarter, dtype=torch.float32, device=rows_cols_P2.device)
    frequency = 1.0 / VISION_ROPE_THETA ** (slot / quarter)
    angles = (rows_cols_P2.float()[..., None] * frequency).flatten(1)
    return angles.cos(), angles.sin()


def merge_block_order(height: int, width: int, merge: int) -> torch.Tensor:
    """Row and column (h * w, 2) of the patches of a frame, in the processor's order: merge x merge blocks, row by row."""
    grid = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), -1)
    return grid.view(height // merge, merge, width // merge, merge, 2).transpose(1, 2).reshape(-1, 2)


def interpolation_taps(rows_cols_P2: torch.Tensor, size: tuple[int, int], side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (4, P) of the side x side position table around each patch, and their bilinear weights (4, P) in fp32.

    The corners of the frame meet the corners of the table (align_corners).
    """
    low, high, above = [], [], []
    for axis, length in enumerate(size):
        source = rows_cols_P2[:, axis].float() * (side - 1) / max(length - 1, 1)
        floor = source.long()
        low.append(floor)
        high.append((floor + 1).clamp(max=side - 1))
        above.append(source - floor)
    (r0, c0), (r1, c1), (dr, dc) = low, high, above
    rows = torch.stack((r0 * side + c0, r0 * side + c1, r1 * side + c0, r1 * side + c1))
    weights = torch.stack(((1 - dr) * (1 - dc), (1 - dr) * dc, dr * (1 - dc), dr * dc))
    return rows, weights


@functools.lru_cache(maxsize=64)
def _frame(height: int, width: int, merge: int, side: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coordinates and interpolation of one frame; remembered, because grids repeat from image to image."""
    order = merge_block_order(height, width, merge)
    return order, *interpolation_taps(order, (height, width), side)


def _vision_inputs(
    batch: Batch, grids: Mapping[str, list[list[int]]], cfg: Qwen3VLMoeConfig, device: torch.device
) -> VisionInputs | None:
    """Positions of all patches; a batch without images gives a tower input of zero rows, so that every step is alike."""
    pixels = [batch[name] for name in ("pixel_values", "pixel_values_videos") if name in batch]
    if cfg.vision is None:
        return None
    for name, key in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        needed = sum(t * h * w for t, h, w in grids[name])
        given = len(batch[key]) if key in batch else 0
        if needed != given:
            raise ValueError(f"{name}_grid_thw {grids[name]} asks for {needed} patches, {key} holds {given}")
    vision, coordinates, taps, weights, lengths = cfg.vision, [], [], [], []
    for t, h, w in grids["image"] + grids["video"]:
        if h % vision.spatial_merge_size or w % vision.spatial_merge_size:
            raise ValueError(f"a grid of {h} x {w} patches does not divide by spatial_merge_size={vision.spatial_merge_size}")
        frame, rows, weight = _frame(h, w, vision.spatial_merge_size, vision.grid_side)
        coordinates.append(frame.repeat(t, 1))
        taps.append(rows.repeat(1, t))
        weights.append(weight.repeat(1, t))
        lengths += [h * w] * t
    if not lengths:
        pixels = [torch.zeros(0, vision.patch_values, device=device)]
        coordinates, taps, weights = [torch.zeros(0, 2)], [torch.zeros(4, 0, dtype=torch.int64)], [torch.zeros(4, 0)]
    cos, sin = vision_rotary(torch.cat(coordinates).to(device), vision.hidden_size // vision.num_heads)
    return VisionInputs(
        patches_PC=torch.cat(pixels),
        tap_rows_4P=torch.cat(taps, 1).to(device),
        tap_weights_4P=torch.cat(weights, 1).to(device),
        cos_P1H=cos[:, None],
        sin_P1H=sin[:, None],
        frames=segments(lengths, device),
    )
