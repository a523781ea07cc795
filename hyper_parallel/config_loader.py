"""Strict reading of configuration files and command lines into ``hyper_parallel.config.Config``.

Nothing is guessed and nothing is ignored: an unknown key, a value of another type, a value out of its limits or a key
that this Trainer does not act on is a ``ConfigError`` with the key's full path and where the value came from.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from hyper_parallel.config import OFF, Config, iter_keys, section_class

USAGE = """\
usage: --config FILE [--PATH VALUE | --PATH=VALUE]...

  --config FILE   YAML file with the root keys model, data and train
  --PATH VALUE    set one key, for example --train.max_steps 3 or --model.freeze_modules='[model.visual]';
                  the value is read as YAML; of two overrides of one key the later counts
  -h, --help      print this text"""

COMMAND_LINE = "the command line"
# YAML 1.1 takes these for strings unless they have both a dot and a signed exponent.
EXPONENT_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


class ConfigError(ValueError):
    """A mistake in a configuration file or on the command line."""


@dataclass(frozen=True)
class Source:
    """Where values came from: a file (or whatever ``name`` says), except for the paths set on the command line."""

    name: str
    overridden: frozenset[str] = frozenset()

    def of(self, path: str) -> str:
        """The origin of the value at ``path``; of a mapping with single keys overridden, both origins."""
        if any(path == other or path.startswith(f"{other}.") for other in self.overridden):
            return COMMAND_LINE
        if any(other.startswith(f"{path}.") for other in self.overridden):
            return f"{self.name} and {COMMAND_LINE}"
        return self.name


# --- entry points ----------------------------------------------------------------------------------------------------


def load_config(argv: Sequence[str]) -> Config:
    """The configuration that a command line (without the program's name) asks for; ``--help`` prints and exits."""
    if "--help" in argv or "-h" in argv:
        print(USAGE)
        raise SystemExit(0)
    options = list(_options(argv))
    files = [text for name, text in options if name == "config"]
    if len(files) != 1 or not files[0]:
        raise ConfigError(f"expected one --config FILE, got {len(files)}: {', '.join(files) or 'none'}\n{USAGE}")
    tree = read_yaml_file(files[0])
    overridden: set[str] = set()
    for path, text in options:
        if path != "config":
            tree = _override(tree, path.split("."), _parse_yaml(text, f"--{path}"), overridden)
    return config_from_dict(tree, source=Source(files[0], frozenset(overridden)))


def config_from_dict(tree: Mapping[str, Any], source: str | Source = "dict") -> Config:
    """The configuration in a nested mapping; ``source`` is named in errors."""
    return _read_section(Config, tree, "", source if isinstance(source, Source) else Source(source))


def read_yaml_file(path: str) -> dict[str, Any]:
    """The mapping in one YAML file; ConfigError if it is missing, empty, broken, or something else than a mapping."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    tree = _parse_yaml(text, path)
    if tree is None:
        raise ConfigError(f"the configuration file {path} is empty")
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping with the keys model, data and train, got {show_value(tree)}")
    return tree


# --- YAML and the command line ---------------------------------------------------------------------------------------


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice in one mapping, where YAML libraries let the last one win."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for name in (name for name, _ in node.value if isinstance(name, yaml.ScalarNode)):
            if name.value in seen:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {name.value}", problem_mark=name.start_mark)
            seen.add(name.value)
        return node


def _parse_yaml(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    # ValueError: a scalar that looks like a date and is none.
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{origin}: not valid YAML: {error}") from error


def _options(argv: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Name and text of every ``--name=text`` and ``--name text``."""
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, text = word[2:].partition("=")
        if not word.startswith("--") or not (name == "config" or "." in name or name in ("model", "data", "train")):
            raise ConfigError(f"unknown argument {word!r} on {COMMAND_LINE}\n{USAGE}")
        if not equals:
            if not words or words[0].startswith("--"):
                raise ConfigError(f"--{name} has no value on {COMMAND_LINE}\n{USAGE}")
            text = words.pop(0)
        yield name, text


def _override(tree: Any, keys: list[str], value: Any, overridden: set[str], prefix: str = "") -> dict[str, Any]:
    """``tree`` with one value replaced; adds to ``overridden`` the first path that the tree did not have."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{prefix} = {show_value(tree)} holds no keys: cannot set {prefix}.{'.'.join(keys)} on {COMMAND_LINE}")
    first, *rest = keys
    path = f"{prefix}.{first}" if prefix else first
    if rest and tree.get(first) is not None:
        value = _override(tree[first], rest, value, overridden, path)
    else:
        overridden.add(path)
        for name in reversed(rest):
            value = {name: value}
    return {**tree, first: value}


# --- checking --------------------------------------------------------------------------------------------------------


def _read_section(section: type, tree: Any, path: str, source: Source) -> Any:
    """One mapping of the file as its dataclass; an empty one (null) means all defaults."""
    if tree is None:
        tree = {}
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path or 'root'} = {show_value(tree)}: expected a mapping (in {source.of(path)})")
    prefix = f"{path}." if path else ""
    declared = {f.name: f for f in fields(section)}
    old_names = {f.metadata["old_name"]: f.name for f in declared.values() if f.metadata.get("old_name")}
    hints = get_type_hints(section)
    values = {}
    for given, value in tree.items():
        name = old_names.get(given, given)
        if name in declared:
            if given in old_names and value is None:
                continue
            if name in values:
                old = next(old for old, new in old_names.items() if new == name)
                raise ConfigError(f"{prefix}{old} is the old name of {prefix}{name}: give one (in {source.of(path)})")
            values[name] = _read_value(declared[name], hints[name], value, f"{prefix}{given}", source)
        elif str(given).startswith(getattr(section, "unsupported_prefix", "\0")):
            _check_unsupported(value, (None,), f"{prefix}{given}", source)
        else:
            raise _unknown_key(given, prefix, declared, source)
    try:
        return section(**values)
    except ValueError as error:
        raise ConfigError(f"{error} (in {source.of(path)})") from error


def _read_value(declared: Field[Any], hint: Any, value: Any, path: str, source: Source) -> Any:
    """The value of one key, converted to its type and checked against its limit."""
    meta = declared.metadata
    if "accepts" in meta:
        _check_unsupported(value, meta["accepts"], path, source)
        return declared.default
    section = section_class(hint)
    if section is not None:
        if value is None and _is_optional(hint):
            return None
        return _read_section(section, value, path, source)
    if isinstance(value, str | bool):
        value = meta["spellings"].get(value, value)
    try:
        converted = _convert(value, hint)
    except TypeError:
        expected = describe_type(hint)
        raise ConfigError(f"{path} = {show_value(value)}: expected {expected} (in {source.of(path)})") from None
    rule = meta["valid"]
    if rule is not None and converted is not None and not rule.holds(converted):
        raise ConfigError(f"{path} = {show_value(value)}: must be {rule.text} (in {source.of(path)})")
    return converted


def _check_unsupported(value: Any, accepts: tuple[Any, ...], path: str, source: Source) -> None:
    for accepted in accepts:
        if accepted is OFF:
            if isinstance(value, Mapping) and value.get("enabled") is False:
                return
        elif type(value) is type(accepted) and value == accepted:
            return
    only = " or ".join(show_value(accepted) for accepted in accepts)
    raise ConfigError(f"{path} = {show_value(value)}: not supported by this Trainer (only {only}) (in {source.of(path)})")


def _unknown_key(name: Any, prefix: str, siblings: Iterable[str], source: Source) -> ConfigError:
    """The error for an unknown key, with the nearest name: among its siblings, else the same name elsewhere."""
    siblings = list(siblings)
    near = [prefix + other for other in difflib.get_close_matches(str(name), siblings, n=1)]
    near += [path for path, _ in iter_keys() if path.split(".")[-1] == name]
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(siblings)}"
    return ConfigError(f"unknown key {prefix}{name}: {hint} (in {source.of(f'{prefix}{name}')})")


# --- types -----------------------------------------------------------------------------------------------------------


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)


def _convert(value: Any, hint: Any) -> Any:
    """``value`` as the type ``hint``; TypeError if it is something else."""
    if _is_optional(hint):
        (inner,) = (kind for kind in get_args(hint) if kind is not NoneType)
        return None if value is None else _convert(value, inner)
    origin, args = get_origin(hint), get_args(hint)
    if hint in (int, float):
        return _convert_number(value, hint)
    if origin is list and isinstance(value, list):
        return [_convert(item, args[0]) for item in value]
    if origin is tuple and isinstance(value, list | tuple) and len(value) == len(args):
        return tuple(_convert(item, kind) for item, kind in zip(value, args, strict=True))
    if origin is dict and isinstance(value, Mapping):
        return _convert_free(value)
    # `type` rather than isinstance: true is no number and 1 is no truth value.
    if (origin is Literal and isinstance(value, str) and value in args) or type(value) is hint:
        return value
    raise TypeError


def _convert_number(value: Any, kind: type[int] | type[float]) -> int | float:
    """An int or a finite float: ints pass for floats, ``1e3`` for both, and 3.0 is no int."""
    if isinstance(value, str) and EXPONENT_NUMBER.fullmatch(value):
        number = float(value)
        value = int(number) if kind is int and number.is_integer() else number
    if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and isinstance(value, float)):
        raise TypeError
    if kind is float and not abs(value) <= sys.float_info.max:
        raise TypeError
    return kind(value)


def _convert_free(value: Any) -> Any:
    """A copy of a mapping whose keys the model checks, with ``1e-6`` read as the number that it is."""
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise TypeError
        return {name: _convert_free(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_convert_free(item) for item in value]
    return float(value) if isinstance(value, str) and EXPONENT_NUMBER.fullmatch(value) else value


def describe_type(hint: Any) -> str:
    """A type in the words of an error message."""
    origin, args = get_origin(hint), get_args(hint)
    if _is_optional(hint):
        return " or ".join(describe_type(kind) for kind in args if kind is not NoneType) + " or null"
    if origin is Literal:
        choices = ", ".join(args)
        return f"one of {choices}" if len(args) > 1 else f"{choices}, the only choice"
    if origin is list:
        return f"a list of {_plural(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)} {_plural(next(iter(args)))}"
    if origin is dict:
        return "a mapping with string keys"
    return {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}[hint]


def _plural(hint: Any) -> str:
    return f"{describe_type(hint).partition(' ')[2]}s"


def show_value(value: Any) -> str:
    """A value as YAML would spell it, on one line."""
    try:
        return json.dumps(value, ensure_ascii=False)
    # Dates, and mappings with keys that are no strings.
    except (TypeError, ValueError):
        return repr(value)
