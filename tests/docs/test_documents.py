"""What the documents say exists: links, paths, keys, messages, numbers; two languages say the same."""

import ast
import functools
import re
from pathlib import Path

import pytest

from hyper_parallel import config_docs
from hyper_parallel.config import iter_keys

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
GUIDE, CHINESE, TROUBLES = DOCS / "guide/qwen3_vl_moe.md", DOCS / "guide/qwen3_vl_moe.zh.md", DOCS / "troubleshooting.md"
TEMPLATES = ROOT / "examples" / "qwen3_vl_30b_a3b_instruct"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
PARAMETERS, FILES = ("model.visual", "model.language_model"), (".yaml", ".jsonl", ".safetensors")  # what looks like keys, too
# Fixed characters that a heading shares with one message of the sources; the shortest message has this many.
ENOUGH = 12


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def names(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_and_paths_exist(page):
    text = prose(page)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    paths = re.findall(r"`((?:hyper_parallel|qwen3vl_functional|docs|tests|examples|benchmarks)/[^`\s]*)`", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    assert [path for path in paths if not (ROOT / path).exists()] == []


def unknown_keys(text: str) -> list[str]:
    """Each ``section.key`` in code that is none, alone or with a value; ``config_overrides`` holds the model's own names."""
    known = {path for path, _ in iter_keys()}
    found = re.findall(r"`(?:--)?((?:model|data|train)\.[a-z_.]+)", text)
    keys = [key.split(".config_overrides.")[0] for key in found if not key.startswith(PARAMETERS) and not key.endswith(FILES)]
    return [key for key in keys if key not in known]


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_keys_exist(page):
    assert unknown_keys(prose(page)) == []


def test_unknown_keys_are_noticed():
    text = "`train.max_steps`, `train.maxsteps`, `--data.path=x`, `train.yaml`, `--model.freeze_modules='[model.visual]'`"
    assert unknown_keys(text) == ["train.maxsteps", "data.path"]


def test_configuration_reference_is_generated():
    written = (DOCS / "config.md").read_text()
    assert written == config_docs.render(), "run: python -m hyper_parallel.config_docs > docs/config.md"
    for path, _ in iter_keys():
        assert f"`{path.split('.')[-1]}`" in written or f"## `{path}`" in written, path


def test_both_languages_have_the_same_sections_and_commands():
    def headings(page: Path) -> list[str]:
        return re.findall(r"^(#+) ", prose(page), re.M)

    def blocks(page: Path) -> list[tuple[str, str]]:
        return [(kind, re.sub(r" +# .*", "", code)) for kind, code in FENCE.findall(page.read_text())]

    assert headings(GUIDE) == headings(CHINESE) and len(headings(GUIDE)) > 10
    assert blocks(GUIDE) == blocks(CHINESE) and len(blocks(GUIDE)) > 10


@pytest.mark.parametrize("page", [GUIDE, CHINESE], ids=names)
@pytest.mark.parametrize("template", ["train.yaml", "train_tp.yaml"])
def test_memory_is_that_of_the_templates(page, template):
    """Whose comments are computed: tests/trainer/test_templates.py."""
    table = [line for line in page.read_text().splitlines() if re.search(r"31\.07 B|3\.65 B", line)]
    rows = table[:2] if template == "train.yaml" else table[2:]
    comments = [line for line in (TEMPLATES / template).read_text().splitlines() if re.search(r"31\.07 B|3\.65 B", line)]
    for row, comment in zip(rows, comments, strict=True):
        written, computed = (re.findall(r"([\d.]+) GiB", line) for line in (row, comment))
        wanted = computed if template == "train_tp.yaml" else [computed[i] for i in (0, 2, 3, 5)]  # 2, 8, 16, 64 of 6 sizes
        assert written == wanted


# --- messages ---------------------------------------------------------------------------------------------------------


@functools.cache
def templates() -> list[list[str]]:
    """Every string of the product's sources, as the fixed parts between the values in it."""
    found = []
    for package in ("hyper_parallel", "qwen3vl_functional"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                fixed = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
                if sum(map(len, fixed)) >= ENOUGH:
                    found.append(fixed)
    return found


def shared(message: str, parts: list[str]) -> int:
    """Fixed characters of a template that the message has, in order, until it leaves it or ends."""
    position = count = 0
    for part in parts:
        found = message.find(part, position)
        if found < 0:
            rest = message[position:]
            return count + max((n for n in range(1, len(part)) if rest.endswith(part[:n])), default=0)
        position, count = found + len(part), count + len(part)
    return count


def messages() -> list[str]:
    return re.findall(r"^### `(.*)`$", TROUBLES.read_text(), re.M)


def printed(message: str) -> bool:
    return max(shared(message, parts) for parts in templates()) >= ENOUGH


@pytest.mark.parametrize("message", messages())
def test_troubleshooting_quotes_a_message_of_the_sources(message):
    assert printed(message)


def test_other_messages_are_not_found():
    for message in ("CUDA out of memory: tried to allocate 2 GiB", "the learning rate went missing in step 3", "expected a duck"):
        assert not printed(message)


def test_every_message_has_a_cause_and_something_to_do():
    sections = re.split(r"^### .*$", TROUBLES.read_text(), flags=re.M)[1:]
    assert len(sections) == len(messages()) >= 15
    for section in sections:
        assert section.count("**Cause:**") == section.count("**What to do:**") == 1
