"""What the data pipeline has to know of a model: numbers only, handed over by the model's adapter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataSpec:
    """Token ids and patch geometry of the model that the batches are for.

    ``vision`` is False for a text-only model: then a sample with an image is an error.
    """

    vocab_size: int
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    vision: bool
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int

    @property
    def patch_values(self) -> int:
        """Values per patch: channels x temporal patch x patch x patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2
