"""A CoCA checkpoint as a source: its configuration and tensors, for a copy of it with another RoPE base."""

import dataclasses
from collections.abc import Mapping

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from coca_hf.convert.families import INERT_FIELDS
from coca_hf.convert.tensors import Piece, Shape
from coca_hf.errors import CocaError


def coca_source_config(config: Mapping, where: str) -> PreTrainedConfig:
    """The configuration of a CoCA `config.json`; `where` names it in errors. The code beside it is not run: ours is.

    Raises CocaError for a family or a field that is not known, or a value that is not valid.
    """
    model_type = config["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise CocaError(f"{where}: got model_type {model_type!r}, which this version of coca_hf does not have")
    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(config_class)} | INERT_FIELDS | {"auto_map"}
    unknown = [field for field in config if field not in known and not field.startswith("_")]
    if unknown:
        raise CocaError(
            f"{where}: {unknown[0]}={config[unknown[0]]!r} is not understood; copying could change the model"
        )
    ignored = {"model_type", "auto_map", "transformers_version"}
    try:
        return config_class(**{field: value for field, value in config.items() if field not in ignored})
    except Exception as error:  # the validators of transformers raise several kinds
        raise CocaError(f"{where}: {' '.join(str(error).split())}") from error


def coca_source_tensors(shapes: Mapping[str, Shape], config: PreTrainedConfig, where: str) -> list[Piece]:
    """Every tensor of the model as a piece that is copied, after comparing them with the `shapes` found.

    Raises CocaError naming the first tensor that is missing, not understood or of the wrong shape.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # sizes that torch refuses
        raise CocaError(f"{where}: its config.json makes no model ({' '.join(str(error).split())})") from error
    tied = set(model._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    for name, shape in expected.items():
        if shapes.get(name) != shape:
            found = f"has shape {shapes[name]}" if name in shapes else "is missing"
            raise CocaError(f"{where}: tensor {name} {found}, expected shape {shape} from config.json")
    unknown = [name for name in shapes if name not in expected and name not in tied]
    if unknown:
        raise CocaError(f"{where}: tensor {unknown[0]} is not understood; expected those of {type(model).__name__}")
    return [Piece(name, shape, name, shape) for name, shape in expected.items()]
