"""Real handwritten digits as a vision-language task, and a small Qwen3-VL-MoE to learn it; no network.

    python examples/qwen3_vl_digits/prepare.py --out outputs/digits

writes
    images/            16x16 PNGs of scikit-learn's 1797 digits, training digits in 8 variants (shifted, rotated)
    train.jsonl        "Which digit is this?" and "Which is larger, the first or the second?" (two images)
    eval.jsonl         the first question on the held-out 20 % of the digits (stratified, never seen in training)
    eval_pairs.jsonl   the second question on pairs of them
    model/             the real Qwen tokenizer and an image processor: what `model.tokenizer_path` points at
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from hyper_parallel.data.qwen_tokenizer import write_qwen_tokenizer

SIZE = 16
VARIANTS = 8
MAX_ROTATION_DEGREES = 10
EVAL_FRACTION = 0.2
WHICH_DIGIT = "Which digit is this?"
WHICH_IS_LARGER = "Which is larger, the first or the second?"

PREPROCESSOR_CONFIG = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "resample": 3,
    # Areas in pixels, not edges: 16x16 is the smallest image and stays as it is.
    "size": {"shortest_edge": SIZE * SIZE, "longest_edge": 256 * SIZE * SIZE},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--seed", type=int, default=0, help="split, augmentation and pairs (default 0)")
    args = parser.parse_args(argv)
    write_task(args.out, seed=args.seed)
    write_model(args.out / "model")


def write_task(out: Path, *, seed: int) -> None:
    """``images/`` and the three JSONL files."""
    pixels, labels = load_digits(return_X_y=True)
    images = np.reshape(pixels, (-1, 8, 8))
    rng = np.random.default_rng(seed)
    train, held_out = train_test_split(np.arange(len(images)), test_size=EVAL_FRACTION, stratify=labels, random_state=seed)
    (out / "images").mkdir(parents=True, exist_ok=True)

    def save(index: int, variant: int) -> tuple[str, int]:
        image = upscaled(images[index])
        if variant:
            image = augmented(image, rng)
        name = f"images/{index:04d}_{variant}.png"
        image.convert("RGB").save(out / name)
        return name, int(labels[index])

    seen = [save(index, variant) for index in train for variant in range(VARIANTS)]
    unseen = [save(index, 0) for index in held_out]
    rows = [single_question(digit) for digit in seen] + paired_questions(seen, rng)
    write_jsonl(out / "train.jsonl", [rows[i] for i in rng.permutation(len(rows))])
    write_jsonl(out / "eval.jsonl", [single_question(digit) for digit in unseen])
    write_jsonl(out / "eval_pairs.jsonl", paired_questions(unseen, rng))


def upscaled(pixels: np.ndarray) -> Image.Image:
    """(8, 8) with values 0..16 -> 16x16 grey."""
    grey = Image.fromarray(np.round(pixels * (255 / 16)).astype(np.uint8))
    return grey.resize((SIZE, SIZE), Image.Resampling.BICUBIC)


def augmented(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Shifted by up to one source pixel (two here) along each axis, and rotated a little."""
    shift = rng.integers(-1, 2, size=2) * 2
    angle = rng.uniform(-MAX_ROTATION_DEGREES, MAX_ROTATION_DEGREES)
    return image.rotate(angle, resample=Image.Resampling.BILINEAR, translate=(int(shift[0]), int(shift[1])))


def single_question(digit: tuple[str, int]) -> dict[str, Any]:
    name, label = digit
    return conversation([name], WHICH_DIGIT, str(label))


def paired_questions(digits: list[tuple[str, int]], rng: np.random.Generator) -> list[dict[str, Any]]:
    """One question for each digit, against a partner drawn at random."""
    rows = []
    for (first, left), other in zip(digits, rng.permutation(len(digits)), strict=True):
        second, right = digits[other]
        answer = "the first" if left > right else "the second" if right > left else "equal"
        rows.append(conversation([first, second], WHICH_IS_LARGER, answer))
    return rows


def conversation(images: list[str], question: str, answer: str) -> dict[str, Any]:
    return {
        "images": images,
        "messages": [
            {"role": "user", "content": "<image>" * len(images) + question},
            {"role": "assistant", "content": answer},
        ],
    }


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_model(directory: Path) -> None:
    """The tokenizer and ``preprocessor_config.json``."""
    write_qwen_tokenizer(directory)
    content = json.dumps(PREPROCESSOR_CONFIG, indent=2) + "\n"
    (directory / "preprocessor_config.json").write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
