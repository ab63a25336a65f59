"""`coca-eval TASK MODEL`: the measurements, and the page and card that their rows make."""

import inspect
import json
import shlex
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from coca_cli.main import BadOption, PlainConsole, console, refuse_other_encodings, say

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


LENGTHS = "Context lengths in tokens, separated by commas."
BATCH = "Sequences per batch, or auto: as many as fit. Results do not depend on it."
SEED = "Seed of the documents or cases that are drawn."
OUT = "Directory for rows.jsonl; existing rows are kept, except those that ran out of memory."
ROPE = "RoPE, several by commas: default, linear:FACTOR, dynamic:FACTOR, yarn:FACTOR."
NAME = "Name of the model in the rows; by default its directory's."
REVISION = "Branch, tag or commit of a MODEL on the hub."
TRUST = "Run the code that the checkpoint carries."
DATA = "Text: a .txt, .jsonl, .json, .parquet or .arrow file, a directory or glob of them, or a hub id."
PRESET = "A data set with published numbers."
DOCUMENTS = "Number of documents to draw; all by default."
CUT = "Cut every document to this many tokens."
DATA_REVISION = "Branch, tag or commit of a data set on the hub."
SKIP = "Skip documents that are empty or shorter than a window, and print their names."
ORIGINAL = "The model that MODEL was converted from, as a directory or hub id."
STRIDE = (
    "Tokens between windows; by default 512, or 256 for other variants than sliding. A shorter "
    "length is its own stride."
)
BUCKET = "Number of consecutive token indices whose losses are summed."
DEPTHS = "Number of depths on an even grid; by default depths are drawn uniformly."
NEW_TOKENS = "Most tokens of an answer; by default 64 for paper, 10 for yarn and longlora."
TASKS = "lm-eval tasks, separated by commas; opencompass stands for those nearest to the paper's."
RULER = "Lengths in tokens, separated by commas, at which to run RULER or its tasks in --tasks."
SEQUENCES = "Number of sequences of each kind of text per length."
PAIRS = "Pairs of query and key positions drawn from every document."
LIMIT = "Number of cases of every task; all by default."
MODES = "What to measure: prefill, decode, train, separated by commas."
REPEATS = "Number of timed steps; the row has their median."
RUNS = "Directories with a rows.jsonl, or of coca-train."
INCLUDE = "Directory with your own lm-eval tasks."
PAGE = "Directory for report.html, report.md and a PNG for each figure."
SHOTS = "Number of examples before a question; by default the task's own."
BASELINE = "Another model, such as the original, timed in turns with MODEL."
BASELINE_NAME = "Name of the baseline in the rows; by default that of its directory."
MEMORY = "Memory, such as 24GB; also prints the longest context that fits."
PAPER = "The paper's curves to draw as well: 350m, llama-7b, pi-32k, separated by commas."
ROWS = "Directory with a rows.jsonl whose tables go into the card; may be repeated."
BASE_MODEL = "Hub id of the original model, if it was converted from a directory."


def parse_lengths(option: typer.CallbackParam, text: str | None) -> list[int]:
    """The lengths in a text, none without one. Raises BadOption for anything else."""
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 10 and int(part) > 1 for part in parts):
        expected = "whole numbers from 2 to 999999999, as in 512,1024,2048"
        raise BadOption(f"{option.opts[0]}: got {text!r}, expected {expected}")
    return list(dict.fromkeys(map(int, parts)))


def parse_batch_size(text: str) -> int | None:
    """The number, or None for auto. Raises BadOption for anything else."""
    if text == "auto":
        return None
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        expected = "auto or a whole number from 1 to 999999999"
        raise BadOption(f"--batch-size: got {text!r}, expected {expected}")
    return int(text)


# Their callbacks turn these texts into list[int] and int | None
Lengths = Annotated[Any, typer.Option(callback=parse_lengths, metavar="<str>", help=LENGTHS)]
BatchSize = Annotated[Any, typer.Option(callback=parse_batch_size, metavar="<str>", help=BATCH)]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help=SEED)]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Expand parameters that are dataclasses into their fields: typer only knows single options."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Callable[..., Any]] = {}
    for parameter in inspect.signature(command).parameters.values():
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += inspect.signature(parameter.annotation).parameters.values()
        else:
            parameters.append(parameter)

    @wraps(command)
    def with_single_options(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(
                **{field: values.pop(field) for field in inspect.signature(group).parameters}
            )
        command(**values)

    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    with_single_options.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    return with_single_options


@dataclass
class ModelOptions:
    """A model under RoPE settings, and where its rows go."""

    model: Annotated[str, typer.Argument(help="A model directory, or a hub id as owner/name.")]
    out: Annotated[Path, typer.Option(help=OUT)]
    rope: Annotated[str, typer.Option(help=ROPE)] = "default"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Type of the weights; auto is the checkpoint's."),
    ] = "auto"
    name: Annotated[str | None, typer.Option(help=NAME)] = None
    revision: Annotated[str | None, typer.Option(help=REVISION)] = None
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help=TRUST)] = False

    def begin(self, lengths: list[int], batch_size: int | None = None):
        """The run of these options: the model, loaded, and its rows so far."""
        from coca_hf.evaluate.loaded_model import parse_ropes, processes
        from coca_hf.evaluate.rows import RowStore, Run

        console.quiet = not processes().is_main_process
        refuse_other_encodings()
        ropes, store = parse_ropes(self.rope), RowStore(self.out)
        loaded = self.load_one(self.model, ropes, self.name, self.revision)
        return Run(loaded, lengths, ropes, store, batch_size)

    def load_one(
        self, path: str, ropes: list, name: str | None = None, revision: str | None = None
    ):
        """The model at `path`, refused if it does not take the settings `ropes`."""
        from coca_hf.evaluate.loaded_model import check_rope, load_model, small_tokenizer_warning

        loaded = load_model(path, self.dtype, name, revision, self.trust_remote_code)
        warn(small_tokenizer_warning(loaded))
        for setting in ropes:
            check_rope(loaded.model, setting)
        return loaded

    def measure_and_print(
        self, run, measurement, yielded: Iterable[dict], new_tokens: int = 0
    ) -> list[dict]:
        """Make the rows of a run, on all processes of `accelerate launch`, and print them.

        The model runs here: `yielded` measures as it is read. Returns the rows in the main process,
        none in others. Ends the command with status 1 if no row has a value.
        new_tokens: of an answer, for the warning that RoPE settings do not reach the lengths.
        """
        from coca_hf.evaluate.loaded_model import beyond_trained_warning, processes
        from coca_hf.evaluate.progress import Progress
        from coca_hf.evaluate.rows import made_otherwise
        from coca_hf.evaluate.tables import results_table

        warn(beyond_trained_warning(run.loaded.model, run.ropes, run.lengths, new_tokens))
        with Progress(console) as run.progress:
            rows = list(yielded)
        is_main = processes().is_main_process
        if is_main:
            PlainConsole().print(results_table(measurement, rows))
            say(measurement.explanation)
            say(f"rows: {self.out / 'rows.jsonl'}")
            words = ("coca-eval", "report", str(self.out), "--out", str(self.out / "page"))
            say(f"next: {shlex.join(words)}")
            if note := made_otherwise(rows):
                console.print(f"note: {note}", style="yellow")
        processes().destroy_process_group()
        if is_main and all(row["value"] is None for row in rows):
            raise typer.Exit(1)  # the table says why
        return rows if is_main else []


@dataclass
class TextOptions:
    """The documents to read."""

    data: Annotated[str | None, typer.Option(help=DATA)] = None
    preset: Annotated[Literal["pg19", "proof-pile"] | None, typer.Option(help=PRESET)] = None
    documents: Annotated[int | None, typer.Option(min=1, help=DOCUMENTS)] = None
    max_tokens: Annotated[int | None, typer.Option(min=2, help=CUT)] = None
    column: Annotated[str, typer.Option(help="Column that holds the text.")] = "text"
    split: Annotated[str, typer.Option(help="Split of a data set on the hub.")] = "test"
    subset: Annotated[str | None, typer.Option(help="Subset of a data set on the hub.")] = None
    data_revision: Annotated[str | None, typer.Option(help=DATA_REVISION)] = None
    skip_short: Annotated[bool, typer.Option("--skip-short", help=SKIP)] = False
    seed: Seed = 0

    def __post_init__(self) -> None:
        if (self.data is None) == (self.preset is None):
            got = "neither" if self.data is None else "both"
            raise BadOption(f"--data, --preset: got {got}, expected one of them")
        for name in ("column", "split"):
            if self.preset and getattr(self, name) != getattr(TextOptions, name):
                raise BadOption(f"--{name}: got it with --preset, which has its own; leave it out")

    def draw(self, run, min_tokens: int | None = None, special_tokens: bool = True):
        """The sample for a run. min_tokens: of a document, by default the longest length."""
        from coca_hf.evaluate.sample import PRESETS, draw_sample, first_of

        options, min_tokens = asdict(self), min_tokens or max(run.lengths)
        if preset := options.pop("preset"):
            chosen = PRESETS[preset]
            min_tokens = max(min_tokens, chosen["min_tokens"])
            options |= chosen | {"max_tokens": self.max_tokens or chosen["max_tokens"]}
            options["documents"] = self.documents or chosen["documents"]
        options |= {"min_tokens": min_tokens, "special_tokens": special_tokens}
        sample = draw_sample(run.loaded, **options)
        if sample.left_out:
            few = f"documents left out, of fewer than {options['min_bytes']:,} bytes"
            console.print(f"{few}: {sample.left_out:,}", style="yellow")
        if sample.skipped:
            skipped = f"({len(sample.skipped)}): {first_of(sample.skipped, 10)}"
            console.print(f"short or empty documents skipped {skipped}", style="yellow")
        wanted, found = options["documents"], len(sample.names)
        if wanted and found < wanted:
            few = f"{found} documents have at least {min_tokens:,} tokens, {wanted} were asked for"
            warn(f"{few}; only these are measured")
        return sample


@dataclass
class PassageOptions(TextOptions):
    """The documents whose passages to read, if any."""

    def __post_init__(self) -> None:
        if self.given:
            return super().__post_init__()
        for field in fields(self):
            if field.name != "seed" and getattr(self, field.name) != field.default:
                option = field.name.replace("_", "-")
                problem = "got it without --data or --preset, expected one of them with it"
                raise BadOption(f"--{option}: {problem}")

    @property
    def given(self) -> bool:
        return self.data is not None or self.preset is not None


def warn(text: str | None) -> None:
    if text:
        console.print(f"warning: {text}", style="yellow")


@app.command("perplexity")
@grouped
def perplexity_command(
    options: ModelOptions,
    lengths: Lengths,
    texts: TextOptions,
    stride: Annotated[int | None, typer.Option(min=1, help=STRIDE)] = None,
    variant: Annotated[
        Literal["sliding", "yarn", "longlora"],
        typer.Option(help="yarn and longlora compute as these scripts do."),
    ] = "sliding",
    batch_size: BatchSize = "auto",
) -> None:
    """Perplexity of documents in sliding windows of each length.

    Each token is scored once and counts the same, except with the --variant of a script.
    """
    from coca_hf.evaluate.perplexity import MEASUREMENT, VARIANTS, perplexity_rows

    run, kind = options.begin(lengths, batch_size), VARIANTS[variant]
    sample = texts.draw(run, special_tokens=kind.special_tokens)
    rows = perplexity_rows(run, sample, stride or kind.stride, variant)
    options.measure_and_print(run, MEASUREMENT, rows)


@app.command("position-loss")
@grouped
def position_command(
    options: ModelOptions,
    lengths: Lengths,
    texts: TextOptions,
    bucket: Annotated[int, typer.Option(min=1, max=10**9, help=BUCKET)] = 64,
    batch_size: BatchSize = "auto",
) -> None:
    """Loss against the token's index in its window.

    It shows the index from which on the model no longer uses its context.
    """
    from coca_hf.evaluate.position import MEASUREMENT, position_rows

    run = options.begin(lengths, batch_size)
    options.measure_and_print(run, MEASUREMENT, position_rows(run, texts.draw(run), bucket))


@app.command("passkey")
@grouped
def passkey_command(
    options: ModelOptions,
    lengths: Lengths,
    cases: Annotated[int, typer.Option(min=1, help="Number of prompts per length.")] = 100,
    depths: Annotated[int | None, typer.Option(min=1, max=1000, help=DEPTHS)] = None,
    variant: Annotated[
        Literal["paper", "yarn", "longlora", "landmark"],
        typer.Option(
            help="Prompt and scoring: paper, yarn and longlora follow the paper and the scripts; "
            "landmark is a prompt that base models answer, scored without generating text."
        ),
    ] = "paper",
    new_tokens: Annotated[int | None, typer.Option(min=1, max=10**6, help=NEW_TOKENS)] = None,
    seed: Seed = 0,
    batch_size: BatchSize = "auto",
) -> None:
    """Share of numbers that the model finds in irrelevant text of up to each length."""
    from coca_hf.evaluate.passkey import MEASUREMENT, VARIANTS, passkey_rows

    run = options.begin(lengths, batch_size)
    rows = passkey_rows(run, cases, new_tokens, seed, variant, depths)
    options.measure_and_print(run, MEASUREMENT, rows, new_tokens or VARIANTS[variant].new_tokens)


@app.command("boundary")
@grouped
def boundary_command(
    options: ModelOptions,
    lengths: Lengths,
    texts: TextOptions,
    pairs: Annotated[int, typer.Option(min=1, help=PAIRS)] = 1024,
) -> None:
    """Angle between query and key before rotation, and where scores rise with distance."""
    from coca_hf.evaluate.boundary import MEASUREMENT, boundary_rows

    run = options.begin(lengths)
    options.measure_and_print(run, MEASUREMENT, boundary_rows(run, texts.draw(run), pairs))


@app.command("copying")
@grouped
def copying_command(
    options: ModelOptions,
    lengths: Lengths,
    texts: PassageOptions,
    cases: Annotated[int, typer.Option(min=1, help="Number of sequences per length.")] = 16,
    batch_size: BatchSize = "auto",
) -> None:
    """Loss on the second copy of random tokens or, with --data, of passages.

    It shows whether the model can look up what it has read.
    """
    from coca_hf.evaluate.copying import MEASUREMENT, copying_rows

    run, sample = options.begin(lengths, batch_size), None
    if texts.given:
        sample = texts.draw(run, max(lengths) // 2, special_tokens=False)
    options.measure_and_print(run, MEASUREMENT, copying_rows(run, cases, texts.seed, sample))


@app.command("recall")
@grouped
def recall_command(
    options: ModelOptions,
    lengths: Lengths,
    cases: Annotated[int, typer.Option(min=1, help="Number of lists per length.")] = 100,
    pairs: Annotated[int, typer.Option(min=2, max=1000, help="Number of lines in a list.")] = 8,
    seed: Seed = 0,
    batch_size: BatchSize = "auto",
) -> None:
    """Share of values that the model finds by their keys in a list spread over each length."""
    from coca_hf.evaluate.recall import MEASUREMENT, recall_rows

    run = options.begin(lengths, batch_size)
    options.measure_and_print(run, MEASUREMENT, recall_rows(run, cases, pairs, seed))


@app.command("attention-maps")
@grouped
def attention_maps_command(
    options: ModelOptions,
    lengths: Lengths,
    texts: TextOptions,
    baseline: Annotated[str, typer.Option(help=ORIGINAL)],
) -> None:
    """Divergence of every head's attention from that of the original model."""
    from coca_hf.evaluate.attention_maps import MEASUREMENT, attention_map_rows

    run = options.begin(lengths)
    original = options.load_one(baseline, run.ropes)
    options.measure_and_print(run, MEASUREMENT, attention_map_rows(run, original, texts.draw(run)))


@app.command("layers")
@grouped
def layers_command(
    original: Annotated[str, typer.Argument(help=ORIGINAL)],
    options: ModelOptions,
    lengths: Lengths,
    texts: TextOptions,
    cases: Annotated[int, typer.Option(min=1, help=SEQUENCES)] = 6,
    batch_size: BatchSize = "auto",
) -> None:
    """Harm of converting each layer, and which layers to keep first."""
    from coca_hf.evaluate.layers import MEASUREMENT, layer_rows

    run = options.begin(lengths, batch_size)
    other = options.load_one(original, run.ropes)
    sample = texts.draw(run, special_tokens=False)
    rows = layer_rows(run, other, sample, cases)
    for row in options.measure_and_print(run, MEASUREMENT, rows):
        if "order" in row:
            order = ",".join(map(str, row["order"]))
            say(f"keep first, measured at {row['length']} tokens: {order}")


@app.command("tasks")
@grouped
def tasks_command(
    options: ModelOptions,
    tasks: Annotated[str, typer.Option(help=TASKS)] = "",
    ruler: Annotated[Any, typer.Option(callback=parse_lengths, metavar="<str>", help=RULER)] = None,
    shots: Annotated[int | None, typer.Option(min=0, help=SHOTS)] = None,
    limit: Annotated[int | None, typer.Option(min=1, max=10**9, help=LIMIT)] = None,
    include_path: Annotated[str | None, typer.Option(help=INCLUDE)] = None,
    batch_size: BatchSize = "auto",
) -> None:
    """Accuracy on tasks of lm-eval, and on RULER at each length."""
    if not tasks and not ruler:
        raise BadOption("--tasks, --ruler: got neither, expected at least one of them")
    if include_path is not None and not tasks:
        raise BadOption("--include-path: got it without --tasks, expected the names of your tasks")
    from coca_hf.evaluate.tasks import MEASUREMENT, parse_tasks, task_rows

    names = parse_tasks(tasks, include_path) if tasks else []
    run = options.begin(ruler, batch_size)
    options.measure_and_print(run, MEASUREMENT, task_rows(run, names, shots, limit, include_path))


@app.command("speed")
@grouped
def speed_command(
    options: ModelOptions,
    lengths: Lengths,
    baseline: Annotated[str | None, typer.Option(help=BASELINE)] = None,
    baseline_name: Annotated[str | None, typer.Option(help=BASELINE_NAME)] = None,
    modes: Annotated[str, typer.Option(help=MODES)] = "prefill,decode,train",
    repeats: Annotated[int, typer.Option(min=1, max=10**6, help=REPEATS)] = 10,
    warmup: Annotated[int, typer.Option(min=0, max=10**6, help="Steps before the timed ones.")] = 3,
    batch_size: Annotated[int, typer.Option(min=1, max=10**9, help="Sequences per batch.")] = 1,
) -> None:
    """Time and memory of prefill, decoding and a training step at each length."""
    if baseline_name is not None and baseline is None:
        raise BadOption(f"--baseline-name: got {baseline_name!r} without --baseline, expected both")
    from coca_hf.evaluate.speed import MEASUREMENT, parse_modes, speed_rows

    chosen = parse_modes(modes)
    run, other = options.begin(lengths, batch_size), None
    if baseline is not None:
        other = options.load_one(baseline, run.ropes, baseline_name)
    options.measure_and_print(run, MEASUREMENT, speed_rows(run, other, chosen, repeats, warmup))


@app.command("inspect")
def inspect_command(
    model: Annotated[Path, typer.Argument(help="A checkpoint directory, CoCA or not.")],
    memory: Annotated[str | None, typer.Option(help=MEMORY)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Describe a checkpoint and the memory of its key/value cache, without loading weights."""
    from coca_hf.evaluate.inspect import describe, inspect_checkpoint
    from coca_hf.weights import parse_size

    memory_bytes = parse_size(memory, "--memory") if memory is not None else None
    facts = inspect_checkpoint(model, memory_bytes)
    print(json.dumps(facts, indent=2) if as_json else describe(facts))


@app.command("report")
def report_command(
    runs: Annotated[list[Path], typer.Argument(help=RUNS)],
    out: Annotated[Path, typer.Option(help=PAGE)],
    paper: Annotated[str, typer.Option(help=PAPER)] = "",
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Evaluation",
) -> None:
    """Turn the rows of several runs into one page: HTML, Markdown and PNG figures."""
    refuse_other_encodings()
    from coca_hf.report import write_report

    curves = [name.strip() for name in paper.split(",") if name.strip()]
    say(f"report: {write_report(runs, out, curves, title)}")


@app.command("card")
def card_command(
    model: Annotated[Path, typer.Argument(help="A directory of coca-convert or coca-train.")],
    rows: Annotated[list[Path] | None, typer.Option(help=ROWS)] = None,
    base_model: Annotated[str | None, typer.Option(help=BASE_MODEL)] = None,
) -> None:
    """Rewrite the model card, MODEL/README.md, from the records in MODEL and the rows. Without rows,
    or a base model, it keeps those that the command wrote before.
    """
    refuse_other_encodings()
    from huggingface_hub.utils import validate_repo_id

    from coca_hf.card import measured_before, write_card
    from coca_hf.errors import library_errors
    from coca_hf.evaluate.loaded_model import fingerprint
    from coca_hf.report import not_together, read_tables, tables_markdown

    if base_model is not None:
        with library_errors("--base-model: expected a hub id, as in owner/name"):
            validate_repo_id(base_model)
    measured, base = measured_before(model)
    tables = read_tables(rows) if rows else []
    measured = tables_markdown(tables) if tables else measured
    path = write_card(model, measured=measured, base_model=base_model or base)
    for notice in not_together(tables):
        warn(notice)
    own = {fingerprint(str(model), None, own_code) for own_code in (False, True)}
    if tables and not any(row["fingerprint"] in own for table in tables for row in table.rows):
        warn(
            f"{model}: no row was measured on these files, as they are now; if the model was "
            "trained since, or the rows are another's, measure it and write the card again"
        )
    say(f"card: {path}\nnext: hf upload OWNER/NAME {shlex.quote(str(model))}")
