"""Mappings of a recipe that refuse what they do not know, and what pydantic finds wrong with them, in one line."""

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from coca_hf.train.tree import nearest, short


class Part(BaseModel):
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
        node = node[step] if isinstance(node, list) or (isinstance(node, dict) and step in node) else None
        named = isinstance(step, int) and isinstance(node, dict) and "name" in node
        steps.append(str(node["name"] if named else step))
    where = f"{'.'.join(step for step in steps if step != 'training' or steps[0] == 'training')}: " if steps else ""
    if problem["type"] == "value_error":
        return where + problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{where}missing, expected a value"
    if problem["type"] in ("dict_type", "model_type"):
        return f"{where}got {short(problem['input'])}, expected a mapping"
    return f"{where}got {short(problem['input'])}, expected {problem['msg'].removeprefix('Input should be ')}"
