"""`data.type: vl_dummy`: random patches and rising token ids, for smoke tests and speed measurements."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hyper_parallel.data.spec import DataSpec

_FIRST_TOKEN = 151643  # <|endoftext|> of the Qwen vocabulary
_TEXT_START, _TEXT_CYCLE = 200, 17
_MIN_TEXT_TOKENS = 4


class SyntheticDataset(Dataset[dict[str, Tensor]]):
    """Sample ``idx`` is one image (or video) and text, the same for the same ``seed + idx`` on every machine.

    ``input_ids`` (S,): 151643, then the placeholders, then ids rising from ``200 + idx % 17``;
    S = max(max_seq_len, placeholders + 4), placeholders = t*h*w / merge^2. ``labels`` copies it, placeholders too.
    ``pixel_values`` (t*h*w, patch_values): standard normal, fp32; ``image_grid_thw`` (1, 3).

    With ``video=True`` the patches come as ``pixel_values_videos`` and ``video_grid_thw``, and one vision_start token
    stands between two frames: the model numbers positions frame by frame, so frames must not touch.
    A text-only model (``spec.vision`` False) gets the text alone.

    A text id outside a small vocabulary, or equal to one of the four special ids, becomes the
    ``id % n``-th of the n ordinary ids. The placeholder itself must fit.
    """

    def __init__(
        self,
        spec: DataSpec,
        *,
        num_samples: int,
        max_seq_len: int,
        grid_thw: tuple[int, int, int],
        video: bool = False,
        seed: int = 0,
    ):
        self.spec, self.num_samples, self.seed, self.video = spec, num_samples, seed, video
        self.grid_thw = grid_thw
        frames, height, width = grid_thw
        merge = spec.spatial_merge_size
        if num_samples < 1:
            raise ValueError(f"vl_dummy needs at least one sample, got {num_samples}: raise data.train_size or train.max_steps")
        if spec.vision and (min(grid_thw) < 1 or height % merge or width % merge):
            raise ValueError(
                f"data.vl_grid_t/h/w = {list(grid_thw)}: all must be positive, "
                f"and height and width multiples of the model's spatial_merge_size {merge}"
            )
        self.placeholder = spec.video_token_id if video else spec.image_token_id
        if spec.vision and not 0 <= self.placeholder < spec.vocab_size:
            name = "video_token_id" if video else "image_token_id"
            raise ValueError(
                f"{name} {self.placeholder} lies outside the model's vocabulary of {spec.vocab_size}: "
                f"set config_overrides.{name} or a larger vocab_size"
            )
        special = torch.tensor([spec.image_token_id, spec.video_token_id, spec.vision_start_token_id, spec.vision_end_token_id])
        self._special = special
        ids = torch.arange(spec.vocab_size)
        self._ordinary = ids[~torch.isin(ids, special)]
        tokens_per_frame = height * width // merge**2 if spec.vision else 0
        self._vision_ids = torch.full((frames * tokens_per_frame,), self.placeholder)
        if spec.vision and video:
            rows = torch.full((frames, tokens_per_frame + 1), self.placeholder)
            rows[:, -1] = spec.vision_start_token_id
            self._vision_ids = rows.flatten()[:-1]
        self._length = max(max_seq_len, len(self._vision_ids) + _MIN_TEXT_TOKENS)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        if not 0 <= idx < self.num_samples:
            raise IndexError(idx)
        first_text = _TEXT_START + idx % _TEXT_CYCLE
        num_text = self._length - 1 - len(self._vision_ids)
        text_ids = torch.cat([torch.tensor([_FIRST_TOKEN]), torch.arange(first_text, first_text + num_text)])
        text_ids = self._fold(text_ids)
        input_ids = torch.cat([text_ids[:1], self._vision_ids, text_ids[1:]])
        sample = {
            "input_ids": input_ids,
            "labels": input_ids.clone(),
            "attention_mask": torch.ones_like(input_ids),
            "mm_token_type_ids": torch.zeros_like(input_ids),
        }
        if self.spec.vision:
            frames, height, width = self.grid_thw
            generator = torch.Generator().manual_seed(self.seed + idx)
            patches = torch.randn(frames * height * width, self.spec.patch_values, generator=generator)
            pixel_key, grid_key = ("pixel_values_videos", "video_grid_thw") if self.video else ("pixel_values", "image_grid_thw")
            sample["mm_token_type_ids"][input_ids == self.placeholder] = 2 if self.video else 1
            sample[pixel_key] = patches
            sample[grid_key] = torch.tensor([self.grid_thw])
        return sample

    def _fold(self, ids: Tensor) -> Tensor:
        misfit = (ids >= self.spec.vocab_size) | torch.isin(ids, self._special)
        return torch.where(misfit, self._ordinary[ids % len(self._ordinary)], ids)
