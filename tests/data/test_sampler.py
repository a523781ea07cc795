import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.data.sampler import GlobalBatchSampler, Position

# Rank counts and micro-batch sizes that all divide 12.
WORLDS = st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 3), (3, 2), (4, 1), (4, 3), (6, 2), (12, 1)])
SIZES = st.integers(1, 60)
SEEDS = st.integers(0, 2**40)


def ranks(num_samples, world, micro, **options):
    return [
        GlobalBatchSampler(num_samples, global_batch_size=12, micro_batch_size=micro, rank=rank, world_size=world, **options)
        for rank in range(world)
    ]


def steps(samplers, count):
    """The samples of ``count`` steps, each as a sorted list over all ranks."""
    per_rank = [list(itertools.islice(sampler, count * sampler.num_micro_batches)) for sampler in samplers]
    size = samplers[0].num_micro_batches
    return [
        sorted(i for batches in per_rank for batch in batches[step * size : (step + 1) * size] for i in batch)
        for step in range(count)
    ]


@given(SIZES, WORLDS, SEEDS, st.booleans())
def test_any_number_of_ranks_makes_the_same_steps(num_samples, world, seed, shuffle):
    options = {"seed": seed, "shuffle": shuffle}
    alone = ranks(num_samples, 1, 12, **options)
    count = 2 * alone[0].steps_per_epoch + 1
    assert steps(ranks(num_samples, *world, **options), count) == steps(alone, count)


@given(SIZES, WORLDS, SEEDS)
def test_an_epoch_is_every_sample_once(num_samples, world, seed):
    samplers = ranks(num_samples, *world, seed=seed)
    per_epoch = samplers[0].steps_per_epoch
    seen = steps(samplers, 2 * per_epoch)
    for epoch in (seen[:per_epoch], seen[per_epoch:]):
        assert sorted(itertools.chain(*epoch)) == list(range(num_samples))
        assert [len(step) for step in epoch[:-1]] == [12] * (per_epoch - 1)


@given(SIZES, WORLDS, SEEDS, st.integers(0, 150))
def test_resume_anywhere_continues_exactly(num_samples, world, seed, taken):
    for whole, interrupted, resumed in zip(*(ranks(num_samples, *world, seed=seed) for _ in range(3)), strict=True):
        expected = list(itertools.islice(whole, taken + 30))
        assert list(itertools.islice(interrupted, taken)) == expected[:taken]
        resumed.load_state_dict(interrupted.state_dict())
        assert list(itertools.islice(resumed, 30)) == expected[taken:]


@given(SIZES, WORLDS, WORLDS, SEEDS, st.integers(0, 12))
def test_a_position_moves_to_another_number_of_ranks(num_samples, before, after, seed, done):
    uninterrupted = steps(ranks(num_samples, 1, 12, seed=seed), done + 8)
    saved = ranks(num_samples, *before, seed=seed)
    assert steps(saved, done) == uninterrupted[:done]
    states = [sampler.state_dict() for sampler in saved]
    assert all(state == states[0] for state in states)
    moved = ranks(num_samples, *after, seed=seed)
    for sampler in moved:
        sampler.load_state_dict(states[0])
    assert steps(moved, 8) == uninterrupted[done:]
    position = Position(states[0]["epoch"], states[0]["sample"])
    assert saved[0].position_at(done) == position
    assert steps(ranks(num_samples, *after, seed=seed, start=position), 8) == uninterrupted[done:]


def test_shuffling_depends_on_seed_and_epoch():
    def epochs(**options):
        batches = list(itertools.islice(GlobalBatchSampler(50, global_batch_size=50, micro_batch_size=50, **options), 2))
        return [tuple(batch) for batch in batches]

    orders = [*epochs(seed=0), *epochs(seed=1), *epochs(seed=2**32)]
    assert len(set(orders)) == 6
    assert epochs(shuffle=False) == [tuple(range(50))] * 2
    assert epochs(seed=3) == epochs(seed=3)


def test_short_last_step_keeps_the_number_of_micro_batches():
    first, last = (
        GlobalBatchSampler(9, global_batch_size=8, micro_batch_size=2, rank=rank, world_size=2, shuffle=False) for rank in (0, 1)
    )
    assert list(itertools.islice(first, 5)) == [[0, 1], [4, 5], [8], [], [0, 1]]
    assert list(itertools.islice(last, 5)) == [[2, 3], [6, 7], [], [], [2, 3]]


def test_the_middle_of_a_step_moves_where_rounds_allow():
    alone = GlobalBatchSampler(20, global_batch_size=8, micro_batch_size=2, shuffle=False)
    assert list(itertools.islice(alone, 6))[-1] == [10, 11]
    moved = [
        GlobalBatchSampler(20, global_batch_size=8, micro_batch_size=2, rank=rank, world_size=2, shuffle=False) for rank in (0, 1)
    ]
    for sampler in moved:
        sampler.load_state_dict(alone.state_dict())
    # The rest of the second step, then the short third.
    assert list(itertools.islice(moved[0], 3)) == [[12, 13], [16, 17], []]
    assert list(itertools.islice(moved[1], 3)) == [[14, 15], [18, 19], []]


def test_changed_data_is_announced():
    sampler = GlobalBatchSampler(10, global_batch_size=2)
    with pytest.warns(UserWarning, match="saved with 12 samples and the dataset now has 10"):
        sampler.load_state_dict({"epoch": 1, "sample": 4, "offset": 0, "num_samples": 12})
    assert sampler.position == Position(1, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, "dataset is empty"),
        ({"global_batch_size": 6}, "global_batch_size 6 must be a multiple .* 2 x 2 data-parallel ranks = 4"),
        ({"global_batch_size": 0}, "global_batch_size 0"),
        ({"start": (0, 11)}, "sample 11, offset 0.* 10 samples"),
        ({"start": (-1, 0)}, "epoch -1"),
        ({"start": (0, 0, 2)}, "2 samples into a step, which 2 ranks"),
    ],
)
def test_errors(options, message):
    options = {"num_samples": 10, "global_batch_size": 8, "micro_batch_size": 2, "world_size": 2} | options
    with pytest.raises(ValueError, match=message):
        GlobalBatchSampler(options.pop("num_samples"), **options)
