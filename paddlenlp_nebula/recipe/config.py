"""From a recipe file and the command line to argument dataclasses, all problems found before anything starts.

PaddleNLP's own PdArgumentParser converts every value, one key at a time, so that a recipe means what the same
words mean to a PaddleNLP script and one bad value does not hide the next. What it would let pass is checked
here: unknown keys, null, numbers out of range, choices.
"""

from __future__ import annotations

import dataclasses
import math
import os
from argparse import ArgumentError
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any, get_args, get_origin

from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.recipe.device import refuse_precision, use_device
from paddlenlp_nebula.recipe.limits import training_problem
from paddlenlp_nebula.recipe.registry import RECIPES, Recipe
from paddlenlp_nebula.recipe.source import Setting, Source, find_recipe, read_overrides, read_recipe

__all__ = ["Configuration", "convert", "load_configuration"]

_SITE = ("cluster", "clusters", "rendezvous", "tls_ca", "tls_cert", "tls_key")


@dataclass(frozen=True)
class Configuration:
    """A recipe that can run: one instance of each of its argument classes, and how the clusters exchange."""

    recipe: Recipe
    arguments: tuple[Any, ...]
    nebula: NebulaArguments

    @property
    def training(self) -> Any:
        """PaddleNLP's TrainingArguments."""
        return next(instance for instance in self.arguments if hasattr(instance, "fp16_opt_level"))

    def value(self, name: str, default: Any = None) -> Any:
        """The value of a field of any of the recipe's argument classes."""
        for instance in self.arguments:
            if hasattr(instance, name):
                return getattr(instance, name)
        return default


def load_configuration(recipe: str, overrides: Sequence[str] = (), *, any_site: bool = False) -> Configuration:
    """Read, convert and check a recipe.

    Args:
        recipe: path of a YAML or JSON file, or the name of a shipped recipe.
        overrides: command-line words such as ``["--max_steps", "100", "--no_lora"]``; they win over the file.
        any_site: check a recipe that may not say yet which cluster this is, as ``nebula validate`` does.

    Raises:
        ConfigurationError: with every problem of the file and the overrides at once.
    """
    path = find_recipe(recipe)
    source = read_recipe(path).overridden_by(read_overrides(overrides))
    chosen = _chosen_recipe(source, path.name)
    if any_site:
        _assume_site(source.settings)
    *arguments, nebula = convert((*chosen.argument_classes(), NebulaArguments), source)
    if problems := chosen.problems(tuple(arguments), nebula):
        raise ConfigurationError(problems)
    return Configuration(chosen, tuple(arguments), nebula)


def convert(classes: Sequence[type], source: Source) -> tuple[Any, ...]:
    """One instance of each dataclass, filled from ``source``. The device that they name becomes Paddle's.

    Raises:
        ConfigurationError: with every problem at once.
    """
    # PdArgumentParser resolves the types of all fields (and strips Optional), which _described reads.
    from paddlenlp.trainer import PdArgumentParser, TrainingArguments

    parser = PdArgumentParser(classes, add_help=False, allow_abbrev=False, exit_on_error=False)
    for action in parser._actions:
        action.required = False  # keys are parsed one by one; what is missing is found below
    fields = {field.name: field for cls in classes for field in dataclasses.fields(cls) if field.init}
    of_training = {f.name for cls in classes if issubclass(cls, TrainingArguments) for f in dataclasses.fields(cls)}

    problems = list(source.problems)
    values: dict[str, Any] = {}
    rejected: set[str] = set()
    for written, setting in source.settings.items():
        name, setting = _resolve(written, setting, fields)
        if name not in fields:
            problems.append(_unknown(written, setting.where, fields))
        elif setting.value is not None:
            try:
                value = _parse(parser, fields[name], setting)
                if name in of_training and (expected := training_problem(name, value)):
                    raise ValueError(expected)
                values[name] = value
            except ValueError as error:
                rejected.add(name)
                problems.append(f"{name} must be {error}, got {_shown(setting)} ({setting.where})")

    instances = []
    for cls in classes:
        own = [field for field in dataclasses.fields(cls) if field.init]
        absent = [field.name for field in own if _required(field) and field.name not in values]
        problems += [f"{name} must be set, got nothing: add `{name}: ...`" for name in absent if name not in rejected]
        # A stand-in for what is absent lets the class still say what else is wrong.
        inputs: dict[str, Any] = dict.fromkeys(absent, "absent")
        inputs.update({field.name: values[field.name] for field in own if field.name in values})
        try:
            instances.append(instance := cls(**inputs))
            if issubclass(cls, TrainingArguments):
                problems += _problems_here(instance)
        except ConfigurationError as error:
            problems += error.problems
        except (ValueError, TypeError, AssertionError, OSError) as error:
            problems.append(f"{cls.__name__} refuses these values: {' '.join(str(error).split())}")
    if problems:
        raise ConfigurationError(problems)
    return tuple(instances)


def _chosen_recipe(source: Source, file_name: str) -> Recipe:
    """Take the key ``recipe`` out of the settings; without it the file is a PaddleNLP user's own: ``sft``."""
    setting = source.settings.pop("recipe", None)
    if setting is None or setting.value is None:
        return RECIPES["sft"]
    if not isinstance(setting.value, str) or setting.value not in RECIPES:
        problem = f"recipe must be {' or '.join(map(repr, RECIPES))}, got {_shown(setting)} ({setting.where})"
        raise ConfigurationError([*source.problems, problem])
    return RECIPES[str(setting.value)]


def _assume_site(settings: dict[str, Setting]) -> None:
    """Fill in what only a running cluster knows, consistently with what is set already."""

    def known(name: str) -> str | None:
        setting = settings.get(name)
        value = setting.value if setting is not None else None
        return value if isinstance(value, str) else os.environ.get(f"NEBULA_{name.upper()}")

    clusters = known("clusters") or ",".join(dict.fromkeys([known("cluster") or "west", "east"]))
    assumed = {"clusters": clusters, "cluster": clusters.partition(",")[0].strip(), "rendezvous": "127.0.0.1:29400"}
    assumed |= dict.fromkeys(("tls_ca", "tls_cert", "tls_key"), "assumed.pem")
    for name in _SITE:
        if not known(name):
            settings[name] = Setting(assumed[name], "assumed")


def _problems_here(training: Any) -> list[str]:
    """What this machine cannot do of PaddleNLP's TrainingArguments; only Paddle knows."""
    found: list[str] = []
    for check, subject in ((use_device, training.device), (refuse_precision, training)):
        try:
            check(subject)
        except ConfigurationError as error:
            found += error.problems
    return found


def _resolve(name: str, setting: Setting, fields: Mapping[str, Any]) -> tuple[str, Setting]:
    """Turn ``--lora`` into ``lora: true`` and ``--no_lora`` into ``lora: false``."""
    if not setting.flag:
        return name, setting
    positive = name.removeprefix("no_")
    if name not in fields and positive in fields and _is_bool(fields[positive]):
        return positive, Setting("false", setting.where)
    # A flag's value is "true" even where no boolean is wanted: the conversion then says what is.
    return name, Setting("true" if name not in fields or _is_bool(fields[name]) else [], setting.where)


def _parse(parser: Any, field: dataclasses.Field[Any], setting: Setting) -> Any:
    """Convert one value as PdArgumentParser does.

    Raises:
        ValueError: whose text ends the sentence "NAME must be ...".
    """
    expected = _described(field)
    takes_list = get_origin(field.type) is list
    if isinstance(setting.value, list):
        groups = setting.value if any(isinstance(item, list) for item in setting.value) else [setting.value]
        two_levels = takes_list and get_origin(get_args(field.type)[0]) is list
        if not takes_list or not all(isinstance(g, list) and g for g in groups) or (len(groups) > 1 and not two_levels):
            raise ValueError(expected)
        words = [word for group in groups for word in (f"--{field.name}", *map(str, group))]
    else:
        words = [f"--{field.name}={setting.value}"]
    try:
        namespace, rest = parser.parse_known_args(words)
    except ArgumentError:
        raise ValueError(expected) from None
    value = getattr(namespace, field.name)
    if rest or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(expected)
    return value


def _described(field: dataclasses.Field[Any]) -> str:
    """What a field's type asks for, in words."""
    kind: Any = field.type
    if choices := field.metadata.get("choices"):
        return " or ".join(repr(choice) for choice in choices)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(repr(member.value) for member in kind)
    if get_origin(kind) is list:
        inner = get_args(kind)[0]
        words = {int: "whole numbers", float: "numbers", str: "words"}
        return "a list of " + words.get(inner, "lists" if get_origin(inner) is list else "values")
    if _is_bool(field):
        return "true or false"
    names = {int: "a whole number", float: "a finite number", str: "a single value", dict: "a JSON object in quotes"}
    return names.get(kind, f"a {getattr(kind, '__name__', kind)}")


def _is_bool(field: dataclasses.Field[Any]) -> bool:
    return field.type is bool or bool in get_args(field.type)


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _unknown(name: str, where: str, fields: Iterable[str]) -> str:
    candidates = ["recipe", *fields]
    close = get_close_matches(name.replace("-", "_"), candidates, n=1) or get_close_matches(
        name.removeprefix("no_"), candidates, n=1
    )
    hint = f"did you mean {close[0]}?" if close else "remove it"
    return f"{name} is not a key of this recipe ({where}): {hint}"


def _shown(setting: Setting) -> str:
    return "nothing" if setting.value == [] else repr(setting.value)
