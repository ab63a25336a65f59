"""The YAML of a recipe as a tree of mappings, lists and values, and changes to it from the command line."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from coca_hf.errors import CocaError


def read_tree(path: Path) -> dict[str, Any]:
    """The mapping in the YAML file at `path`. Raises CocaError where there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise CocaError(f"{path}: cannot be read as a recipe: {reason}") from None
    tree = _parse(text, str(path))
    if not isinstance(tree, dict):
        raise CocaError(f"{path}: got {type(tree).__name__}, expected a recipe: model, data, training, stages")
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
    node: Any = tree
    for step in steps:
        node = _item(node, step, override) if isinstance(node, list) else _mapping(node, override).setdefault(step, {})
    _mapping(node, override)[last] = _parse(value, override)


def nearest(name: str, known: Iterable[str]) -> str:
    """The one of `known` that is spelt most like `name`."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]


def _mapping(node: Any, override: str) -> dict[str, Any]:
    if not isinstance(node, dict):
        raise CocaError(f"{override}: the path goes through {node!r}, expected one that leads to a key of the recipe")
    return node


def _item(items: list, step: str, override: str) -> Any:
    names = {
        str(item["name"] if isinstance(item, dict) and "name" in item else number): item
        for number, item in enumerate(items)
    }
    if step not in names:
        known = f"expected one of {', '.join(names)}; nearest: {nearest(step, names)}" if names else "the list is empty"
        raise CocaError(f"{override}: got {step!r}, {known}")
    return names[step]


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers and booleans (1e-4 is a number, no is a word), and a repeated key is an error."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for repeated in (key for number, key in enumerate(keys) if key in keys[:number]):
            raise yaml.constructor.ConstructorError(None, None, f"the key {repeated!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise CocaError(f"{where}: {line}not YAML: {problem}") from None
