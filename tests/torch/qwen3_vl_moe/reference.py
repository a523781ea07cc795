"""The reference that parity is measured against: transformers' eager model, its weights as our tree, and batches for both."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import vjp
from transformers import Qwen3VLMoeConfig as ReferenceConfig
from transformers import Qwen3VLMoeForConditionalGeneration

from qwen3vl_functional import Qwen3VLMoeConfig
from qwen3vl_functional.positions import IGNORE_INDEX, Batch
from qwen3vl_functional.spec import leaves, unflatten

TINY = Path(__file__).with_name("tiny_config.json")

# Relative to the largest magnitude of what is compared. Both sides compute in fp32 (unit roundoff 6e-8) but add in another
# order: a rung sums some hundred terms a few times over.
RUNG_TOLERANCE = 1e-5


def tiny_config(*, tied: bool = False, **text: Any) -> Qwen3VLMoeConfig:
    """The tiny config, all of whose sizes differ, with fields of its text part replaced."""
    cfg = Qwen3VLMoeConfig.from_dict(json.loads(TINY.read_text()))
    return dataclasses.replace(cfg, text=dataclasses.replace(cfg.text, **text), tie_word_embeddings=tied)


def build_reference(cfg: Qwen3VLMoeConfig, *, seed: int = 0) -> Qwen3VLMoeForConditionalGeneration:
    """A random fp32 model in which every parameter matters: gains away from 1, biases away from 0, matrices at unit gain."""
    config = ReferenceConfig.from_dict(cfg.to_dict())
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = Qwen3VLMoeForConditionalGeneration(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(0.3 * noise + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
            elif "embed" in name and parameter.dim() == 2:
                parameter.copy_(0.5 * noise)
            else:  # fan-in is all that follows the output dim; experts have their own dim before it
                fan_in = parameter[0].numel() if "experts" not in name else parameter.shape[-1]
                parameter.copy_(noise / fan_in**0.5)
    return model


def to_ours(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A parameter or its gradient in our layout: transformers 5 keeps expert matrices (experts, out, in)."""
    is_expert = name.rpartition(".")[2] in ("gate_up_proj", "down_proj") and tensor.dim() == 3
    return tensor.detach().transpose(1, 2).contiguous() if is_expert else tensor.detach().clone()


def tree_of(module: nn.Module) -> dict[str, Any]:
    """A (sub)module's parameters as our tree, copied."""
    return unflatten({name: to_ours(name, parameter) for name, parameter in module.named_parameters()})


def relative_error(ours: torch.Tensor, theirs: torch.Tensor, *, scale: float | None = None) -> float:
    """Largest difference over the largest magnitude of the reference (or over ``scale``)."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    if ours.numel() == 0:
        return 0.0
    scale = theirs.abs().max().item() if scale is None else scale
    error = (ours - theirs).abs().max().item()
    return error / scale if scale else (0.0 if error == 0 else float("inf"))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float, what: str) -> None:
    error = relative_error(ours, theirs)
    assert error <= tolerance, f"{what}: relative error {error:.2e} exceeds {tolerance:.0e}"


def check_rung(
    module: nn.Module,
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    *inputs: torch.Tensor,
    tolerance: float = RUNG_TOLERANCE,
    seed: int = 7,
) -> dict[str, torch.Tensor]:
    """Compare ``ours(tree, *inputs)`` with ``theirs(*inputs)``, values and gradients; returns our parameter gradients.

    Either function returns a tensor or a tuple of tensors. A random cotangent is pulled back by torch.func.vjp on our side
    and by autograd on theirs, to every parameter of ``module`` and to every floating input.
    """
    names = [name for name, _ in module.named_parameters()]
    flat = dict(leaves(tree_of(module)))
    given = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    floating = [i for i, x in enumerate(given) if x.requires_grad]

    def pure(params: Mapping[str, torch.Tensor], xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        arguments = list(inputs)
        for i, x in zip(floating, xs, strict=True):
            arguments[i] = x
        return _tuple(ours(unflatten(params), *arguments))

    outputs, pullback = vjp(pure, flat, [inputs[i].detach() for i in floating])
    expected = _tuple(theirs(*given))
    generator = torch.Generator().manual_seed(seed)
    cotangents = tuple(torch.randn(output.shape, generator=generator) for output in expected)
    param_grads, input_grads = pullback(cotangents, retain_graph=False, create_graph=False)
    sources = [*module.parameters(), *(given[i] for i in floating)]
    reference_grads = torch.autograd.grad(expected, sources, cotangents, allow_unused=True)

    for i, (output, target) in enumerate(zip(outputs, expected, strict=True)):
        assert_close(output, target.detach(), tolerance, f"output {i}")
    for name, grad in zip(names, reference_grads[: len(names)], strict=True):
        grad = torch.zeros_like(flat[name]) if grad is None else to_ours(name, grad)
        assert_close(param_grads[name], grad, tolerance, f"gradient of {name}")
    for i, ours_grad, grad in zip(floating, input_grads, reference_grads[len(names) :], strict=True):
        assert_close(ours_grad, torch.zeros_like(ours_grad) if grad is None else grad, tolerance, f"gradient of input {i}")
    return param_grads


def _tuple(outputs: Any) -> tuple[torch.Tensor, ...]:
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


# A sample is a list of parts: a number of text tokens, or a kind and its (frames, height, width) grid in patches.
# "image" and "video" stand between vision_start and vision_end, a video's frames each after its timestamp;
# "bare image" has nothing around it.
Part = int | tuple[str, tuple[int, int, int]]


def make_batch(
    cfg: Qwen3VLMoeConfig, samples: Sequence[Sequence[Part]], *, padding_side: str = "right", seed: int = 0
) -> dict[str, torch.Tensor]:
    """A Hugging Face batch of random ids and pixels, with labels on two thirds of the text.

    The first token of a sample is no target: nothing stands before it (under left padding the reference would predict it
    from a padding token). Padding carries random ids and no label.
    """
    assert cfg.vision is not None
    generator = torch.Generator().manual_seed(seed)
    first_special = min(cfg.image_token_id, cfg.video_token_id, cfg.vision_start_token_id, cfg.vision_end_token_id)
    grids: dict[str, list[tuple[int, int, int]]] = {"image": [], "video": []}

    def text(n: int) -> list[int]:
        return torch.randint(first_special, (n,), generator=generator).tolist()

    rows: list[list[int]] = []
    for sample in samples:
        row: list[int] = []
        for part in sample:
            if isinstance(part, int):
                row += text(part)
                continue
            kind, (t, h, w) = part
            grids["video" if "video" in kind else "image"].append((t, h, w))
            token = cfg.video_token_id if "video" in kind else cfg.image_token_id
            merged = h * w // cfg.vision.spatial_merge_size**2
            if kind.startswith("bare"):
                row += [token] * (t * merged)
            elif kind == "image":
                row += [cfg.vision_start_token_id, *[token] * (t * merged), cfg.vision_end_token_id]
            else:
                for _ in range(t):
                    row += [*text(3), cfg.vision_start_token_id, *[token] * merged, cfg.vision_end_token_id]
        rows.append(row)

    length = max(len(row) for row in rows)
    ids = torch.randint(first_special, (len(rows), length), generator=generator)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, IGNORE_INDEX)
    for b, row in enumerate(rows):
        begin = 0 if padding_side == "right" else length - len(row)
        part = slice(begin, begin + len(row))
        ids[b, part], mask[b, part] = torch.tensor(row), 1
        chosen = (torch.rand(len(row), generator=generator) < 0.67) & (ids[b, part] < first_special)
        chosen[0] = False
        labels[b, part] = torch.where(chosen, ids[b, part], IGNORE_INDEX)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    batch["mm_token_type_ids"] = (ids == cfg.image_token_id).long() + 2 * (ids == cfg.video_token_id).long()
    for kind, key in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if grids[kind]:
            patches = sum(t * h * w for t, h, w in grids[kind])
            batch[key] = torch.randn(patches, cfg.vision.patch_values, generator=generator)
            batch[f"{kind}_grid_thw"] = torch.tensor(grids[kind])
    return batch


def reference_outputs(model: Qwen3VLMoeForConditionalGeneration, batch: Batch) -> Any:
    """One call of the reference, which caches position offsets on itself: they are cleared before and after."""
    model.model.rope_deltas = None
    outputs = model(**batch, use_cache=False)
    model.model.rope_deltas = None
    return outputs


def reference_grads(model: Qwen3VLMoeForConditionalGeneration, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradient of every parameter in our layout; zero where the loss does not reach it."""
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(to_ours(name, parameter)) if grad is None else to_ours(name, grad)
        for (name, parameter), grad in zip(named.items(), grads, strict=True)
    }
