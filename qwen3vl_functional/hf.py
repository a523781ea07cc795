"""The hub's directory layout: read weights leaf by leaf, write them back bit-equal.

Expert tensors lie on the hub as this package keeps them, ``(experts, in, out)``. transformers 5 saves them transposed; a file's
layout is told by its shape, and never guessed where the shape fits both ways.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tensordict import TensorDict

from .config import Qwen3VLMoeConfig
from .model import param_specs
from .sharding import Placement
from .spec import ParamSpec, leaves, to_tensordict

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
# What travels with the weights: tokenizer, processor, chat template and generation settings are all of these kinds.
COMPANION_SUFFIXES = {".json", ".txt", ".jinja", ".model"}

ExpertLayout = Literal["hub", "transposed"]


class TensorSource(Protocol):
    """Named tensors in a directory, whatever the files there are: shapes and dtypes at once, values part by part."""

    @property
    def directory(self) -> Path: ...

    @property
    def shape_of(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def dtype_of(self) -> Mapping[str, torch.dtype]: ...

    def read(self, path: str, part: tuple[slice, ...] = (), /) -> torch.Tensor:
        """One tensor, or the ``part`` of it, as its file holds it."""
        ...


class WeightFiles(NamedTuple):
    """A Hugging Face directory: which file holds each tensor, and the tensors' shapes and dtypes; nothing is read yet."""

    directory: Path
    file_of: dict[str, str]
    shape_of: dict[str, tuple[int, ...]]
    dtype_of: dict[str, torch.dtype]

    def read(self, path: str, part: tuple[slice, ...] = (), /) -> torch.Tensor:
        """One tensor, or the ``part`` of it, as its file holds it."""
        with safe_open(self.directory / self.file_of[path], framework="pt") as file:
            return file.get_slice(path)[part] if part else file.get_tensor(path)


def read_config_dict(directory: str | Path) -> dict[str, Any]:
    """The raw config.json of a directory; ValueError names the path if it is absent or broken."""
    path = Path(directory) / CONFIG
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; expected a Hugging Face qwen3_vl_moe directory") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}, not a mapping")
    return raw


def read_config(directory: str | Path) -> Qwen3VLMoeConfig:
    """The architecture of a Hugging Face directory."""
    return Qwen3VLMoeConfig.from_dict(read_config_dict(directory), source=str(Path(directory) / CONFIG))


def scan_weights(directory: str | Path) -> WeightFiles:
    """Find all tensors of a directory (one file, or shards with an index).

    Raises ValueError for a missing or unreadable file, a tensor in two files, and an index that disagrees with its files.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; expected Hugging Face weights")
    index, indexed = directory / INDEX, None
    if index.exists():
        indexed = _read_index(index)
        names = sorted(set(indexed.values()))
    elif (directory / SINGLE).exists():
        names = [SINGLE]
    else:
        raise ValueError(f"{directory} holds neither {SINGLE} nor {INDEX}")
    files = WeightFiles(directory, {}, {}, {})
    for name in names:
        try:
            with safe_open(directory / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a mapping)
                    if key in files.file_of:
                        raise ValueError(f"{directory}: tensor {key!r} is in both {files.file_of[key]} and {name}")
                    part = file.get_slice(key)
                    files.file_of[key] = name
                    files.shape_of[key] = tuple(part.get_shape())
                    files.dtype_of[key] = _TORCH_DTYPES.get(part.get_dtype(), torch.float32)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{directory / name} cannot be read: {error}") from None
    if indexed is not None and indexed != files.file_of:
        wrong = sorted(key for key in indexed.keys() | files.file_of.keys() if indexed.get(key) != files.file_of.get(key))
        raise ValueError(f"{index} disagrees with the files beside it on {_some(wrong)}")
    return files


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        if all(isinstance(name, str) for name in weight_map.values()):
            return weight_map
        problem = "weight_map does not name files"
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        problem = repr(error)
    raise ValueError(f"{path} is not an index of weights: {problem}")


def load_params(
    source: str | Path | TensorSource,
    cfg: Qwen3VLMoeConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    expert_layout: ExpertLayout | None = None,
    placement: Placement = Placement(),
) -> TensorDict:
    """Read all weights of a Hugging Face directory, or of another source, one leaf at a time; a rank reads only its slices.

    ``expert_layout`` is needed only where a file's expert shapes fit both layouts and its config.json shows that
    transformers 5 wrote it. Raises ValueError naming every missing, unexpected or mis-shaped tensor.
    """
    files = scan_weights(source) if isinstance(source, (str, Path)) else source
    specs = dict(leaves(param_specs(cfg)))
    _check_names(files, specs, cfg)
    flat: dict[str, torch.Tensor] = {}
    for path, spec in specs.items():
        transposed = _is_transposed(files, path, spec, expert_layout)
        part = placement.part(path)
        leaf = files.read(path, (part[0], part[2], part[1]) if transposed and part else part)
        # copy=True: a tensor that safetensors mapped from the file must not be updated in place.
        local = (leaf.transpose(1, 2) if transposed else leaf).to(
            device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format
        )
        flat[path] = placement.wrap(path, local)
    return to_tensordict(flat)


def _check_names(files: TensorSource, specs: Mapping[str, ParamSpec], cfg: Qwen3VLMoeConfig) -> None:
    missing = sorted(specs.keys() - files.shape_of.keys())
    unexpected = sorted(files.shape_of.keys() - specs.keys())
    if cfg.tie_word_embeddings and "lm_head.weight" in unexpected and not missing:
        embedding = files.read("model.language_model.embed_tokens.weight")
        if torch.equal(embedding, files.read("lm_head.weight")):
            unexpected.remove("lm_head.weight")
    if cfg.vision is None:  # a text-only run takes the decoder of a vision-language checkpoint
        unexpected = [path for path in unexpected if not path.startswith("model.visual.")]
    deeper = "model.language_model.layers."  # a shallower run takes the first layers of a deeper checkpoint
    unexpected = [
        path
        for path in unexpected
        if not (path.startswith(deeper) and int(path.removeprefix(deeper).split(".")[0]) >= cfg.text.num_hidden_layers)
    ]
    problems = [f"missing {_some(missing)}"] if missing else []
    problems += [f"unexpected {_some(unexpected)}"] if unexpected else []
    if problems:
        raise ValueError(f"{files.directory} does not hold this model's weights: {'; '.join(problems)}")


def _is_transposed(files: TensorSource, path: str, spec: ParamSpec, layout: ExpertLayout | None) -> bool:
    """Whether the file holds a leaf with its last two dims exchanged (experts only)."""
    found, expected = files.shape_of[path], spec.shape
    if spec.dims[0] != "experts":
        if found != expected:
            raise ValueError(f"{files.directory}: {path} has shape {list(found)}, the config asks for {list(expected)}")
        return False
    swapped = (expected[0], expected[2], expected[1])
    if found not in (expected, swapped):
        raise ValueError(
            f"{files.directory}: {path} has shape {list(found)}, the config asks for {list(expected)} "
            f"(or {list(swapped)}, as transformers 5 writes it)"
        )
    if expected != swapped:
        actual = "hub" if found == expected else "transposed"
        if layout is not None and layout != actual:
            raise ValueError(
                f"{files.directory}: {path} has shape {list(found)}, which is the {actual!r} layout, "
                f"but expert_layout={layout!r} was given"
            )
        return actual == "transposed"
    if layout is None and _written_by_transformers_5(files.directory):
        raise ValueError(
            f"{files.directory}: {path} is square {list(found)} and its config.json was written by "
            "transformers 5, which saves experts transposed: say which it is, "
            "expert_layout='hub' or 'transposed'"
        )
    return layout == "transposed"


def save_params(
    params: TensorDict | TensorSource,
    cfg: Qwen3VLMoeConfig,
    directory: str | Path,
    *,
    source: str | Path | None = None,
    companions: Sequence[str | Path] = (),
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a Hugging Face directory that transformers loads; it appears whole or not at all.

    ``params``: whole leaves (``unshard`` a placed tree first), or tensors that lie in files, which are read one by one.

    ``source``: the directory the weights came from. Its dtypes, its division into shards and its config.json are kept,
    so an untouched model comes back bit-equal; a tower that a text-only run left out comes back too. Otherwise tensors
    are written in ``dtype`` (None: as they are), in shards of at most ``max_shard_bytes``. Tokenizer, processor and
    generation files are copied from ``source`` and ``companions``. Raises ValueError where the experts are square:
    transformers 5 would load them transposed.
    """
    directory = Path(directory)
    refuse_square_experts(cfg)
    specs = dict(leaves(param_specs(cfg)))
    for origin in (source, *companions):
        if origin is not None and not Path(origin).is_dir():
            raise ValueError(f"{origin} is not a directory; its tokenizer and processor files cannot be copied")
    held = dict(leaves(params)) if isinstance(params, TensorDict) else None
    read: Callable[[str], torch.Tensor] = held.__getitem__ if held is not None else params.read
    dtypes = {path: leaf.dtype for path, leaf in held.items()} if held is not None else dict(params.dtype_of)
    if lost := specs.keys() - dtypes.keys():
        raise ValueError(f"the weights to export lack {_some(sorted(lost))}")
    readers = dict.fromkeys(specs, read)
    dtypes = {path: dtype or dtypes[path] for path in specs}
    sizes = {path: spec.numel for path, spec in specs.items()}
    files = scan_weights(source) if source and _has_weights(source) else None
    if files is not None:
        if cfg.vision is None:  # trained as text only: the tower goes back as it came
            tower = [path for path in files.file_of if path.startswith("model.visual.")]
            readers |= dict.fromkeys(tower, files.read)
            sizes |= {path: math.prod(files.shape_of[path]) for path in tower}
            cfg = dataclasses.replace(cfg, vision=read_config(files.directory).vision)
        dtypes |= {path: files.dtype_of[path] for path in readers if path in files.dtype_of}
    sizes = {path: size * dtypes[path].itemsize for path, size in sizes.items()}
    same_tensors = files is not None and files.file_of.keys() == readers.keys()
    file_of = files.file_of if files is not None and same_tensors else _plan_shards(sizes, max_shard_bytes)

    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in sorted(set(file_of.values())):
        shard = {
            path: read(path).detach().to(device="cpu", dtype=dtypes[path]).contiguous()
            for path, read in readers.items()
            if file_of[path] == name
        }
        (partial / name).touch()
        mode = (partial / name).stat().st_mode  # safetensors would leave the file to its owner alone
        save_file(shard, partial / name, metadata={"format": "pt"})
        (partial / name).chmod(mode)
    for origin in [*([source] if source else []), *companions]:
        _copy_companions(Path(origin), partial)
    _write_config(cfg, partial / CONFIG, source, next(iter(dtypes.values())))
    if set(file_of.values()) != {SINGLE}:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(file_of.items()))}
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    _replace_directory(partial, directory)
    return directory


def refuse_square_experts(cfg: Qwen3VLMoeConfig) -> None:
    """Raise ValueError for a model that cannot be exported, because its experts fit both layouts."""
    for path, spec in leaves(param_specs(cfg)):
        if spec.dims[0] == "experts" and spec.shape[1] == spec.shape[2]:
            raise ValueError(
                f"{path} is square {list(spec.shape)}: transformers 5 takes the layout of experts from their "
                "shape and would silently load this export transposed; it is not written"
            )


def _plan_shards(sizes: Mapping[str, int], max_shard_bytes: int) -> dict[str, str]:
    """Fill shards in the tree's order; one that fits is the single file."""
    shard_of, shard, filled = {}, 1, 0
    for path, size in sizes.items():
        if filled and filled + size > max_shard_bytes:
            shard, filled = shard + 1, 0
        shard_of[path], filled = shard, filled + size
    if shard == 1:
        return dict.fromkeys(sizes, SINGLE)
    return {path: f"model-{number:05d}-of-{shard:05d}.safetensors" for path, number in shard_of.items()}


def _write_config(cfg: Qwen3VLMoeConfig, path: Path, source: str | Path | None, dtype: torch.dtype) -> None:
    if source and (Path(source) / CONFIG).exists():
        raw = read_config_dict(source)
        # transformers 4 knows the field only as num_experts, so a file that lacks it is written anew.
        if Qwen3VLMoeConfig.from_dict(raw) == cfg and "num_experts" in raw.get("text_config", {}):
            shutil.copyfile(Path(source) / CONFIG, path)
            return
    name = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps({**cfg.to_dict(), "dtype": name}, indent=2) + "\n")


def _copy_companions(origin: Path, target: Path) -> None:
    for file in sorted(origin.iterdir()):
        if file.suffix in COMPANION_SUFFIXES and file.name not in (CONFIG, INDEX) and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)


def _replace_directory(new: Path, target: Path) -> None:
    """Move ``new`` to ``target``; what stood there is removed only after the new one is in place."""
    if not target.exists():
        os.replace(new, target)
        return
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    os.replace(target, old)
    os.replace(new, target)
    shutil.rmtree(old)


def _written_by_transformers_5(directory: Path) -> bool:
    """Whether a config.json, where there is one, has the form that transformers 5 gives it."""
    return (directory / CONFIG).exists() and "num_local_experts" in read_config_dict(directory).get("text_config", {})


def _has_weights(directory: str | Path) -> bool:
    return any((Path(directory) / name).exists() for name in (SINGLE, INDEX))


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{len(names)} tensors ({shown}{', ...' if len(names) > 5 else ''})"


_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
