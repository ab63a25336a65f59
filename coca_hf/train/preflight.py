"""What a run refuses before it writes anything, the cheapest checks first. Begin with `preflight`.

Later, each stage compares the hashes of the weights that it starts from (`check_base`), and each
checkpoint makes sure that the disk has room for it (`saving_to`).
"""

import copy
import functools
import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig, PartialState
from torch import nn
from transformers import (
    Adafactor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    get_scheduler,
)
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.utils import ADAPTER_CONFIG_NAME

from coca_hf.convert.config import check_generation_config, check_not_quantized, head_of
from coca_hf.errors import CocaError, library_errors, nearest, one_line, short
from coca_hf.files import locked
from coca_hf.models.attention import layer_types
from coca_hf.models.cache import KEY_FIELDS
from coca_hf.models.hub import TRAINING
from coca_hf.models.rotary import LENGTH_DEPENDENT_ROPE_TYPES
from coca_hf.precision import matrix_dtype
from coca_hf.train import model as models
from coca_hf.train.data import Corpus, tokenizer_hash
from coca_hf.train.processes import (
    Stopped,
    StopRequest,
    announce,
    from_main_process,
    main_process_first,
)
from coca_hf.train.recipe import Recipe, has_bounds
from coca_hf.train.run_directory import (
    LOCK,
    ResolvedStage,
    begin_out,
    check_inputs,
    check_out,
    model_hashes,
    noted_inputs,
)
from coca_hf.weights import read_record

MODELS = ("model", "teacher", "tokenizer")  # keys of a recipe whose values may be on the hub
CONSTANT = ("constant", "constant_with_warmup")  # schedules
# fields of a config with which a model changes its logits after the head
LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
OF_WHOLE_WEIGHTS = (Adafactor, torch.optim.Adagrad)
RING_DEVICES = ("cuda",)  # those that torch's ring attention has kernels for
FIXED_BY_WEIGHTS = {  # or fitted with them: fields of a checkpoint's config
    *("attention_bias", "head_dim", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_hidden_layers", "num_key_value_heads", "tie_word_embeddings", "vocab_size"),
    *KEY_FIELDS,
}


def preflight(
    recipe: Recipe,
    out_dir: Path,
    only: str | None,
    resume: bool,
    until_the_end: ExitStack,
    stop: StopRequest,
) -> tuple[Recipe, list[ResolvedStage], int, dict[str, Any]]:
    """Check everything that can be known before the first stage, then begin OUT or continue it.

    Every process calls this. only: the one stage to run, or None. until_the_end: holds OUT's lock,
    the only file written before everything is checked.

    Returns the recipe with everything that it takes from the hub at this run's commits, the stages
    to run, the number of blocks of all stages up to the last of these, and the main process's
    inputs (`OUT/inputs.json`).

    Raises, in every process, CocaError for the first thing that does not work, and Stopped after a
    signal.
    """
    # 1. In every process, because each has its own launcher and device
    check_launcher()
    stages = resolve_stages(recipe, out_dir)
    chosen = [stage for stage in stages if only in (None, stage.name)]
    if not chosen:
        names = [stage.name for stage in stages]
        raise CocaError(
            f"--stage: got {short(only)}, expected one of {', '.join(names)}; nearest: "
            f"{nearest(only or '', names)}"
        )
    num_blocks = sum(stage.num_blocks for stage in stages[: stages.index(chosen[-1]) + 1])
    # 2. In the main process, which alone writes. The others wait outside of collectives, because
    # hashing large files takes long.
    from_main_process(lambda: lock(out_dir, until_the_end))

    def check_and_begin(check_stop: Callable[[], None]) -> Any:
        if PartialState().is_main_process:
            return _check_and_begin(recipe, out_dir, stages, chosen, num_blocks, resume, check_stop)

    try:
        found = main_process_first(check_and_begin, stop)
    except Stopped as stopped:
        raise Stopped(
            f"{out_dir}: stopped by {stopped} before the first stage; continue with --resume"
        ) from None
    origins, commits, inputs = from_main_process(lambda: found)
    recipe.data.pin_(commits)
    at_commits = _at(recipe, origins)
    directory = origins["model"][1] if recipe.model else None
    chosen = [
        stage if stage.before else replace(stage, base=at_commits.start, base_directory=directory)
        for stage in chosen
    ]
    return at_commits, chosen, num_blocks, inputs


def _check_and_begin(
    given: Recipe,
    out_dir: Path,
    stages: list[ResolvedStage],
    chosen: list[ResolvedStage],
    num_blocks: int,
    resume: bool,
    check_stop: Callable[[], None],
) -> tuple[dict[str, tuple[str, Path]], list[str | None], dict[str, Any]]:
    """Returns where the recipe's models are (`located`), the commits of its data sets, and what
    `OUT/inputs.json` has.
    """
    # Small files of OUT, and options alone
    check_out(given, out_dir, resume)
    if (before := chosen[0].before) and not before.is_complete:
        raise CocaError(
            f"--stage {chosen[0].name}: starts from {before.directory}, which is not complete; "
            f"run --stage {before.name} first"
        )
    for stage in stages:
        check_loggers(stage.arguments, f"stages.{stage.name}")
        check_optimizer(stage.arguments, f"stages.{stage.name}")
    # Configs, from the hub if they are there, and models on the meta device
    noted = noted_inputs(out_dir, given)
    at_commits = (noted or {}).get("hub", {})
    names = {key: name for key in MODELS if (name := getattr(given, key))}
    origins = {key: models.located(at_commits.get(key, name)) for key, name in names.items()}
    recipe = _at(given, origins)
    for name, directory in (origins[key] for key in ("model", "teacher") if key in origins):
        check_whole(name, directory)
        check_generation_config(directory)
    check_model(recipe)
    check_overrides(recipe)
    check_kernels(recipe)
    config = models.start_config(recipe)
    check_head(recipe.start, config)
    check_not_quantized(recipe.start, config)
    if recipe.teacher:
        check_teacher(recipe, config)
    # The tokenizer, and a block of every source
    corpus = Corpus(recipe.data, models.start_tokenizer(recipe), config.vocab_size, check_stop)
    check_tokenizer(corpus.tokenizer, config)
    if recipe.teacher:
        check_teacher_tokens(str(recipe.teacher), corpus.tokenizer, config.vocab_size)
    if notice := check_positions(recipe, config):
        announce(notice)
    commits = corpus.pin_((noted or {}).get("commits"))
    if not corpus.has(num_blocks):  # prepared blocks need no sources
        corpus.check_sources()
    # The hashes of all weights and data, which decide the training and are not in the recipe
    on_hub = {key: name for key, (name, _) in origins.items() if not Path(name).exists()}
    inputs: dict[str, Any] = {"sources": corpus.files}
    if any(commits):
        inputs["commits"] = commits
    inputs["tokenizer"] = tokenizer_hash(corpus.tokenizer)
    for key, (_, directory) in origins.items():
        if key != "tokenizer" and key not in on_hub:
            inputs[key] = model_hashes(directory, check_stop)
    if on_hub:
        inputs["hub"] = on_hub
    if recipe.teacher and (notice := unusual_teacher(recipe, inputs)):
        announce(notice)
    inputs["blocks"] = corpus.directory.name
    if recipe.model and (notice := seen_before(recipe, origins["model"][1], inputs["blocks"])):
        announce(notice)
    inputs["blocks_per_step"] = {stage.name: stage.blocks_per_step for stage in stages}
    check_inputs(out_dir, noted, inputs)
    begin_out(out_dir, given, inputs)
    return origins, commits, inputs


def check_launcher() -> None:
    """Refuse parallelism that `accelerate launch` configures and the recipe does not mention."""
    for kind in ("CP", "SP", "TP"):
        size = os.environ.get(f"PARALLELISM_CONFIG_{kind}_SIZE", "1")
        if size != "1":
            raise CocaError(
                f"parallelism_config_{kind.lower()}_size: got {size}, expected 1: shard with "
                "FSDP2, and set context_parallel_size in the recipe for blocks too long for one GPU"
            )
    version = os.environ.get("FSDP_VERSION", "1")  # Accelerate's default
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and version != "2":
        raise CocaError(
            f"fsdp_version: got {version}, expected 2: FSDP1 rounds rotary frequencies to bfloat16; "
            "launch with --config_file recipes/accelerate/8gpu.yaml, or set fsdp_version: 2 in yours"
        )


def resolve_stages(recipe: Recipe, out_dir: Path) -> list[ResolvedStage]:
    """Every stage with its options as TrainingArguments, which check how they go together."""
    stages: list[ResolvedStage] = []
    for number, stage in enumerate(recipe.stages, 1):
        before = stages[-1] if stages else None
        directory, where = out_dir / f"{number}-{stage.name}", f"stages.{stage.name}"
        options, own_options = recipe.trainer_options(stage), recipe.own_options(stage)
        # transformers requires it to compute bf16 on a CPU
        options.setdefault("use_cpu", not torch.accelerator.is_available())
        options.setdefault("tf32", False)  # torch_compile would set it, for later stages too
        with library_errors(f"{where}: the trainer does not take these options"):
            if options["use_cpu"]:  # transformers does not pass ddp_timeout on
                timeout = timedelta(seconds=options["ddp_timeout"])
                PartialState(cpu=True, backend=options.get("ddp_backend"), timeout=timeout)
            arguments = TrainingArguments(
                output_dir=str(directory / "trainer"),
                remove_unused_columns=False,
                ignore_data_skip=True,  # the blocks of a resumed stage begin at its checkpoint
                eval_on_start=True,  # see StageTrainer.evaluate
                **options,
            )
            on_cpu = arguments.device.type == "cpu"  # joins the other processes
        check_precision(arguments, where)
        if arguments.n_gpu > 1:  # transformers would split every batch among them by DataParallel
            if number == 1:
                announce(
                    f"one process uses one GPU: this one takes the first of {arguments.n_gpu}; for "
                    "all of them: accelerate launch --config_file LAYOUT --num_processes "
                    f"{arguments.n_gpu} -m coca_hf.train RECIPE "
                    "(LAYOUT: recipes/accelerate/8gpu.yaml)"
                )
            arguments._n_gpu = 1
        sharing = own_options.context_parallel_size
        arguments.parallelism_config = (
            context_parallel(arguments, sharing, where) if sharing > 1 else None
        )
        arguments.dataloader_pin_memory &= not on_cpu  # torch warns if there is no GPU to pin for
        arguments.run_name = f"{arguments.run_name or out_dir.resolve().name}/{directory.name}"
        arguments.gradient_accumulation_steps = recipe.accumulation(stage, arguments.world_size)
        start = before.directory if before else None
        base = str(start or recipe.start)
        per_step = recipe.blocks_per_step(stage, arguments.world_size)
        stages.append(
            ResolvedStage(stage, own_options, arguments, per_step, base, start, before, directory)
        )
    return stages


def check_precision(arguments: TrainingArguments, where: str) -> None:
    """Warns of bf16 on a CPU that has to emulate it.

    Raises CocaError for another precision of `accelerate launch`, and for fp16 on a CPU.
    """
    own = "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "no"
    if (launched := os.environ.get("ACCELERATE_MIXED_PRECISION", "no")) not in ("no", own):
        raise CocaError(
            f"{where}: got mixed_precision {launched} from accelerate launch, expected {own}: "
            "the recipe decides, with bf16 or fp16; launch with --mixed_precision no"
        )
    if arguments.fp16 and arguments.device.type == "cpu":
        raise CocaError(
            f"{where}: got fp16 on a CPU, where losses are not scaled; expected bf16, or neither"
        )
    if arguments.bf16 and arguments.device.type == "cpu" and matrix_dtype("cpu") == torch.float32:
        announce(
            f"{where}: bf16 may take many times as long as float32 on this processor, which has "
            "neither AMX nor AVX-512 BF16; set training.bf16=false"
        )


def context_parallel(arguments: TrainingArguments, size: int, where: str) -> ParallelismConfig:
    """Accelerate's configuration for groups of `size` GPUs, 2 or more, that share a block, each
    with a part of its tokens.

    transformers' Trainer splits every batch along its tokens, with their positions and shifted
    labels; torch computes attention over the parts as a ring (arXiv 2310.01889); Accelerate
    combines them, under FSDP2; `data.DealtBlocks` gives every process of a group the same block.
    Our tests run it only on a CPU, with another attention instead of torch's ring.

    Raises CocaError for a layout of processes that does not allow it.
    """
    given, device = f"{where}: got context_parallel_size {size}", arguments.device.type
    if device not in RING_DEVICES:
        without = f"on a {device}, for which torch has no ring attention"
        raise CocaError(f"{given} {without}; expected GPUs, or leave it out")
    if (os.environ.get("ACCELERATE_USE_FSDP"), os.environ.get("FSDP_VERSION")) != ("true", "2"):
        raise CocaError(
            f"{given} without FSDP2, expected it; start with `accelerate launch --config_file "
            f"recipes/accelerate/8gpu.yaml`"
        )
    # At least 1, as it demands: fewer processes than `size` are refused by `Recipe.accumulation`
    return ParallelismConfig(cp_size=size, dp_shard_size=max(arguments.world_size // size, 1))


def lock(out_dir: Path, until_the_end: ExitStack) -> None:
    """Raises CocaError if another run holds OUT, or nothing can be written beside it.

    If OUT is a mount point, as in containers, its parent differs between them: the lock is in OUT.
    """
    own = out_dir.resolve()  # the same for every name of OUT
    file = own / LOCK if own.is_mount() else own.parent / f".{own.name}.lock"
    message = f"{out_dir}: another coca-train is writing it; wait for it, or choose another --out"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        until_the_end.enter_context(locked(file, message))
    except OSError as error:
        raise CocaError(
            f"{out_dir}: cannot be written: {error.strerror}; choose another --out"
        ) from None


def check_loggers(arguments: TrainingArguments, where: str) -> None:
    """Raises CocaError for an unknown or missing logger, and for settings that do not work."""
    try:
        for make_callback in get_reporting_integration_callbacks(arguments.report_to):
            make_callback()
        if "trackio" in arguments.report_to:
            from trackio.sqlite_storage import SQLiteStorage

            SQLiteStorage.validate_project_name(arguments.project)
        logs_model = os.environ.get("WANDB_LOG_MODEL")
        if "wandb" in arguments.report_to and logs_model in ("checkpoint", "end"):
            raise ValueError(
                f"got WANDB_LOG_MODEL={logs_model}, expected false: a stage is not complete when "
                "transformers uploads it; upload its directory afterwards"
            )
    except (RuntimeError, ValueError, ImportError) as error:
        raise CocaError(f"{where}.report_to: {one_line(error)}") from error


def check_optimizer(arguments: TrainingArguments, where: str) -> None:
    """Make the optimizer and the schedule of these options, for a model of one parameter.

    Raises CocaError if they do not work.
    """
    model, num_steps = nn.Linear(1, 1, bias=False), arguments.max_steps
    optim, schedule = (
        getattr(choice, "value", choice)
        for choice in (arguments.optim, arguments.lr_scheduler_type)
    )
    in_state = "keeps in its state, as tensors and numbers, all that --resume needs"
    unlike = {
        "schedule_free": "saves the weights it trains",
        "lomo": "steps after the backward, to skip bad steps",  # adalomo, too
        **dict.fromkeys(("galore", "apollo", "grokadamw"), in_state),
    }
    for name, expected in unlike.items():
        if name in optim:
            raise CocaError(f"{where}: got optim {optim}, expected an optimizer that {expected}")
    given = (
        f"{where}: optim {optim}, optim_args {short(arguments.optim_args)}, lr_scheduler_type "
        f"{schedule}, lr_scheduler_kwargs {short(arguments.lr_scheduler_kwargs)} do not work"
    )
    with library_errors(given):  # optimizers raise anything for their options
        kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
        without = copy.copy(arguments)
        without.optim_args = None
        plain = Trainer.get_optimizer_cls_and_kwargs(without, model)[1]
        if arguments.optim_args and plain == options:
            raise ValueError(f"{optim} takes no optim_args")
        compresses = kind.__module__.startswith(("bitsandbytes.", "torchao."))
        if (kind in OF_WHOLE_WEIGHTS or compresses) and models.is_sharded():
            raise ValueError(
                f"{optim} cannot step, or not resume, weights that FSDP2 has sharded; "
                "adamw_torch_fused can"
            )
        optimizer = kind(model.parameters(), **options)
        kwargs = None if has_bounds(arguments) else arguments.lr_scheduler_kwargs
        warmup_steps = arguments.get_warmup_steps(num_steps)
        # transformers ignores them
        if schedule in CONSTANT and arguments.lr_scheduler_kwargs:
            raise ValueError(f"{schedule} takes no lr_scheduler_kwargs")
        if schedule == CONSTANT[0] and warmup_steps:
            raise ValueError(f"{schedule} has no warm-up, {CONSTANT[1]} has")
        made = get_scheduler(schedule, optimizer, warmup_steps, num_steps, kwargs)
        for rate in getattr(made, "lr_lambdas", ()):  # a wrong value may show after the warm-up
            for step in (warmup_steps, (warmup_steps + num_steps) // 2, num_steps):
                float(rate(step))


def check_overrides(recipe: Recipe) -> None:
    """Raises CocaError for an override that does not fit the weights of the recipe's checkpoint."""
    if recipe.model is None:
        return
    config = models.load_config(recipe.model)
    for key in sorted(FIXED_BY_WEIGHTS & recipe.config.keys()):
        if (given := recipe.config[key]) != (own := getattr(config, key)):
            raise CocaError(
                f"config.{key}: got {short(given)}, expected {own}, as the weights of "
                f"{recipe.model} have it; leave it out"
            )


def check_model(recipe: Recipe) -> None:
    """Raises CocaError, from the config alone, for a model that cannot run on a block, or a stage
    that has nothing to train.
    """
    with torch.device("meta"):
        model = models.model_from_config(recipe).train()
        ids = torch.zeros(1, recipe.data.seq_len, dtype=torch.int64)
        with models.building(model.config), models.shapes_only(model), torch.no_grad():
            model(input_ids=ids, labels=ids, use_cache=False)
        for stage in recipe.stages:
            # Adapters stay in the model
            models.stage_model(copy.deepcopy(model) if stage.lora else model, stage)


def check_whole(name: str, directory: Path) -> None:
    """Raises CocaError for a peft adapter beside a model: only the adapter would be saved."""
    if (directory / ADAPTER_CONFIG_NAME).exists():
        raise CocaError(
            f"{name}: got {ADAPTER_CONFIG_NAME}, which makes transformers load another base and "
            "save the adapter alone, expected a whole model; merge the adapter (merge_and_unload), "
            f"or remove {ADAPTER_CONFIG_NAME} if it is merged"
        )


def check_head(name: str, config: PreTrainedConfig) -> None:
    """Raises CocaError for a classifier."""
    if (head := head_of(getattr(config, "architectures", None))) != "ForCausalLM":
        raise CocaError(
            f"{name}: got {config.architectures[0]}, expected a causal language model; take the "
            f"one that it was made from, without {head}"
        )


def check_kernels(recipe: Recipe) -> None:
    """Raises CocaError for attention that is unknown or does not run here, for a model whose blocks
    cannot be shared among GPUs, and for a fused loss of one that changes its logits.
    """
    model_with = functools.cache(functools.partial(models.model_from_config, recipe))
    for stage in recipe.stages:
        options, where = recipe.own_options(stage), f"stages.{stage.name}"
        attention = options.attn_implementation
        try:
            with torch.device("meta"):
                model = model_with(attention)
        except CocaError as error:
            raise CocaError(
                f"{where}: attn_implementation {attention!r} does not run here: "
                f"{one_line(error.__cause__ or error)}; sdpa runs everywhere"
            ) from error
        if options.context_parallel_size > 1:
            check_model_for_context_parallel(model, where)
        caps = [name for name in LOGIT_CAPS if getattr(model.config, name, None)]
        if options.fused_cross_entropy and caps:
            raise CocaError(
                f"{where}: got fused_cross_entropy with {caps[0]} {getattr(model.config, caps[0])}, "
                "which would cap hidden states instead of logits; leave fused_cross_entropy out"
            )


def check_model_for_context_parallel(model: PreTrainedModel, where: str) -> None:
    """Raises CocaError for a model that does not compute the same on parts of a block.

    To balance the work of the GPUs, a part has tokens from the beginning and from the end of the
    block. A model must therefore take positions from `position_ids` alone, as the rotary embeddings
    of CoCA do, given the length of the whole block (`rope_length`).
    """
    config = model.config
    is_coca = config.model_type.startswith("coca_")
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    reasons = {
        "attention without SDPA": config._attn_implementation != "sdpa",
        "sliding windows": set(layer_types(config)) != {"full_attention"},
        "attention that Accelerate does not find by the name self_attn": not any(
            name.endswith("self_attn") for name, _ in model.named_modules()
        ),
        "positions in its mask": "alibi" in config.model_type,
        "attention with dropout": bool(getattr(config, "attention_dropout", 0)),
        f"rope_type {rope_type} of transformers' own": rope_type in LENGTH_DEPENDENT_ROPE_TYPES
        and not is_coca,
    }
    for reason, applies in reasons.items():
        if applies:
            raise CocaError(
                f"{where}: context_parallel_size cannot be used with {type(model).__name__}: it "
                f"has {reason}"
            )


def check_teacher(recipe: Recipe, student: PreTrainedConfig) -> None:
    """Raises CocaError, from the configs alone, if the teacher is not the student's original, or
    blocks have positions that it does not have.
    """
    teacher, data = str(recipe.teacher), recipe.data
    config = models.load_config(teacher)
    check_head(teacher, config)
    for key in ("vocab_size", "num_hidden_layers", "hidden_size"):
        theirs, ours = getattr(config, key), getattr(student, key)
        if theirs != ours:
            raise CocaError(
                f"teacher: {teacher} has {key} {theirs}, but the model has {ours}; take the one it "
                "was converted from"
            )
    trained = getattr(config, "max_position_embeddings", None) or math.inf
    key = "skip_positions" if data.skip_positions else "seq_len"
    if (reach := getattr(data, key)) > trained:
        raise CocaError(
            f"data.{key}: got {reach}, expected at most {trained}, the positions of the "
            f"teacher {teacher} (max_position_embeddings), from which the model learns"
        )


def check_teacher_tokens(teacher: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raises CocaError if the teacher's tokenizer has other ids for the student's tokens. Added ones
    may differ.
    """
    try:
        theirs = models.load_tokenizer(teacher).get_vocab()
    except CocaError:
        return  # it has none
    added = tokenizer.get_added_vocab()
    for token, number in tokenizer.get_vocab().items():
        if token not in added and number < vocab_size and theirs.get(token) != number:
            raise CocaError(
                f"teacher: {teacher} has a tokenizer with the id {theirs.get(token)} for "
                f"{short(token)}, expected the model's, {number}; take the one it was converted from"
            )


def unusual_teacher(recipe: Recipe, inputs: dict[str, Any]) -> str | None:
    """A notice if the teacher has the weights of the model, or is a CoCA model itself."""
    weights = [
        {file: digest for file, digest in inputs.get(key, {}).items() if file != "config.json"}
        for key in ("model", "teacher")
    ]
    kind = models.load_config(str(recipe.teacher)).model_type
    if recipe.teacher == recipe.model or (weights[0] and weights[0] == weights[1]):
        what = "has the weights that the model begins with, which have nothing to teach it"
    elif kind.startswith("coca_"):
        what = f"is a CoCA model ({kind})"
    else:
        return None
    return f"teacher: {recipe.teacher} {what}; expected the original, from before the conversion"


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Raises CocaError if the tokenizer can make tokens that the model does not have."""
    # Added tokens may be beyond the vocabulary; text does not contain them
    added = set(tokenizer.get_added_vocab()) - {tokenizer.eos_token}
    largest = max(number for word, number in tokenizer.get_vocab().items() if word not in added)
    if largest >= config.vocab_size:
        raise CocaError(
            f"{tokenizer.name_or_path}: got a tokenizer with a token {largest}, expected one below "
            f"the model's vocab_size, {config.vocab_size}; take the tokenizer of the model"
        )


def check_positions(recipe: Recipe, config: PreTrainedConfig) -> str | None:
    """A notice if blocks are longer than the model was trained for and nothing in its config shows
    that this is intended; otherwise None.

    Raises CocaError if blocks skip to positions that the model does not have, or does not read.
    """
    data, trained = recipe.data, getattr(config, "max_position_embeddings", None) or math.inf
    if data.skip_positions and "alibi" in config.model_type:
        raise CocaError(
            f"data.skip_positions: got {data.skip_positions} for {recipe.start} ({config.model_type}), "
            "which counts tokens and reads no positions, so nothing would be skipped; leave it out"
        )
    if data.skip_positions and data.skip_positions > trained:
        raise CocaError(
            f"data.skip_positions: got {data.skip_positions}, expected at most {trained}, the "
            f"positions of {recipe.start} (max_position_embeddings)"
        )
    rope = getattr(config, "rope_parameters", None)  # None: a model without RoPE
    if not rope or data.seq_len <= trained or rope.get("rope_type", "default") != "default":
        return None
    return (
        f"data.seq_len: got {data.seq_len:,} tokens, more than the {trained:,} positions of "
        f"{recipe.start} (max_position_embeddings): it was not trained on those beyond; if that is "
        f"intended, set config.max_position_embeddings={data.seq_len}, which the result keeps, or "
        "scale RoPE by config.rope_parameters"
    )


def seen_before(recipe: Recipe, start: Path, blocks: str) -> str | None:
    """A notice if the model in `start` was trained on the blocks that the first stage begins with.

    blocks: the name of their directory, which is a hash of what makes them.
    """
    record = read_record(start / TRAINING)
    end = record.get("end_block")
    if not end or record.get("blocks") != blocks:
        return None
    return (
        f"model: {recipe.start} has seen blocks 0 to {end - 1:,} of this data, which "
        "this run repeats; for others, set data.seed to another number, or give other text"
    )


def _at(recipe: Recipe, origins: dict[str, tuple[str, Path]]) -> Recipe:
    return recipe.model_copy(update={key: name for key, (name, _) in origins.items()})
