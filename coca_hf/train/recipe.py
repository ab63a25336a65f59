"""Recipes: one YAML file that says which model is trained, on what, and in which stages.

    model: checkpoints/smollm2-135m-coca      # a converted directory, or owner/name on the hub, or owner/name@revision
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

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator
from transformers import TrainingArguments

from coca_hf.errors import CocaError
from coca_hf.train.options import DEFAULTS, StageOptions, check_options, checked_training
from coca_hf.train.parts import Part, explain
from coca_hf.train.tree import override_, read_tree, short

OBJECTIVES = ("lm", "distill", "attention-transfer", "attention-maps")


class Source(Part):
    """Documents, and their share of the tokens among all sources."""

    path: str = Field(min_length=1)
    weight: float = Field(gt=0, le=1e9)
    column: str = "text"
    split: str = "train"
    subset: str | None = None  # of a data set on the hub
    revision: str | None = None  # of a data set on the hub: a commit or a branch, by default the main one
    skip_empty: bool = False  # leave out rows without text, which else are errors
    _commit: str | None = PrivateAttr(None)  # of a data set on the hub: what `revision` was when the run began

    @property
    def commit(self) -> str | None:
        """What is read of a data set on the hub."""
        return self._commit or self.revision

    def pin_(self, commit: str | None) -> None:
        """Read a data set on the hub at this commit from now on, whatever becomes of the branch."""
        self._commit = commit

    @property
    def place(self) -> tuple[str, str, str, str | None, str | None, bool]:
        """The arguments of `read_documents`."""
        return self.path, self.column, self.split, self.subset, self.commit, self.skip_empty


class Data(Part):
    """What is trained on: blocks of `seq_len` tokens, mixed from `sources`; `seed` fixes the order of the blocks.

    held_out_blocks: so many are kept out of the training, to measure the loss on. prepared: the directory for blocks
    that `--prepare` tokenised; they are used where they are those of this recipe.
    """

    seq_len: int = Field(ge=2)
    sources: list[Source] = Field(min_length=1)
    seed: int = 0
    held_out_blocks: int = Field(default=64, ge=0)
    prepared: str = "prepared"


class Lora(Part):
    """Low-rank adapters of peft (Hu et al., arXiv 2106.09685): rank, scale `alpha / r`, dropout on their input."""

    r: int = Field(ge=1)
    alpha: float = Field(gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)


_STAGE_KEYS = ("name", "train", "lora", "objective", "temperature")  # all else is a training option


class Stage(Part):
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
            raise ValueError(f"got {short(train)}, expected all or a list of module names such as [t_proj]")
        return train

    @field_validator("objective", mode="before")
    @classmethod
    def _weights(cls, given: Any) -> Any:
        weights = {given: 1.0} if isinstance(given, str) else given
        for name in weights if isinstance(weights, dict) else ():
            if name not in OBJECTIVES:
                raise ValueError(
                    f"got {short(name)}, expected {', '.join(OBJECTIVES)}, or a mapping of them to weights"
                )
        numbers = weights.values() if isinstance(weights, dict) else [1.0]  # pydantic refuses what is no mapping
        if not numbers or not all(isinstance(number, int | float) and number > 0 for number in numbers):
            raise ValueError(f"got {short(given)}, expected weights above 0")
        return weights

    @property
    def needs_teacher(self) -> bool:
        return set(self.objective) != {"lm"}

    @field_validator("training")
    @classmethod
    def _check_training(cls, training: dict[str, Any]) -> dict[str, Any]:
        return checked_training(training, also_known=_STAGE_KEYS)


class Recipe(Part):
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
            check_options(stage.name, options)
            try:
                self.stage_options(stage)
            except ValidationError as error:
                problems = "; ".join(explain({}, problem) for problem in error.errors())
                raise ValueError(f"stages.{stage.name}: {problems}") from None
            if self.stage_options(stage).fused_cross_entropy:
                _check_fused(stage)
            if "attention-maps" in stage.objective:
                _check_maps(stage, self.stage_options(stage))
            if self.stage_options(stage).context_parallel_size > 1:
                check_context_parallel(stage, self.stage_options(stage), self.data.seq_len)
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
            self._groups(stage, world_size)
            * options.get("per_device_train_batch_size", TrainingArguments.per_device_train_batch_size)
            * options.get("gradient_accumulation_steps", TrainingArguments.gradient_accumulation_steps)
        )

    def accumulation(self, stage: Stage, world_size: int) -> int:
        """Batches of one process that a step takes. Raises CocaError where global_batch_size cannot be had."""
        options = self.options(stage)
        batch = options.get("per_device_train_batch_size", TrainingArguments.per_device_train_batch_size)
        blocks, at_once = self.blocks_per_step(stage, world_size), batch * self._groups(stage, world_size)
        if blocks % at_once:
            raise CocaError(
                f"stages.{stage.name}: got global_batch_size {blocks}, expected a multiple of {at_once}: "
                f"per_device_train_batch_size {batch} on {world_size} processes; change one of them"
            )
        given = options.get("gradient_accumulation_steps", blocks // at_once)
        if given != blocks // at_once:
            raise CocaError(
                f"stages.{stage.name}: got global_batch_size {blocks} and gradient_accumulation_steps {given}, "
                f"expected {blocks // at_once} on {world_size} processes; leave gradient_accumulation_steps out"
            )
        return blocks // at_once

    def _groups(self, stage: Stage, world_size: int) -> int:
        """Groups of processes that share a block. Raises CocaError where there is no whole number of them."""
        size = self.stage_options(stage).context_parallel_size
        if world_size % size:
            raise CocaError(
                f"stages.{stage.name}: got context_parallel_size {size} on {world_size} processes, expected a divisor "
                f"of their number"
            )
        return world_size // size

    def to_dict(self) -> dict[str, Any]:
        parts = self.model_dump(exclude={"stages"}, exclude_none=True)
        stages = [
            {**stage.model_dump(exclude={"training"}, exclude_defaults=True), **stage.training} for stage in self.stages
        ]
        return {**parts, "data": self.data.model_dump(), "stages": stages}


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
        raise CocaError(f"{path}: {'; '.join(explain(tree, problem) for problem in error.errors())}") from None


def _check_fused(stage: Stage) -> None:
    """Raises ValueError for what needs the logits that a fused cross-entropy does not give."""
    if "distill" in stage.objective:
        raise ValueError(
            f"stages.{stage.name}: got fused_cross_entropy with objective distill, which needs the logits; leave one "
            f"of them out"
        )


def _check_maps(stage: Stage, options: StageOptions) -> None:
    """Raises ValueError where attention maps are compared that the attention does not give."""
    attention = options.attn_implementation or "sdpa"
    if attention != "eager":
        raise ValueError(
            f"stages.{stage.name}: got objective attention-maps with attn_implementation {attention}, expected eager, "
            f"which alone has the maps"
        )


def check_context_parallel(stage: Stage, options: StageOptions, seq_len: int) -> None:
    """Raises ValueError for what cannot be computed on parts of a block."""
    size = options.context_parallel_size
    given = f"stages.{stage.name}: got context_parallel_size {size}"
    if options.attn_implementation not in (None, "sdpa"):
        raise ValueError(f"{given} with attn_implementation {options.attn_implementation}, expected sdpa")
    if stage.needs_teacher:
        raise ValueError(f"{given} with objective {', '.join(stage.objective)}, expected lm alone")
    if seq_len % (2 * size):
        raise ValueError(f"{given}, expected data.seq_len, {seq_len}, to be a multiple of {2 * size}")
