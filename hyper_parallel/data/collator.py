"""Samples of different lengths into one right-padded batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

IGNORE_INDEX = -100
# The value does not matter: padding is masked by attention_mask and has no target.
_PAD_ID = 0

_PADDING = {"input_ids": _PAD_ID, "labels": IGNORE_INDEX, "attention_mask": 0, "mm_token_type_ids": 0}
_CONCATENATED = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


Sample = dict[str, Tensor]


def collate(samples: Sequence[Sample | Sequence[Sample]]) -> Sample:
    """``input_ids``, ``labels``, ``attention_mask``, ``mm_token_type_ids`` (B, T) int64, padded on the right.

    ``pixel_values`` (P, C) fp32 and ``image_grid_thw`` (N, 3) int64 are concatenated in batch order, and so are
    ``pixel_values_videos`` and ``video_grid_thw``; they are absent when no sample has them.
    A pack (a sequence of samples) counts as its samples, side by side.
    No samples give one text token without a target, so that a rank whose share of a short step is empty still steps.
    """
    samples = [sample for entry in samples for sample in ([entry] if isinstance(entry, dict) else entry)]
    if not samples:
        samples = [_targetless_sample()]
    batch = {
        key: pad_sequence([sample[key] for sample in samples], batch_first=True, padding_value=value)
        for key, value in _PADDING.items()
    }
    for key in _CONCATENATED:
        parts = [sample[key] for sample in samples if key in sample]
        if parts:
            batch[key] = torch.cat(parts)
    return batch


def _targetless_sample() -> Sample:
    one = torch.ones(1, dtype=torch.int64)
    return {
        "input_ids": one * _PAD_ID,
        "labels": one * IGNORE_INDEX,
        "attention_mask": one,
        "mm_token_type_ids": one * 0,
    }
