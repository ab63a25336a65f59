"""The three commands: `coca-convert`, `coca-train`, `coca-eval`."""

import gc
import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers.utils.logging import set_verbosity_error

from coca_hf.errors import CocaError

# Prints paths and names as they are, whatever rich would read into them.
PlainConsole = partial(Console, markup=False, emoji=False, highlight=False)
console = PlainConsole(stderr=True, soft_wrap=True)

convert_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
train_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
evaluate_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


def convert() -> None:
    _run(convert_app)


def train() -> None:
    _run(train_app)


def evaluate() -> None:
    _run(evaluate_app)


def _run(app: typer.Typer) -> None:
    """Run a command; bad input becomes one line on stderr and exit code 2."""
    gc.freeze()  # what is imported stays; the collector's going over it would be most of the time that exiting takes
    set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # of names it will drop: not ours
    try:
        app()
    except CocaError as error:
        console.print(f"error: {error}", style="red")
        sys.exit(2)


@convert_app.command()
def convert_command(
    src: Annotated[str, typer.Argument(help="Checkpoint: a directory, a .gguf file or a hub id.")],
    dst: Annotated[str, typer.Argument(help="Directory to write. Absent or complete at every moment.")],
    constraint: Annotated[
        str | None, typer.Option(help="slack (the paper's main results, and the default) or strict.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto (the source's), float32, bfloat16 or float16.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint at DST.")] = False,
    max_shard_size: Annotated[str, typer.Option(help="Of the files of weights, as in 500MB or 5GB.")] = "1GB",
    ntk_length: Annotated[
        int | None,
        typer.Option(help="Bake in the base of dynamic NTK for so many tokens; SRC may then be a CoCA checkpoint."),
    ] = None,
    ntk_factor: Annotated[
        float | None, typer.Option(help="Of dynamic NTK; by default the config's, or length / trained length.")
    ] = None,
    released: Annotated[
        bool, typer.Option("--released", help="SRC is a GPT-NeoX CoCA checkpoint of the authors' released code.")
    ] = False,
) -> None:
    """Turn a LLaMA, Mistral, Qwen2, Qwen3 or GPT-NeoX checkpoint into CoCA. Interrupted, it continues if run again."""
    from coca_hf.convert import convert_checkpoint

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"converting {src}", visible=False)
        record = convert_checkpoint(
            src,
            dst,
            constraint,
            dtype,
            overwrite,
            progress=lambda done, total: bar.update(task, completed=done, total=total, visible=True),
            max_shard_size=max_shard_size,
            ntk_length=ntk_length,
            ntk_factor=ntk_factor,
            released=released,
        )
    _print_conversion(record, dst)


def _print_conversion(record: dict, dst: str) -> None:
    parameters, cache = record["parameters"], record["kv_cache_bytes_per_token"]
    shares = record["trainable_fraction"]
    console.print(f"{dst}: {record['constraint']}, {record['dtype']}")
    console.print(f"  parameters            {parameters['before']:,} before, {parameters['after']:,} after")
    console.print(f"  trained per stage     k {shares['k']:.1%}, qkv {shares['qkv']:.1%}, full {shares['full']:.0%}")
    console.print(f"  key/value cache       {cache['before']:,} bytes per token before, {cache['after']:,} after")
    console.print(f"  start of W_T          {record['start']['rule']}")
    if rope := record.get("rope"):
        console.print(
            f"  RoPE                  base {rope['rope_theta']['after']:,.0f} for {rope['ntk_length']:,} tokens, "
            f"made of {rope['rope_theta']['before']:,.0f} for {rope['trained_length']:,} by dynamic NTK, factor "
            f"{rope['factor']:g}",
        )
    if "CoCA" in record["source_format"] and "released" not in record["source_format"]:
        return
    console.print(
        f"The attention has to be trained before the model is useful. Next: set `model: {dst}` in a recipe, then "
        f"coca-train RECIPE (recipes/llama-7b/three-stage.yaml is the paper's)",
    )


@train_app.command()
def train_command(
    recipe: Annotated[Path, typer.Argument(help="A recipe: one YAML file. See recipes/.", show_default=False)],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="As in training.learning_rate=1e-4 stages.full.max_steps=10",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where stages go; runs/<name of the recipe> by default.")] = None,
    stage: Annotated[str | None, typer.Option(help="Run this one; the stage before it must be complete.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue what is in OUT.")] = False,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Do not train: tokenise what all stages will read, once, to disk.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Train nothing: say what each stage takes on the GPUs described below.")
    ] = False,
    world_size: Annotated[
        int, typer.Option(min=1, help="With --plan and --prepare: the processes, each with a GPU, that will train.")
    ] = 1,
    gpu_memory: Annotated[float, typer.Option(help="Of a plan: GB of each GPU.")] = 80,
    gpu: Annotated[str, typer.Option(help="Of a plan: whose peak FLOPS; A100, H100, H200, L40S, RTX 4090 …")] = "H100",
    mfu: Annotated[float, typer.Option(help="Of a plan: the share of the peak that the training is to reach.")] = 0.4,
    as_json: Annotated[bool, typer.Option("--json", help="Of a plan: for programs.")] = False,
) -> None:
    """Train a CoCA checkpoint in the stages of a recipe, each from directory to directory."""
    if plan:
        _plan(recipe, settings or [], world_size, gpu_memory, gpu, mfu, as_json)
        return
    from accelerate import PartialState
    from transformers.utils.logging import disable_progress_bar

    from coca_hf.train.recipe import load_recipe
    from coca_hf.train.stages import run_recipe
    from coca_hf.train.stop import EXIT_STOPPED, Stopped

    disable_progress_bar()  # of loading and saving; the training keeps its own
    checked = load_recipe(recipe, settings or [])
    if prepare:
        return _prepare(checked, world_size)
    try:
        directory = run_recipe(checked, out or Path("runs") / recipe.stem, stage, resume)
    except Stopped as stopped:
        if PartialState().is_main_process:
            console.print(str(stopped))
        PartialState().destroy_process_group()
        raise typer.Exit(EXIT_STOPPED) from None
    if PartialState().is_main_process:
        lengths = f"{checked.data.seq_len},{2 * checked.data.seq_len}"
        PlainConsole().print(f"checkpoint: {directory}", soft_wrap=True)
        PlainConsole().print(
            f"next: coca-eval perplexity {directory} --data TEXT --lengths {lengths} --rope default,dynamic:2 "
            f"--out {directory.parent / 'rows'}",
            soft_wrap=True,
        )
    PartialState().destroy_process_group()  # or a process that exits under gloo's threads may abort


def _prepare(recipe, world_size: int) -> None:
    from coca_hf.train.data import blocks_of
    from coca_hf.train.model import start_tokenizer

    blocks, wanted = blocks_of(recipe, start_tokenizer(recipe)), recipe.num_blocks(world_size)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("preparing blocks", total=wanted)
        prepared = blocks.prepare(wanted, lambda done: bar.update(task, completed=done))
    PlainConsole().print(
        f"prepared: {prepared.num_blocks:,} blocks, {prepared.num_blocks * prepared.seq_len:,} tokens in "
        f"{prepared.directory}: all stages on {world_size} processes take {wanted:,} blocks",
        soft_wrap=True,
    )


def _plan(
    path: Path, settings: list[str], world_size: int, gpu_memory: float, gpu: str, mfu: float, as_json: bool
) -> None:
    from coca_hf.train.plan import plan_recipe, plan_table
    from coca_hf.train.recipe import load_recipe

    with console.status("planning"):
        plan = plan_recipe(load_recipe(path, settings), world_size, gpu_memory, gpu, mfu)
    if as_json:
        print(json.dumps(plan.to_dict(), indent=2))
        return
    PlainConsole().print(plan_table(plan))
    for line in plan.advice():
        PlainConsole().print(line, soft_wrap=True)


ModelArgument = Annotated[str, typer.Argument(help="A model directory, or a hub id as owner/name.", show_default=False)]
LengthsOption = Annotated[str, typer.Option(help="Context lengths in tokens, with commas between them.")]
OutOption = Annotated[Path, typer.Option(help="Directory for rows.jsonl; rows that are there are not made again.")]
RopeOption = Annotated[
    str,
    typer.Option(help="default, linear:F, dynamic:F or yarn:F with a factor F, or several with commas between them."),
]
DtypeOption = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")]
NameOption = Annotated[str | None, typer.Option(help="What rows call the model; the directory's name by default.")]
BatchOption = Annotated[
    str, typer.Option(help="Sequences at a time, or auto: as many as fit. It does not change the result.")
]
DataOption = Annotated[
    str | None,
    typer.Option(help="A .txt, .jsonl or .parquet file, a directory or glob of them, or a data set on the hub."),
]
PresetOption = Annotated[str | None, typer.Option(help="pg19 or proof-pile: the data sets of published numbers.")]
DocumentsOption = Annotated[int | None, typer.Option(min=1, help="Draw so many documents; all by default.")]
MaxTokensOption = Annotated[int | None, typer.Option(min=2, help="Cut every document to its first tokens.")]
ColumnOption = Annotated[str, typer.Option(help="Where .jsonl, .parquet or a data set keeps the text.")]
SplitOption = Annotated[str, typer.Option(help="Of a data set on the hub.")]
SkipShortOption = Annotated[
    bool, typer.Option("--skip-short", help="Leave out, and name, documents shorter than a window.")
]
SeedOption = Annotated[int, typer.Option(help="Of the drawn documents or cases.")]


@evaluate_app.command("perplexity")
def perplexity_command(
    model: ModelArgument,
    lengths: LengthsOption,
    out: OutOption,
    data: DataOption = None,
    preset: PresetOption = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens between windows, 512 by default; for a shorter length, that length is used and said so."
        ),
    ] = None,
    variant: Annotated[
        str, typer.Option(help="sliding, or yarn, yarn-truncate or longlora: the numbers of those scripts, stride 256.")
    ] = "sliding",
    rope: RopeOption = "default",
    documents: DocumentsOption = None,
    max_tokens: MaxTokensOption = None,
    column: ColumnOption = "text",
    split: SplitOption = "test",
    skip_short: SkipShortOption = False,
    seed: SeedOption = 0,
    batch_size: BatchOption = "1",
    dtype: DtypeOption = "auto",
    name: NameOption = None,
) -> None:
    """Perplexity with a sliding window (window = length), token-weighted, each token scored once."""
    wanted = _lengths(lengths)
    from coca_hf.evaluate.perplexity import perplexity_rows
    from coca_hf.evaluate.variants import check_variant

    kind = check_variant(variant)
    subject, ropes, size = _subject_and_ropes(model, rope, dtype, name, batch_size)
    source = _Source(data, preset, column, split, documents, max_tokens, seed, skip_short)
    sample = _draw_sample(subject, max(wanted), source, kind.special_tokens)
    _warn_beyond_trained(subject, ropes, wanted)
    stride = stride or kind.stride
    rows = partial(perplexity_rows, subject, sample, wanted, stride, ropes, batch_size=size, variant=variant)
    _make_rows(out, rows)


@evaluate_app.command("position-loss")
def position_command(
    model: ModelArgument,
    lengths: LengthsOption,
    out: OutOption,
    data: DataOption = None,
    preset: PresetOption = None,
    bucket: Annotated[int, typer.Option(min=1, help="Token indices whose losses are summed.")] = 64,
    rope: RopeOption = "default",
    documents: DocumentsOption = None,
    max_tokens: MaxTokensOption = None,
    column: ColumnOption = "text",
    split: SplitOption = "test",
    skip_short: SkipShortOption = False,
    seed: SeedOption = 0,
    batch_size: BatchOption = "1",
    dtype: DtypeOption = "auto",
    name: NameOption = None,
) -> None:
    """Loss against the token's index in a window of LENGTH tokens: where the model's context really ends."""
    wanted = _lengths(lengths)
    from coca_hf.evaluate.position import position_rows

    subject, ropes, size = _subject_and_ropes(model, rope, dtype, name, batch_size)
    source = _Source(data, preset, column, split, documents, max_tokens, seed, skip_short)
    sample = _draw_sample(subject, max(wanted), source)
    _warn_beyond_trained(subject, ropes, wanted)
    _make_rows(out, partial(position_rows, subject, sample, wanted, ropes, bucket=bucket, batch_size=size))


@evaluate_app.command("passkey")
def passkey_command(
    model: ModelArgument,
    lengths: LengthsOption,
    out: OutOption,
    cases: Annotated[int, typer.Option(min=1, help="Prompts per length.")] = 100,
    depths: Annotated[
        int | None, typer.Option(min=1, help="A grid of so many depths, in turn; drawn uniformly by default.")
    ] = None,
    variant: Annotated[
        str, typer.Option(help="paper, or yarn or longlora: the prompts and scoring of those scripts.")
    ] = "paper",
    new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens the model may answer with; 64, the paper's, by default.")
    ] = None,
    rope: RopeOption = "default",
    seed: SeedOption = 0,
    batch_size: BatchOption = "1",
    dtype: DtypeOption = "auto",
    name: NameOption = None,
) -> None:
    """Passkey retrieval as in the paper: a number hidden in up to LENGTH tokens, greedy decoding, share found."""
    wanted = _lengths(lengths)
    from coca_hf.evaluate.passkey import check_variant, passkey_rows

    kind = check_variant(variant)
    subject, ropes, size = _subject_and_ropes(model, rope, dtype, name, batch_size)
    new_tokens = new_tokens or kind.new_tokens
    _warn_beyond_trained(subject, ropes, wanted, new_tokens)
    rows = partial(
        passkey_rows,
        subject,
        wanted,
        ropes,
        num_cases=cases,
        new_tokens=new_tokens,
        seed=seed,
        batch_size=size,
        variant=variant,
        depths=depths,
    )
    _make_rows(out, rows)


@evaluate_app.command("boundary")
def boundary_command(
    model: ModelArgument,
    lengths: LengthsOption,
    out: OutOption,
    data: DataOption = None,
    preset: PresetOption = None,
    pairs: Annotated[int, typer.Option(min=1, help="Positions (query, key) drawn from every document.")] = 1024,
    rope: RopeOption = "default",
    documents: DocumentsOption = None,
    max_tokens: MaxTokensOption = None,
    column: ColumnOption = "text",
    split: SplitOption = "test",
    skip_short: SkipShortOption = False,
    seed: SeedOption = 0,
    dtype: DtypeOption = "auto",
    name: NameOption = None,
) -> None:
    """The angle between query and key that RoPE starts from, and where it breaks the order of scores."""
    wanted = _lengths(lengths)
    from coca_hf.evaluate.boundary import boundary_rows

    subject, ropes, _ = _subject_and_ropes(model, rope, dtype, name)
    source = _Source(data, preset, column, split, documents, max_tokens, seed, skip_short)
    sample = _draw_sample(subject, max(wanted), source)
    _make_rows(out, partial(boundary_rows, subject, sample, wanted, ropes, pairs_per_document=pairs, seed=seed))


@evaluate_app.command("tasks")
def tasks_command(
    model: ModelArgument,
    out: OutOption,
    tasks: Annotated[
        str, typer.Option(help="lm-eval's names with commas between them; opencompass: those nearest the paper's.")
    ] = "",
    ruler: Annotated[str, typer.Option(help="Lengths in tokens at which to run RULER.")] = "",
    shots: Annotated[int | None, typer.Option(min=0, help="Examples before a question; the task's own.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Cases of every task; all by default.")] = None,
    include_path: Annotated[str | None, typer.Option(help="A directory of lm-eval tasks of your own.")] = None,
    rope: RopeOption = "default",
    batch_size: BatchOption = "1",
    dtype: DtypeOption = "auto",
    name: NameOption = None,
) -> None:
    """Tasks of lm-eval by name, and RULER: whether short contexts are as good as before, and long ones are used."""
    from coca_hf.evaluate.tasks import parse_tasks, task_rows

    names = parse_tasks(tasks, include_path) if tasks else []
    wanted = _lengths(ruler, "--ruler") if ruler else []
    if not names and not wanted:
        raise CocaError("--tasks, --ruler: got neither, expected at least one of them")
    subject, ropes, size = _subject_and_ropes(model, rope, dtype, name, batch_size)
    rows = partial(
        task_rows,
        subject,
        names,
        ropes,
        ruler_lengths=wanted,
        shots=shots,
        limit=limit,
        batch_size=size,
        include_path=include_path,
    )
    _make_rows(out, rows)


@evaluate_app.command("speed")
def speed_command(
    model: ModelArgument,
    lengths: LengthsOption,
    out: OutOption,
    baseline: Annotated[
        str | None, typer.Option(help="Another model, as the unconverted one, measured in turns with MODEL.")
    ] = None,
    modes: Annotated[str, typer.Option(help="Some of prefill, decode and train.")] = "prefill,decode,train",
    rope: RopeOption = "default",
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps; the row has their median.")] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before them.")] = 3,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    dtype: DtypeOption = "auto",
    name: NameOption = None,
) -> None:
    """Seconds and memory of prefill, decoding and a training step against sequence length."""
    wanted = _lengths(lengths)
    from coca_hf.evaluate.load import load_subject
    from coca_hf.evaluate.rope import check_rope
    from coca_hf.evaluate.speed import parse_modes, speed_rows

    chosen = parse_modes(modes)
    subject, ropes, _ = _subject_and_ropes(model, rope, dtype, name)
    other = load_subject(baseline, dtype) if baseline else None
    for setting in ropes:
        if other:
            check_rope(other.model, setting)
    rows = partial(
        speed_rows,
        subject,
        wanted,
        ropes,
        baseline=other,
        modes=chosen,
        batch_size=batch_size,
        repeats=repeats,
        warmup=warmup,
    )
    _make_rows(out, rows)


@evaluate_app.command("inspect")
def inspect_command(
    model: Annotated[Path, typer.Argument(help="A checkpoint directory, CoCA or not.", show_default=False)],
    memory: Annotated[
        str | None, typer.Option(help="As in 24GB; also tells the longest context that fits there.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """What a checkpoint is, and what its key/value cache takes; nothing is loaded."""
    from coca_hf.evaluate.inspect import describe, inspect_checkpoint
    from coca_hf.weights import parse_size

    facts = inspect_checkpoint(model, parse_size(memory, "--memory") if memory is not None else None)
    print(json.dumps(facts, indent=2) if as_json else describe(facts))


@evaluate_app.command("report")
def report_command(
    runs: Annotated[list[Path], typer.Argument(help="Directories with a rows.jsonl.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Directory for report.html, report.md and a PNG for each figure.")],
    paper: Annotated[
        str, typer.Option(help="Published curves to draw beside: 350m, llama-7b, pi-32k, with commas between them.")
    ] = "",
) -> None:
    """Turn the rows of several runs into one page: HTML that needs nothing else, Markdown, and PNG figures."""
    from coca_hf.report import write_report

    page = write_report(runs, out, [name.strip() for name in paper.split(",") if name.strip()])
    PlainConsole().print(f"report: {page}", soft_wrap=True)


@evaluate_app.command("card")
def card_command(
    model: Annotated[
        Path, typer.Argument(help="A directory that coca-convert or coca-train made.", show_default=False)
    ],
    rows: Annotated[list[Path] | None, typer.Option(help="Directory with a rows.jsonl; may be given again.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the converted model, if it was a path.")] = None,
) -> None:
    """Write MODEL/README.md anew: the model card, from the records in MODEL, with the tables of ROWS."""
    from coca_hf.card import write_card
    from coca_hf.report.page import tables_markdown

    path = write_card(model, measured=tables_markdown(rows) if rows else None, base_model=base_model)
    PlainConsole().print(f"card: {path}\nnext: hf upload OWNER/NAME {model}", soft_wrap=True)


def _lengths(text: str, option: str = "--lengths") -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 1 for part in parts):
        raise CocaError(f"{option}: got {text!r}, expected whole numbers above 1, as in 512,1024,2048")
    return list(dict.fromkeys(int(part) for part in parts))


def _subject_and_ropes(model: str, rope: str, dtype: str, name: str | None, batch_size: str = "1"):
    """Load the model, say at once whether it takes the RoPE settings, and how many sequences it gets at a time."""
    from coca_hf.evaluate.batches import parse_batch_size, processes
    from coca_hf.evaluate.load import load_subject
    from coca_hf.evaluate.rope import check_rope, parse_ropes

    console.quiet = not processes().is_main_process
    ropes = parse_ropes(rope)
    subject = load_subject(model, dtype, name)
    for setting in ropes:
        check_rope(subject.model, setting)
    return subject, ropes, parse_batch_size(batch_size, subject.model.device)


class _Source(NamedTuple):
    """What the commands are asked to read."""

    data: str | None
    preset: str | None
    column: str
    split: str
    documents: int | None
    max_tokens: int | None
    seed: int
    skip_short: bool


def _draw_sample(subject, min_tokens: int, source: _Source, special_tokens: bool = True):
    from coca_hf.evaluate.sample import check_preset, draw_sample

    if (source.data is None) == (source.preset is None):
        raise CocaError("--data, --preset: got both or neither, expected one of them")
    options = source._asdict()
    if preset := options.pop("preset"):
        chosen = check_preset(preset)
        min_tokens = max(min_tokens, chosen.pop("min_tokens"))
        options |= chosen | {"max_tokens": source.max_tokens or chosen["max_tokens"]}
        options["documents"] = source.documents or chosen.get("documents")
    sample = draw_sample(subject, min_tokens=min_tokens, special_tokens=special_tokens, **options)
    if sample.skipped:
        console.print(f"skipped {len(sample.skipped)} short documents: {', '.join(sample.skipped)}", style="yellow")
    return sample


def _warn_beyond_trained(subject, ropes: list, lengths: list[int], new_tokens: int = 0) -> None:
    from coca_hf.evaluate.rope import warn_beyond_trained

    if warning := warn_beyond_trained(subject.model, ropes, lengths, new_tokens):
        console.print(f"warning: {warning}", style="yellow")


def _make_rows(out: Path, rows_of: Callable) -> None:
    """Make the rows, on all processes of `accelerate launch` if there are several, and print them."""
    from coca_hf.evaluate.batches import processes
    from coca_hf.evaluate.rows import RowStore
    from coca_hf.evaluate.show import progress_on, results_table

    store = RowStore(out)
    with progress_on(console) as track:
        rows = list(rows_of(store=store, track=track))
    if processes().is_main_process:
        where = f"rows: {out / 'rows.jsonl'}\nnext: coca-eval report {out} --out {out / 'page'}"
        PlainConsole().print(results_table(rows))
        PlainConsole().print(where, soft_wrap=True)
    processes().destroy_process_group()
