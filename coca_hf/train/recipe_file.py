"""A recipe's file: its YAML, overrides of it, and mappings that refuse what they do not know."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ConfigDict, model_validator

from coca_hf.errors import CocaError, nearest, one_line, short


def read_tree(path: Path) -> dict[str, Any]:
    """The mapping in the YAML file at `path`. Raises CocaError where there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise CocaError(f"{path}: cannot be read as a recipe: {reason}") from None
    tree = _parse(text, str(path))
    if not isinstance(tree, dict):
        raise CocaError(
            f"{path}: got {type(tree).__name__}, expected a recipe: model, data, training, stages"
        )
    return tree


def override_(tree: dict[str, Any], override: str) -> None:
    """Set one `dotted.path=value` in the tree, in place; stages go by name, sources by number.

    A new key is made; whether there is such a key is for the recipe to say.

    Raises CocaError for a path through a value, or to a stage or source that does not exist.
    """
    path, equals, value = override.partition("=")
    if not equals or not all(path.split(".")):
        raise CocaError(f"{override}: expected key=value, such as training.learning_rate=1e-4")
    *steps, last = path.split(".")
    override = override if len(override) <= 200 else f"{override[:200]} ..."  # what messages say
    node: Any = tree
    for step in steps:
        node = (
            _item(node, step, override)
            if isinstance(node, list)
            else _mapping(node, override).setdefault(step, {})
        )
    _mapping(node, override)[last] = _parse(value, override)


class StrictMapping(BaseModel):
    """A mapping of the recipe that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, given: Any) -> Any:
        for key in given if isinstance(given, dict) else ():
            if key not in cls.model_fields:
                raise ValueError(unknown_key(key, cls.model_fields))
        return given


def unknown_key(key: Any, known: Iterable[str]) -> str:
    return f"unknown key {short(key)}; nearest: {nearest(str(key), known)}"


def explain(tree: Any, problem: Any) -> str:
    """One problem that pydantic found, as `where: got, expected`, with stages by name."""
    steps: list[str] = []
    node: Any = tree
    for step in problem["loc"]:
        is_there = isinstance(node, list) or (isinstance(node, dict) and step in node)
        node = node[step] if is_there else None
        named = isinstance(step, int) and isinstance(node, dict) and "name" in node
        steps.append(str(node["name"] if named else step))
    path = [step for step in steps if step != "training" or steps[0] == "training"]
    path = path[:-1] if path[-1:] == ["[key]"] else path
    where = f"{'.'.join(path)}: " if steps else ""
    if problem["type"] == "value_error":
        return where + problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{where}missing, expected a value"
    if problem["type"] in ("dict_type", "model_type"):
        return f"{where}got {short(problem['input'])}, expected a mapping"
    if problem["type"] == "too_short":
        return f"{where}got {short(problem['input'])}, expected one or more"
    expected = problem["msg"].removeprefix("Input should be ")
    return f"{where}got {short(problem['input'])}, expected {expected}"


def _mapping(node: Any, override: str) -> dict[str, Any]:
    if not isinstance(node, dict):
        raise CocaError(
            f"{override}: the path goes through {short(node)}, expected one that leads to a key of "
            f"the recipe"
        )
    return node


def _item(items: list, step: str, override: str) -> Any:
    names = {
        str(item["name"] if isinstance(item, dict) and "name" in item else number): item
        for number, item in enumerate(items)
    }
    if step not in names:
        known = "the list is empty"
        if names:
            known = f"expected one of {', '.join(names)}; nearest: {nearest(step, names)}"
        raise CocaError(f"{override}: got {short(step)}, {known}")
    return names[step]


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers and booleans: 1e-4 is a number; no, 1:30 and 2026-11-21 are words."""

    yaml_implicit_resolvers = {
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag.rpartition(":")[2] not in ("bool", "int", "float", "timestamp")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_DECIMAL = r"(\d[\d_]*\.\d*|\.\d+)([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+"
for _name, _pattern, _first in (
    ("float", rf"^[-+]?({_DECIMAL}|\.(inf|Inf|INF))$|^\.(nan|NaN|NAN)$", "-+.0123456789"),
    ("int", r"^[-+]?(0|[1-9][\d_]*|0x[\da-fA-F]+|0o[0-7]+)$", "-+0123456789"),
    ("bool", r"^(true|True|TRUE|false|False|FALSE)$", "tTfF"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), list(_first))
_Loader.add_constructor(
    "tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(cast(Any, node)), 0)
)


def _parse(text: str, where: str) -> Any:
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        _refuse_repeated_keys(node, set())
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or one_line(error)
        raise CocaError(f"{where}: {line}not YAML: {problem}") from None
    except RecursionError:
        raise CocaError(f"{where}: not a recipe: nested too deeply") from None
    except ValueError as error:  # of a value with a tag of its own, such as !!int x
        raise CocaError(f"{where}: not YAML: {one_line(error)}") from None
    finally:
        if loader:
            loader.dispose()


def _refuse_repeated_keys(node: yaml.Node | None, seen: set[int]) -> None:
    """A key that stands twice in a mapping is an error; what `<<` merges in may stand beside it."""
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))
    keys = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    for repeated in (key for number, key in enumerate(keys) if key in keys[:number]):
        raise yaml.constructor.ConstructorError(
            None, None, f"the key {short(repeated)} stands twice", node.start_mark
        )
    for child in node.value:
        for part in child if isinstance(child, tuple) else (child,):
            _refuse_repeated_keys(part, seen)
