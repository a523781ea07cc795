"""Tokenizer and image processor of a model directory, through transformers but without torchvision.

The only place of the data package that imports transformers, and only when a data set with text or images is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hyper_parallel.data.spec import DataSpec

if TYPE_CHECKING:
    from PIL.Image import Image

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
_IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_SPECIAL_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_TEXT_TOKENS = ("<|im_start|>", "<|im_end|>")


class Patches(NamedTuple):
    """One image or video as the vision tower takes it: ``values`` (t*h*w, C) fp32 and its grid in patches."""

    values: Tensor
    grid_thw: tuple[int, int, int]


class Processor:
    """Text to token ids, images and pre-sampled frames to patches; checked against the model on construction."""

    def __init__(self, path: str | Path, spec: DataSpec):
        self.spec = spec
        path = Path(path)
        transformers = _import_transformers()
        self._image_processor: Any = None
        if spec.vision:
            _require_one_of(path, _IMAGE_PROCESSOR_FILES, "image processor")
            self._image_processor = _load_image_processor(transformers, path)
            self._check_geometry(path)
        _require_one_of(path, _TOKENIZER_FILES, "tokenizer")
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        self._check_tokens(path)
        # The Rust tokenizer itself: half the time of transformers' wrapper for a short text, and no thread pool to fork.
        self._backend = self._tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens written in the text are recognised, none are added."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def num_patches(self, height: int, width: int) -> int:
        """Patches that ``image`` makes of an image of this size (in one temporal slot)."""
        if self._image_processor is None:
            raise ValueError("the model has no vision tower, but the sample has an image or video")
        return self._image_processor.get_number_of_image_patches(height, width, {})

    def image(self, image: Image) -> Patches:
        """A still image; its patches repeat it in every temporal slot."""
        if self._image_processor is None:
            raise ValueError("the model has no vision tower, but the sample has an image or video")
        features = self._image_processor(images=[image], return_tensors="pt")
        t, h, w = features["image_grid_thw"][0].tolist()
        return Patches(features["pixel_values"].float(), (t, h, w))

    def video(self, frames: Sequence[Image]) -> Patches:
        """Frames sampled beforehand; an incomplete last temporal patch repeats the last frame.

        Each frame is resized as an image is, so the area limits of ``preprocessor_config.json`` hold per frame.
        """
        slots = self.spec.temporal_patch_size
        if not frames:
            raise ValueError("a video needs at least one frame")
        images = [self.image(frame) for frame in frames]
        images += images[-1:] * (-len(images) % slots)
        (_, h, w) = images[0].grid_thw
        if any(image.grid_thw != (1, h, w) for image in images):
            raise ValueError(f"the frames of a video differ in size: {sorted({image.grid_thw[1:] for image in images})} patches")
        # (temporal patch, slot of the frame, patch, channel, slot, pixel): frame s of a temporal patch fills slot s.
        stacked = torch.stack([image.values for image in images])
        stacked = stacked.view(-1, slots, h * w, self.spec.in_channels, slots, self.spec.patch_size**2)
        values = torch.stack([stacked[:, slot, :, :, slot] for slot in range(slots)], dim=3)
        return Patches(values.reshape(-1, self.spec.patch_values), (len(stacked), h, w))

    def _check_tokens(self, path: Path) -> None:
        if len(self._tokenizer) > self.spec.vocab_size:
            raise ValueError(
                f"the tokenizer of {path} has {len(self._tokenizer)} tokens, "
                f"more than the model's vocab_size {self.spec.vocab_size}"
            )
        ids = self._tokenizer.get_vocab()
        for token in _TEXT_TOKENS:
            if token not in ids:
                raise ValueError(f"the tokenizer of {path} lacks {token}: it is not one of the Qwen family")
        for field, token in _SPECIAL_TOKENS.items():
            expected = getattr(self.spec, field)
            if self.spec.vision and ids.get(token) != expected:
                raise ValueError(f"{token} is {ids.get(token)} in the tokenizer of {path}, but the model's {field} is {expected}")

    def _check_geometry(self, path: Path) -> None:
        for field, name in (
            ("patch_size", "patch_size"),
            ("temporal_patch_size", "temporal_patch_size"),
            ("spatial_merge_size", "merge_size"),
        ):
            ours, theirs = getattr(self.spec, field), getattr(self._image_processor, name)
            if ours != theirs:
                raise ValueError(f"{name} is {theirs} in the image processor of {path}, but the model's {field} is {ours}")
        channels = len(self._image_processor.image_mean)
        if channels != self.spec.in_channels:
            raise ValueError(f"the image processor of {path} makes {channels} channels, the model takes {self.spec.in_channels}")


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ValueError('this data.type needs transformers: pip install "hyper-parallel[hf]"') from None
    return transformers


def _load_image_processor(transformers: Any, path: Path) -> Any:
    """The class that needs no torchvision: in v5 the PIL one beside the default, in v4 the slow one."""
    if hasattr(transformers, "Qwen2VLImageProcessorPil"):
        return transformers.Qwen2VLImageProcessorPil.from_pretrained(str(path), local_files_only=True)
    slow = transformers.Qwen2VLImageProcessor
    processor = slow.from_pretrained(str(path), local_files_only=True)
    config, _ = slow.get_image_processor_dict(str(path), local_files_only=True)
    if config.get("size") and "min_pixels" not in config:
        # 4.57's constructor replaces any size by Qwen2-VL's.
        processor.min_pixels, processor.max_pixels = config["size"]["shortest_edge"], config["size"]["longest_edge"]
    return processor


def _require_one_of(path: Path, names: Sequence[str], what: str) -> None:
    if not any((path / name).is_file() for name in names):
        raise ValueError(f"{path} holds no {what}: expected {' or '.join(names)} (data.processor_path)")
