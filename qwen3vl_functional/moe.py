"""The mixture of experts: route, sort rows by expert, run the experts as grouped matmuls, combine."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .collectives import Groups, all_reduce, axis_rank, replicated_to_varying
from .config import TextConfig
from .layers import Params
from .spec import SpecTree, weight


def moe_specs(cfg: TextConfig) -> SpecTree:
    """Router and experts of one layer; expert tensors lie as on the hub, ``x @ W``, gate half first."""
    std, embed, width = cfg.initializer_range, cfg.hidden_size, cfg.moe_intermediate_size
    return {
        "experts": {
            "gate_up_proj": weight((cfg.num_experts, embed, 2 * width), ("experts", "embed", "gate_up"), std),
            "down_proj": weight((cfg.num_experts, width, embed), ("experts", "expert_mlp", "embed"), std),
        },
        "gate": {"weight": weight((cfg.num_experts, embed), ("router", "embed"), std)},
    }


class Routing(NamedTuple):
    """What the router decides, and what the load balance needs of it."""

    experts_TK: torch.Tensor
    weights_TK: torch.Tensor  # in the activations' dtype, sum to 1 over K
    probs_TE: torch.Tensor  # fp32
    count_E: torch.Tensor  # int64: tokens that chose each expert

    @property
    def prob_sum_E(self) -> torch.Tensor:
        """Probability of each expert, summed over tokens; fp32."""
        return self.probs_TE.sum(0)


def moe(params: Params, x_TD: torch.Tensor, cfg: TextConfig, groups: Groups) -> tuple[torch.Tensor, Routing]:
    """Send each token through its K experts; under tp each rank runs its own experts and the sums are added up."""
    routing = route(params["gate"]["weight"], x_TD, cfg)
    # The router runs alike on every tp rank; only what the experts do with its weights differs by rank.
    x_TD = replicated_to_varying(x_TD, groups.tp)
    weights_TK = replicated_to_varying(routing.weights_TK, groups.tp)
    gate_up, down = params["experts"]["gate_up_proj"], params["experts"]["down_proj"]
    first = axis_rank(groups.tp) * gate_up.shape[0]
    y_TD = run_experts(gate_up, down, x_TD, routing.experts_TK, weights_TK, first=first, count_E=routing.count_E)
    return all_reduce(y_TD, groups.tp), routing


def route(weight_ED: torch.Tensor, x_TD: torch.Tensor, cfg: TextConfig) -> Routing:
    """Softmax over all experts in fp32, then the top K, renormalised to sum to 1."""
    probs_TE = F.linear(x_TD, weight_ED).softmax(-1, dtype=torch.float32)
    weights_TK, experts_TK = probs_TE.topk(cfg.num_experts_per_tok)
    weights_TK = (weights_TK / weights_TK.sum(-1, keepdim=True)).to(x_TD.dtype)
    chosen = experts_TK.flatten()
    # bincount would wait for the device, to learn the largest.
    count_E = chosen.new_zeros(cfg.num_experts).scatter_add(0, chosen, torch.ones_like(chosen))
    return Routing(experts_TK, weights_TK, probs_TE, count_E)


def run_experts(
    gate_up_EDF: torch.Tensor,
    down_EFD: torch.Tensor,
    x_TD: torch.Tensor,
    experts_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    *,
    first: int,
    count_E: torch.Tensor,
) -> torch.Tensor:
    """Weighted sum over the local experts ``first`` .. ``first + len(gate_up)`` of each token's expert outputs (T, D)."""
    rows = sort_rows(experts_TK, count_E, first, len(gate_up_EDF), multiple=_row_multiple(x_TD))
    token_R = rows.slot_R // experts_TK.shape[1]
    # index_select rather than indexing: its backward is one index_add.
    ends_E = rows.count_E.cumsum(0, dtype=torch.int32)
    gate_RF, up_RF = grouped_linear(x_TD.index_select(0, token_R), gate_up_EDF, ends_E).chunk(2, dim=-1)
    y_RD = grouped_linear(F.silu(gate_RF) * up_RF, down_EFD, ends_E)
    weight_R = weights_TK.flatten().index_select(0, rows.slot_R)
    if rows.keep_R is not None:
        weight_R = weight_R * rows.keep_R
    return torch.zeros_like(x_TD).index_add(0, token_R, y_RD * weight_R[:, None])


class Rows(NamedTuple):
    """(token, slot) pairs sorted by expert, ``count_E`` rows each; ``keep_R`` is False for rows that only fill up."""

    slot_R: torch.Tensor  # index into the flattened (T, K)
    count_E: torch.Tensor
    keep_R: torch.Tensor | None


def sort_rows(experts_TK: torch.Tensor, count_E: torch.Tensor, first: int, local: int, *, multiple: int) -> Rows:
    """The rows of experts ``first`` .. ``first + local``, each expert's count rounded up to a ``multiple``."""
    slot_R = experts_TK.flatten().argsort(stable=True)
    if local < len(count_E):  # a contiguous run
        begin, count_E = int(count_E[:first].sum()), count_E[first : first + local]
        slot_R = slot_R[begin : begin + int(count_E.sum())]
    if multiple == 1:
        return Rows(slot_R, count_E, None)
    fill_E = -count_E % multiple
    shift_E = fill_E.cumsum(0) - fill_E
    place_R = torch.arange(len(slot_R), device=slot_R.device) + shift_E.repeat_interleave(count_E)
    total = len(slot_R) + int(fill_E.sum())
    keep_R = torch.zeros(total, dtype=torch.bool, device=slot_R.device)
    return Rows(slot_R.new_zeros(total).index_copy(0, place_R, slot_R), count_E + fill_E, keep_R.index_fill(0, place_R, True))


def _row_multiple(x: torch.Tensor) -> int:
    """A CPU compiles a matmul in reduced precision anew for every number of rows that it meets: let it meet few."""
    if torch.compiler.is_compiling():  # to count the rows that fill up is to read the device
        return 1
    return 32 if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) else 1


def grouped_linear(x_RD: torch.Tensor, weight_EDF: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """``x[rows of expert e] @ weight[e]`` for rows sorted by expert, which end at ``ends_E`` (int32); experts may be empty."""
    if _can_group(x_RD, weight_EDF):
        if torch.compiler.is_compiling() and x_RD.dtype != torch.bfloat16:
            return _GroupedMM.apply(x_RD, weight_EDF, ends_E)
        return F.grouped_mm(x_RD, weight_EDF, offs=ends_E)
    # unbind once: indexing weight[e] would write a gradient the size of all experts for each of them.
    rows = x_RD.tensor_split(_values(ends_E[:-1]))
    return torch.cat([x @ w for x, w in zip(rows, weight_EDF.unbind(0), strict=True)])


torch.library.define("qwen3vl_functional::grouped_mm", "(Tensor a, Tensor b, Tensor ends_E) -> Tensor")


@torch.library.impl("qwen3vl_functional::grouped_mm", "CompositeExplicitAutograd")
def _(a: torch.Tensor, b: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(a, b, offs=ends_E)


@torch.library.register_fake("qwen3vl_functional::grouped_mm")
def _(a: torch.Tensor, b: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    groups = (len(ends_E),) if b.dim() == 2 else ()  # (rows, D) x (E, D, F), or (D, rows) x (rows, F) cut into E products
    return a.new_empty(*groups, a.shape[0], b.shape[-1])


def _opaque_grouped_mm(a: torch.Tensor, b: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """torch's grouped matmul, whole for compilers: in other dtypes than bf16 it runs, but cannot be traced."""
    return torch.ops.qwen3vl_functional.grouped_mm(a, b, ends_E)


class _GroupedMM(torch.autograd.Function):
    """The grouped matmul with its derivative, in a form that torch.func can take inside a program too."""

    @staticmethod
    def forward(x_RD: torch.Tensor, weight_EDF: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        return _opaque_grouped_mm(x_RD, weight_EDF, ends_E)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_RF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # pyright: ignore
        x_RD, weight_EDF, ends_E = ctx.saved_tensors
        grad_RF = grad_RF.contiguous()
        x_grad = _opaque_grouped_mm(grad_RF, weight_EDF.transpose(1, 2), ends_E)
        return x_grad, _opaque_grouped_mm(x_RD.T, grad_RF, ends_E), None


def _values(indices: torch.Tensor) -> list[int]:
    """An integer tensor as a list. torch 2.6's ``tolist`` does not see through the wrappers of torch.func."""
    internals: Any = torch._C
    while internals._functorch.is_functorch_wrapped_tensor(indices):
        indices = internals._functorch.get_unwrapped(indices)
    with internals._DisableFuncTorch():
        return indices.tolist()


def can_compile_experts() -> bool:
    """Whether torch.compile may see the experts: as a loop, without the grouped kernel, torch 2.6 computes wrong losses."""
    return hasattr(F, "grouped_mm")


def _can_group(x_RD: torch.Tensor, weight_EDF: torch.Tensor) -> bool:
    """Whether torch has the grouped kernel and takes these operands (rows of whole 16 bytes; no fp64, no empty input)."""
    if not hasattr(F, "grouped_mm") or x_RD.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    aligned = all(size * x_RD.element_size() % 16 == 0 for size in weight_EDF.shape[1:])
    return aligned and x_RD.shape[0] > 0


def load_balance(prob_sum_E: torch.Tensor, count_E: torch.Tensor, rows: int) -> torch.Tensor:
    """Switch-style balance ``E * sum_e f_e p_e``, pooled over all layers and tokens; equals K when balanced.

    ``prob_sum_E`` and ``count_E`` are sums over ``rows`` = tokens x layers; gradients flow through the probabilities.
    """
    return len(count_E) * (count_E.to(prob_sum_E.dtype) * prob_sum_E).sum() / max(rows, 1) ** 2
