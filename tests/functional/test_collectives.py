"""Two gloo ranks against one: what each collective does to gradients, and the tensor-parallel blocks, every gradient included."""

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from plain import value_and_grad

from qwen3vl_functional import Qwen3VLMoeConfig
from qwen3vl_functional.collectives import (
    Groups,
    all_gather,
    all_reduce,
    all_to_all,
    axis_rank,
    reduce_scatter,
    replicated_to_varying,
)
from qwen3vl_functional.layers import segments
from qwen3vl_functional.moe import moe, moe_specs
from qwen3vl_functional.positions import TextInputs, text_rotary
from qwen3vl_functional.spec import leaves, unflatten
from qwen3vl_functional.text import dense_mlp, dense_mlp_specs, self_attention, self_attention_specs
from qwen3vl_functional.transforms import Block, Loss, LossValue

RANKS = 2
TIME_LIMIT = 60.0
TINY = Path(__file__).parents[1] / "torch" / "qwen3_vl_moe" / "tiny_config.json"
CUT = {"q_heads", "kv_heads", "experts", "mlp"}  # the dims that the tp axis takes
LENGTHS = (4, 1, 6)
TOKENS = sum(LENGTHS)
SENT = ((1, 3), (4, 0))  # rows that each rank sends to each


def tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The same random numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))), dtype=torch.float32)


def shard(leaf: torch.Tensor, dims: tuple[str, ...], rank: int, world: int) -> torch.Tensor:
    for dim, name in enumerate(dims):
        if name in CUT:
            leaf = leaf.chunk(world, dim)[rank]
    return leaf.contiguous()


def text_inputs(cfg: Qwen3VLMoeConfig) -> TextInputs:
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).expand(3, -1)
    cos, sin = text_rotary(positions, cfg.text)
    empty = torch.zeros(0, dtype=torch.int64)
    return TextInputs(empty, cos[:, None], sin[:, None], segments(LENGTHS), empty, empty, empty, empty)


def blocks(cfg: Qwen3VLMoeConfig):
    """Name -> (specs, function of parameters, x and groups)."""
    inputs = text_inputs(cfg)

    def experts(params, x, groups):
        y, routing = moe(params, x, cfg.text, groups)
        return y, routing.prob_sum_E

    return {
        "moe": (moe_specs(cfg.text), experts),
        "self_attention": (self_attention_specs(cfg.text), lambda p, x, g: (self_attention(p, x, inputs, cfg.text, g),)),
        "dense_mlp": (dense_mlp_specs(cfg.text), lambda p, x, g: (dense_mlp(p, x, g),)),
    }


def block_results(group: dist.ProcessGroup | None, world: int) -> dict[str, dict[str, torch.Tensor]]:
    """Outputs and all gradients of each block on this rank."""
    cfg = Qwen3VLMoeConfig.from_dict(json.loads(TINY.read_text()))
    rank, results = axis_rank(group), {}
    for name, (specs, fn) in blocks(cfg).items():
        params = {
            path: shard(tensor(path, spec.shape) * 0.3 + (spec.init == "ones"), spec.dims, rank, world)
            for path, spec in leaves(specs)
        }
        x = tensor("x", (TOKENS, cfg.text.hidden_size))
        outputs, pullback = torch.func.vjp(lambda flat, x, fn=fn: fn(unflatten(flat), x, Groups(tp=group)), params, x)
        cotangents = tuple(tensor(f"cotangent{i}", output.shape) for i, output in enumerate(outputs))
        param_grads, x_grad = pullback(cotangents, retain_graph=False, create_graph=False)
        results[name] = {f"output.{i}": output for i, output in enumerate(outputs)} | {"x": x_grad, **param_grads}
    return results


def collective_results(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Values and gradients of each collective, with tensors that differ by rank."""
    rank = dist.get_rank(group)
    x, results = tensor("x", (4, 2)) + rank, {}
    sent, received = SENT[rank], [SENT[other][rank] for other in range(RANKS)]

    def exchange(x, group):
        return all_to_all(x, group, sent=sent, received=received)

    for fn in (replicated_to_varying, all_reduce, all_gather, reduce_scatter, exchange):
        out, pullback = torch.func.vjp(lambda x, fn=fn: fn(x, group), x)
        cotangent = tensor("c", tuple(out.shape)) * (1 + rank)
        results[fn.__name__], results[f"{fn.__name__}.grad"] = out, pullback(cotangent)[0]
    results["x"] = x  # the collectives work on copies
    return results


def chain_results(group: dist.ProcessGroup | None, world: int, *, remat: bool) -> dict[str, torch.Tensor]:
    """Gradients of two MLPs on end through the chain of vjps."""
    cfg = Qwen3VLMoeConfig.from_dict(json.loads(TINY.read_text()))
    specs = dense_mlp_specs(cfg.text)
    flat = {
        f"{i}.{path}": shard(tensor(f"{i}.{path}", spec.shape) * 0.3, spec.dims, axis_rank(group), world)
        for i in range(2)
        for path, spec in leaves(specs)
    }
    tree = {**unflatten(flat), "x": tensor("x", (TOKENS, cfg.text.hidden_size))}

    def mlp(params, x):
        return (x + dense_mlp(params, x, Groups(tp=group)),)

    chain = [
        Block(("x",), (), ("text",), lambda x: (x * 1.0,)),
        *(Block((str(i),), ("text",), ("text",), mlp, remat) for i in range(2)),
    ]
    end = Loss((), ("text",), lambda _, v: LossValue(v["text"].square().sum() / 2, {}, {}, {"text": v["text"].clone()}))
    grads: dict[str, torch.Tensor] = {}
    loss = value_and_grad(chain, end, tree, {*flat, "x"}, grads).loss
    return {"loss": loss, **grads}


def worker(rank: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    results = {
        "rank": axis_rank(group),
        "blocks": block_results(group, RANKS),
        "collectives": collective_results(group),
        "chain": chain_results(group, RANKS, remat=False),
        "remat": chain_results(group, RANKS, remat=True),
    }
    torch.save(results, f"{out}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two processes computed."""
    directory = tmp_path_factory.mktemp("gloo")
    context = mp.spawn(worker, args=(str(directory / "store"), str(directory / "out")), nprocs=RANKS, join=False)
    deadline = time.monotonic() + TIME_LIMIT
    while not context.join(timeout=1.0):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail(f"the ranks hang: not done within {TIME_LIMIT} s")
    return [torch.load(directory / f"out.{rank}") for rank in range(RANKS)]


def test_without_a_group_nothing_happens():
    x = torch.ones(2)
    assert all(fn(x, None) is x for fn in (replicated_to_varying, all_reduce, all_gather, reduce_scatter))
    assert all_to_all(x, None, sent=[2], received=[2]) is x and axis_rank(None) == 0


def test_backward_of_collectives(ranks):
    """Each backward is the transpose of its forward, taken over all ranks together."""
    x = [tensor("x", (4, 2)) + rank for rank in range(RANKS)]
    for rank, results in enumerate(ranks):
        ours = results["collectives"]
        assert results["rank"] == rank and torch.equal(ours["x"], x[rank])

        def cotangents(rows):
            return [tensor("c", (rows, 2)) * (1 + other) for other in range(RANKS)]

        half = slice(2 * rank, 2 * rank + 2)
        torch.testing.assert_close(ours["replicated_to_varying"], x[rank])
        torch.testing.assert_close(ours["replicated_to_varying.grad"], sum(cotangents(4)))
        torch.testing.assert_close(ours["all_reduce"], sum(x))
        torch.testing.assert_close(ours["all_reduce.grad"], cotangents(4)[rank])
        torch.testing.assert_close(ours["all_gather"], torch.cat(x))
        torch.testing.assert_close(ours["all_gather.grad"], sum(cotangents(8))[4 * rank : 4 * rank + 4])
        torch.testing.assert_close(ours["reduce_scatter"], sum(x)[half])
        torch.testing.assert_close(ours["reduce_scatter.grad"], torch.cat(cotangents(2)))


def test_all_to_all_goes_there_and_back(ranks):
    x = [tensor("x", (4, 2)) + rank for rank in range(RANKS)]
    pieces = [rows.split(sent) for rows, sent in zip(x, SENT, strict=True)]
    there = [torch.cat([pieces[sender][rank] for sender in range(RANKS)]) for rank in range(RANKS)]
    cotangents = [tensor("c", tuple(rows.shape)) * (1 + rank) for rank, rows in enumerate(there)]
    arrived = [c.split([SENT[sender][rank] for sender in range(RANKS)]) for rank, c in enumerate(cotangents)]
    for rank, results in enumerate(ranks):
        torch.testing.assert_close(results["collectives"]["exchange"], there[rank])
        back = torch.cat([arrived[receiver][rank] for receiver in range(RANKS)])
        torch.testing.assert_close(results["collectives"]["exchange.grad"], back)


def joined(parts: list[torch.Tensor], dims: tuple[str, ...]) -> torch.Tensor:
    """The whole tensor from the ranks' shards; what no axis cuts must be equal on all ranks."""
    for dim, name in enumerate(dims):
        if name in CUT:
            return torch.cat(parts, dim)
    for part in parts[1:]:
        assert torch.equal(part, parts[0])
    return parts[0]


@pytest.mark.parametrize("name", ["moe", "self_attention", "dense_mlp"])
def test_two_ranks_equal_one(cfg, ranks, name):
    specs = dict(leaves(blocks(cfg)[name][0]))
    expected = block_results(None, 1)[name]
    for key, value in expected.items():
        dims = specs[key].dims if key in specs else ()
        ours = joined([results["blocks"][name][key] for results in ranks], dims)
        assert value.any(), key
        assert (ours - value).norm() <= 1e-5 * value.norm(), key  # fp32 sums in another order


def test_chain_of_vjps_on_two_ranks(cfg, ranks):
    specs = dict(leaves(dense_mlp_specs(cfg.text)))
    expected = chain_results(None, 1, remat=False)
    for key, value in expected.items():
        dims = specs[key[2:]].dims if key[2:] in specs else ()
        ours = joined([results["chain"][key] for results in ranks], dims)
        assert (ours - value).norm() <= 1e-5 * value.norm(), key
        assert all(torch.equal(results["chain"][key], results["remat"][key]) for results in ranks)
