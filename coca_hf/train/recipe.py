"""Recipes: one YAML file that says which model is trained, on what, and in which stages.

    model: checkpoints/smollm2-135m-coca      # a converted directory or hub id
    data:
      seq_len: 2048                           # tokens in a block
      sources:                                # weights: shares of the tokens; paths: see documents.read_documents
        - {path: books/*.parquet, weight: 0.75}
        - {path: code.jsonl, weight: 0.25, column: content}
    training:                                 # names of transformers.TrainingArguments or StageOptions, for all stages
      learning_rate: 1.0e-4
    stages:                                   # each may override anything under `training`
      - {name: k, train: [t_proj], max_steps: 15000}
      - {name: full, train: all, max_steps: 15000}
    teacher: checkpoints/smollm2-135m         # the original model, for stages with an objective beside `lm`, such as
                                              # `objective: {lm: 0.5, distill: 0.5}`; see objectives.py

`config` overrides fields of the model's config. A model from scratch has `tokenizer` in the place of `model`, and a
`config` with its `model_type`. A stage with `lora: {r: 16, alpha: 32}` trains adapters on the linear layers that it
names; they are merged at its end.

Relative paths are relative to the current directory. The schedule of the paper, linear from `start_lr` to the learning
rate over `warmup_steps` (below 1, a share of all steps) and linear to `end_lr`, is
`lr_scheduler_kwargs: {start_lr: 1e-7, end_lr: 1e-5}`.
"""

import dataclasses
import functools
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from transformers import TrainingArguments

from coca_hf.errors import CocaError
from coca_hf.train.tree import nearest, override_, read_tree

DEFAULTS = {
    "report_to": ["tensorboard"],
    "logging_steps": 10,
    "save_total_limit": 1,
    "disable_tqdm": False,
    "ddp_find_unused_parameters": False,  # every parameter that learns is used in every step
}

OBJECTIVES = ("lm", "distill", "attention-transfer")

_BY_DATA = "coca-train feeds the blocks itself, so that every run sees the same ones"
_BY_EVAL = "coca-train only trains; evaluate the result with coca-eval"
_BY_HAND = "upload a finished stage's directory yourself, with `hf upload`"
_BY_RESUME = "coca-train keeps what --resume needs"
OWNED = {
    "output_dir": "results lie in OUT/<number>-<name>; give OUT with --out",
    "num_train_epochs": "give max_steps, the length of a stage",
    "label_smoothing_factor": "transformers takes the labels of models that it does not know one token too early",
    "logging_nan_inf_filter": "a loss that is not a number stops the run",
    "deepspeed": "shard with FSDP2, through `accelerate launch`",
    "resume_from_checkpoint": "continue a run with --resume",
    "restore_callback_states_from_checkpoint": _BY_RESUME,
    "save_only_model": _BY_RESUME,
    "enable_jit_checkpoint": "SIGTERM and SIGUSR1 always write a checkpoint",
    "use_liger_kernel": "Liger patches only model types that it knows, not CoCA's; give fused_cross_entropy: liger",
    "parallelism_config": "coca-train has a block on one GPU; set fused_cross_entropy, shard with FSDP2",
    **dict.fromkeys(("remove_unused_columns", "ignore_data_skip", "accelerator_config", "data_seed"), _BY_DATA),
    **dict.fromkeys(("auto_find_batch_size", "train_sampling_strategy", "length_column_name"), _BY_DATA),
    **dict.fromkeys(("do_train", "do_eval", "do_predict", "load_best_model_at_end"), _BY_EVAL),
    **dict.fromkeys(("metric_for_best_model", "greater_is_better", "per_device_eval_batch_size"), _BY_EVAL),
}
_LEAST = {
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "save_steps", "logging_steps"), 1),
    **dict.fromkeys(("dataloader_num_workers", "warmup_steps", "weight_decay", "max_grad_norm", "adam_epsilon"), 0),
}
_OWNED_PREFIXES = {"eval_": _BY_EVAL, "hub_": _BY_HAND, "push_to_hub": _BY_HAND}


class _Part(BaseModel):
    """A mapping of the recipe that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, given: Any) -> Any:
        for key in given if isinstance(given, dict) else ():
            if key not in cls.model_fields:
                raise ValueError(_unknown(key, cls.model_fields))
        return given


class Source(_Part):
    """Documents, and their share of the tokens among all sources."""

    path: str = Field(min_length=1)
    weight: float = Field(gt=0)
    column: str = "text"
    split: str = "train"
    subset: str | None = None  # of a data set on the hub
    revision: str | None = None  # of a data set on the hub: a commit, so that it stays what it is
    skip_empty: bool = False  # leave out rows without text, which else are errors

    @property
    def place(self) -> tuple[str, str, str, str | None, str | None, bool]:
        """The arguments of `read_documents`."""
        return self.path, self.column, self.split, self.subset, self.revision, self.skip_empty


class Data(_Part):
    """What is trained on: blocks of `seq_len` tokens, mixed from `sources`; `seed` fixes the order of the blocks.

    held_out_blocks: so many are kept out of the training, to measure the loss on. prepared: the directory for blocks
    that `--prepare` tokenised; they are used where they are those of this recipe.
    """

    seq_len: int = Field(ge=2)
    sources: list[Source] = Field(min_length=1)
    seed: int = 0
    held_out_blocks: int = Field(default=64, ge=0)
    prepared: str = "prepared"


class StageOptions(_Part):
    """What a recipe may say among the training options beside those of TrainingArguments.

    global_batch_size: blocks that an optimizer step takes over all processes; it sets gradient_accumulation_steps, so
    that one recipe trains the same on any number of processes. held_out_steps: steps between measurements of the
    held-out loss; 0: before and after the stage only. max_bad_steps: so many in a row end the run; fewer are skipped.
    A step is bad if its loss or its gradient is not a number, and, with spike_factor, if its loss is above so many
    times the running mean. attn_implementation: as `from_pretrained` takes it. fused_cross_entropy: never hold the
    logits of all tokens, which with a large vocabulary are much of the memory, for one more product with the head; or
    liger: by its Triton kernel, for GPUs.
    """

    global_batch_size: int | None = Field(default=None, ge=1)
    held_out_steps: int = Field(default=0, ge=0)
    max_bad_steps: int = Field(default=1, ge=1)
    spike_factor: float | None = Field(default=None, gt=1)
    attn_implementation: str | None = None
    fused_cross_entropy: bool | typing.Literal["liger"] = False


class Lora(_Part):
    """Low-rank adapters of peft (Hu et al., arXiv 2106.09685): rank, scale `alpha / r`, dropout on their input."""

    r: int = Field(ge=1)
    alpha: float = Field(gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)


_STAGE_KEYS = ("name", "train", "lora", "objective", "temperature")  # all else is a training option


class Stage(_Part):
    """One run of the trainer: the parameters that learn, by module name or `all`, and its own training options.

    With `lora`, adapters on the linear layers of that name learn instead; `all` means those of the decoder's layers.
    `objective` names what is minimised, or gives several their weights: see `objectives.py`.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$")  # a directory name, and a step in a dotted path
    train: str | list[str]
    lora: Lora | None = None
    objective: dict[str, float] = {"lm": 1.0}
    temperature: float = Field(default=1.0, gt=0)  # of distillation
    training: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _gather_training(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        own = {key: value for key, value in given.items() if key in _STAGE_KEYS}
        return {**own, "training": {key: value for key, value in given.items() if key not in own}}

    @field_validator("train", mode="before")
    @classmethod
    def _names_or_all(cls, train: Any) -> Any:
        names = isinstance(train, list) and bool(train) and all(isinstance(name, str) for name in train)
        if train != "all" and not names:
            raise ValueError(f"got {train!r}, expected all or a list of module names such as [t_proj]")
        return train

    @field_validator("objective", mode="before")
    @classmethod
    def _weights(cls, given: Any) -> Any:
        weights = {given: 1.0} if isinstance(given, str) else given
        for name in weights if isinstance(weights, dict) else ():
            if name not in OBJECTIVES:
                raise ValueError(f"got {name!r}, expected {', '.join(OBJECTIVES)}, or a mapping of them to weights")
        numbers = weights.values() if isinstance(weights, dict) else [1.0]  # pydantic refuses what is no mapping
        if not numbers or not all(isinstance(number, int | float) and number > 0 for number in numbers):
            raise ValueError(f"got {given!r}, expected weights above 0")
        return weights

    @property
    def needs_teacher(self) -> bool:
        return set(self.objective) != {"lm"}

    @field_validator("training")
    @classmethod
    def _check_training(cls, training: dict[str, Any]) -> dict[str, Any]:
        return checked_training(training, also_known=_STAGE_KEYS)


class Recipe(_Part):
    """A checked recipe. `to_dict` gives it back in the shape of its file, with every default filled in."""

    model: str | None = None
    tokenizer: str | None = None
    config: dict[str, Any] = {}
    teacher: str | None = None  # the original model, where an objective needs it
    data: Data
    training: dict[str, Any] = Field(default={}, validate_default=True)
    stages: list[Stage] = Field(min_length=1)

    @field_validator("training")
    @classmethod
    def _check_training(cls, training: dict[str, Any]) -> dict[str, Any]:
        return {**DEFAULTS, **checked_training(training)}

    @model_validator(mode="after")
    def _check_start(self) -> "Recipe":
        if (self.model is None) == (self.tokenizer is None):
            raise ValueError("model: expected a checkpoint, or, for a model from scratch, tokenizer instead")
        if (self.tokenizer is None) == ("model_type" in self.config):
            raise ValueError("config.model_type: expected beside tokenizer, for a model from scratch, and only there")
        return self

    @model_validator(mode="after")
    def _check_stages(self) -> "Recipe":
        names = [stage.name for stage in self.stages]
        for stage in self.stages:
            if stage.needs_teacher and self.teacher is None:
                raise ValueError(
                    f"stages.{stage.name}: objective {', '.join(stage.objective)} needs the original model, got none; "
                    f"give its directory or hub id as teacher, beside model"
                )
            if names.count(stage.name) > 1:
                raise ValueError(f"stages: got two of the name {stage.name!r}, expected a name for each")
            options = self.options(stage)
            if options.get("max_steps", 0) <= 0:
                raise ValueError(
                    f"stages.{stage.name}: got max_steps {options.get('max_steps')}, expected a number above 0; "
                    f"say how long the stage is, here or under training"
                )
            _check_options(stage.name, options)
            try:
                self.stage_options(stage)
            except ValidationError as error:
                problems = "; ".join(_explain({}, problem) for problem in error.errors())
                raise ValueError(f"stages.{stage.name}: {problems}") from None
            if self.stage_options(stage).fused_cross_entropy:
                _check_fused(stage)
        return self

    def options(self, stage: Stage) -> dict[str, Any]:
        """The TrainingArguments of a stage: its own over the shared ones."""
        given = {**self.training, **stage.training}
        return {key: value for key, value in given.items() if key not in StageOptions.model_fields}

    def stage_options(self, stage: Stage) -> StageOptions:
        given = {**self.training, **stage.training}
        return StageOptions(**{key: value for key, value in given.items() if key in StageOptions.model_fields})

    @property
    def start(self) -> str:
        """Where the first stage starts: the model's directory or hub id, or in words that there is none."""
        return self.model or f"{self.config['model_type']} from scratch"

    def num_blocks(self, world_size: int) -> int:
        """The blocks that all stages take together, on so many processes."""
        return sum(self.options(stage)["max_steps"] * self.blocks_per_step(stage, world_size) for stage in self.stages)

    def blocks_per_step(self, stage: Stage, world_size: int) -> int:
        """Blocks that one optimizer step of a stage takes, over so many processes."""
        options = self.options(stage)
        return self.stage_options(stage).global_batch_size or (
            world_size
            * options.get("per_device_train_batch_size", TrainingArguments.per_device_train_batch_size)
            * options.get("gradient_accumulation_steps", TrainingArguments.gradient_accumulation_steps)
        )

    def accumulation(self, stage: Stage, world_size: int) -> int:
        """Batches of one process that a step takes. Raises CocaError where global_batch_size cannot be had."""
        options = self.options(stage)
        batch = options.get("per_device_train_batch_size", TrainingArguments.per_device_train_batch_size)
        blocks = self.blocks_per_step(stage, world_size)
        if blocks % (batch * world_size):
            raise CocaError(
                f"stages.{stage.name}: got global_batch_size {blocks}, expected a multiple of {batch * world_size}: "
                f"per_device_train_batch_size {batch} on {world_size} processes"
            )
        return blocks // (batch * world_size)

    def to_dict(self) -> dict[str, Any]:
        parts = self.model_dump(exclude={"stages"}, exclude_none=True)
        stages = [
            {**stage.model_dump(exclude={"training"}, exclude_defaults=True), **stage.training} for stage in self.stages
        ]
        return {**parts, "data": self.data.model_dump(), "stages": stages}


class LinearBounds(_Part):
    """`lr_scheduler_kwargs` of a linear schedule: the rates before the warm-up and after the last step."""

    start_lr: float = Field(default=0.0, ge=0)
    end_lr: float = Field(default=0.0, ge=0)


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read the recipe at `path`, with `overrides` such as `training.learning_rate=1e-4` or `stages.full.max_steps=10`.

    An override's value is YAML; stages go by name, sources by number (from 0).

    Raises CocaError for a file that is no recipe, a key that is not known (naming the nearest that is), a value of the
    wrong type, a stage without a length.
    """
    tree = read_tree(Path(path))
    for override in overrides:
        override_(tree, override)
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise CocaError(f"{path}: {'; '.join(_explain(tree, problem) for problem in error.errors())}") from None


def checked_training(options: dict[str, Any], also_known: tuple[str, ...] = ()) -> dict[str, Any]:
    """Training options with every value in the type that is declared for it, as plain YAML values.

    Raises ValueError for an unknown option, one that coca-train sets itself, or a value of another type.
    """
    checked = {}
    for key, value in options.items():
        if key not in _training_types():
            reason = _owned_reason(str(key))
            known = [*_training_types(), *also_known]
            raise ValueError(f"{key!r} is not a recipe's to set: {reason}" if reason else _unknown(key, known))
        hint, adapter = _training_types()[key]
        try:
            if isinstance(value, bool) and bool not in (hint, *typing.get_args(hint)):
                raise TypeError  # pydantic would take true for 1
            checked[key] = adapter.dump_python(adapter.validate_python(value), mode="json")
        except (TypeError, ValidationError):
            expected = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            raise ValueError(f"{key}: got {value!r}, expected {expected}") from None
    return checked


@functools.cache
def _training_types() -> dict[str, tuple[Any, TypeAdapter]]:
    """Every option of TrainingArguments that a recipe may set, and our own, with its declared type."""
    hints = typing.get_type_hints(TrainingArguments)
    config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    names = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    own = {name: field.annotation for name, field in StageOptions.model_fields.items()}
    return {
        name: (hint, TypeAdapter(hint, config=config))
        for name, hint in [*((name, hints[name]) for name in names if _owned_reason(name) is None), *own.items()]
    }


def _owned_reason(key: str) -> str | None:
    by_prefix = (reason for prefix, reason in _OWNED_PREFIXES.items() if key.startswith(prefix))
    return OWNED.get(key) or next(by_prefix, None)


def _check_options(stage: str, options: dict[str, Any]) -> None:
    """What a stage's options must be beside their types. Raises ValueError."""
    for key in ("logging_strategy", "save_strategy"):
        if options.get(key, "steps") not in ("steps", "no"):
            raise ValueError(f"stages.{stage}: got {key} {options[key]!r}, expected steps or no: there are no epochs")
    for key, least in _LEAST.items():
        if options.get(key, least) < least:
            raise ValueError(f"stages.{stage}: got {key} {options[key]}, expected at least {least}")
    for key in ("adam_beta1", "adam_beta2"):
        if not 0 <= options.get(key, 0) < 1:
            raise ValueError(f"stages.{stage}: got {key} {options[key]}, expected at least 0 and below 1")
    if options.get("learning_rate", 1.0) <= 0:
        raise ValueError(f"stages.{stage}: got learning_rate {options['learning_rate']}, expected a rate above 0")
    if options.get("dataloader_num_workers", 0) > 1:
        raise ValueError(f"stages.{stage}: got several dataloader_num_workers, expected 0 or 1: there is one stream")
    kwargs = options.get("lr_scheduler_kwargs")
    if not kwargs or options.get("lr_scheduler_type", "linear") != "linear":
        return
    try:
        LinearBounds.model_validate(kwargs)
    except ValidationError as error:
        problems = "; ".join(_explain(kwargs, problem) for problem in error.errors())
        raise ValueError(f"stages.{stage}: lr_scheduler_kwargs of a linear schedule: {problems}") from None


def _check_fused(stage: Stage) -> None:
    """Raises ValueError for what needs the logits that a fused cross-entropy does not give."""
    if "distill" in stage.objective:
        raise ValueError(
            f"stages.{stage.name}: got fused_cross_entropy with objective distill, which needs the logits; leave one "
            f"of them out"
        )


def _unknown(key: Any, known: Iterable[str]) -> str:
    return f"unknown key {key!r}; nearest: {nearest(str(key), known)}"


def _explain(tree: Any, problem: Any) -> str:
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
        return f"{where}got {problem['input']!r}, expected a mapping"
    return f"{where}got {problem['input']!r}, expected {problem['msg'].removeprefix('Input should be ')}"
