"""A CoCA checkpoint as a source: its configuration, for a copy of it with another RoPE base."""

import dataclasses
from collections.abc import Collection, Mapping

from transformers import CONFIG_MAPPING, PreTrainedConfig

from coca_hf.convert.families import is_inert, without_fields
from coca_hf.errors import CocaError, one_line


def coca_source_config(config: Mapping, where: str, ignored: Collection[str] = ()) -> PreTrainedConfig:
    """The configuration of a CoCA `config.json`, as in `coca_config`. The code beside it is not run: ours is.

    Raises CocaError for a family or a field that is not known, or a value that is not valid.
    """
    model_type = config["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise CocaError(f"{where}: got model_type {model_type!r}, which this version of coca_hf does not have")
    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(config_class)} | {"auto_map"}
    config = without_fields(config, ignored, known, where)
    unknown = [name for name, value in config.items() if value is not None and name not in known and not is_inert(name)]
    if unknown:
        raise CocaError(
            f"{where}: {unknown[0]}={config[unknown[0]]!r} is not understood; copying could change the model; "
            f"--ignore-field {unknown[0]} leaves it out, if it says nothing about weights or attention"
        )
    left_out = {"model_type", "auto_map", "transformers_version"}
    try:
        return config_class(**{field: value for field, value in config.items() if field not in left_out})
    except Exception as error:  # the validators of transformers raise several kinds
        raise CocaError(f"{where}: {one_line(error)}") from error
