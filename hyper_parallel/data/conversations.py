"""Conversations with images and videos, rendered the way Qwen3-VL reads them.

A message is ``<|im_start|>role\\n`` content ``<|im_end|>\\n``; an image is ``<|vision_start|>``, h*w / merge^2 times
``<|image_pad|>``, ``<|vision_end|>``. A video is, for each temporal patch, ``<1.5 seconds>`` (mean time of its frames)
and the same with ``<|video_pad|>``, without the extra outer pair that transformers 5.12 and later leave around a clip.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hyper_parallel.data.collator import IGNORE_INDEX
from hyper_parallel.data.processor import Patches, Processor
from hyper_parallel.data.rows import Rows, image_size, load_image

_ROLES = ("system", "user", "assistant")
_PLACEHOLDER = re.compile("(<image>|<video>)")
_TYPE_ID = {"image": 1, "video": 2}


class _Text(NamedTuple):
    kind: Literal["prompt", "answer"]
    text: str


class _Frame(NamedTuple):
    """One image, or one temporal patch of a video: a run of placeholders that truncation never cuts."""

    modality: Literal["image", "video"]
    item: int
    tokens: int


class _Part(NamedTuple):
    """A piece of a message; ``value`` is text, or a source, or None for the row's next image or video."""

    type: Literal["text", "image", "video"]
    value: Any


@dataclass
class _Media:
    """The row's images or videos: taken in order, kept as patches."""

    modality: Literal["image", "video"]
    queue: list[Any]
    patches: list[Patches]
    taken: int = 0

    def next_source(self) -> Any:
        if self.taken == len(self.queue):
            raise ValueError(f"the text asks for {self.modality} {self.taken + 1}, but the row has {len(self.queue)}")
        self.taken += 1
        return self.queue[self.taken - 1]


class _ReadPatches(Protocol):
    """Turns the source of an image, or those of a video's frames, into patches."""

    def __call__(self, frames: Sequence[Any], modality: Literal["image", "video"], /) -> Patches: ...


class ConversationDataset(Dataset[dict[str, Tensor]]):
    """Rows of ``messages`` (or of a ``text`` column: plain language modelling) as model inputs.

    A sample has ``input_ids``, ``labels``, ``attention_mask``, ``mm_token_type_ids`` (T,) int64, and where present
    ``pixel_values`` (P, C) fp32 with ``image_grid_thw`` (n, 3), ``pixel_values_videos`` with ``video_grid_thw``.

    Targets are the assistants' content and its ``<|im_end|>``, or with ``train_on_prompt`` all text: role headers and
    video times too, but never placeholders nor vision_start and vision_end. A plain text row is all target; it gets no
    end-of-document token, so write ``<|endoftext|>`` into the text where one is wanted.

    Content is text, in which ``<image>`` and ``<video>`` stand for the row's next one, or a list of
    ``{type: text, text}``, ``{type: image}``, ``{type: video}``. A video is ``{frames, fps}`` or
    ``{frames, timestamps}``,
    timestamps in seconds.

    A sample longer than ``max_seq_len`` loses its end; an image or temporal patch that does not fit is dropped whole,
    with all that follows. If no target is left the sample simply adds nothing to the loss.
    Every mistake in a row is a ValueError that starts with the row's name.
    """

    def __init__(
        self,
        rows: Rows,
        processor: Processor,
        *,
        max_seq_len: int,
        messages_key: str = "messages",
        text_key: str = "text",
        image_key: str = "image",
        train_on_prompt: bool = False,
    ):
        self.rows, self.processor, self.max_seq_len = rows, processor, max_seq_len
        self.messages_key, self.text_key, self.image_key = messages_key, text_key, image_key
        self.train_on_prompt = train_on_prompt

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        row = self.rows[idx]
        try:
            return self._sample(row)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.rows.name(idx)}: {error}") from error

    def length(self, idx: int) -> int:
        """Tokens of a sample, without decoding its images. One that is cut counts as ``max_seq_len``."""
        row = self.rows[idx]
        try:
            pieces = self._read(row, self._media(row), self._measured)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.rows.name(idx)}: {error}") from error
        tokens = sum(
            len(self.processor.encode(piece.text)) if isinstance(piece, _Text) else piece.tokens + 2  # vision_start, vision_end
            for piece in pieces
        )
        return min(tokens, self.max_seq_len)

    def _sample(self, row: dict[str, Any]) -> dict[str, Tensor]:
        media = self._media(row)
        pieces = self._read(row, media, self._patches)
        return self._assemble(pieces, {modality: items.patches for modality, items in media.items()})

    def _media(self, row: dict[str, Any]) -> dict[str, _Media]:
        return {
            "image": _Media("image", _column(row, self.image_key), []),
            "video": _Media("video", _column(row, "video"), []),
        }

    def _patches(self, frames: Sequence[Any], modality: Literal["image", "video"]) -> Patches:
        images = [load_image(frame, self.rows.root) for frame in frames]
        return self.processor.image(images[0]) if modality == "image" else self.processor.video(images)

    def _measured(self, frames: Sequence[Any], modality: Literal["image", "video"]) -> Patches:
        """Patches without values, from the size that a file's header tells."""
        patches = self.processor.num_patches(*image_size(frames[0], self.rows.root))
        slots = self.processor.spec.temporal_patch_size if modality == "video" else 1
        return Patches(torch.empty(0), (-(-len(frames) // slots), 1, patches))

    def _read(self, row: dict[str, Any], media: dict[str, _Media], patches: _ReadPatches) -> list[_Text | _Frame]:
        pieces = list(self._pieces(row, media, patches))
        for items in media.values():
            if items.taken < len(items.queue):
                raise ValueError(f"the row has {len(items.queue)} {items.modality}s, but its text uses {items.taken}")
        return _merged(pieces)

    def _pieces(self, row: dict[str, Any], media: dict[str, _Media], patches: _ReadPatches) -> Iterator[_Text | _Frame]:
        messages = row.get(self.messages_key)
        if messages is None:
            text = row.get(self.text_key)
            if not isinstance(text, str) or not text:
                raise ValueError(f"neither {self.messages_key!r} nor a non-empty {self.text_key!r}; columns: {sorted(row)}")
            yield from self._content(text, "answer", media, patches)
            return
        if not isinstance(messages, list) or not messages:
            raise ValueError(f"{self.messages_key!r} must be a non-empty list of messages, got {messages!r:.80}")
        for number, message in enumerate(messages):
            if not isinstance(message, dict) or message.get("role") not in _ROLES:
                raise ValueError(f"message {number} needs a role out of {_ROLES} and a content, got {message!r:.80}")
            kind = "answer" if message["role"] == "assistant" else "prompt"
            yield _Text("prompt", f"<|im_start|>{message['role']}\n")
            yield from self._content(message.get("content"), kind, media, patches)
            yield _Text(kind, "<|im_end|>")
            yield _Text("prompt", "\n")

    def _content(
        self, content: Any, kind: Literal["prompt", "answer"], media: dict[str, _Media], read: _ReadPatches
    ) -> Iterator[_Text | _Frame]:
        for part in _parts(content):
            if part.type == "text":
                yield _Text(kind, part.value)
                continue
            items = media[part.type]
            source = items.next_source() if part.value is None else part.value
            frames, times = [source], None
            if part.type == "video":
                frames, times = _video(source, self.processor.spec.temporal_patch_size)
            patches = read(frames, part.type)
            items.patches.append(patches)
            t, h, w = patches.grid_thw
            for index in range(t):
                if times is not None:
                    yield _Text(kind, f"<{times[index]:.1f} seconds>")
                yield _Frame(part.type, len(items.patches) - 1, h * w // self.processor.spec.spatial_merge_size**2)

    def _assemble(self, pieces: Sequence[_Text | _Frame], patches: dict[str, list[Patches]]) -> dict[str, Tensor]:
        spec = self.processor.spec
        placeholder = {"image": spec.image_token_id, "video": spec.video_token_id}
        ids: list[int] = []
        labels: list[int] = []
        types: list[int] = []
        kept: dict[str, list[int]] = {modality: [0] * len(items) for modality, items in patches.items()}
        for piece in pieces:
            room = self.max_seq_len - len(ids)
            if isinstance(piece, _Text):
                tokens = self.processor.encode(piece.text)
                target = self.train_on_prompt or piece.kind == "answer"
                ids += tokens[:room]
                labels += tokens[:room] if target else [IGNORE_INDEX] * len(tokens[:room])
                types += [0] * len(tokens[:room])
            else:
                run = [placeholder[piece.modality]] * piece.tokens
                tokens = [spec.vision_start_token_id, *run, spec.vision_end_token_id]
                if len(tokens) <= room:
                    ids += tokens
                    labels += [IGNORE_INDEX] * len(tokens)
                    types += [0, *[_TYPE_ID[piece.modality]] * piece.tokens, 0]
                    kept[piece.modality][piece.item] += 1
            if len(tokens) > room:
                break
        if not ids:
            raise ValueError(f"nothing of the sample fits data.max_seq_len {self.max_seq_len}")
        sample = {
            "input_ids": torch.tensor(ids),
            "labels": torch.tensor(labels),
            "attention_mask": torch.ones(len(ids), dtype=torch.int64),
            "mm_token_type_ids": torch.tensor(types),
        }
        for modality, keys in (
            ("image", ("pixel_values", "image_grid_thw")),
            ("video", ("pixel_values_videos", "video_grid_thw")),
        ):
            shown = [
                Patches(item.values[: frames * item.grid_thw[1] * item.grid_thw[2]], (frames, *item.grid_thw[1:]))
                for item, frames in zip(patches[modality], kept[modality], strict=True)
                if frames
            ]
            features = sum(len(item.values) for item in shown) // spec.spatial_merge_size**2
            placeholders = ids.count(placeholder[modality]) if spec.vision else 0
            if placeholders != features:
                raise ValueError(
                    f"{placeholders} {modality} placeholder tokens, but {features} {modality} features: "
                    f"is a special token such as <|{modality}_pad|> written in the text?"
                )
            if shown:
                sample[keys[0]] = torch.cat([item.values for item in shown])
                sample[keys[1]] = torch.tensor([item.grid_thw for item in shown])
        return sample


def _column(row: dict[str, Any], key: str) -> list[Any]:
    """The row's ``key`` or plural ``keys`` as a list; a single value is a list of one."""
    present = [name for name in (key, f"{key}s") if row.get(name) not in (None, [])]
    if len(present) > 1:
        raise ValueError(f"the row has both {present[0]!r} and {present[1]!r}: keep one")
    value = row[present[0]] if present else []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _parts(content: Any) -> Iterator[_Part]:
    if isinstance(content, str):
        for text in _PLACEHOLDER.split(content):
            if text in ("<image>", "<video>"):
                yield _Part("image" if text == "<image>" else "video", None)
            elif text:
                yield _Part("text", text)
        return
    if not isinstance(content, list):
        raise ValueError(f"a message's content must be text or a list of parts, got {content!r:.80}")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            yield _Part("text", part["text"])
        elif kind in ("image", "video"):
            yield _Part(kind, part.get(kind))
        else:
            raise ValueError(f"a content part must be {{type: text, text}}, {{type: image}} or {{type: video}}, got {part!r:.80}")


def _video(source: Any, frames_per_patch: int) -> tuple[list[Any], list[float]]:
    """The frames, and the mean time of each temporal patch in seconds."""
    frames = source.get("frames") if isinstance(source, dict) else None
    if not isinstance(frames, list) or not frames:
        raise ValueError(f"a video must be {{frames: [images], fps}} or {{frames, timestamps}}, got {source!r:.80}")
    times, fps = source.get("timestamps"), source.get("fps")
    if times is None:
        if not isinstance(fps, (int, float)) or fps <= 0:
            raise ValueError(f"a video needs timestamps in seconds or a positive fps, got fps {fps!r}")
        times = [index / fps for index in range(len(frames))]
    if len(times) != len(frames):
        raise ValueError(f"a video has {len(frames)} frames, but {len(times)} timestamps")
    times = [*times, *times[-1:] * (-len(times) % frames_per_patch)]
    # First and last frame of the patch: the reference's mean, which for two frames is the plain one.
    firsts, lasts = times[::frames_per_patch], times[frames_per_patch - 1 :: frames_per_patch]
    return frames, [(first + last) / 2 for first, last in zip(firsts, lasts, strict=True)]


def _merged(pieces: Sequence[_Text | _Frame]) -> list[_Text | _Frame]:
    """Neighbouring texts of one kind become one: the tokenizer merges across their border.

    Prompt and answer stay apart, because generation starts right after the tokenised prompt.
    """
    merged: list[_Text | _Frame] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if isinstance(piece, _Text) and isinstance(last, _Text) and piece.kind == last.kind:
            merged[-1] = _Text(piece.kind, last.text + piece.text)
        else:
            merged.append(piece)
    return merged
