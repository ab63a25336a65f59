"""The training options that a recipe may set: most TrainingArguments, and a few of our own."""

import dataclasses
import functools
import inspect
import typing
from typing import Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch.utils.checkpoint import checkpoint
from transformers import TrainingArguments

from coca_hf.errors import short
from coca_hf.train.recipe_file import StrictMapping, explain, unknown_key

DEFAULTS = {
    "report_to": ["tensorboard"],
    "logging_steps": 10,
    # A step that spoils the weights shows in the next one's loss, after its checkpoint
    "save_total_limit": 2,
    "disable_tqdm": False,
    "ddp_timeout": 600,  # seconds that a process may keep the others waiting
    "ddp_find_unused_parameters": False,  # every parameter that learns is used in every step
}

_BY_DATA = "coca-train feeds the blocks itself, so that every run sees the same ones"
_BY_MAP = "blocks are read from disk as they are, in no time; leave it out"
_BY_EVAL = "coca-train only trains; evaluate the result with coca-eval"
_BY_HAND = "upload a finished stage's directory yourself, with `hf upload`"
_BY_RESUME = "coca-train keeps what --resume needs"
OWNED = {
    "output_dir": "results lie in OUT/<number>-<name>; give OUT with --out",
    "num_train_epochs": "give max_steps, the length of a stage",
    "label_smoothing_factor": "transformers takes the labels of models that it does not know "
    "one token too early",
    "logging_nan_inf_filter": "a loss that is not a number stops the run",
    "deepspeed": "shard with FSDP2, through `accelerate launch`",
    "resume_from_checkpoint": "continue a run with --resume",
    "restore_callback_states_from_checkpoint": _BY_RESUME,
    "save_only_model": _BY_RESUME,
    "enable_jit_checkpoint": "SIGTERM and SIGUSR1 always write a checkpoint",
    "use_liger_kernel": "Liger patches only model types that it knows, not CoCA's; "
    "give fused_cross_entropy: liger",
    "parallelism_config": "give context_parallel_size; other than that, shard with FSDP2 through "
    "`accelerate launch`",
    **dict.fromkeys(("remove_unused_columns", "ignore_data_skip", "accelerator_config"), _BY_DATA),
    **dict.fromkeys(("data_seed", "auto_find_batch_size", "train_sampling_strategy"), _BY_DATA),
    "length_column_name": _BY_DATA,
    **dict.fromkeys(("dataloader_num_workers", "dataloader_prefetch_factor"), _BY_MAP),
    **dict.fromkeys(("dataloader_in_order", "dataloader_persistent_workers"), _BY_MAP),
    "dataloader_multiprocessing_context": _BY_MAP,
    "load_best_model_at_end": _BY_EVAL,
    **dict.fromkeys(("metric_for_best_model", "greater_is_better"), _BY_EVAL),
    "per_device_eval_batch_size": _BY_EVAL,
}
_OWNED_PREFIXES = {
    **dict.fromkeys(("eval_", "do_"), _BY_EVAL),
    **dict.fromkeys(("hub_", "push_to_hub"), _BY_HAND),
}
_LEAST = {
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), 1),
    **dict.fromkeys(("save_steps", "logging_steps"), 1),
    **dict.fromkeys(("warmup_steps", "weight_decay", "max_grad_norm", "adam_epsilon"), 0),
    "neftune_noise_alpha": 0,
}


class StageOptions(StrictMapping):
    """What a recipe may say among the training options beside those of TrainingArguments.

    global_batch_size: blocks that an optimizer step takes over all processes; it sets
    gradient_accumulation_steps, so that a recipe trains the same on any number of them.
    held_out_steps: steps between measurements of the held-out loss; 0: before and after the stage
    only. max_bad_steps: that many in a row end the run; fewer are skipped. A step is bad if its
    loss or gradient is not a number, unless fp16 scaled it too high, and if its loss is above
    spike_factor times the running mean. attn_implementation: as `from_pretrained` takes it.
    fused_cross_entropy: never hold the logits of all tokens, for one more product with the head;
    liger: by its Triton kernel, on GPUs. context_parallel_size: GPUs that share a block.
    """

    global_batch_size: int | None = Field(default=None, ge=1)
    held_out_steps: int = Field(default=0, ge=0)
    max_bad_steps: int = Field(default=1, ge=1)
    spike_factor: float | None = Field(default=None, gt=1)
    attn_implementation: str | None = None
    fused_cross_entropy: bool | typing.Literal["liger"] = False
    context_parallel_size: int = Field(default=1, ge=1)


class LinearBounds(StrictMapping):
    """`lr_scheduler_kwargs` of a linear schedule: rates before the warm-up and after the end."""

    start_lr: float = Field(default=0.0, ge=0)
    end_lr: float = Field(default=0.0, ge=0)


def has_bounds(arguments: TrainingArguments) -> bool:
    """Whether `trainer.linear_rate` is the schedule, with `LinearBounds`."""
    return bool(arguments.lr_scheduler_kwargs) and arguments.lr_scheduler_type == "linear"


def checked_training(options: dict[str, Any], also_known: tuple[str, ...] = ()) -> dict[str, Any]:
    """Training options with every value in the type that is declared for it, as plain YAML values.

    Raises ValueError for an unknown option, one that coca-train sets itself, or a value of another
    type.
    """
    checked = {}
    for key, value in options.items():
        if key not in _training_types():
            reason = _owned_reason(str(key))
            known = [*_training_types(), *also_known]
            raise ValueError(
                f"{short(key)} is not a recipe's to set: {reason}"
                if reason
                else unknown_key(key, known)
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
    """Every option that a recipe may set, of TrainingArguments and our own, with its type."""
    hints = typing.get_type_hints(TrainingArguments)
    config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    names = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    types = {name: hints[name] for name in names if _owned_reason(name) is None}
    types |= {name: field.annotation for name, field in StageOptions.model_fields.items()}
    return {name: (hint, TypeAdapter(hint, config=config)) for name, hint in types.items()}


def _owned_reason(key: str) -> str | None:
    by_prefix = (reason for prefix, reason in _OWNED_PREFIXES.items() if key.startswith(prefix))
    return OWNED.get(key) or next(by_prefix, None)


def check_options(stage: str, options: dict[str, Any]) -> None:
    """What a stage's options must be beside their types. Raises ValueError."""

    def check(key: str, is_right: bool, expected: str) -> None:
        if not is_right:
            raise ValueError(
                f"stages.{stage}: got {key} {short(options[key])}, expected {expected}"
            )

    for key in ("logging_strategy", "save_strategy"):
        is_right = options.get(key, "steps") in ("steps", "no")
        check(key, is_right, "steps or no: there are no epochs")
    for key, least in _LEAST.items():
        check(key, options.get(key) is None or options[key] >= least, f"at least {least}")
    for key in ("adam_beta1", "adam_beta2"):
        check(key, 0 <= options.get(key, 0) < 1, "at least 0 and below 1")
    check("learning_rate", options.get("learning_rate", 1.0) > 0, "a rate above 0")
    own = inspect.signature(checkpoint).parameters.values()
    known = [
        "preserve_rng_state",
        *(parameter.name for parameter in own if parameter.kind is parameter.KEYWORD_ONLY),
    ]
    for key in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        for name in options.get(key) or ():
            if name not in known:
                raise ValueError(f"stages.{stage}: {key}: {unknown_key(name, known)}")
    if mode := options.get("torch_compile_mode"):
        from torch._inductor import list_mode_options  # takes a second

        modes = list_mode_options()
        check("torch_compile_mode", mode in modes, f"one of {', '.join(modes)}")
    kwargs = options.get("lr_scheduler_kwargs")
    if not kwargs or options.get("lr_scheduler_type", "linear") != "linear":
        return
    try:
        LinearBounds.model_validate(kwargs)
    except ValidationError as error:
        problems = "; ".join(explain(kwargs, problem) for problem in error.errors())
        raise ValueError(
            f"stages.{stage}: lr_scheduler_kwargs of a linear schedule: {problems}"
        ) from None
