"""Recipes: one YAML file that says which model is trained, on what, and in which stages.

    model: checkpoints/smollm2-135m-coca      # a directory, or owner/name[@revision] on the hub
    data:
      seq_len: 2048                           # tokens in a block
      sources:                                # weights: shares of the tokens; see documents.py
        - {path: books/*.parquet, weight: 0.75}
        - {path: code.jsonl, weight: 0.25, column: content}
        - {synthetic: lookups, weight: 0.5}     # amid the text of the sources above: lookups.py
    training:                                 # TrainingArguments or StageOptions, for all stages
      learning_rate: 1.0e-4
    stages:                                   # each may override anything under `training`
      - {name: k, train: [t_proj], max_steps: 15000}
      - {name: full, train: all, max_steps: 15000}
    teacher: checkpoints/smollm2-135m         # the original model, for stages with an objective
                                              # beside `lm`: {lm: 0.5, distill: 0.5}

`config` overrides fields of the model's config. A model from scratch has `tokenizer` in the place
of `model`, and a `config` with its `model_type`. A stage with `lora: {r: 16, alpha: 32}` trains
adapters on the linear layers that it names; they are merged at its end. A stage with
`answer_weight: 1` counts the answers of synthetic lookups again.

Relative paths are relative to the current directory. The schedule of the paper, linear from
`start_lr` to the learning rate over `warmup_steps` (below 1, a share of all steps) and linear to
`end_lr`, is `lr_scheduler_kwargs: {start_lr: 1e-7, end_lr: 1e-5}`.
"""

import copy
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    PositiveFloat,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from transformers import TrainingArguments

from coca_hf.errors import CocaError, short
from coca_hf.train.options import DEFAULTS, StageOptions, check_options, checked_training
from coca_hf.train.recipe_file import StrictMapping, explain, override_, read_tree

ObjectiveName = Literal["lm", "distill", "attention-transfer", "attention-maps"]


class Source(StrictMapping):
    """Documents, or synthetic text, and their share of the tokens among all sources."""

    path: str = ""
    # Made from the text of the other sources, in the place of a path
    synthetic: Literal["lookups"] | None = None
    weight: float = Field(gt=0, le=1e9)
    column: str = "text"
    split: str = "train"
    subset: str | None = None  # of a data set on the hub
    # Of a data set on the hub: a commit or a branch, by default the main one
    revision: str | None = None
    skip_empty: bool = False  # leave out rows without text, which are errors otherwise
    # Of a data set on the hub: what `revision` was when the run began
    _commit: str | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _check_kind(self) -> "Source":
        if bool(self.path) == bool(self.synthetic):
            raise ValueError("expected either path, of documents, or synthetic: lookups")
        of_documents = Source.model_fields.keys() - {"path", "synthetic", "weight"}
        given = [
            key
            for key in sorted(of_documents)
            if getattr(self, key) != Source.model_fields[key].default
        ]
        if self.synthetic and given:
            raise ValueError(
                f"got {', '.join(given)} beside synthetic, which only documents have; leave it out"
            )
        return self

    @property
    def name(self) -> str:
        """What messages and records call it."""
        return self.path or f"synthetic {self.synthetic}"

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


class Data(StrictMapping):
    """What is trained on: blocks of `seq_len` tokens, mixed from `sources`; `seed` fixes the order
    of the blocks.

    held_out_blocks: the number that is kept out of the training, to measure the loss on. prepared:
    the directory in which the blocks of this recipe, and of others, are made and read.
    skip_positions: leave out positions at random places of every block, so that they rise to at
    most so many, such as the trained length: a block then teaches distances that are longer than it
    is (PoSE, arXiv 2309.10400).
    """

    seq_len: int = Field(ge=2)
    sources: list[Source] = Field(min_length=1)
    seed: int = 0
    held_out_blocks: int = Field(default=64, ge=0)
    prepared: str = "prepared"
    skip_positions: int | None = None

    @model_validator(mode="after")
    def _check_data(self) -> "Data":
        if not any(source.path for source in self.sources):
            raise ValueError(
                "got synthetic sources alone, expected documents beside them, whose text they take"
            )
        if self.skip_positions is not None and self.skip_positions <= self.seq_len:
            raise ValueError(
                f"got skip_positions {self.skip_positions}, expected more than seq_len, "
                f"{self.seq_len}: the positions that a block is to reach"
            )
        return self

    @property
    def has_answers(self) -> bool:
        return any(source.synthetic for source in self.sources)


class Lora(StrictMapping):
    """Low-rank adapters of peft (arXiv 2106.09685): rank, scale `alpha / r`, input dropout."""

    r: int = Field(ge=1)
    alpha: float = Field(gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)


# All else is a training option
_STAGE_KEYS = ("name", "train", "lora", "objective", "temperature", "answer_weight")


class Stage(StrictMapping):
    """One run of the trainer: the parameters that learn, by module name or `all`, and its own
    training options.

    With `lora`, adapters on the linear layers of that name learn instead; `all` means those of the
    decoder's layers. `objective` names what is minimised, or gives several their weights: see
    `objectives.py`. `answer_weight` adds, so many times, the mean over the answers of each block of
    synthetic lookups to the mean over its tokens.
    """

    # A directory name, and a step in a dotted path
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$")
    train: str | list[str]
    lora: Lora | None = None
    objective: dict[ObjectiveName, PositiveFloat] = Field(default={"lm": 1.0}, min_length=1)
    temperature: float = Field(default=1.0, gt=0)  # of distillation
    answer_weight: float = Field(default=0.0, ge=0)
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
        names = (
            isinstance(train, list) and bool(train) and all(isinstance(name, str) for name in train)
        )
        if train != "all" and not names:
            raise ValueError(
                f"got {short(train)}, expected all or a list of module names such as [t_proj]"
            )
        return train

    @field_validator("objective", mode="before")
    @classmethod
    def _as_weights(cls, given: Any) -> Any:
        return {given: 1.0} if isinstance(given, str) else given

    @property
    def needs_teacher(self) -> bool:
        return set(self.objective) != {"lm"}

    @field_validator("training")
    @classmethod
    def _check_training(cls, training: dict[str, Any]) -> dict[str, Any]:
        return checked_training(training, also_known=_STAGE_KEYS)


class Recipe(StrictMapping):
    """A checked recipe. `to_dict` gives its file's shape, with every default filled in."""

    model: str | None = None
    tokenizer: str | None = None
    config: dict[str, Any] = {}
    teacher: str | None = None  # the original model, where an objective needs it
    data: Data
    training: dict[str, Any] = Field(default={}, validate_default=True)
    stages: list[Stage] = Field(min_length=1)
    _batches_in_file: dict[str, int | None] = PrivateAttr({})  # of stages, without overrides

    @field_validator("training")
    @classmethod
    def _check_training(cls, training: dict[str, Any]) -> dict[str, Any]:
        return {**DEFAULTS, **checked_training(training)}

    @model_validator(mode="after")
    def _check_start(self) -> "Recipe":
        if (self.model is None) == (self.tokenizer is None):
            raise ValueError(
                "model: expected a checkpoint, or, for a model from scratch, tokenizer instead"
            )
        if (self.tokenizer is None) == ("model_type" in self.config):
            raise ValueError(
                "config.model_type: expected beside tokenizer, for a model from scratch, and only "
                "there"
            )
        return self

    @model_validator(mode="after")
    def _check_stages(self) -> "Recipe":
        names = [stage.name for stage in self.stages]
        for stage in self.stages:
            if stage.needs_teacher and self.teacher is None:
                raise ValueError(
                    f"stages.{stage.name}: objective {', '.join(stage.objective)} needs the "
                    f"original model, got none; "
                    f"give its directory or hub id as teacher, beside model"
                )
            if names.count(stage.name) > 1:
                raise ValueError(
                    f"stages: got two of the name {stage.name!r}, expected a name for each"
                )
            options = self.options(stage)
            if options.get("max_steps", 0) <= 0:
                raise ValueError(
                    f"stages.{stage.name}: got max_steps {options.get('max_steps')}, expected a "
                    "number above 0; say how long the stage is, here or under training"
                )
            check_options(stage.name, options)
            try:
                own_options = self.stage_options(stage)
            except ValidationError as error:
                problems = "; ".join(explain({}, problem) for problem in error.errors())
                raise ValueError(f"stages.{stage.name}: {problems}") from None
            _check_loss(stage, own_options, self.data)
            if own_options.context_parallel_size > 1:
                check_context_parallel(stage, own_options, self.data)
        return self

    def options(self, stage: Stage) -> dict[str, Any]:
        """The TrainingArguments of a stage: its own over the shared ones."""
        given = {**self.training, **stage.training}
        return {key: value for key, value in given.items() if key not in StageOptions.model_fields}

    def stage_options(self, stage: Stage) -> StageOptions:
        given = {**self.training, **stage.training}
        return StageOptions(
            **{key: value for key, value in given.items() if key in StageOptions.model_fields}
        )

    @property
    def start(self) -> str:
        """Where the first stage starts: the model's directory or hub id, or `... from scratch`."""
        return self.model or f"{self.config['model_type']} from scratch"

    def num_blocks(self, world_size: int) -> int:
        """The blocks that all stages take together, on `world_size` processes."""
        return sum(
            self.options(stage)["max_steps"] * self.blocks_per_step(stage, world_size)
            for stage in self.stages
        )

    def blocks_per_step(self, stage: Stage, world_size: int) -> int:
        """Blocks that one optimizer step of a stage takes, over `world_size` processes."""
        accumulated = self.options(stage).get("gradient_accumulation_steps")
        return self.stage_options(stage).global_batch_size or (
            self._groups(stage, world_size)
            * self._batch(stage)
            * (accumulated or TrainingArguments.gradient_accumulation_steps)
        )

    def _batch(self, stage: Stage) -> int:
        """Blocks that a process takes at once."""
        own = self.options(stage).get("per_device_train_batch_size")
        return own or TrainingArguments.per_device_train_batch_size

    def batch_in_file(self, stage: Stage) -> int | None:
        """The recipe's own `global_batch_size` of a stage, where overrides changed it."""
        batch = self._batches_in_file.get(stage.name)
        return batch if batch != self.stage_options(stage).global_batch_size else None

    def accumulation(self, stage: Stage, world_size: int) -> int:
        """Batches of a process in a step. Raises CocaError where global_batch_size has none."""
        blocks, batch = self.blocks_per_step(stage, world_size), self._batch(stage)
        at_once = batch * self._groups(stage, world_size)
        if blocks % at_once:
            raise CocaError(
                f"stages.{stage.name}: got global_batch_size {blocks}, expected a multiple of "
                f"{at_once}: "
                f"per_device_train_batch_size {batch} on {world_size} processes; change one of them"
            )
        given = self.options(stage).get("gradient_accumulation_steps", blocks // at_once)
        if given != blocks // at_once:
            raise CocaError(
                f"stages.{stage.name}: got global_batch_size {blocks} and "
                f"gradient_accumulation_steps {given}, expected {blocks // at_once} on "
                f"{world_size} processes; leave gradient_accumulation_steps out"
            )
        return blocks // at_once

    def _groups(self, stage: Stage, world_size: int) -> int:
        """Groups of processes that share a block. Raises CocaError unless a whole number."""
        size = self.stage_options(stage).context_parallel_size
        if world_size % size:
            raise CocaError(
                f"stages.{stage.name}: got context_parallel_size {size} on {world_size} processes, "
                "expected a divisor of their number"
            )
        return world_size // size

    def to_dict(self) -> dict[str, Any]:
        parts = self.model_dump(exclude={"stages"}, exclude_none=True)
        stages = [
            {**stage.model_dump(exclude={"training"}, exclude_defaults=True), **stage.training}
            for stage in self.stages
        ]
        return {**parts, "data": self.data.model_dump(), "stages": stages}


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read the recipe at `path`, with `overrides` such as `training.learning_rate=1e-4` or
    `stages.full.max_steps=10`.

    An override's value is YAML; stages go by name, sources by number (from 0).

    Raises CocaError for a file that is no recipe, a key that is not known (naming the nearest that
    is), a value of the wrong type, a stage without a length.
    """
    tree = read_tree(Path(path))
    written = copy.deepcopy(tree)
    for override in overrides:
        override_(tree, override)
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise CocaError(
            f"{path}: {'; '.join(explain(tree, problem) for problem in error.errors())}"
        ) from None
    with suppress(ValidationError):  # only overrides make it a recipe
        in_file = Recipe.model_validate(written)
        recipe._batches_in_file = {
            stage.name: in_file.stage_options(stage).global_batch_size for stage in in_file.stages
        }
    return recipe


def _check_loss(stage: Stage, options: StageOptions, data: Data) -> None:
    """Raises ValueError where what a stage minimises cannot be computed as its options say."""
    given = f"stages.{stage.name}: got answer_weight {stage.answer_weight:g}"
    if stage.answer_weight and not data.has_answers:
        raise ValueError(
            f"{given} without a source that has answers; add {{synthetic: lookups, weight: 0.5}} "
            f"to data.sources"
        )
    if stage.answer_weight and set(stage.objective) == {"attention-transfer"}:
        raise ValueError(
            f"{given} with objective attention-transfer alone, which weights no tokens; leave one "
            f"of them out"
        )
    logits_of = "objective distill" if "distill" in stage.objective else "answer_weight"
    if options.fused_cross_entropy and ("distill" in stage.objective or stage.answer_weight):
        raise ValueError(
            f"stages.{stage.name}: got fused_cross_entropy with {logits_of}, which needs the "
            f"logits; leave one of them out"
        )
    if "temperature" in stage.model_fields_set and "distill" not in stage.objective:
        raise ValueError(
            f"stages.{stage.name}: got temperature {stage.temperature:g} without objective "
            f"distill, which alone has one; leave it out"
        )
    attention = options.attn_implementation or "sdpa"
    if "attention-maps" in stage.objective and attention != "eager":
        raise ValueError(
            f"stages.{stage.name}: got objective attention-maps with attn_implementation "
            f"{attention}, expected eager, which alone has the maps"
        )


def check_context_parallel(stage: Stage, options: StageOptions, data: Data) -> None:
    """Raises ValueError for what cannot be computed on parts of a block."""
    size = options.context_parallel_size
    given = f"stages.{stage.name}: got context_parallel_size {size}"
    if options.attn_implementation not in (None, "sdpa"):
        raise ValueError(
            f"{given} with attn_implementation {options.attn_implementation}, expected sdpa"
        )
    if stage.needs_teacher or stage.answer_weight:
        objective = ", ".join(stage.objective) + (
            " and answer_weight" if stage.answer_weight else ""
        )
        raise ValueError(f"{given} with objective {objective}, expected lm alone")
    if data.skip_positions:
        raise ValueError(
            f"{given} with data.skip_positions, expected positions in order; leave one of them out"
        )
    if data.seq_len % (2 * size):
        raise ValueError(
            f"{given}, expected data.seq_len, {data.seq_len}, to be a multiple of {2 * size}"
        )
