"""Every command of the documents, taken apart: programs, modules and files that exist, keys that the loader takes."""

import re
import shlex
from pathlib import Path

import pytest

from hyper_parallel.config_loader import ConfigError, load_config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BASH = re.compile(r"^```bash\n(.*?)^```$", re.M | re.S)
LAUNCH = "hyper_parallel.trainer.launch"


def commands() -> list[tuple[str, list[str]]]:
    """Page and words of each command, variables filled in as the page's own ``export`` lines say."""
    found = []
    for page in PAGES:
        variables: dict[str, str] = {}
        for line in "".join(BASH.findall(page.read_text())).splitlines():
            words = shlex.split(re.sub(r"\$(\w+)", lambda match: variables[match[1]], line), comments=True)  # noqa: B023
            if words[:1] == ["export"]:
                variables |= dict(word.split("=", 1) for word in words[1:])
            elif words:
                found.append((str(page.relative_to(ROOT)), words))
    return found


def check(words: list[str]) -> None:
    program, *rest = words
    if program == "timeout":
        first = next(i for i, word in enumerate(rest) if not word.startswith("--"))
        return check(rest[first + 1 :])
    if program == "make":
        assert rest and all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M) for target in rest)
    elif program == "." and rest == [".venv/bin/activate"]:
        pass
    elif program == "bash":
        assert (ROOT / rest[0]).is_file()
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        arguments = get_args_parser().parse_args(rest)
        assert arguments.module
        check_module(arguments.training_script, arguments.training_script_args)
    else:
        assert Path(program).name in ("python", "python3"), program
        if rest[0] == "-m":
            check_module(rest[1], rest[2:])
        else:
            check_flags(ROOT / rest[0], rest[1:])


def check_module(module: str, arguments: list[str]) -> None:
    if module == LAUNCH:
        load_config(arguments)
    elif not module.startswith("hyper_parallel"):
        assert module in ("venv", "pip", "pytest")
    else:
        check_flags(ROOT / f"{module.replace('.', '/')}.py", arguments)


def check_flags(source: Path, arguments: list[str]) -> None:
    """Flags, and for a tool with several commands the first word, stand in the program that takes them."""
    text = source.read_text()
    wanted = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    if "add_subparsers" in text:
        wanted.append(arguments[0])
    assert [flag for flag in wanted if f'"{flag}"' not in text] == []


@pytest.mark.parametrize(
    ("page", "words"), commands(), ids=lambda value: value if isinstance(value, str) else " ".join(value)[:60]
)
def test_command(page, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    check(words)


@pytest.mark.parametrize(
    "line",
    [
        f"python -m {LAUNCH} --config examples/qwen3_vl_30b_a3b_instruct/smoke.yaml --train.stepz=3",
        f"torchrun --nproc_per_node 2 -m {LAUNCH} --config absent.yaml",
        "python -m hyper_parallel.absent",
        "python -m hyper_parallel.checkpoint repair outputs",
        "python examples/absent.py",
        "make coffee",
        "rm -rf outputs",
    ],
)
def test_wrong_commands_are_noticed(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises((AssertionError, ConfigError, OSError)):
        check(shlex.split(line))


def test_no_variable_of_torchrun_is_exported():
    """With RANK in the environment every later launch in that shell would wait for other processes."""
    for page in PAGES:
        for block in BASH.findall(page.read_text()):
            assert not re.search(r"\b(RANK|LOCAL_RANK|WORLD_SIZE)=", block), page


def test_the_pages_with_commands_are_read():
    pages = {page for page, _ in commands()}
    assert {"README.md", "docs/guide/qwen3_vl_moe.md", "docs/checkpoint.md"} <= pages
