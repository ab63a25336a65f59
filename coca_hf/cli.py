"""The three commands: `coca-convert`, `coca-train`, `coca-eval`."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
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
    set_verbosity_error()
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
) -> None:
    """Train a CoCA checkpoint in the stages of a recipe, each from directory to directory."""
    from accelerate import PartialState
    from transformers.utils.logging import disable_progress_bar

    from coca_hf.train.recipe import load_recipe
    from coca_hf.train.stages import run_recipe

    disable_progress_bar()  # of loading and saving; the training keeps its own
    checked = load_recipe(recipe, settings or [])
    directory = run_recipe(checked, out or Path("runs") / recipe.stem, stage, resume)
    if PartialState().is_main_process:
        lengths = f"{checked.data.seq_len},{2 * checked.data.seq_len}"
        PlainConsole().print(f"checkpoint: {directory}", soft_wrap=True)
        PlainConsole().print(
            f"next: coca-eval perplexity {directory} --data TEXT --lengths {lengths} --rope default,dynamic:2 "
            f"--out {directory.parent / 'rows'}",
            soft_wrap=True,
        )
    PartialState().destroy_process_group()  # or a process that exits under gloo's threads may abort


ModelArgument = Annotated[str, typer.Argument(help="A model directory, or a hub id as owner/name.", show_default=False)]
LengthsOption = Annotated[str, typer.Option(help="Context lengths in tokens, with commas between them.")]
OutOption = Annotated[Path, typer.Option(help="Directory for rows.jsonl; rows that are there are not made again.")]
RopeOption = Annotated[
    str, typer.Option(help="default, linear:FACTOR or dynamic:FACTOR, or several with commas between them.")
]
DtypeOption = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")]
NameOption = Annotated[str | None, typer.Option(help="What rows call the model; the directory's name by default.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Sequences at a time; it does not change the result.")]
SeedOption = Annotated[int, typer.Option(help="Of the drawn documents or cases.")]


@evaluate_app.command("perplexity")
def perplexity_command(
    model: ModelArgument,
    data: Annotated[
        str,
        typer.Option(help="A .txt, .jsonl or .parquet file, a directory or glob of them, or a data set on the hub."),
    ],
    lengths: LengthsOption,
    out: OutOption,
    stride: Annotated[
        int, typer.Option(min=1, help="Tokens between windows; for a shorter length, that length is used and said so.")
    ] = 512,
    rope: RopeOption = "default",
    documents: Annotated[int | None, typer.Option(min=1, help="Draw so many documents; all by default.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Cut every document to its first tokens.")] = None,
    column: Annotated[str, typer.Option(help="Where .jsonl, .parquet or a data set keeps the text.")] = "text",
    split: Annotated[str, typer.Option(help="Of a data set on the hub.")] = "test",
    skip_short: Annotated[
        bool, typer.Option("--skip-short", help="Leave out, and name, documents shorter than a window.")
    ] = False,
    seed: SeedOption = 0,
    batch_size: BatchOption = 1,
    dtype: DtypeOption = "auto",
    name: NameOption = None,
) -> None:
    """Perplexity with a sliding window (window = length), token-weighted, each token scored once."""
    wanted = _lengths(lengths)
    from coca_hf.evaluate.perplexity import perplexity_rows
    from coca_hf.evaluate.sample import draw_sample

    subject, ropes = _subject_and_ropes(model, rope, dtype, name)
    sample = draw_sample(
        subject,
        data,
        max(wanted),
        column=column,
        split=split,
        documents=documents,
        max_tokens=max_tokens,
        seed=seed,
        skip_short=skip_short,
    )
    if sample.skipped:
        console.print(f"skipped {len(sample.skipped)} short documents: {', '.join(sample.skipped)}", style="yellow")
    _warn_beyond_trained(subject, ropes, wanted)
    _make_rows(out, partial(perplexity_rows, subject, sample, wanted, stride, ropes, batch_size=batch_size))


@evaluate_app.command("passkey")
def passkey_command(
    model: ModelArgument,
    lengths: LengthsOption,
    out: OutOption,
    cases: Annotated[int, typer.Option(min=1, help="Prompts per length.")] = 100,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens the model may answer with.")] = 64,
    rope: RopeOption = "default",
    seed: SeedOption = 0,
    batch_size: BatchOption = 1,
    dtype: DtypeOption = "auto",
    name: NameOption = None,
) -> None:
    """Passkey retrieval as in the paper: a number hidden in up to LENGTH tokens, greedy decoding, share found."""
    wanted = _lengths(lengths)
    from coca_hf.evaluate.passkey import passkey_rows

    subject, ropes = _subject_and_ropes(model, rope, dtype, name)
    _warn_beyond_trained(subject, ropes, wanted, new_tokens)
    rows = partial(
        passkey_rows,
        subject,
        wanted,
        ropes,
        num_cases=cases,
        new_tokens=new_tokens,
        seed=seed,
        batch_size=batch_size,
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
    out: Annotated[Path, typer.Option(help="Directory for report.md and its plots.")],
) -> None:
    """Turn the rows of several runs into one page: Markdown tables and PNG plots."""
    from coca_hf.report import write_report

    PlainConsole().print(f"report: {write_report(runs, out)}", soft_wrap=True)


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


def _lengths(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 1 for part in parts):
        raise CocaError(f"--lengths: got {text!r}, expected whole numbers above 1, as in 512,1024,2048")
    return list(dict.fromkeys(int(part) for part in parts))


def _subject_and_ropes(model: str, rope: str, dtype: str, name: str | None):
    """Load the model, and say at once whether it takes the RoPE settings."""
    from coca_hf.evaluate.load import load_subject
    from coca_hf.evaluate.rope import check_rope, parse_ropes

    ropes = parse_ropes(rope)
    subject = load_subject(model, dtype, name)
    for setting in ropes:
        check_rope(subject.model, setting)
    return subject, ropes


def _warn_beyond_trained(subject, ropes: list, lengths: list[int], new_tokens: int = 0) -> None:
    from coca_hf.evaluate.rope import warn_beyond_trained

    if warning := warn_beyond_trained(subject.model, ropes, lengths, new_tokens):
        console.print(f"warning: {warning}", style="yellow")


def _make_rows(out: Path, rows_of: Callable) -> None:
    from coca_hf.evaluate.rows import RowStore
    from coca_hf.evaluate.show import progress_on, results_table

    store = RowStore(out)
    with progress_on(console) as track:
        rows = list(rows_of(store=store, track=track))
    PlainConsole().print(results_table(rows))
    PlainConsole().print(
        f"rows: {out / 'rows.jsonl'}\nnext: coca-eval report {out} --out {out / 'page'}", soft_wrap=True
    )
