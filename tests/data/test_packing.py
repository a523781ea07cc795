import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hyper_parallel.config import DataConfig
from hyper_parallel.data.collator import collate
from hyper_parallel.data.conversations import ConversationDataset
from hyper_parallel.data.loader import build_loader
from hyper_parallel.data.packing import PackedDataset, pack
from hyper_parallel.data.rows import JsonLines

CAPACITY = 100


@given(st.lists(st.integers(1, CAPACITY), max_size=60))
def test_a_partition_that_fits(lengths):
    packs = pack(lengths, CAPACITY)
    assert sorted(index for indices in packs for index in indices) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in indices) for indices in packs]
    assert all(0 < load <= CAPACITY for load in loads)
    # Best fit leaves no two packs that would have fitted into one.
    assert all(a + b > CAPACITY for i, a in enumerate(loads) for b in loads[:i])
    assert pack(lengths, CAPACITY) == packs


def rows(directory, pictures):
    """Short and long ones, with images of several sizes, one of them turned by its tag, a video, one beyond the limit."""
    turned = Image.open(pictures / "c.png")
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(directory / "turned.png", exif=exif)
    frames = [str(pictures / f"f{i}.png") for i in range(3)]
    chats = [
        ("<image>which?", "a", {"image": str(pictures / "a.png")}),
        ("say nothing", "", {}),
        ("<image><image>compare", "the second is larger", {"images": [str(pictures / "b.png"), str(directory / "turned.png")]}),
        ("<video>what happens?", "noise", {"video": {"frames": frames, "fps": 2}}),
        ("a long one " * 40, "cut", {}),
    ]
    path = directory / "rows.jsonl"
    lines = [
        json.dumps({"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer}], **columns})
        for user, answer, columns in chats * 4
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory, pictures):
    return rows(tmp_path_factory.mktemp("rows"), pictures)


def test_lengths_are_those_of_the_samples(file, processor):
    dataset = ConversationDataset(JsonLines(file), processor, max_seq_len=CAPACITY)
    lengths = [dataset.length(index) for index in range(len(dataset))]
    assert lengths == [len(dataset[index]["input_ids"]) for index in range(len(dataset))]
    assert CAPACITY in lengths and min(lengths) < 20


def test_a_mistake_in_a_row_is_named(tmp_path, processor):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "<image>"}], "image": "none.png"}))
    dataset = ConversationDataset(JsonLines(tmp_path / "rows.jsonl"), processor, max_seq_len=CAPACITY)
    with pytest.raises(ValueError, match=r"rows.jsonl:1: cannot read the image .*none.png"):
        dataset.length(0)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_once_and_as_it_was(file, processor, spec, digits, workers):
    config = DataConfig(
        type="json_file", train_path=str(file), max_seq_len=CAPACITY, packing=True, num_workers=workers, pin_memory=False
    )

    def load(rank, world_size, config=config):
        return build_loader(
            config,
            spec,
            processor_path=str(digits / "model"),
            rank=rank,
            world_size=world_size,
            micro_batch_size=1,
            global_batch_size=2,
            seed=0,
            max_steps=None,
        )

    dataset = ConversationDataset(JsonLines(file), processor, max_seq_len=CAPACITY)
    expected = sorted(dataset[index]["input_ids"].tolist() for index in range(len(dataset)))
    seen = []
    for rank in range(2):
        loader = load(rank, 2)
        assert isinstance(loader.dataset, PackedDataset) and len(loader.dataset) < len(dataset)
        batches = iter(loader)
        for _ in range(loader.steps_per_epoch * loader.num_micro_batches):
            batch = next(batches)
            tokens = batch["attention_mask"].sum()
            assert tokens <= CAPACITY
            if (batch["labels"] == -100).all() and tokens == 1:
                continue  # the share of a short last step
            seen += [ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    assert sorted(seen) == expected
    first, again = next(iter(load(0, 1))), next(iter(load(0, 1)))
    assert first.keys() == again.keys() and all(torch.equal(first[key], again[key]) for key in first)
    with pytest.raises(ValueError, match="nothing to pack"):
        load(0, 1, dataclasses.replace(config, type="vl_dummy"))


def test_a_pack_is_its_samples_side_by_side(file, processor):
    dataset = ConversationDataset(JsonLines(file), processor, max_seq_len=CAPACITY)
    samples = [dataset[index] for index in (0, 2, 3)]
    plain, packed = collate(samples), collate([samples[:2], samples[2:]])
    assert plain.keys() == packed.keys() and all(torch.equal(plain[key], packed[key]) for key in plain)
