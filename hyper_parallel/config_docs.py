"""``python -m hyper_parallel.config_docs > docs/config.md``: the reference of all configuration keys, from their declarations."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from typing import Any, get_type_hints

from .config import OFF, Config, section_class
from .config_loader import describe_type, show_value

INTRODUCTION = """\
# Configuration keys

A configuration is one YAML file with the root keys `model`, `data` and `train`. Every key below may stand in the file or be
given on the command line as `--section.key=value`, where the value is read as YAML; the command line wins. A section or key
that is left out has its default. An unknown key, a value of another type or out of its limits is an error that names the key and
where the value came from.

This page is generated: `python -m hyper_parallel.config_docs > docs/config.md`.
"""
UNSUPPORTED = "Files of the existing Trainer carry these keys, on which this Trainer does not act. No other values are accepted:"


def render() -> str:
    """The whole page, in Markdown."""
    return "\n".join([INTRODUCTION, *(_section(path, section) for path, section in _sections(Config))])


def _sections(section: type, path: str = "") -> Iterator[tuple[str, type]]:
    """Every mapping below ``section`` with its dotted path, outer ones first."""
    hints = get_type_hints(section)
    for declared in fields(section):
        inner = section_class(hints[declared.name])
        if inner is not None:
            name = f"{path}.{declared.name}" if path else declared.name
            yield name, inner
            yield from _sections(inner, name)


def _section(path: str, section: type) -> str:
    hints = get_type_hints(section)
    _, _, about = inspect.cleandoc(section.__doc__ or "").partition(": ")
    keys = [(declared, hints[declared.name]) for declared in fields(section)]
    supported = [_row(path, *key) for key in keys if "accepts" not in key[0].metadata]
    parts = [
        f"## `{path}`",
        about[:1].upper() + about[1:],
        "\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *supported]),
    ]
    unsupported = [_unsupported_row(declared) for declared, _ in keys if "accepts" in declared.metadata]
    if prefix := getattr(section, "unsupported_prefix", None):
        unsupported.append(f"| `{prefix}*` | `null` | |")
    if unsupported:
        parts += [UNSUPPORTED, "\n".join(["| key | may be | what it would mean |", "|---|---|---|", *unsupported])]
    return "\n\n".join(parts) + "\n"


def _row(path: str, declared: Field[Any], hint: Any) -> str:
    meta = declared.metadata
    if section_class(hint) is not None:
        value, default = "a mapping", "`null`" if declared.default is None else "all defaults"
        target = f"{path}.{declared.name}".replace(".", "")
        return f"| `{declared.name}` | {value} | {default} | {_text(meta['doc'])}: [below](#{target}) |"
    value = describe_type(hint)
    if meta["valid"] is not None:
        value += f", {meta['valid'].text}"
    doc = _text(meta["doc"])
    spellings = [f"`{show_value(given)}` for `{meant}`" for given, meant in meta["spellings"].items()]
    if spellings:
        doc += f"; also {', '.join(spellings)}"
    if meta["old_name"]:
        doc += f"; old name `{meta['old_name']}`"
    return f"| `{declared.name}` | {value} | `{_default(declared.default)}` | {doc} |"


def _unsupported_row(declared: Field[Any]) -> str:
    accepts = declared.metadata["accepts"]
    values = ["a mapping with `enabled: false`" if value is OFF else f"`{show_value(value)}`" for value in accepts]
    return f"| `{declared.name}` | {' or '.join(values)} | {_text(declared.metadata['doc'])} |"


def _default(value: Any) -> str:
    assert not is_dataclass(value), value
    return show_value(list(value) if isinstance(value, tuple) else value)


def _text(doc: str) -> str:
    """Plain text that Markdown and HTML leave alone."""
    return doc.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("_", "\\_").replace("*", "\\*")


if __name__ == "__main__":
    print(render(), end="")
