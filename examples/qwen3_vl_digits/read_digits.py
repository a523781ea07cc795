"""Let transformers read held-out digits with the weights that the Trainer exported, next to ours and to the pictures.

    python examples/qwen3_vl_digits/read_digits.py --data outputs/digits --model outputs/digits/run

Both models decode greedily from the same prompts; the exit code is 1 if any answer differs. Writes <model>/digits.png.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from transformers import AutoTokenizer, Qwen3VLMoeForConditionalGeneration

from hyper_parallel.data.conversations import ConversationDataset
from hyper_parallel.data.processor import Processor
from hyper_parallel.data.rows import JsonLines
from hyper_parallel.data.spec import DataSpec
from qwen3vl_functional import Qwen3VLMoeConfig, forward, load_params, read_config

END = "<|im_end|>"
MAX_ANSWER_TOKENS = 6
SHADES = " .:-=+*#%@"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the run's output_dir, or an exported directory")
    parser.add_argument("--data", type=Path, required=True, help="directory written by prepare.py")
    parser.add_argument("--single", type=int, default=8, help="how many one-digit questions")
    parser.add_argument("--pairs", type=int, default=4, help="how many two-digit questions")
    args = parser.parse_args()

    directory = newest_export(args.model)
    cfg = read_config(directory)
    params = load_params(directory, cfg)
    reference = Qwen3VLMoeForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    processor = Processor(directory, data_spec(cfg))

    shown: list[tuple[Sequence[Image.Image], str]] = []
    same = right = 0
    for name, number in (("eval.jsonl", args.single), ("eval_pairs.jsonl", args.pairs)):
        rows = JsonLines(args.data / name)
        samples = ConversationDataset(rows, processor, max_seq_len=256)
        for index in range(number):
            prompt, answer = split_answer(samples[index])
            truth = tokenizer.decode(answer).removesuffix(END)
            ours = tokenizer.decode(our_answer(params, cfg, prompt, answer[-1])).removesuffix(END)
            theirs = tokenizer.decode(reference_answer(reference, prompt, answer[-1])).removesuffix(END)
            same, right = same + (ours == theirs), right + (ours == truth)
            row = rows[index]
            images = [Image.open(args.data / image) for image in row["images"]]
            question = row["messages"][0]["content"].replace("<image>", "")
            print("\n" + ascii_art(images))
            print(f"{question}\n  truth {truth!r}, ours {ours!r}, transformers {theirs!r}")
            shown.append((images, f"{theirs} ({'right' if theirs == truth else 'wrong: ' + truth})"))

    sheet = args.model / "digits.png"
    contact_sheet(shown).save(sheet)
    total = args.single + args.pairs
    print(f"\n{same} of {total} answers equal to transformers', {right} right")
    print(f"exported model: {directory}\npictures with answers: {sheet}")
    return 0 if same == total else 1


def newest_export(path: Path) -> Path:
    """The ``hf_ckpt`` of the run's last step, or ``path`` itself if it is an exported directory."""
    if (path / "config.json").exists():
        return path
    exports = sorted(path.glob("step_*/hf_ckpt"), key=lambda found: int(found.parent.name.removeprefix("step_")))
    if not exports:
        raise SystemExit(f"{path} holds no step_<N>/hf_ckpt; train first")
    return exports[-1]


def data_spec(cfg: Qwen3VLMoeConfig) -> DataSpec:
    assert cfg.vision is not None
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    geometry = ("in_channels", "patch_size", "temporal_patch_size", "spatial_merge_size")
    numbers = {name: getattr(cfg, name) for name in ids} | {name: getattr(cfg.vision, name) for name in geometry}
    return DataSpec(vocab_size=cfg.text.vocab_size, vision=True, **numbers)


def split_answer(sample: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The prompt as a batch of one, and the tokens of the answer."""
    targets = (sample["labels"] != -100).nonzero().flatten()
    begin, end = int(targets[0]), int(targets[-1]) + 1
    prompt = {name: tensor[None, :begin] if tensor.dim() == 1 else tensor for name, tensor in sample.items()}
    return prompt, sample["input_ids"][begin:end].tolist()


def our_answer(params: Any, cfg: Qwen3VLMoeConfig, prompt: dict[str, torch.Tensor], end: int) -> list[int]:
    """Greedy decoding by whole forward passes: plain, and enough for a few tokens."""
    answer: list[int] = []
    while len(answer) < MAX_ANSWER_TOKENS and end not in answer:
        ids = torch.cat([prompt["input_ids"], torch.tensor([answer], dtype=torch.int64)], 1)
        pixels = {name: prompt[name] for name in ("pixel_values", "image_grid_thw")}
        answer.append(int(forward(params, {"input_ids": ids, **pixels}, cfg).logits_TV[-1].argmax()))
    return answer


def reference_answer(model: Any, prompt: dict[str, torch.Tensor], end: int) -> list[int]:
    inputs = {name: tensor for name, tensor in prompt.items() if name != "labels"}
    model.model.rope_deltas = None  # transformers keeps it from the call before
    ids = model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False, eos_token_id=end, pad_token_id=end)
    return ids[0, prompt["input_ids"].shape[1] :].tolist()


def ascii_art(images: Sequence[Image.Image]) -> str:
    """The pictures side by side, two characters a pixel at half the resolution."""
    lines = []
    small = [image.convert("L").resize((8, 8), Image.Resampling.BOX) for image in images]
    for y in range(8):
        pixels = [[image.getpixel((x, y)) for x in range(8)] for image in small]
        lines.append("   ".join("".join(2 * SHADES[int(value) * 9 // 255] for value in row) for row in pixels))  # pyright: ignore
    return "\n".join(lines)


def contact_sheet(shown: list[tuple[Sequence[Image.Image], str]]) -> Image.Image:
    """One tile a question: its pictures, enlarged, with the answer below."""
    side, columns = 96, 4
    width, height = 2 * side + 24, side + 32
    rows = -(-len(shown) // columns)
    sheet = Image.new("RGB", (columns * width, rows * height), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (images, caption) in enumerate(shown):
        x, y = number % columns * width + 8, number // columns * height + 4
        for i, image in enumerate(images):
            sheet.paste(image.convert("RGB").resize((side, side), Image.Resampling.NEAREST), (x + i * (side + 8), y))
        draw.text((x, y + side + 6), caption, fill="black" if "wrong" not in caption else "red")
    return sheet


if __name__ == "__main__":
    sys.exit(main())
