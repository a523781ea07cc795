"""Tokens per second with and without ``data.packing``, on the digits and on conversations of very different lengths.

    python benchmarks/packing.py [--steps 12]

All run on the same rows and the same model, one process: the Trainer on samples one by one, on four samples a micro-batch (which
it packs too, as it packs every batch) and on packs; and transformers with torch's AdamW on four samples padded to the longest.
Padding does not count as tokens. Medians over steps, the first left out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from reference_run import ReferenceRun

from hyper_parallel.config_loader import config_from_dict
from hyper_parallel.models.qwen3_vl_moe.adapter import Qwen3VLMoeAdapter
from hyper_parallel.trainer.trainer import Trainer
from qwen3vl_functional import init_params, param_specs, save_params

EXAMPLE = Path(__file__).parents[1] / "examples" / "qwen3_vl_digits"
TOKENS = 1024  # of a pack
CONTENDERS: dict[str, dict[str, Any]] = {
    "one sample": {"micro_batch_size": 1},
    "4 samples": {"micro_batch_size": 4},
    "transformers, 4 samples padded": {"micro_batch_size": 4, "padded": True},
    f"a pack of {TOKENS}": {"micro_batch_size": 1, "packing": True},
}


def mixed_rows(path: Path, rows: int = 1500) -> None:
    """Text of 5 to 900 words, most of them short, as in real conversations."""
    generator = random.Random(0)
    with path.open("w") as file:
        for _ in range(rows):
            words = min(900, int(generator.lognormvariate(4.0, 1.1)) + 5)
            answer = " ".join(generator.choice(("the", "model", "reads", "seven", "pictures")) for _ in range(words))
            messages = [{"role": "user", "content": "go on"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def tokens_per_second(digits: Path, rows: Path, output: Path, steps: int, *, padded: bool = False, **data: Any) -> float:
    """Median over steps; ``padded``: of transformers."""
    raw = yaml.safe_load((EXAMPLE / "train.yaml").read_text())
    micro_batch = data.pop("micro_batch_size")
    raw["model"]["tokenizer_path"] = str(digits / "model")
    raw["data"] = {"type": "json_file", "train_path": str(rows), "max_seq_len": TOKENS, **data}
    raw["train"] |= {"max_steps": steps, "micro_batch_size": micro_batch, "global_batch_size": micro_batch}
    raw["train"] |= {"checkpoint": {"output_dir": str(output), "save_steps": 0}, "eval": {"eval_steps": 0}}
    raw["train"]["logging"] = {"log_steps": 10 * steps}
    config = config_from_dict(raw, source="benchmark")
    if padded:
        architecture = Qwen3VLMoeAdapter(config).architecture
        save_params(init_params(param_specs(architecture), seed=0), architecture, output / "weights")
        reference = ReferenceRun(replace(config, model=replace(config.model, weights_path=str(output / "weights"))))
        reference.model.set_attn_implementation("sdpa")
        reference.train(output)
    else:
        Trainer(config).train()
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][1:]
    return statistics.median(record["tokens_per_second"] for record in records)


def compare(steps: int) -> dict[str, dict[str, float]]:
    """Tokens per second by data and by what a micro-batch holds; packs last."""
    speeds: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        command = [sys.executable, str(EXAMPLE / "prepare.py"), "--out", str(root / "digits")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        mixed_rows(root / "mixed.jsonl")
        for data, rows in (("digits", root / "digits" / "train.jsonl"), ("mixed lengths", root / "mixed.jsonl")):
            for label, options in CONTENDERS.items():
                speed = tokens_per_second(root / "digits", rows, root / f"{data} {label}", steps, **options)
                speeds.setdefault(data, {})[label] = speed
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    print(f"{'data':14} {'micro-batch':32} {'tokens/s':>10} {'ratio':>6}")
    for data, speeds in compare(parser.parse_args().steps).items():
        base = next(iter(speeds.values()))
        for label, speed in speeds.items():
            print(f"{data:14} {label:32} {speed:10.0f} {speed / base:6.2f}")


if __name__ == "__main__":
    main()
