"""Operations that the vision tower and the text decoder share: norms, rotary application, attention over segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

Params = Mapping[str, Any]


def linear(params: Params, x: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T (+ bias)``."""
    return F.linear(x, params["weight"], params.get("bias"))


def rms_norm(weight: torch.Tensor, x: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dim: statistics in fp32, the gain applied in x's dtype (as the reference)."""
    if x.dtype == torch.float32 and weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    # torch's own would round once, after the gain.
    x_fp32 = x.float()
    normed = x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def layer_norm(params: Params, x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Layer norm over the last dim; the tower's eps is fixed at 1e-6."""
    return F.layer_norm(x, x.shape[-1:], params["weight"], params["bias"], eps)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + H/2) of each head.

    x (rows, heads, H); cos, sin (rows, 1, H/2). Computed in cos' dtype, returned in x's.
    """
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Segments(NamedTuple):
    """Rows packed end to end, cut into segments that attend only to themselves: a text sample, a frame.

    ``pad`` (count, longest) and ``unpad`` (rows) index between the packed rows and a right-padded rectangle; both None where
    all segments are equally long. ``keep`` (count, 1, 1, longest) marks the rectangle's real keys.
    """

    count: int
    pad: torch.Tensor | None = None
    unpad: torch.Tensor | None = None
    keep: torch.Tensor | None = None


def segments(lengths: Sequence[int], device: torch.device | str = "cpu") -> Segments:
    """Describe consecutive segments of the given lengths."""
    count, longest = len(lengths), max(lengths, default=0)
    if all(length == longest for length in lengths):
        return Segments(count)
    sizes = torch.tensor(lengths)
    column = torch.arange(longest)
    keep = column < sizes[:, None]
    starts = (sizes.cumsum(0) - sizes)[:, None]
    pad = torch.where(keep, starts + column, 0)
    unpad = keep.flatten().nonzero().flatten()
    return Segments(count, pad.to(device), unpad.to(device), keep[:, None, None, :].to(device))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seg: Segments, *, causal: bool) -> torch.Tensor:
    """Scaled dot-product attention inside each segment, (rows, heads, H) each; k and v may have fewer heads (GQA).

    Returns (rows, heads * H). Causal needs no mask for a padded rectangle: its padding stands after every real query.
    """
    rows, num_heads, head_dim = q.shape
    if rows == 0:
        return q.flatten(1)
    # A size comes from a tensor where it can: of one that is only a number, torch loses track in the programs that it keeps.
    shape = (seg.count, -1) if seg.pad is None else seg.pad.shape
    if seg.pad is not None:
        q, k, v = (x.index_select(0, seg.pad.flatten()) for x in (q, k, v))
    q, k, v = (x.view(*shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    mask = None if causal else seg.keep
    gqa = k.shape[1] != num_heads
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa)
    out = out.transpose(1, 2).reshape(-1, num_heads * head_dim)
    return out if seg.unpad is None else out.index_select(0, seg.unpad)
