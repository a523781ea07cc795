import collections
import json
import runpy

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from hyper_parallel.data.conversations import ConversationDataset
from hyper_parallel.data.rows import JsonLines

LABELS = load_digits().target


def rows(digits, name):
    return [json.loads(line) for line in (digits / name).read_text().splitlines()]


def index(image):
    return int(image.removeprefix("images/").split("_")[0])


def test_held_out_digits_are_never_trained_on(digits):
    seen = {index(image) for row in rows(digits, "train.jsonl") for image in row["images"]}
    for name in ("eval.jsonl", "eval_pairs.jsonl"):
        unseen = {index(image) for row in rows(digits, name) for image in row["images"]}
        assert not seen & unseen
        assert seen | unseen == set(range(1797))
        assert len(unseen) == 360
        counts = collections.Counter(LABELS[sorted(unseen)].tolist())
        assert set(counts) == set(range(10)) and max(counts.values()) - min(counts.values()) <= 2


@pytest.mark.parametrize("name", ["train.jsonl", "eval.jsonl", "eval_pairs.jsonl"])
def test_answers_are_true(digits, name):
    questions = collections.Counter()
    for row in rows(digits, name):
        question, answer = (message["content"] for message in row["messages"])
        values = [LABELS[index(image)] for image in row["images"]]
        questions[question] += 1
        if len(values) == 1:
            assert (question, answer) == ("<image>Which digit is this?", str(values[0]))
        else:
            assert question == "<image><image>Which is larger, the first or the second?"
            wanted = "equal" if values[0] == values[1] else ("the second", "the first")[int(values[0] > values[1])]
            assert answer == wanted
    expected = {"train.jsonl": [1437 * 8] * 2, "eval.jsonl": [360], "eval_pairs.jsonl": [360]}[name]
    assert list(questions.values()) == expected


def test_variants_differ_a_little_from_the_digit(digits):
    same = differ = 0
    for i in sorted({index(image) for row in rows(digits, "train.jsonl") for image in row["images"]})[:20]:
        pictures = [np.asarray(Image.open(digits / f"images/{i:04d}_{v}.png")) for v in range(8)]
        assert {picture.shape for picture in pictures} == {(16, 16, 3)}
        same += sum(np.array_equal(pictures[0], picture) for picture in pictures[1:])
        differ += len({picture.tobytes() for picture in pictures})
    assert same == 0 and differ > 20 * 7


def test_samples_fit_the_model(digits, processor):
    data = ConversationDataset(JsonLines(digits / "eval_pairs.jsonl"), processor, max_seq_len=64)
    sample = data[0]
    assert sample["image_grid_thw"].tolist() == [[1, 4, 4]] * 2
    assert len(sample["input_ids"]) < 64
    targets = sample["labels"][sample["labels"] != -100].tolist()
    assert processor.encode(rows(digits, "eval_pairs.jsonl")[0]["messages"][1]["content"] + "<|im_end|>") == targets


def test_the_seed_decides(digits, prepare_script, tmp_path):
    write_task = runpy.run_path(str(prepare_script))["write_task"]
    write_task(tmp_path, seed=0)
    for name in ("train.jsonl", "eval.jsonl", "eval_pairs.jsonl", rows(digits, "train.jsonl")[0]["images"][0]):
        assert (tmp_path / name).read_bytes() == (digits / name).read_bytes()
