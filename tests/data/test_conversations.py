import json
from unittest.mock import Mock

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLProcessor

from hyper_parallel.data.conversations import ConversationDataset
from hyper_parallel.data.rows import JsonLines, SavedDataset

START, END, NEWLINE, VISION_START, VISION_END, IMAGE, VIDEO = 151644, 151645, 198, 151652, 151653, 151655, 151656
USER, ASSISTANT, SYSTEM = 872, 77091, 8948
TARGETLESS = -100


@pytest.fixture
def dataset(tmp_path, pictures, processor):
    def make(*rows, **options):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for picture in pictures.iterdir():
            if not (tmp_path / picture.name).exists():
                (tmp_path / picture.name).symlink_to(picture)
        return ConversationDataset(JsonLines(path), processor, **{"max_seq_len": 1000} | options)

    return make


def chat(user, answer="7", **columns):
    return {
        "messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer}],
        **columns,
    }


def image_block(tokens):
    return [VISION_START, *[IMAGE] * tokens, VISION_END]


def labelled(sample):
    """(ids, the positions that are targets) after checking that labels copy the ids."""
    targets = sample["labels"] != TARGETLESS
    assert torch.equal(sample["labels"][targets], sample["input_ids"][targets])
    return sample["input_ids"].tolist(), targets.nonzero().flatten().tolist()


def test_a_conversation_written_out(dataset):
    sample = dataset(chat("<image>hi", image="a.png"))[0]
    ids, targets = labelled(sample)
    prompt = [START, USER, NEWLINE, *image_block(4), 6023, END, NEWLINE, START, ASSISTANT, NEWLINE]
    assert ids == [*prompt, 22, END, NEWLINE]
    assert targets == [len(prompt), len(prompt) + 1]
    assert sample["mm_token_type_ids"].tolist() == [int(i == IMAGE) for i in ids]
    assert sample["attention_mask"].tolist() == [1] * len(ids)
    assert sample["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert {key: value.dtype for key, value in sample.items() if key != "pixel_values"} == dict.fromkeys(
        ("input_ids", "labels", "attention_mask", "mm_token_type_ids", "image_grid_thw"), torch.int64
    )
    assert sample["pixel_values"].dtype == torch.float32


def test_every_assistant_turn_is_a_target(dataset):
    row = {"messages": [{"role": "system", "content": "hi"}, *chat("hi", "7")["messages"], *chat("hi", "8")["messages"]]}
    ids, targets = labelled(dataset(row)[0])
    turn = [START, USER, NEWLINE, 6023, END, NEWLINE, START, ASSISTANT, NEWLINE]
    assert ids == [START, SYSTEM, NEWLINE, 6023, END, NEWLINE, *turn, 22, END, NEWLINE, *turn, 23, END, NEWLINE]
    assert targets == [15, 16, 27, 28]


def test_train_on_prompt_spares_only_vision_tokens(dataset):
    row = chat("<image>hi", image="a.png")
    ids, targets = labelled(dataset(row, train_on_prompt=True)[0])
    assert targets == [i for i, token in enumerate(ids) if token not in (VISION_START, VISION_END, IMAGE)]
    assert ids == labelled(dataset(row)[0])[0]


def test_the_prompt_is_tokenised_as_in_generation(dataset, processor):
    """An answer that starts with a newline must not melt into the newline after the role."""
    ids, _ = labelled(dataset(chat("hi", "\n7"))[0])
    prompt = processor.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert ids == [*prompt, *processor.encode("\n7<|im_end|>\n")]


def test_plain_text_rows(dataset, processor):
    ids, targets = labelled(dataset({"text": "number 7<|endoftext|>"})[0])
    assert ids == [4082, 220, 22, 151643]
    assert targets == [0, 1, 2, 3]
    ids, targets = labelled(dataset({"story": "7<image>", "images": ["a.png"]}, text_key="story")[0])
    assert (ids, targets) == ([22, *image_block(4)], [0])


ORDERS = {
    "parts": [{"type": "text", "text": "first "}, {"type": "image"}, {"type": "text", "text": " then\n"}, {"type": "image"}],
    "markers": "first <image> then\n<image>",
    "own sources": [
        {"type": "text", "text": "first "},
        {"type": "image", "image": "b.png"},
        {"type": "text", "text": " then\n"},
        {"type": "image", "image": "c.png"},
    ],
}


@pytest.mark.parametrize("content", ORDERS.values(), ids=ORDERS)
def test_images_in_order_against_transformers(dataset, digits, pictures, content):
    own = isinstance(content, list) and "image" in content[1]
    sample = dataset(chat(content, "done", **({} if own else {"images": ["b.png", "c.png"]})))[0]
    tokenizer = AutoTokenizer.from_pretrained(digits / "model")
    images = [Image.open(pictures / f"{name}.png") for name in "bc"]
    features = Qwen2VLImageProcessorPil.from_pretrained(digits / "model")(images=images, return_tensors="pt")
    text = tokenizer.apply_chat_template(chat(ORDERS["parts"], "done")["messages"], tokenize=False)
    for grid in features["image_grid_thw"]:
        text = text.replace("<|image_pad|>", "<|hole|>" * (int(grid.prod()) // 4), 1)
    expected = tokenizer(text.replace("<|hole|>", "<|image_pad|>"))["input_ids"]
    assert sample["input_ids"].tolist() == expected
    assert torch.equal(sample["pixel_values"], features["pixel_values"])
    assert torch.equal(sample["image_grid_thw"], features["image_grid_thw"])


def test_video_with_times(dataset, processor):
    frames = [f"f{i}.png" for i in range(5)]
    for timing in ({"fps": 2.0}, {"timestamps": [0.0, 0.5, 1.0, 1.5, 2.0]}):
        sample = dataset(chat("look!<video>", videos=[{"frames": frames, **timing}]))[0]
        ids, targets = labelled(sample)
        block = "<|vision_start|>" + "<|video_pad|>" * 6 + "<|vision_end|>"
        times = Qwen3VLProcessor._calculate_timestamps(Mock(), list(range(5)), 2.0, 2)
        assert times == [0.25, 1.25, 2.0]
        content = "".join(f"<{time:.1f} seconds>{block}" for time in times)
        text = f"<|im_start|>user\nlook!{content}<|im_end|>\n<|im_start|>assistant\n7<|im_end|>\n"
        assert ids == processor.encode(text)
        assert [ids[i] for i in targets] == [22, END]
        assert sample["mm_token_type_ids"].tolist() == [2 * (i == VIDEO) for i in ids]
        assert sample["video_grid_thw"].tolist() == [[3, 6, 4]]
        assert sample["pixel_values_videos"].shape == (72, 96)
        assert "pixel_values" not in sample


def test_image_and_video_in_one_sample(dataset):
    row = chat("<video><image>", image="a.png", video={"frames": ["f0.png", "f1.png"], "fps": 1})
    sample = dataset(row)[0]
    kinds = [int(k) for k in sample["mm_token_type_ids"].unique_consecutive()]
    assert kinds == [0, 2, 0, 1, 0]
    assert (len(sample["pixel_values"]), len(sample["pixel_values_videos"])) == (16, 24)


def test_truncation_never_cuts_a_block(dataset):
    row = chat("a<image>b<image>c", "7", images=["a.png", "b.png"])
    whole = dataset(row)[0]
    length = len(whole["input_ids"])
    first, second = 4, 4 + 6 + 1  # where the two blocks (6 and 8 tokens) begin
    for limit in range(1, length + 3):
        sample = dataset(row, max_seq_len=limit)[0]
        kept = limit if limit < length else length
        if first <= kept < first + 6:
            kept = first
        if second <= kept < second + 8:
            kept = second
        assert sample["input_ids"].tolist() == whole["input_ids"][:kept].tolist(), limit
        assert sample["labels"].tolist() == whole["labels"][:kept].tolist()
        images = (kept >= first + 6) + (kept >= second + 8)
        assert len(sample.get("image_grid_thw", [])) == images
        patches = (0, 16, 16 + 24)[images]
        assert torch.equal(sample.get("pixel_values", torch.empty(0, 96)), whole["pixel_values"][:patches])


def test_truncation_keeps_whole_frames_of_a_video(dataset):
    row = chat("<video>", videos=[{"frames": [f"f{i}.png" for i in range(4)], "fps": 1.0}])
    whole = dataset(row)[0]
    ends = [i + 1 for i, token in enumerate(whole["input_ids"].tolist()) if token == VISION_END]
    for limit, frames in ((ends[0] - 1, 0), (ends[0], 1), (ends[1] - 1, 1), (ends[1], 2)):
        sample = dataset(row, max_seq_len=limit)[0]
        assert [grid[0] for grid in sample.get("video_grid_thw", torch.empty(0, 3)).tolist()] == [frames][: frames > 0]
        patches = sample.get("pixel_values_videos", torch.empty(0, 96))
        assert torch.equal(patches, whole["pixel_values_videos"][: 24 * frames])
        assert (sample["input_ids"] == VIDEO).sum() == 6 * frames


def test_rows_of_a_saved_dataset(tmp_path, pictures, processor, dataset):
    import datasets

    parts = [{"type": "image", "text": None}, {"type": "text", "text": "hi"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "7"}]}]
    picture = Image.open(pictures / "a.png")
    table = datasets.Dataset.from_list([{"messages": messages, "image": picture}]).cast_column("image", datasets.Image())
    table.save_to_disk(tmp_path / "decoded")
    table.cast_column("image", datasets.Image(decode=False)).save_to_disk(tmp_path / "encoded")
    expected = dataset(chat("<image>hi", image="a.png"))[0]
    for name in ("decoded", "encoded"):
        sample = ConversationDataset(SavedDataset(tmp_path / name), processor, max_seq_len=100)[0]
        assert sample.keys() == expected.keys()
        assert all(torch.equal(sample[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (chat("<image>"), "asks for image 1, but the row has 0"),
        (chat("<image><image>", image="a.png"), "asks for image 2, but the row has 1"),
        (chat("hi", images=["a.png", "b.png"]), "the row has 2 images, but its text uses 0"),
        (chat("<video>"), "asks for video 1, but the row has 0"),
        (chat("<image>", image="a.png", images=["a.png"]), "has both 'image' and 'images'"),
        (chat("<image>", image="gone.png"), "cannot read the image .*gone.png"),
        (chat("<|image_pad|>"), r"1 image placeholder tokens, but 0 image features"),
        (chat("<image><|image_pad|>", image="a.png"), r"5 image placeholder tokens, but 4 image features"),
        (chat("<|video_pad|>"), r"1 video placeholder tokens, but 0 video features"),
        (chat("<video>", video={"frames": ["f0.png"]}), "timestamps in seconds or a positive fps, got fps None"),
        (chat("<video>", video={"frames": ["f0.png"], "fps": 0}), "positive fps, got fps 0"),
        (chat("<video>", video={"frames": ["f0.png"], "timestamps": [0, 1]}), "1 frames, but 2 timestamps"),
        (chat("<video>", video="clip.mp4"), "a video must be .*got 'clip.mp4'"),
        (chat("<video>", video={"frames": ["a.png", "b.png"], "fps": 1}), "frames of a video differ in size"),
        (chat([{"type": "audio"}]), "a content part must be .*audio"),
        (chat([{"type": "text"}]), "a content part must be"),
        (chat(["hi"]), "a content part must be .*got 'hi'"),
        (chat(None), "content must be text or a list of parts, got None"),
        ({"messages": [{"from": "human", "value": "hi"}]}, "message 0 needs a role"),
        ({"messages": []}, "'messages' must be a non-empty list"),
        ({"messages": "hi"}, "'messages' must be a non-empty list"),
        ({"content": "hi"}, r"neither 'messages' nor a non-empty 'text'; columns: \['content'\]"),
        ({"text": ""}, "non-empty 'text'"),
    ],
)
def test_errors_name_the_line(dataset, row, message):
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{message}"):
        dataset(chat("hi"), row)[1]


def test_nothing_fits(dataset):
    with pytest.raises(ValueError, match=r"nothing of the sample fits data\.max_seq_len 5"):
        dataset({"text": "<image>", "image": "a.png"}, max_seq_len=5)[0]
