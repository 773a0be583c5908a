"""Reading a recipe: where its file is, what it says, and what the command line changes.

Every value stays the text that was written, because PaddleNLP's argument parser takes text: ``1e-4``, ``no``
and ``010`` then mean in a recipe exactly what they mean on a PaddleNLP command line, which they would not
after YAML 1.1 had made a string, a boolean and an octal number of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from paddlenlp_nebula.errors import ConfigurationError

__all__ = ["Setting", "Source", "find_recipe", "read_overrides", "read_recipe", "shipped_recipes"]

Value: TypeAlias = "str | list[Any] | None"

_PACKAGE = Path(__file__).resolve().parent.parent
# In a wheel the recipes lie inside the package, in a source tree beside it.
_SHELVES = (_PACKAGE / "shipped_recipes", _PACKAGE.parent / "recipes")
_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Setting:
    """One key's value.

    Args:
        value: the text as written, a list of texts (or of such lists), or None for "not set". A flag without
            a value on the command line is None with ``flag`` true.
        where: where it was written, for messages ("line 3 of x.yaml", "command line").
    """

    value: Value
    where: str
    flag: bool = False


@dataclass
class Source:
    """What was read, and one sentence for each thing in it that cannot be right."""

    settings: dict[str, Setting] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def overridden_by(self, other: Source) -> Source:
        """Both together; where both set a key, ``other`` wins."""
        return Source({**self.settings, **other.settings}, [*self.problems, *other.problems])


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with the package: name -> file."""
    found: dict[str, Path] = {}
    for shelf in _SHELVES:
        for path in sorted(shelf.rglob("*")):
            inside = path.relative_to(shelf)
            if path.suffix in _SUFFIXES and inside.parts[0] != "data":
                found.setdefault(inside.with_suffix("").as_posix(), path)
    return found


def find_recipe(name: str) -> Path:
    """The file of a recipe given as a path, or as the name of a shipped one.

    Raises:
        ConfigurationError: there is no such file.
    """
    path = Path(name).expanduser()
    try:
        is_file = path.is_file()
    except OSError as error:  # no name for a file, such as a whole recipe
        raise ConfigurationError([f"there is no recipe file {name!r:.80}: {error.strerror}"]) from None
    if is_file:
        return path
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    if path.is_dir():
        raise ConfigurationError([f"a recipe is a YAML or JSON file, got the directory {name!r}"])
    close = get_close_matches(path.stem, shipped, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    names = ", ".join(shipped) or "none"
    raise ConfigurationError([f"there is no recipe file {name!r}{hint} (recipes known by name: {names})"])


def read_recipe(path: Path) -> Source:
    """Read a flat YAML or JSON file.

    Raises:
        ConfigurationError: the file cannot be read or parsed, or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors write a mark in front
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError([f"the recipe file {str(path)!r} cannot be read: {error}"]) from None
    try:
        return _read_json(text, path.name) if path.suffix == ".json" else _read_yaml(text, path.name)
    except RecursionError:
        raise ConfigurationError([f"{path.name} must be flat, got values nested without end"]) from None


def read_overrides(tokens: Sequence[str]) -> Source:
    """Read ``--key value``, ``--key=value``, ``--key a b``, ``--key`` and ``--no_key`` from a command line.

    As on any PaddleNLP command line the last of several values for one key counts.
    """
    source = Source()
    key: str | None = None
    values: list[str] = []

    def close() -> None:
        if key is not None:
            value = None if not values or values == ["null"] else values[0] if len(values) == 1 else list(values)
            source.settings[key] = Setting(value, "command line", flag=not values)

    for token in tokens:
        if token.startswith("--") and len(token) > 2:
            close()
            key, equals, value = token[2:].partition("=")
            values = [value] if equals else []
        elif key is None:
            source.problems.append(f"overrides are written --key value, got {token!r} on the command line")
        else:
            values.append(token)
    close()
    return source


def _read_json(text: str, name: str) -> Source:
    source = Source()
    where = f"in {name}"

    def pairs_to_mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key, value in pairs:
            if key in mapping:
                source.problems.append(f"{key} is set twice {where}: remove one of the two")
            mapping[key] = ("true" if value else "false") if isinstance(value, bool) else value
        return mapping

    try:
        # Numbers stay text, so that a learning rate is not rounded and printed anew.
        content = json.loads(
            text, object_pairs_hook=pairs_to_mapping, parse_float=str, parse_int=str, parse_constant=str
        )
    except json.JSONDecodeError as error:
        raise ConfigurationError([f"{name} is not valid JSON: {error}"]) from None
    if not isinstance(content, dict):
        raise ConfigurationError([f"{name} must be a mapping of keys to values, got a {type(content).__name__}"])
    for key, value in content.items():
        _add(source, key, value, where)
    return source


class _TextLoader(yaml.SafeLoader):
    """YAML whose plain scalars stay text, except null."""


_TextLoader.yaml_implicit_resolvers = {}
_TextLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])


def _read_yaml(text: str, name: str) -> Source:
    source = Source()
    loader = None
    try:
        loader = _TextLoader(text)
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            kind = "nothing" if root is None else "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            raise ConfigurationError([f"{name} must be a mapping of keys to values, got {kind}"])
        for key_node, value_node in root.value:
            key = loader.construct_object(key_node, deep=True)
            where = f"line {key_node.start_mark.line + 1} of {name}"
            if not isinstance(key, str):
                source.problems.append(f"keys are plain words, got {key!r} in {where}")
            elif key in source.settings:
                source.problems.append(
                    f"{key} is set twice, in {source.settings[key].where} and in {where}: remove one of the two"
                )
            else:
                _add(source, key, loader.construct_object(value_node, deep=True), where)
    except yaml.YAMLError as error:
        raise ConfigurationError([f"{name} is not valid YAML: {_yaml_reason(error)}"]) from None
    finally:
        if loader is not None:
            loader.dispose()
    return source


def _yaml_reason(error: yaml.YAMLError) -> str:
    """What the parser says, in one line that begins with the place."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    place = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    begun = f" ({error.context} that begins in line {error.context_mark.line + 1})" if error.context_mark else ""
    return f"{place}: {error.problem}{begun}"


def _add(source: Source, key: str, value: Any, where: str) -> None:
    """Take a key whose value is flat; note a problem otherwise. A key is entered in both cases, so it is not missed."""
    source.settings[key] = Setting(None, where)
    if isinstance(value, dict):
        inner = ", ".join(map(str, value)) or "none"
        source.problems.append(
            f"{key} must be a single value or a list, got a mapping ({where}): recipes are flat, "
            f"so write its keys ({inner}) beside {key}"
        )
        return
    if isinstance(value, list) and any(item is None or isinstance(item, dict) for item in value):
        source.problems.append(
            f"{key} must be a list of plain values, got a list with null or a mapping in it ({where})"
        )
        return
    if isinstance(value, bool):
        value = "true" if value else "false"
    source.settings[key] = Setting(value, where)
