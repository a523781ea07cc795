"""``python -m hyper_parallel.checkpoint inspect DIR | verify DIR | export-hf DIR OUT [--config FILE] | diff A B``.

Looks at checkpoints without a run: what one holds, whether it is whole, its weights for Hugging Face, and what two differ in.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from . import models
from .config_loader import config_from_dict, load_config
from .core.distributed_checkpoint.chunks import ChunkedTensors, is_checkpoint
from .core.distributed_checkpoint.manifest import damage, read_manifest
from .trainer.resume import load_progress, newest_first

Tensors = dict[str, tuple[tuple[int, ...], Callable[[], torch.Tensor]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0: fine; 1: damaged (verify) or different (diff); 2: a mistake in what was asked."""
    parser = argparse.ArgumentParser(prog="python -m hyper_parallel.checkpoint", description="Looks at checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("inspect", help="what a step_<N> directory holds, or each one of a run's output directory")
    command.add_argument("directory", type=Path)
    command = commands.add_parser("verify", help="compare every file with the checksum that was recorded when it was written")
    command.add_argument("directory", type=Path)
    command = commands.add_parser("export-hf", help="write the weights as a Hugging Face directory")
    command.add_argument("directory", type=Path)
    command.add_argument("out", type=Path)
    command.add_argument("--config", help="the run's YAML file; needed only where another Trainer wrote the checkpoint")
    command = commands.add_parser("diff", help="the largest difference of each parameter of two checkpoints or exports")
    command.add_argument("a", type=Path)
    command.add_argument("b", type=Path)
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "inspect":
            return inspect(arguments.directory)
        if arguments.command == "verify":
            return verify(arguments.directory)
        if arguments.command == "export-hf":
            return export_hf(arguments.directory, arguments.out, arguments.config)
        return diff(arguments.a, arguments.b)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def inspect(directory: Path) -> int:
    """Print what a checkpoint, or each checkpoint of a run, holds; files are measured but not read."""
    directories = [directory] if is_checkpoint(directory) else newest_first(directory)
    if not directories:
        raise ValueError(f"{directory} neither is a checkpoint nor holds step_<N> directories")
    for number, path in enumerate(directories):
        try:
            text = describe(path)
        except ValueError as error:
            if len(directories) == 1:
                raise
            text = f"{path}\n  cannot be read: {error}"
        print(("\n" if number else "") + text)
    return 0


def describe(directory: Path) -> str:
    """A few lines about one checkpoint."""
    progress, manifest, tensors = load_progress(directory), read_manifest(directory), ChunkedTensors(directory)
    parameters = sum(math.prod(shape) for shape in tensors.shape_of.values())
    dtypes = Counter(str(dtype).removeprefix("torch.") for dtype in tensors.dtype_of.values())
    kinds = ", ".join(f"{count} {name}" for name, count in dtypes.items())
    sizes: Counter[str] = Counter(dict.fromkeys(("model", "optimizer", "hf_ckpt", "other"), 0))
    for path in directory.rglob("*"):
        if path.is_file():
            sizes[_kind(path.relative_to(directory))] += path.stat().st_size
    lines = [
        str(directory),
        f"  step {progress.step}, epoch {progress.epoch}",
        f"  {parameters:,} parameters in {len(tensors.shape_of)} tensors ({kinds})",
        "  " + ", ".join(f"{kind} {size / 2**20:,.1f} MiB" for kind, size in sizes.items() if size),
    ]
    if manifest is None:
        return "\n".join([*lines, "  no manifest.json: another Trainer wrote it, and nothing tells whether its files are whole"])
    axes = ", ".join(f"{axis} {size}" for axis, size in manifest.topology.items() if size > 1) or "one process"
    wrong = [name for name, record in manifest.files.items() if _size(directory / name) != record.size]
    state = f"{len(wrong)} files missing or of another size, such as {wrong[0]}" if wrong else "all there, in the recorded sizes"
    return "\n".join(
        [
            *lines,
            f"  saved {manifest.saved_at} by {manifest.world_size} ranks ({axes})",
            f"  {len(manifest.files)} files: {state}",
        ]
    )


def verify(directory: Path) -> int:
    """Read every file and compare it with the manifest."""
    manifest = read_manifest(directory)
    if manifest is None:
        raise ValueError(f"{directory} has no manifest.json: it is unfinished, or another Trainer wrote it")
    if problems := damage(directory, manifest.files):
        print("\n".join(problems), file=sys.stderr)
        return 1
    print(f"{directory}: {len(manifest.files)} files are as they were written")
    return 0


def export_hf(directory: Path, out: Path, config_file: str | None) -> int:
    """Write the weights for transformers, as the run would have with ``save_hf_weights``."""
    manifest = read_manifest(directory)
    if config_file is not None:
        config = load_config(["--config", config_file])
    elif manifest is not None:
        config = config_from_dict(manifest.config, source=str(directory / "manifest.json"))
    else:
        raise ValueError(f"{directory} has no manifest.json, which would tell the model: give the run's --config FILE")
    if out.exists():
        raise ValueError(f"{out} exists already")
    models.build(config).export_hf(ChunkedTensors(directory), out)
    print(f"wrote {out}")
    return 0


def diff(a: Path, b: Path) -> int:
    """Print the largest absolute difference of every parameter that differs, and its part of the parameter's largest value."""
    left, right = _tensors(a), _tensors(b)
    for name in sorted(left.keys() ^ right.keys()):
        print(f"{name}: only in {a if name in left else b}")
    rows, same = [], 0
    for name in (name for name in left if name in right):
        (shape, read), (other_shape, read_other) = left[name], right[name]
        if shape != other_shape:
            print(f"{name}: {list(shape)} in {a}, {list(other_shape)} in {b}")
            continue
        x, y = read(), read_other()
        same_bits = torch.equal(x, y)
        x, y = x.double(), y.double()
        difference = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs())
        largest = 0.0 if same_bits or not x.numel() else float(difference.max())
        if largest == 0.0:
            same += 1
        else:
            rows.append((largest, largest / max(float(x.abs().max()), 1e-30), name))
    width = max((len(name) for _, _, name in rows), default=0)
    for largest, relative, name in sorted(rows, reverse=True):
        print(f"{name:{width}}  {largest:.3e}  relative {relative:.3e}")
    print(f"{same} parameters are equal, {len(left.keys() | right.keys()) - same} differ")
    return 0 if same == len(left.keys() | right.keys()) else 1


def _tensors(directory: Path) -> Tensors:
    """The parameters of a checkpoint, or of a directory of safetensors files."""
    if is_checkpoint(directory):
        chunked = ChunkedTensors(directory)
        return {name: (shape, lambda name=name: chunked.read(name)) for name, shape in chunked.shape_of.items()}
    tensors: Tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            shape = tuple(file.get_slice(name).get_shape())
            tensors[name] = (shape, lambda file=file, name=name: file.get_tensor(name))
    if not tensors:
        raise ValueError(f"{directory} holds neither a checkpoint nor safetensors files")
    return tensors


def _kind(path: Path) -> str:
    if path.parts[0] == "hf_ckpt":
        return "hf_ckpt"
    if path.suffix == ".safetensors":
        return "model"
    return "optimizer" if path.name.startswith("optimizer_rank") else "other"


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
