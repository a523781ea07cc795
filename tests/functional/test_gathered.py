"""FSDP in flight on 2, 3 and 4 gloo ranks: gathers, releases, refills and reductions of random leaves; memory of a chain."""

import itertools
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import mesh, ranks

from qwen3vl_functional.gathered import GatheredWeights, share
from qwen3vl_functional.peers import is_shared
from qwen3vl_functional.sharding import AXES, Axes, Layout, Placement, layouts, local_slices, local_view
from qwen3vl_functional.spec import ParamSpec, leaves, to_tensordict, unflatten
from qwen3vl_functional.transforms import Block, Loss, LossValue, run, value_and_grad

TOPOLOGIES = [(1, 2), (1, 3), (2, 2)]  # dp_replicate, dp_shard
DIM_NAMES = ("rows", "columns", "depth")


TRANSPORTS = ("memory", "messages", "collectives")


@st.composite
def cases(draw, topology):
    """Leaves of random shapes in two blocks (0, 1 and uneven rows; scalars), some of them in a replicated subtree."""
    specs = {}
    for i in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        root = draw(st.sampled_from(("one", "one.replicated", "two")))
        specs[f"{root}.{i}"] = ParamSpec(shape, DIM_NAMES[: len(shape)])
    # A model axis may have taken the leading dim, so that FSDP cuts another: size 1 here, so nothing else changes.
    second = draw(st.sets(st.sampled_from([path for path, spec in specs.items() if len(spec.shape) > 1] or [""])))
    replicated = ("one.replicated",) if any(path.startswith("one.replicated") for path in specs) else ()
    table = layouts(
        unflatten(specs), {"dp_shard": topology[1]}, dict.fromkeys(DIM_NAMES[: _most_dims(specs)], ()), replicated=replicated
    )
    for path in second & specs.keys():
        if table[path].fsdp_dim is not None:
            table[path] = Layout(specs[path].shape, tuple(1 if axis == "dp_shard" else None for axis in AXES))
    return {
        "topology": topology,
        "table": table,
        "seed": draw(st.integers(0, 9)),
        "fused": draw(st.booleans()),
        "transport": draw(st.sampled_from(TRANSPORTS)),
        "reshard": draw(st.booleans()),
        "prefetch": draw(st.booleans()),
    }


def _most_dims(specs):
    return max(len(spec.shape) for spec in specs.values())


def whole(path, layout, seed, kind="leaf"):
    """The same numbers on every rank: small integers, whose sums are exact in every order and in bf16."""
    generator = torch.Generator().manual_seed(seed * 1000 + sum(map(ord, path + kind)))
    return torch.randint(-8, 9, layout.shape, generator=generator).float()


def axes_of(topology):
    device_mesh = mesh((*topology, 1, 1, 1))
    groups = [device_mesh.get_group(name) if size > 1 else None for name, size in zip(AXES, topology, strict=False)]
    return Axes(replicate=groups[0], shard=groups[1]), tuple(device_mesh.get_coordinate())


def weights_of(case, *, dtype=None, reduce_dtype=torch.float32, leaf_dtype=torch.float32, **options):
    """GatheredWeights over this rank's parts, and what slices they are."""
    axes, coordinate = axes_of(case["topology"])
    parts = {path: local_slices(layout, (*case["topology"], 1, 1, 1), coordinate) for path, layout in case["table"].items()}
    shards = {
        path: whole(path, layout, case["seed"])[parts[path]].clone().to(leaf_dtype) for path, layout in case["table"].items()
    }
    options = {"fused": case["fused"], "reshard": case["reshard"], **options}
    if case["transport"] == "memory":
        placement = Placement(mesh((*case["topology"], 1, 1, 1)), case["table"], axes)
        tree = to_tensordict({path: placement.wrap(path, shard) for path, shard in shards.items()})
        shared = {path: local_view(leaf) for path, leaf in leaves(share(tree, placement).to_dict())}
        assert shared.keys() == shards.keys() and all(torch.equal(shared[path], shards[path]) for path in shards)
        shards = {path: shared[path] for path in shards}
    weights = GatheredWeights(shards, case["table"], axes, dtype=dtype, reduce_dtype=reduce_dtype, **options)
    if any(math.prod(cut.shape) for cut in weights.cuts.values()):
        assert weights.transport == ("memory" if case["transport"] == "memory" else "messages")
        weights.transport = case["transport"]  # collectives are for other backends, and work here too
    return weights, parts


def copied(case, dtype, leaf_dtype=torch.float32):
    """The cut leaves that have to be copied before they can be used."""
    in_place = case["transport"] == "memory" and dtype in (None, leaf_dtype)
    dims = {path: layout.fsdp_dim for path, layout in case["table"].items() if math.prod(layout.shape)}
    return {path for path, dim in dims.items() if dim is not None and not (in_place and dim == 0)}


def assert_equal(ours, expected, what):
    assert ours.dtype == expected.dtype and ours.shape == expected.shape and torch.equal(ours, expected), what


def roots(weights):
    return [weights.paths([root]) for root in ("one", "two")]


def fetch_and_refill(case, dtype, leaf_dtype):
    """Whole leaves, twice the same tensors, empty in between; at most the announced gather is under way."""
    weights, _ = weights_of(case, dtype=dtype, leaf_dtype=leaf_dtype)
    cut = copied(case, dtype, leaf_dtype)
    for paths in roots(weights):
        if case["prefetch"]:
            weights.prefetch(paths)
            weights.prefetch(paths)  # announced twice is gathered once
        got = weights.fetch(paths)
        assert list(got) == paths
        assert not weights._ahead
        expected = {path: whole(path, case["table"][path], case["seed"]).to(dtype or leaf_dtype) for path in paths}
        for path in paths:
            assert_equal(got[path], expected[path], path)
        emptied = weights.release(got)
        assert emptied == (case["reshard"] and bool(cut & set(paths)))
        for path, leaf in got.items():
            if path in cut and case["reshard"]:
                assert leaf.untyped_storage().size() == 0
            else:
                assert_equal(leaf, expected[path], path)
        if emptied:
            if case["prefetch"]:
                weights.prefetch(paths, got)
            versions = {path: leaf._version for path, leaf in got.items()}
            weights.refill(got)
            for path, leaf in got.items():
                assert_equal(leaf, expected[path], path)
                assert leaf._version == versions[path]  # else autograd refuses the graph that holds it
        again = weights.fetch(paths)
        if not case["reshard"]:
            assert all(again[path] is got[path] for path in paths)
    one = weights.paths(["one"])
    if one and case["reshard"]:
        for path, leaf in weights.fetch(one, dtype=torch.float64).items():  # the loss may ask for its own dtype
            assert_equal(leaf, whole(path, case["table"][path], case["seed"]).to(leaf_dtype).double(), path)
    assert weights.finish() == {}


def reduction(case, reduce_dtype, grad_dtype, micro_batches):
    """Each rank's own whole gradient, summed over all ranks and micro-batches, and cut."""
    weights, parts = weights_of(case, reduce_dtype=reduce_dtype)
    world, rank = dist.get_world_size(), dist.get_rank()
    trained = [path for path in case["table"] if not path.endswith("0")]  # leaf 0 is frozen

    def grad(path, rank, number):
        return whole(path, case["table"][path], case["seed"], f"grad {rank} {number}")

    for number in range(micro_batches):
        for paths in reversed(roots(weights)):
            weights.reduce({path: grad(path, rank, number).to(grad_dtype) for path in paths if path in trained})
    sums = weights.finish()
    assert sums.keys() == set(trained)
    for path, ours in sums.items():
        total = sum(grad(path, other, number) for other in range(world) for number in range(micro_batches))
        assert_equal(ours, total[parts[path]], path)
        assert ours.is_contiguous() and ours.untyped_storage().nbytes() == ours.nbytes  # its own memory, not the collective's
    assert not weights._reductions


@pytest.mark.parametrize("topology", TOPOLOGIES)
@given(data=st.data(), dtypes=st.sampled_from([(None, torch.float32), (None, torch.bfloat16), (torch.bfloat16, torch.float32)]))
@settings(max_examples=30)
def test_fetch_release_refill(topology, data, dtypes):
    ranks(math.prod(topology)).call(fetch_and_refill, data.draw(cases(topology)), *dtypes)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@given(
    data=st.data(),
    dtypes=st.sampled_from([(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]),
)
@settings(max_examples=30)
def test_gradients_add_up(topology, data, dtypes):
    ranks(math.prod(topology)).call(reduction, data.draw(cases(topology)), *dtypes, data.draw(st.integers(1, 3)))


def rounding(topology):
    """1 + 1/512 is a number in fp32 and none in bf16: the sum tells in which dtype it travelled."""
    table = {"leaf": Layout((5,), tuple(0 if axis == "dp_shard" else None for axis in AXES)), "kept": Layout((2,), (None,) * 5)}
    case = {"topology": topology, "table": table, "seed": 0, "fused": True, "transport": "memory", "reshard": True}
    sums = {}
    for dtype in (torch.float32, torch.bfloat16):
        weights, _ = weights_of(case, reduce_dtype=dtype)
        weights.reduce({path: torch.full(layout.shape, 1 + 2**-9) for path, layout in table.items()})
        sums[dtype] = {path: (grad.dtype, grad.unique().tolist()) for path, grad in weights.finish().items()}
    return sums


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_reduce_dtype(topology):
    world = math.prod(topology)
    for sums in ranks(world).call(rounding, topology):
        assert sums[torch.float32] == dict.fromkeys(("leaf", "kept"), (torch.float32, [world * (1 + 2**-9)]))
        assert sums[torch.bfloat16] == dict.fromkeys(("leaf", "kept"), (torch.float32, [float(world)]))


# A chain of matmuls, its weights uneven and one of them frozen.

WIDTHS = (5, 4, 3, 7, 2)


def chain_table(world):
    specs = {str(i): {"w": ParamSpec(shape, ("rows", "columns"))} for i, shape in enumerate(itertools.pairwise(WIDTHS))}
    return layouts(specs, {"dp_shard": world}, {"rows": (), "columns": ()})


def chain(remat, probe):
    def block(i):
        def fn(params, x):
            probe(i, params["w"])
            return (torch.tanh(x @ params["w"]),)

        return Block((str(i),), ("x",), ("x",), fn, remat=remat and i in (1, 2))

    first = Block((), (), ("x",), lambda: (torch.linspace(-1, 1, 3 * WIDTHS[0]).view(3, -1) + dist.get_rank(),))
    return [first, *(block(i) for i in range(len(WIDTHS) - 1))]


def square_loss(check):
    def fn(params, values):
        check()
        return LossValue(values["x"].square().sum() / 2, {}, {}, {"x": values["x"].clone()})

    return Loss((), ("x",), fn)


def chain_memory(topology, reshard, remat, fused, transport):
    """How many gathered leaves hold storage while blocks compute, at the loss and after each pullback; gradients; the loss."""
    case = {
        "topology": topology,
        "table": chain_table(topology[1]),
        "seed": 1,
        "fused": fused,
        "transport": transport,
        "reshard": reshard,
    }
    weights, parts = weights_of(case)
    gathered: list[weakref.ref[torch.Tensor]] = []
    counts: dict[str, int] = {"block": 0, "loss": -1, "reduce": 0, "gathers": 0}
    original, reduce, start = weights.fetch, weights.reduce, weights._gather

    def fetch(paths, *, dtype=None):
        got = original(paths, dtype=dtype)
        for leaf in got.values():
            gathered.append(weakref.ref(leaf))
        return got

    def alive():
        tensors = [leaf for ref in gathered if (leaf := ref()) is not None]
        return len({id(leaf) for leaf in tensors if leaf.untyped_storage().size() > 0 and not is_shared(leaf)})

    def probe(i, leaf):
        counts["block"] = max(counts["block"], alive())

    def at_loss():
        counts["loss"] = alive()

    def at_reduce(grads, pending=()):
        counts["reduce"] = max(counts["reduce"], alive())
        reduce(grads, pending)

    def counted(paths, dtype, into):
        gathers = start(paths, dtype, into)
        counts["gathers"] += len(gathers)
        return gathers

    weights.fetch, weights.reduce, weights._gather = fetch, at_reduce, counted
    trained = [path for path in case["table"] if path != "1.w"]
    loss = value_and_grad(chain(remat, probe), square_loss(at_loss), weights, trained)
    grads = weights.finish()
    counts["end"] = alive()
    return counts, {path: (parts[path], grad) for path, grad in grads.items()}, float(loss.loss)


def expected_chain(topology):
    """Sum over ranks of the same chain, by autograd."""
    table, total, sums = chain_table(topology[1]), 0.0, {}
    for rank in range(math.prod(topology)):
        free = {path: whole(path, layout, 1).requires_grad_() for path, layout in table.items()}
        x = torch.linspace(-1, 1, 3 * WIDTHS[0]).view(3, -1) + rank
        for weight in free.values():
            x = torch.tanh(x @ weight)
        loss = x.square().sum() / 2
        total += float(loss.detach())
        for path, grad in zip(free, torch.autograd.grad(loss, list(free.values())), strict=True):
            sums[path] = sums.get(path, 0) + grad
    return total, sums


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("remat", [False, True])
def test_a_chain_frees_what_it_gathered(topology, remat):
    total, expected = expected_chain(topology)
    num_blocks = len(WIDTHS) - 1
    results = {}
    for reshard in (True, False):
        for fused, transport in ((True, "memory"), (True, "messages"), (True, "collectives"), (False, "collectives")):
            answers = ranks(math.prod(topology)).call(chain_memory, topology, reshard, remat, fused, transport)
            results[reshard, fused, transport] = answers
            assert sum(loss for _, _, loss in answers) == pytest.approx(total, rel=1e-6)
            for counts, grads, _ in answers:
                assert grads.keys() == expected.keys() - {"1.w"}
                for path, (part, grad) in grads.items():
                    error = (grad - expected[path][part]).norm()
                    assert error <= 1e-6 * expected[path].norm(), (path, float(error))
                if transport == "memory":  # leaves are used where they lie
                    assert set(counts.values()) == {0}
                    continue
                if reshard:
                    # In the backward the announced block's leaves are on their way while another block is run again.
                    assert counts["block"] == (2 if remat else 1)
                    assert counts["loss"] == counts["reduce"] == 1
                else:
                    assert counts["block"] == counts["loss"] == counts["reduce"] == num_blocks
                assert counts["end"] == 0
                assert counts["gathers"] == (2 if reshard else 1) * num_blocks
    # Which collectives carry the numbers changes nothing about the numbers.
    first = results.pop((True, True, "memory"))
    for answers in results.values():
        for (_, grads, loss), (_, first_grads, first_loss) in zip(answers, first, strict=True):
            assert loss == first_loss
            assert all(torch.equal(grads[path][1], first_grads[path][1]) for path in grads)


def run_only(topology):
    """Without derivatives: equal to the plain matmuls, and nothing stays gathered."""
    case = {
        "topology": topology,
        "table": chain_table(topology[1]),
        "seed": 1,
        "fused": True,
        "transport": "memory",
        "reshard": True,
    }
    weights, _ = weights_of(case)
    x = run(chain(False, lambda i, leaf: None), weights)["x"]
    expected = torch.linspace(-1, 1, 3 * WIDTHS[0]).view(3, -1) + dist.get_rank()
    for path, layout in case["table"].items():
        expected = torch.tanh(expected @ whole(path, layout, 1))
    assert_equal(x, expected, "x")
    assert not weights._ahead and weights.finish() == {}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_evaluation(topology):
    ranks(math.prod(topology)).call(run_only, topology)
