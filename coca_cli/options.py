"""The options that measurements share, and what is made of them."""

import inspect
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from coca_cli.console import BadOption, PlainConsole, console, say

LENGTHS = "Context lengths in tokens, separated by commas."
BATCH = "Sequences per batch, or auto: as many as fit. It changes no result."
SEED = "Seed of the documents or cases that are drawn."
MODEL = "A model directory, or a hub id as owner/name."
OUT = "Directory for rows.jsonl; existing rows are kept, unless memory ran out."
ROPE = "RoPE, several by commas: default, linear:FACTOR, dynamic:FACTOR, yarn:FACTOR."
DTYPE = "Type of the weights: auto (the checkpoint's), float32, bfloat16 or float16."
NAME = "Name of the model in the rows; by default that of its directory."
REVISION = "Branch, tag or commit of a MODEL on the hub."
TRUST = "Run the code that the checkpoint carries."
DATA = "Text: a .txt, .jsonl or .parquet file, a directory or glob of them, or a hub id."
PRESET = "A data set with published numbers: pg19 or proof-pile."
DOCUMENTS = "Number of documents to draw; all by default."
CUT = "Cut every document to its first tokens, this many."
COLUMN = "Column that holds the text."
SPLIT = "Split of a data set on the hub."
SUBSET = "Subset of a data set on the hub."
DATA_REVISION = "Branch, tag or commit of a data set on the hub."
SKIP = "Skip documents that are empty or shorter than a window, and print their names."


def parse_lengths(option: typer.CallbackParam, text: str | None) -> list[int]:
    """No lengths for no text. Raises BadOption for what is no list of lengths."""
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


# What the functions make of these texts: list[int], and int | None
Lengths = Annotated[Any, typer.Option(callback=parse_lengths, metavar="<str>", help=LENGTHS)]
BatchSize = Annotated[Any, typer.Option(callback=parse_batch_size, metavar="<str>", help=BATCH)]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help=SEED)]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a parameter that is a dataclass stand for its fields; typer knows single options only."""
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
                **{field: values.pop(field) for field in inspect.signature(group).parameters},
            )
        command(**values)

    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    with_single_options.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    return with_single_options


@dataclass
class ModelOptions:
    """A model under RoPE settings, and where its rows go."""

    model: Annotated[str, typer.Argument(help=MODEL, show_default=False)]
    out: Annotated[Path, typer.Option(help=OUT)]
    rope: Annotated[str, typer.Option(help=ROPE)] = "default"
    dtype: Annotated[str, typer.Option(help=DTYPE)] = "auto"
    name: Annotated[str | None, typer.Option(help=NAME)] = None
    revision: Annotated[str | None, typer.Option(help=REVISION)] = None
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help=TRUST)] = False

    def load(self, lengths: list[int], batch_size: int | None = None, new_tokens: int = 0):
        """The run of these options; `make` warns where RoPE settings do not reach its lengths."""
        from coca_hf.evaluate.batches import processes
        from coca_hf.evaluate.rope import parse_ropes, warn_beyond_trained
        from coca_hf.evaluate.rows import RowStore, Run

        console.quiet = not processes().is_main_process
        if not all(map(_is_text, sys.argv)):
            problem = "got a name that is not UTF-8, which no row can hold; rename it"
            raise BadOption(f"{shlex.join(sys.argv)!a}: {problem}")
        ropes = parse_ropes(self.rope)
        loaded = self.load_one(self.model, ropes, self.name, self.revision)
        self.warning = warn_beyond_trained(loaded.model, ropes, lengths, new_tokens)
        return Run(loaded, lengths, ropes, RowStore(self.out), batch_size)

    def load_one(
        self, path: str, ropes: list, name: str | None = None, revision: str | None = None
    ):
        """The model at `path`, refused where it does not take the settings `ropes`."""
        from coca_hf.evaluate.loaded_model import load_model, warn_small_tokenizer
        from coca_hf.evaluate.rope import check_rope

        loaded = load_model(path, self.dtype, name, revision, self.trust_remote_code)
        warn(warn_small_tokenizer(loaded))
        for setting in ropes:
            check_rope(loaded.model, setting)
        return loaded

    def make(self, run, yielded: Iterable[dict]) -> None:
        """Make the rows of a run, on all processes of `accelerate launch`, and print them."""
        from coca_hf.evaluate.batches import processes
        from coca_hf.evaluate.rows import made_otherwise
        from coca_hf.evaluate.terminal import progress_on, results_table

        warn(self.warning)
        with progress_on(console) as run.store.progress:
            rows = list(yielded)
        if processes().is_main_process:
            PlainConsole().print(results_table(rows))
            say(f"rows: {self.out / 'rows.jsonl'}")
            say(f"next: coca-eval report {self.out} --out {self.out / 'page'}")
            if note := made_otherwise(rows):
                console.print(f"note: {note}", style="yellow")
        processes().destroy_process_group()


@dataclass
class TextOptions:
    """The documents that are read."""

    data: Annotated[str | None, typer.Option(help=DATA)] = None
    preset: Annotated[str | None, typer.Option(help=PRESET)] = None
    documents: Annotated[int | None, typer.Option(min=1, help=DOCUMENTS)] = None
    max_tokens: Annotated[int | None, typer.Option(min=2, help=CUT)] = None
    column: Annotated[str, typer.Option(help=COLUMN)] = "text"
    split: Annotated[str, typer.Option(help=SPLIT)] = "test"
    subset: Annotated[str | None, typer.Option(help=SUBSET)] = None
    data_revision: Annotated[str | None, typer.Option(help=DATA_REVISION)] = None
    skip_short: Annotated[bool, typer.Option("--skip-short", help=SKIP)] = False
    seed: Seed = 0

    def __post_init__(self) -> None:
        if (self.data is None) == (self.preset is None):
            raise BadOption("--data, --preset: got both or neither, expected one of them")

    def draw(self, run, min_tokens: int | None = None, special_tokens: bool = True):
        """The sample for a run. min_tokens: of a document, by default the longest of the lengths."""
        from coca_hf.evaluate.sample import check_preset, draw_sample, first_of

        options, min_tokens = asdict(self), min_tokens or max(run.lengths)
        if preset := options.pop("preset"):
            chosen = check_preset(preset)
            min_tokens = max(min_tokens, chosen.pop("min_tokens"))
            options |= chosen | {"max_tokens": self.max_tokens or chosen["max_tokens"]}
            options["documents"] = self.documents or chosen["documents"]
        options |= {"min_tokens": min_tokens, "special_tokens": special_tokens}
        sample = draw_sample(run.loaded, **options)
        if sample.left_out:
            least = f"{options['min_bytes']:,} bytes"
            told = f"left out {sample.left_out:,} documents of fewer than {least}"
            console.print(told, style="yellow")
        if sample.skipped:
            names = first_of(sample.skipped, 10)
            told = f"skipped {len(sample.skipped)} short or empty documents: {names}"
            console.print(told, style="yellow")
        wanted, found = options["documents"], len(sample.names)
        if wanted and found < wanted:
            few = f"{found} documents have at least {min_tokens:,} tokens, {wanted} were asked for"
            warn(f"{few}; only these are measured")
        return sample


@dataclass
class PassageOptions(TextOptions):
    """The documents whose passages are read, where a measurement can do without."""

    def __post_init__(self) -> None:
        if self.given:
            super().__post_init__()
        for field in fields(self):
            is_default = field.name == "seed" or getattr(self, field.name) == field.default
            if not self.given and not is_default:
                option = field.name.replace("_", "-")
                problem = "got it without --data or --preset, expected one of them with it"
                raise BadOption(f"--{option}: {problem}")

    @property
    def given(self) -> bool:
        return self.data is not None or self.preset is not None


def _is_text(name: str) -> bool:
    """Whether the system gave UTF-8; other bytes become surrogates, which cannot be written."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def warn(text: str | None) -> None:
    if text:
        console.print(f"warning: {text}", style="yellow")
