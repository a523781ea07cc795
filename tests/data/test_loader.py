import itertools
import json
from pathlib import Path

import pytest
import torch

from hyper_parallel.config import DataConfig
from hyper_parallel.data.loader import build_eval_loader, build_loader, sampler_state


def loader(spec, config=None, **changes):
    options = {
        "processor_path": None,
        "rank": 0,
        "world_size": 1,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "seed": 3,
        "max_steps": 5,
    } | changes
    return build_loader(config or DataConfig(max_seq_len=16, train_size=10), spec, **options)


def take(iterator, count):
    return [batch["pixel_values"] for batch in itertools.islice(iterator, count)]


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_synthetic_size_and_batches(spec):
    whole = loader(spec, DataConfig(max_seq_len=16))
    assert len(whole.dataset) == 5 * 4
    assert (whole.steps_per_epoch, whole.num_micro_batches) == (5, 2)
    assert next(iter(whole))["input_ids"].shape == (2, 16)
    assert loader(spec).steps_per_epoch == 3  # train_size 10


def test_order_is_the_data_sets(spec):
    ordered = loader(spec, DataConfig(max_seq_len=16, train_size=8, shuffle=False))
    expected = [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1]]
    patches = [torch.cat([ordered.dataset[i]["pixel_values"] for i in indices]) for indices in expected]
    assert same(take(ordered, 5), patches)


@pytest.mark.parametrize("taken", [0, 3, 8])
@pytest.mark.parametrize("workers", [(0, 0), (2, 2), (0, 2), (2, 0)])
def test_resume_continues_with_the_very_next_batch(spec, taken, workers):
    def make(num_workers):
        # 12 samples: no empty micro-batch, so that every batch has pixels to compare.
        return loader(spec, DataConfig(max_seq_len=16, train_size=12, num_workers=num_workers))

    expected = take(make(0), taken + 4)
    saved = make(workers[0])
    assert same(take(iter(saved), taken), expected[:taken])
    state = saved.state_dict()
    resumed = make(workers[1])
    resumed.load_state_dict(state)
    assert same(take(iter(resumed), 4), expected[taken:])
    resumed.load_state_dict(state)
    assert same(take(iter(resumed), 2), expected[taken : taken + 2])
    # Once more from the resumed loader's own state, whose workers have read ahead.
    third = make(workers[0])
    third.load_state_dict(resumed.state_dict())
    assert same(take(iter(third), 2), expected[taken + 2 :])


def test_state_survives_a_file_and_moves_to_more_ranks(spec, tmp_path):
    config = DataConfig(max_seq_len=16, train_size=12, num_workers=2, prefetch_factor=3)
    saved = loader(spec, config)
    take(iter(saved), 2)  # one step
    torch.save(saved.state_dict(), tmp_path / "loader.pt")
    state = torch.load(tmp_path / "loader.pt", weights_only=True)
    assert sampler_state(state) == {"epoch": 0, "sample": 4, "offset": 0, "num_samples": 12}
    expected = take(loader(spec, start=(0, 4), config=config), 2)
    parts = []
    for rank in (0, 1):
        half = loader(spec, config, rank=rank, world_size=2)
        half.load_state_dict(state)
        parts += take(iter(half), 1)
    assert same([torch.cat(parts)], [torch.cat(expected)])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterating_again_goes_on(spec, num_workers):
    again = loader(spec, DataConfig(max_seq_len=16, train_size=12, num_workers=num_workers))
    expected = take(loader(spec, DataConfig(max_seq_len=16, train_size=12)), 6)
    assert same([*take(again, 2), *take(again, 1), *take(again, 3)], expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_global_generator_is_left_alone(spec, num_workers):
    before = torch.get_rng_state()
    take(loader(spec, DataConfig(max_seq_len=16, train_size=12, num_workers=num_workers)), 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_start_at_a_step(spec):
    config = DataConfig(max_seq_len=16, train_size=12)
    whole = loader(spec, config)
    later = loader(spec, config, start=whole.batch_sampler.position_at(4))
    assert same(take(later, 4), take(whole, 12)[8:])


def test_state_of_another_trainer(spec):
    foreign = {"_snapshot": {"_snapshot_step": 2}, "_steps_since_snapshot": 0, "_iterator_finished": False}
    with pytest.raises(ValueError, match="no global data position"):
        loader(spec).load_state_dict(foreign)


def test_empty_share_of_a_short_step(spec):
    batches = list(itertools.islice(loader(spec), 6))
    assert [len(batch["labels"]) for batch in batches] == [2, 2, 2, 2, 2, 1]
    assert batches[-1]["labels"].tolist() == [[-100]]


def rows_file(path, count):
    path.write_text("".join(json.dumps({"text": f"number {i}"}) + "\n" for i in range(count)))
    return str(path)


def test_json_file_end_to_end(spec, digits):
    config = DataConfig(type="json_file", train_path=str(digits / "train.jsonl"), train_size=8, max_seq_len=64)
    batch = next(iter(loader(spec, config, processor_path=str(digits / "model"))))
    assert batch["input_ids"].shape[0] == 2
    assert (batch["input_ids"] == spec.image_token_id).sum() * 4 == len(batch["pixel_values"])


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_evaluation_is_one_pass_in_file_order(spec, processor, tmp_path, monkeypatch, world, num_workers):
    monkeypatch.setattr("hyper_parallel.data.loader.Processor", lambda path, spec: processor)  # loaded once
    config = DataConfig(type="json_file", eval_path=rows_file(tmp_path / "rows.jsonl", 7), num_workers=num_workers)
    per_rank = []
    for rank in range(world):
        evaluation = build_eval_loader(config, spec, processor_path="model", rank=rank, world_size=world, micro_batch_size=2)
        batches = list(evaluation)
        assert [b["input_ids"].tolist() for b in evaluation] == [b["input_ids"].tolist() for b in batches]
        per_rank.append([b["input_ids"][:, 2].tolist() if (b["labels"] != -100).any() else [] for b in batches])
    assert {len(batches) for batches in per_rank} == {-(-7 // (2 * world))}
    digits_seen = [i for batch in zip(*per_rank, strict=True) for share in batch for i in share]
    assert digits_seen == list(range(15, 22))  # the tokens of "0" to "6"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(type="json_file"), "json_file needs data.train_path"),
        (DataConfig(type="json_file", train_path="x.jsonl"), "set data.processor_path, model.tokenizer_path"),
        (DataConfig(prefetch_factor=2), "prefetch_factor 2 has no effect without data.num_workers"),
    ],
)
def test_errors(spec, config, message):
    with pytest.raises(ValueError, match=message):
        loader(spec, config)


def test_train_size_beyond_the_file(spec, digits, tmp_path):
    path = rows_file(tmp_path / "rows.jsonl", 3)
    config = DataConfig(type="json_file", train_path=path, train_size=4, processor_path=str(digits / "model"))
    with pytest.raises(ValueError, match="train_size 4 must lie between 1 and the 3 rows"):
        loader(spec, config)


def test_no_evaluation_on_synthetic_data(spec):
    with pytest.raises(ValueError, match="vl_dummy has nothing to evaluate on"):
        build_eval_loader(DataConfig(eval_path="x"), spec, processor_path=None, rank=0, world_size=1, micro_batch_size=1)


def test_bad_row_in_a_worker_names_the_line(spec, digits, tmp_path):
    path = Path(rows_file(tmp_path / "rows.jsonl", 3))
    path.write_text(path.read_text() + "{broken\n")
    config = DataConfig(type="json_file", train_path=str(path), num_workers=1, shuffle=False)
    with pytest.raises(ValueError, match=r"rows.jsonl:4: not valid JSON"):
        list(itertools.islice(loader(spec, config, processor_path=str(digits / "model")), 2))
