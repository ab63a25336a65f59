"""Recipes: one YAML file that says which model is trained, on what, and in which stages.

    model: checkpoints/smollm2-135m-coca      # a directory, or owner/name[@revision] on the hub
    data:
      seq_len: 2048                           # tokens in a block
      sources:                                # weights: shares of the tokens, of the weights' sum
        - {path: books/*.parquet, weight: 0.4}  # which files and data sets: documents.py
        - {path: code.jsonl, weight: 0.1, column: content}
        - {synthetic: lookups, weight: 0.5}   # lookups in the text of the other sources: lookups.py
    training:                                 # TrainingArguments or StageOptions, for all stages
      learning_rate: 1.0e-4
    stages:                                   # each may override anything under `training`
      - {name: k, train: [t_proj], max_steps: 15000}
      - {name: full, train: all, max_steps: 15000}
    teacher: checkpoints/smollm2-135m         # the original model, for stages that learn from its
                                              # predictions: objective: {lm: 0.5, distill: 0.5}

`config` overrides fields of the model's config. To train from scratch, give `tokenizer` instead of
`model`, and a `config` with its `model_type`. A stage with `lora: {r: 16, alpha: 32}` trains
adapters on the linear layers that it names and merges them at its end. A stage with
`answer_weight: 1` adds the mean loss over the answers of synthetic lookups to that over all tokens.

Relative paths are relative to the current directory. The paper's schedule, linear from `start_lr`
to the learning rate over `warmup_steps` (below 1, a share of all steps) and linear to `end_lr`, is
`lr_scheduler_kwargs: {start_lr: 1e-7, end_lr: 1e-5}`.
"""

import copy
import dataclasses
import functools
import inspect
import io
import typing
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from torch.utils.checkpoint import checkpoint
from transformers import TrainingArguments
from transformers.utils.logging import get_log_levels_dict

from coca_hf.documents import TextSource
from coca_hf.errors import CocaError, nearest, one_line, short
from coca_hf.tokens import TOKENS_A_SKIP

ObjectiveName = Literal["lm", "distill"]

DEFAULTS = {
    "report_to": ["tensorboard"],
    "logging_steps": 10,
    # A step that spoils the weights shows in the next one's loss, after its checkpoint
    "save_total_limit": 2,
    "disable_tqdm": False,
    "ddp_timeout": 600,  # seconds that a process may keep the others waiting
    "ddp_find_unused_parameters": False,  # every trained parameter is used in every step
}
# The TrainingArguments that a recipe may not set, by the reason that the error gives
REFUSED_OPTIONS = {
    "results lie in OUT/<number>-<name>; give OUT with --out": "output_dir",
    "all machines see OUT, which the main process writes": "save_on_each_node",
    "give max_steps, the length of a stage": "num_train_epochs",
    "losses are compared across stages and runs, as plain cross-entropies": (
        "label_smoothing_factor"
    ),
    "a loss that is not a number stops the run": "logging_nan_inf_filter",
    "shard with FSDP2, through `accelerate launch`": "deepspeed fsdp fsdp_config",
    "continue a run with --resume": "resume_from_checkpoint",
    "coca-train keeps what --resume needs": (
        "restore_callback_states_from_checkpoint save_only_model"
    ),
    "only GaLore and APOLLO have them, which cannot continue a run": "optim_target_modules",
    "SIGTERM and SIGUSR1 always write a checkpoint": "enable_jit_checkpoint",
    "Liger patches only the model types that it knows; give fused_cross_entropy: true": (
        "use_liger_kernel liger_kernel_config"
    ),
    "give context_parallel_size, and shard with FSDP2 through `accelerate launch`": (
        "parallelism_config"
    ),
    "coca-train deals out the blocks itself, so that every run sees the same ones": (
        "remove_unused_columns ignore_data_skip accelerator_config data_seed length_column_name "
        "auto_find_batch_size train_sampling_strategy dataloader_drop_last"
    ),
    "blocks are read from disk as they are, in no time; leave it out": (
        "dataloader_num_workers dataloader_prefetch_factor dataloader_in_order "
        "dataloader_persistent_workers dataloader_multiprocessing_context"
    ),
    "coca-train only trains; evaluate the result with coca-eval": (
        "eval_* do_* load_best_model_at_end metric_for_best_model greater_is_better "
        "per_device_eval_batch_size *_full_eval batch_eval_metrics prediction_loss_only "
        "label_names include_for_metrics"
    ),
    "upload a finished stage's directory yourself, with `hf upload`": "hub_* push_to_hub*",
}
_LEAST = {
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), 1),
    **dict.fromkeys(("save_steps", "save_total_limit", "logging_steps", "ddp_timeout"), 1),
    **dict.fromkeys(("warmup_steps", "weight_decay", "max_grad_norm", "neftune_noise_alpha"), 0),
}
# All other keys of a stage are training options
_STAGE_KEYS = ("name", "train", "lora", "objective", "answer_weight")


def _refuse_bool(given: Any) -> Any:
    if isinstance(given, bool):  # pydantic would take true for 1
        raise ValueError(f"got {given}, expected a number")
    return given


Number = Annotated[float, BeforeValidator(_refuse_bool)]


class StrictMapping(BaseModel):
    """A mapping of the recipe that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, given: Any) -> Any:
        for key in given if isinstance(given, dict) else ():
            if key not in cls.model_fields:
                raise ValueError(_unknown_key(key, cls.model_fields))
        return given


class Source(StrictMapping):
    """Documents, or synthetic text, and their share of the tokens among all sources."""

    path: str = ""
    synthetic: Literal["lookups"] | None = None  # made from the text of the other sources
    weight: Number = Field(gt=0, le=1e9)
    column: str = "text"
    # Of a data set on the hub; revision: a branch, a tag or a commit, by default the main branch
    split: str = "train"
    subset: str | None = None
    revision: str | None = None
    skip_empty: bool = False  # leave out rows without text, which are errors otherwise
    _commit: str | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _check_kind(self) -> "Source":
        if bool(self.path) == bool(self.synthetic):
            raise ValueError("expected either path, of documents, or synthetic: lookups")
        of_documents = Source.model_fields.keys() - {"path", "synthetic", "weight"}
        given = self.model_dump(include=of_documents, exclude_defaults=True)
        if self.synthetic and given:
            raise ValueError(
                f"got {', '.join(sorted(given))} beside synthetic, which only documents have; leave "
                "it out"
            )
        return self

    @property
    def name(self) -> str:
        """What messages and records call it."""
        return self.path or f"synthetic {self.synthetic}"

    @property
    def commit(self) -> str | None:
        """The commit or revision at which a data set on the hub is read."""
        return self._commit or self.revision

    @property
    def text(self) -> TextSource:
        return TextSource(
            self.path, self.column, self.split, self.subset, self.commit, self.skip_empty
        )


class Data(StrictMapping):
    """The training data: blocks of `seq_len` tokens, mixed from `sources` in an order that `seed`
    fixes.

    held_out_blocks: number of blocks left out of the training, to measure the loss on. prepared:
    the directory where the blocks of this and other recipes are made and read. skip_positions: skip
    positions at random places of half of the blocks, so that they rise to at most this many, such
    as the trained length: a block then teaches longer distances than it has tokens (PoSE, arXiv
    2309.10400).
    """

    seq_len: int = Field(ge=2, lt=2**31)
    sources: list[Source] = Field(min_length=1)
    seed: int = Field(default=0, strict=True)
    held_out_blocks: int = Field(default=64, ge=0, strict=True)
    prepared: str = "prepared"
    skip_positions: int | None = None

    @model_validator(mode="after")
    def _check_data(self) -> "Data":
        if not any(source.path for source in self.sources):
            raise ValueError(
                "got synthetic sources alone, expected documents beside them, whose text they use"
            )
        if self.skip_positions is not None and self.skip_positions <= self.seq_len:
            raise ValueError(
                f"got skip_positions {self.skip_positions}, expected more than seq_len, "
                f"{self.seq_len}: the number of positions that a block spreads over"
            )
        if self.skip_positions is not None and self.seq_len < TOKENS_A_SKIP:
            raise ValueError(
                f"got skip_positions with seq_len {self.seq_len}, expected a seq_len of at least "
                f"{TOKENS_A_SKIP}: shorter blocks skip nothing"
            )
        return self

    def pin_(self, commits: list[str | None]) -> None:
        """Read the sources on the hub at these commits from now on, even if a branch moves."""
        for source, commit in zip(self.sources, commits, strict=True):
            source._commit = commit

    @property
    def has_answers(self) -> bool:
        return any(source.synthetic for source in self.sources)


class Lora(StrictMapping):
    """Low-rank adapters of peft (arXiv 2106.09685): rank, scale `alpha / r`, input dropout."""

    r: int = Field(ge=1, strict=True)
    alpha: Number = Field(gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)


class StageOptions(StrictMapping):
    """The training options of a recipe that TrainingArguments does not have.

    global_batch_size: blocks in an optimizer step over all processes; it sets
    gradient_accumulation_steps, so a recipe trains the same on any number of processes.
    held_out_steps: steps between measurements of the held-out loss; 0: only before and after the
    stage. max_bad_steps: this many bad steps in a row end the run; fewer are skipped. A step is bad
    if its loss or gradient is not a number, unless fp16 scaled it too high, or if its loss is above
    spike_factor times the running mean. attn_implementation: as `from_pretrained` takes it; sdpa
    by default if GPUs share a block. fused_cross_entropy: never hold the logits of all tokens, at
    the cost of one more product with the head. context_parallel_size: GPUs that share a block.
    """

    global_batch_size: int | None = Field(default=None, ge=1, lt=2**31)
    held_out_steps: int = Field(default=0, ge=0)
    max_bad_steps: int = Field(default=1, ge=1)
    spike_factor: float | None = Field(default=None, gt=1)
    attn_implementation: str | None = None
    fused_cross_entropy: bool = False
    context_parallel_size: int = Field(default=1, ge=1)


class LinearBounds(StrictMapping):
    """`lr_scheduler_kwargs` of a linear schedule: rates before the warm-up and after the end."""

    start_lr: Number = Field(default=0.0, ge=0)
    end_lr: Number = Field(default=0.0, ge=0)


def has_bounds(arguments: TrainingArguments) -> bool:
    """Whether the schedule is `trainer.linear_rate`, with `LinearBounds`."""
    return bool(arguments.lr_scheduler_kwargs) and arguments.lr_scheduler_type == "linear"


class Stage(StrictMapping):
    """One run of the trainer: the parameters to train, by module name or `all`, and its own
    training options.

    With `lora`, adapters on the linear layers of that name are trained instead; `all` means those
    of the decoder's layers. `objective` names what is minimised, or maps several to their weights:
    see `objectives.py`. `answer_weight` times the mean loss over the answers of each block of
    synthetic lookups is added to the mean over its tokens.
    """

    # A directory name, and a step in a dotted path
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$")
    train: str | list[str]
    lora: Lora | None = None
    objective: dict[ObjectiveName, Annotated[Number, Field(gt=0)]] = Field(
        default={"lm": 1.0}, min_length=1
    )
    answer_weight: Number = Field(default=0.0, ge=0)
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
        names = isinstance(train, list) and train and all(isinstance(name, str) for name in train)
        if train != "all" and not names:
            raise ValueError(
                f"got {short(train)}, expected all or a list of module names such as [t_proj]"
            )
        return train

    @field_validator("objective", mode="before")
    @classmethod
    def _as_weights(cls, given: Any) -> Any:
        return {given: 1.0} if isinstance(given, str) else given

    @field_validator("training")
    @classmethod
    def _check_training(cls, training: dict[str, Any]) -> dict[str, Any]:
        return _checked_training(training, also_known=_STAGE_KEYS)

    @property
    def needs_teacher(self) -> bool:
        return "distill" in self.objective

    @property
    def needs_objective(self) -> bool:
        """Whether it minimises more than the mean cross-entropy of the text."""
        return self.objective != {"lm": 1.0} or bool(self.answer_weight)

    @property
    def needs_logits(self) -> bool:
        return "distill" in self.objective or bool(self.answer_weight)


class Recipe(StrictMapping):
    """A checked recipe. `to_dict` gives its file's shape, with every default filled in."""

    model: str | None = Field(default=None, min_length=1)
    tokenizer: str | None = Field(default=None, min_length=1)
    config: dict[str, Any] = {}
    # The original model, if an objective needs it
    teacher: str | None = Field(default=None, min_length=1)
    data: Data
    training: dict[str, Any] = Field(default={}, validate_default=True)
    stages: list[Stage] = Field(min_length=1)
    _batches_in_file: dict[str, int | None] = PrivateAttr({})  # of stages, without overrides
    _shared_overrides: dict[str, str] = PrivateAttr({})  # that some stages do not see

    @field_validator("training")
    @classmethod
    def _check_training(cls, training: dict[str, Any]) -> dict[str, Any]:
        return {**DEFAULTS, **_checked_training(training)}

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
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"stages: got two of the name {name!r}, expected a name for each")
        for stage in self.stages:
            where = f"stages.{stage.name}"
            if stage.needs_teacher and self.teacher is None:
                raise ValueError(
                    f"{where}: objective {', '.join(stage.objective)} needs the original model, "
                    "got none; give its directory or hub id as teacher, beside model"
                )
            _check_arguments(where, self.trainer_options(stage))
            with _explained(where):
                options = self.own_options(stage)
            check_stage(stage, options, self.data)
        return self

    def trainer_options(self, stage: Stage) -> dict[str, Any]:
        """The TrainingArguments of a stage: its own over the shared ones."""
        given = {**self.training, **stage.training}
        return {key: value for key, value in given.items() if key not in StageOptions.model_fields}

    def own_options(self, stage: Stage) -> StageOptions:
        given = {**self.training, **stage.training}
        own = {key: value for key, value in given.items() if key in StageOptions.model_fields}
        if own.get("context_parallel_size", 1) != 1 and own.get("attn_implementation") is None:
            own["attn_implementation"] = "sdpa"
        return StageOptions(**own)

    @property
    def start(self) -> str:
        """Where the first stage starts: the model's directory or hub id, or `... from scratch`."""
        return self.model or f"{self.config['model_type']} from scratch"

    def num_blocks(self, world_size: int) -> int:
        """The blocks that all stages take together, on `world_size` processes."""
        return sum(
            self.trainer_options(stage)["max_steps"] * self.blocks_per_step(stage, world_size)
            for stage in self.stages
        )

    def blocks_per_step(self, stage: Stage, world_size: int) -> int:
        """Blocks that one optimizer step of a stage takes, over `world_size` processes."""
        accumulated = self.trainer_options(stage).get("gradient_accumulation_steps", 1)
        at_once = self._blocks_at_once(stage, world_size)
        return self.own_options(stage).global_batch_size or at_once * accumulated

    def accumulation(self, stage: Stage, world_size: int) -> int:
        """Batches of a process in a step. Raises CocaError if global_batch_size allows none."""
        blocks = self.blocks_per_step(stage, world_size)
        at_once = self._blocks_at_once(stage, world_size)
        if blocks % at_once:
            raise CocaError(
                f"stages.{stage.name}: got global_batch_size {blocks}, expected a multiple of "
                f"{at_once}: per_device_train_batch_size {self._batch(stage)} on {world_size} "
                "processes; change one of them"
            )
        given = self.trainer_options(stage).get("gradient_accumulation_steps", blocks // at_once)
        if given != blocks // at_once:
            raise CocaError(
                f"stages.{stage.name}: got global_batch_size {blocks} and "
                f"gradient_accumulation_steps {given}, expected {blocks // at_once} on "
                f"{world_size} processes; leave gradient_accumulation_steps out"
            )
        return blocks // at_once

    def _blocks_at_once(self, stage: Stage, world_size: int) -> int:
        """Blocks of a batch over all processes. Raises CocaError unless whole groups share them."""
        sharing = self.own_options(stage).context_parallel_size
        if world_size % sharing:
            raise CocaError(
                f"stages.{stage.name}: got context_parallel_size {sharing} on {world_size} "
                "processes, expected a divisor of their number"
            )
        return world_size // sharing * self._batch(stage)

    def _batch(self, stage: Stage) -> int:
        default = TrainingArguments.per_device_train_batch_size
        return self.trainer_options(stage).get("per_device_train_batch_size", default)

    def batch_in_file(self, stage: Stage) -> int | None:
        """The `global_batch_size` of a stage in the recipe's file, if overrides changed it."""
        batch = self._batches_in_file.get(stage.name)
        return batch if batch != self.own_options(stage).global_batch_size else None

    def overrides_without_effect(self, stage: Stage) -> list[str]:
        """The overrides for all stages that do not reach this one, which has its own."""
        return [given for key, given in self._shared_overrides.items() if key in stage.training]

    def to_dict(self) -> dict[str, Any]:
        tree = self.model_dump(exclude={"stages"}, exclude_none=True)
        stages = [
            {**stage.model_dump(exclude={"training"}, exclude_defaults=True), **stage.training}
            for stage in self.stages
        ]
        return {**tree, "data": self.data.model_dump(), "stages": stages}


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read the recipe at `path`, with `overrides` such as `training.learning_rate=1e-4` or
    `stages.full.max_steps=10`.

    An override's value is YAML; stages go by name, sources by number (from 0).

    Raises CocaError for a file that is not a recipe, an unknown key (naming the nearest known one),
    a value of the wrong type, a stage without a length, and an override that no stage would see or
    that a later one replaces with all that is around it.
    """
    tree, overrides = read_tree(Path(path)), list(overrides)
    written = copy.deepcopy(tree)
    _check_order(overrides)
    for override in overrides:
        _override_(tree, override)
    with _explained(str(path), tree):
        recipe = Recipe.model_validate(tree)
    for override in overrides:
        section, _, key = override.partition("=")[0].partition(".")
        own = [stage.name for stage in recipe.stages if key.split(".")[0] in stage.training]
        if section == "training" and own:
            recipe._shared_overrides[key.split(".")[0]] = override
        if section == "training" and len(own) == len(recipe.stages):
            raise CocaError(
                f"{override}: changes nothing, because every stage has its own; override "
                f"stages.{own[0]}.{key} instead"
            )
    with suppress(ValidationError):  # the overrides may be what completes it
        in_file = Recipe.model_validate(written)
        recipe._batches_in_file = {
            stage.name: in_file.own_options(stage).global_batch_size for stage in in_file.stages
        }
    return recipe


def _checked_training(options: dict[str, Any], also_known: tuple[str, ...] = ()) -> dict[str, Any]:
    """Training options with every value in the type that is declared for it, as plain YAML values.

    Raises ValueError for an unknown option, one that coca-train sets itself, or a value of another
    type.
    """
    checked = {}
    for key, value in options.items():
        if key not in _training_types():
            reason = _reason_not_set(str(key))
            raise ValueError(
                f"{short(key)} is not a recipe's to set: {reason}"
                if reason
                else _unknown_key(key, [*_training_types(), *also_known])
            )
        hint, adapter = _training_types()[key]
        try:
            if isinstance(value, bool) and bool not in (hint, *typing.get_args(hint)):
                raise TypeError  # pydantic would take true for 1
            checked[key] = adapter.dump_python(adapter.validate_python(value), mode="json")
        except (TypeError, ValidationError):
            expected = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            raise ValueError(f"{key}: got {short(value)}, expected {expected}") from None
    return checked


@functools.cache
def _training_types() -> dict[str, tuple[Any, TypeAdapter]]:
    """Every option that a recipe may set, of TrainingArguments and StageOptions, with its type."""
    hints = typing.get_type_hints(TrainingArguments)
    config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    names = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    types = {name: hints[name] for name in names if _reason_not_set(name) is None}
    types |= {name: field.annotation for name, field in StageOptions.model_fields.items()}
    return {name: (hint, TypeAdapter(hint, config=config)) for name, hint in types.items()}


def _reason_not_set(key: str) -> str | None:
    for reason, names in REFUSED_OPTIONS.items():
        if any(fnmatchcase(key, name) for name in names.split()):
            return reason
    return None


def _check_arguments(where: str, options: dict[str, Any]) -> None:
    """Raises ValueError for a training option of the right type and a wrong value."""

    def check(key: str, is_right: bool, expected: str) -> None:
        if not is_right:
            raise ValueError(f"{where}: got {key} {short(options.get(key))}, expected {expected}")

    length = "a number above 0; say how long the stage is, here or under training"
    check("max_steps", options.get("max_steps", 0) > 0, length)
    for key in ("logging_strategy", "save_strategy"):
        is_right = options.get(key, "steps") in ("steps", "no")
        check(key, is_right, "steps or no: there are no epochs")
    for key, least in _LEAST.items():
        check(key, options.get(key) is None or options[key] >= least, f"at least {least}")
    for key in (*_LEAST, "max_steps"):
        check(key, (options.get(key) or 0) < 2**31, "less than 2^31")
    levels = *get_log_levels_dict(), "passive"
    for key in ("log_level", "log_level_replica"):
        check(key, options.get(key, "passive") in levels, f"one of {', '.join(levels)}")
    both = {"gradient_checkpointing", "activation_checkpointing"} <= options.keys()
    one = "one of it and activation_checkpointing, two names of one option"
    check("gradient_checkpointing", not both, one)
    check("learning_rate", options.get("learning_rate", 1.0) > 0, "a rate above 0")
    follows_loss = options.get("lr_scheduler_type") in ("reduce_lr_on_plateau", "greedy")
    check("lr_scheduler_type", not follows_loss, "a schedule that follows steps, as linear does")
    check("seed", 0 <= options.get("seed", 0) < 2**32, "0 to 2^32 - 1")
    parameters = inspect.signature(checkpoint).parameters.values()
    known = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    known.append("preserve_rng_state")
    for key in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        for name in options.get(key) or ():
            if name not in known:
                raise ValueError(f"{where}: {key}: {_unknown_key(name, known)}")
    if backend := options.get("torch_compile_backend"):
        from accelerate.utils import DynamoBackend  # other recipes are read without accelerate

        backends = [each.value.lower() for each in DynamoBackend]
        check("torch_compile_backend", backend.lower() in backends, f"one of {', '.join(backends)}")
    if mode := options.get("torch_compile_mode"):
        from torch._inductor import list_mode_options  # takes a second

        modes = list_mode_options()
        check("torch_compile_mode", mode in modes, f"one of {', '.join(modes)}")
    kwargs = options.get("lr_scheduler_kwargs")
    if kwargs and options.get("lr_scheduler_type", "linear") == "linear":
        with _explained(f"{where}: lr_scheduler_kwargs of a linear schedule", kwargs):
            bounds = LinearBounds.model_validate(kwargs)
        rate = options.get("learning_rate", TrainingArguments.learning_rate)
        for key, bound in bounds:
            if bound > rate:
                raise ValueError(
                    f"{where}: got {key} {bound:g} of lr_scheduler_kwargs, expected at most the "
                    f"learning_rate, {rate:g}; lower it too"
                )


def check_stage(stage: Stage, options: StageOptions, data: Data) -> None:
    """Raises ValueError if a stage cannot be computed as its options and the data say."""

    def refuse(problem: str, remedy: str = "leave one of them out") -> None:
        raise ValueError(f"stages.{stage.name}: got {problem}; {remedy}")

    if stage.answer_weight and not data.has_answers:
        refuse(
            f"answer_weight {stage.answer_weight:g} without a source that has answers",
            "add {synthetic: lookups, weight: 0.5} to data.sources",
        )
    if "tf32" in stage.training:
        refuse("tf32", "torch has one setting for all stages: give training.tf32")
    if options.fused_cross_entropy and stage.needs_logits:
        cause = "objective distill" if stage.needs_teacher else "answer_weight"
        refuse(f"fused_cross_entropy with {cause}, which needs the logits")
    if (sharing := options.context_parallel_size) > 1:
        given = f"context_parallel_size {sharing}"
        if (attention := options.attn_implementation) != "sdpa":
            refuse(f"{given} with attn_implementation {attention}, expected sdpa")
        if stage.needs_teacher or stage.answer_weight:
            objective = ", ".join(stage.objective)
            objective += " and answer_weight" if stage.answer_weight else ""
            refuse(f"{given} with objective {objective}, expected lm alone")
        if data.skip_positions:
            refuse(f"{given} with data.skip_positions, expected positions in order")
        if data.seq_len % (2 * sharing):
            expected = f"expected a multiple of {2 * sharing}"
            refuse(f"{given} with data.seq_len {data.seq_len}", expected)


def _unknown_key(key: Any, known: Iterable[str]) -> str:
    if key in _training_types():
        return f"unknown key {short(key)} here; it is a training option: give training.{key}"
    return f"unknown key {short(key)}; nearest: {nearest(str(key), known)}"


@contextmanager
def _explained(where: str, tree: Any = None) -> Iterator[None]:
    """Turn what pydantic raises for `tree` into one CocaError that opens with `where`."""
    try:
        yield
    except ValidationError as error:
        problems = "; ".join(_explain(tree, problem) for problem in error.errors())
        raise CocaError(f"{where}: {problems}") from None


def _explain(tree: Any, problem: Any) -> str:
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
    own = {"dict_type": "a mapping", "model_type": "a mapping"}
    own |= {"too_short": "one or more", "string_too_short": "a name"}
    expected = own.get(problem["type"]) or problem["msg"].removeprefix("Input should be ")
    return f"{where}got {short(problem['input'])}, expected {expected}"


def read_tree(path: Path) -> dict[str, Any]:
    """The mapping in the YAML file at `path`. Raises CocaError if there is none."""
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


def _check_order(overrides: list[str]) -> None:
    """Raises CocaError for `stages.k.max_steps=1` before `stages=[...]`, which would drop it."""
    for number, override in enumerate(overrides):
        around = override.partition("=")[0]
        for before in overrides[:number]:
            if before.partition("=")[0].startswith(f"{around}."):
                raise CocaError(
                    f"{_cut(before)}: changes nothing, because {around}=... replaces it; give it "
                    f"after {around}=..., or leave it out"
                )


def _cut(override: str) -> str:
    """An override, for messages."""
    return override if len(override) <= 200 else f"{override[:200]} ..."


def _override_(tree: dict[str, Any], override: str) -> None:
    """Set one `dotted.path=value` in the tree, in place; stages go by name, sources by number.

    A new key is made; the recipe decides whether it is known.

    Raises CocaError for a path through a value, or to a stage or source that does not exist.
    """
    path, equals, value = override.partition("=")
    if not equals or not all(path.split(".")):
        raise CocaError(f"{override}: expected key=value, such as training.learning_rate=1e-4")
    *steps, last = path.split(".")
    override = _cut(override)

    def mapping(node: Any) -> dict[str, Any]:
        if not isinstance(node, dict):
            raise CocaError(
                f"{override}: the path goes through {short(node)}, expected one that leads to a "
                "key of the recipe"
            )
        return node

    node: Any = tree
    for depth, step in enumerate(steps):
        place: Any = _place(node, step, override) if isinstance(node, list) else step
        if not isinstance(node, list) and step not in mapping(node):
            # a stage's mapping begins as the one that it replaces
            is_of_stage = (steps[0], depth) == ("stages", 2)
            node[step] = _inherited(tree, step) if is_of_stage else {}
        node[place] = copy.copy(node[place])  # an alias in the file may share it with others
        node = node[place]
    mapping(node)[last] = _parse(value, override)


def _inherited(tree: dict[str, Any], key: str) -> Any:
    """What counts for a stage that has nothing under `key`."""
    if key == "objective":
        return dict(Stage.model_fields[key].default)
    shared = tree.get("training")
    return shared.get(key, {}) if isinstance(shared, dict) else {}


def _place(items: list, step: str, override: str) -> int:
    """The place of the stage of a name, or of the source of a number. Raises CocaError."""
    names = {
        str(item["name"] if isinstance(item, dict) and "name" in item else number): number
        for number, item in enumerate(items)
    }
    if step not in names:
        known = "the list is empty"
        if names:
            known = f"expected one of {', '.join(names)}; nearest: {nearest(step, names)}"
        raise CocaError(f"{override}: got {short(step)}, {known}")
    return names[step]


def _parse(text: str, where: str) -> Any:
    """YAML 1.2, in which 1e-4 is a number, and `no` and 1:30 are words; no key may stand twice."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of several lines, about valid YAML
            return YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = one_line(getattr(error, "problem", None) or error)
        raise CocaError(f"{where}: {line}not YAML: {problem}") from None
    except RecursionError:
        raise CocaError(f"{where}: not a recipe: nested too deeply") from None
    except ValueError as error:  # of !!int x, and of numbers with thousands of digits
        raise CocaError(f"{where}: not YAML: {one_line(error)}") from None
    except (KeyError, AttributeError, IndexError):  # of !!bool x and !!int ''
        raise CocaError(f"{where}: not YAML: a value does not fit its tag") from None


def recipe_text(recipe: Recipe) -> str:
    """The YAML that `load_recipe` reads as this recipe."""
    stream, yaml = io.StringIO(), YAML()
    yaml.allow_unicode = False  # escapes U+0085, which would be read as a blank
    yaml.dump(recipe.to_dict(), stream)
    return stream.getvalue()
