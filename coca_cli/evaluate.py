"""`coca-eval TASK MODEL`: the measurements, and what is made of their rows."""

import json
from pathlib import Path
from typing import Annotated

import typer

from coca_cli.console import BadOption, say
from coca_cli.options import (
    BatchOption,
    LengthsOption,
    PassageTexts,
    Run,
    SeedOption,
    Texts,
    grouped,
    parse_batch_size,
    parse_lengths,
    warn_beyond_trained,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.command("perplexity")
@grouped
def perplexity_command(
    run: Run,
    lengths: LengthsOption,
    texts: Texts,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens between windows, 512 by default; for a shorter length, that length is used and said so."
        ),
    ] = None,
    variant: Annotated[
        str, typer.Option(help="sliding, or yarn, yarn-truncate or longlora: the numbers of those scripts, stride 256.")
    ] = "sliding",
    batch_size: BatchOption = "auto",
) -> None:
    """Perplexity with a sliding window (window = length), token-weighted, each token scored once."""
    wanted, size = parse_lengths(lengths), parse_batch_size(batch_size)
    from coca_hf.evaluate.perplexity import perplexity_rows
    from coca_hf.evaluate.variants import check_variant

    kind = check_variant(variant)
    subject, ropes = run.load()
    sample = texts.draw(subject, max(wanted), kind.special_tokens)
    warn_beyond_trained(subject, ropes, wanted)
    stride = stride or kind.stride
    run.make_rows(perplexity_rows, subject, sample, wanted, stride, ropes, batch_size=size, variant=variant)


@app.command("position-loss")
@grouped
def position_command(
    run: Run,
    lengths: LengthsOption,
    texts: Texts,
    bucket: Annotated[int, typer.Option(min=1, max=10**9, help="Token indices whose losses are summed.")] = 64,
    batch_size: BatchOption = "auto",
) -> None:
    """Loss against the token's index in a window of LENGTH tokens: where the model's context really ends."""
    wanted, size = parse_lengths(lengths), parse_batch_size(batch_size)
    from coca_hf.evaluate.position import position_rows

    subject, ropes = run.load()
    sample = texts.draw(subject, max(wanted))
    warn_beyond_trained(subject, ropes, wanted)
    run.make_rows(position_rows, subject, sample, wanted, ropes, bucket=bucket, batch_size=size)


@app.command("passkey")
@grouped
def passkey_command(
    run: Run,
    lengths: LengthsOption,
    cases: Annotated[int, typer.Option(min=1, help="Prompts per length.")] = 100,
    depths: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="A grid of so many depths, in turn; drawn uniformly by default."),
    ] = None,
    variant: Annotated[
        str,
        typer.Option(
            help="paper; yarn or longlora: the prompts and scoring of those scripts; landmark: their "
            "prompt, which base models answer, scored in one forward without generation."
        ),
    ] = "paper",
    new_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=10**6, help="Tokens the model may answer with; 64, the paper's, by default."),
    ] = None,
    seed: SeedOption = 0,
    batch_size: BatchOption = "auto",
) -> None:
    """Passkey retrieval as in the paper: a number hidden in up to LENGTH tokens, greedy decoding, share found."""
    wanted, size = parse_lengths(lengths), parse_batch_size(batch_size)
    from coca_hf.evaluate.passkey import check_variant, passkey_rows

    kind = check_variant(variant)
    subject, ropes = run.load()
    warn_beyond_trained(subject, ropes, wanted, new_tokens or kind.new_tokens)
    run.make_rows(
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


@app.command("boundary")
@grouped
def boundary_command(
    run: Run,
    lengths: LengthsOption,
    texts: Texts,
    pairs: Annotated[int, typer.Option(min=1, help="Positions (query, key) drawn from every document.")] = 1024,
) -> None:
    """The angle between query and key that RoPE starts from, and where it breaks the order of scores."""
    wanted = parse_lengths(lengths)
    from coca_hf.evaluate.boundary import boundary_rows

    subject, ropes = run.load()
    sample = texts.draw(subject, max(wanted))
    warn_beyond_trained(subject, ropes, wanted)
    run.make_rows(boundary_rows, subject, sample, wanted, ropes, pairs_per_document=pairs, seed=texts.seed)


@app.command("copying")
@grouped
def copying_command(
    run: Run,
    lengths: LengthsOption,
    texts: PassageTexts,
    cases: Annotated[int, typer.Option(min=1, help="Sequences per length.")] = 16,
    batch_size: BatchOption = "auto",
) -> None:
    """Loss on the second copy of random tokens or, with --data, of passages: whether attention can look things up."""
    wanted, size = parse_lengths(lengths), parse_batch_size(batch_size)
    from coca_hf.evaluate.copying import copying_rows

    subject, ropes = run.load()
    sample = texts.draw(subject, max(wanted) // 2, special_tokens=False) if texts.given else None
    warn_beyond_trained(subject, ropes, wanted)
    run.make_rows(
        copying_rows, subject, wanted, ropes, num_cases=cases, seed=texts.seed, batch_size=size, sample=sample
    )


@app.command("recall")
@grouped
def recall_command(
    run: Run,
    lengths: LengthsOption,
    cases: Annotated[int, typer.Option(min=1, help="Lists per length.")] = 100,
    pairs: Annotated[int, typer.Option(min=2, max=1000, help="Lines of a list.")] = 8,
    seed: SeedOption = 0,
    batch_size: BatchOption = "auto",
) -> None:
    """Key-value recall: a line of a list, spread over LENGTH tokens, is asked for; share of exact answers, and nats."""
    wanted, size = parse_lengths(lengths), parse_batch_size(batch_size)
    from coca_hf.evaluate.recall import recall_rows

    subject, ropes = run.load()
    warn_beyond_trained(subject, ropes, wanted)
    run.make_rows(recall_rows, subject, wanted, ropes, num_cases=cases, pairs=pairs, seed=seed, batch_size=size)


@app.command("attention-maps")
@grouped
def attention_maps_command(
    run: Run,
    lengths: LengthsOption,
    texts: Texts,
    baseline: Annotated[
        str, typer.Option(help="The model that MODEL was converted from, as a directory or hub id.", show_default=False)
    ],
) -> None:
    """How far every head's attention is from the original model's: what training has brought back of it."""
    wanted = parse_lengths(lengths)
    from coca_hf.evaluate.attention_maps import attention_map_rows

    subject, ropes = run.load()
    other = run.load_one(baseline, ropes)
    sample = texts.draw(subject, max(wanted))
    warn_beyond_trained(subject, ropes, wanted)
    run.make_rows(attention_map_rows, subject, other, sample, wanted, ropes)


@app.command("layers")
@grouped
def layers_command(
    original: Annotated[
        str,
        typer.Argument(help="The model that MODEL was converted from, as a directory or hub id.", show_default=False),
    ],
    run: Run,
    lengths: LengthsOption,
    texts: Texts,
    cases: Annotated[int, typer.Option(min=1, help="Sequences of each text per length.")] = 6,
    batch_size: BatchOption = "auto",
) -> None:
    """The harm that converting each layer does, alone and beside all others, and which layers to keep first."""
    wanted, size = parse_lengths(lengths), parse_batch_size(batch_size)
    from coca_hf.evaluate.layers import layer_rows

    subject, ropes = run.load()
    other = run.load_one(original, ropes)
    sample = texts.draw(subject, max(wanted), special_tokens=False)
    warn_beyond_trained(subject, ropes, wanted)
    run.make_rows(layer_rows, other, subject, sample, wanted, ropes, num_cases=cases, seed=texts.seed, batch_size=size)


@app.command("tasks")
@grouped
def tasks_command(
    run: Run,
    tasks: Annotated[
        str, typer.Option(help="lm-eval's names with commas between them; opencompass: those nearest the paper's.")
    ] = "",
    ruler: Annotated[
        str, typer.Option(help="Lengths in tokens at which to run RULER, or those of its tasks that --tasks names.")
    ] = "",
    shots: Annotated[int | None, typer.Option(min=0, help="Examples before a question; the task's own.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, max=10**9, help="Cases of every task; all by default.")] = None,
    include_path: Annotated[str | None, typer.Option(help="A directory of lm-eval tasks of your own.")] = None,
    batch_size: BatchOption = "auto",
) -> None:
    """Tasks of lm-eval by name, and RULER: whether short contexts are as good as before, and long ones are used."""
    wanted = parse_lengths(ruler, "--ruler") if ruler else []
    if not tasks and not wanted:
        raise BadOption("--tasks, --ruler: got neither, expected at least one of them")
    size = parse_batch_size(batch_size)
    from coca_hf.evaluate.tasks import parse_tasks, task_rows

    names = parse_tasks(tasks, include_path) if tasks else []
    subject, ropes = run.load()
    warn_beyond_trained(subject, ropes, wanted)
    run.make_rows(
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


@app.command("speed")
@grouped
def speed_command(
    run: Run,
    lengths: LengthsOption,
    baseline: Annotated[
        str | None, typer.Option(help="Another model, as the unconverted one, measured in turns with MODEL.")
    ] = None,
    baseline_name: Annotated[
        str | None, typer.Option(help="What rows call that; its directory's name by default.")
    ] = None,
    modes: Annotated[str, typer.Option(help="Some of prefill, decode and train.")] = "prefill,decode,train",
    repeats: Annotated[int, typer.Option(min=1, max=10**6, help="Timed steps; the row has their median.")] = 10,
    warmup: Annotated[int, typer.Option(min=0, max=10**6, help="Steps before them.")] = 3,
    batch_size: Annotated[int, typer.Option(min=1, max=10**9, help="Sequences at a time.")] = 1,
) -> None:
    """Seconds and memory of prefill, decoding and a training step against sequence length."""
    wanted = parse_lengths(lengths)
    if baseline_name is not None and baseline is None:
        raise BadOption(f"--baseline-name: got {baseline_name!r} without --baseline, expected both")
    from coca_hf.evaluate.speed import parse_modes, speed_rows

    chosen = parse_modes(modes)
    subject, ropes = run.load()
    other = run.load_one(baseline, ropes, baseline_name) if baseline is not None else None
    warn_beyond_trained(subject, ropes, wanted)
    run.make_rows(
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


@app.command("inspect")
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


@app.command("report")
def report_command(
    runs: Annotated[list[Path], typer.Argument(help="Directories with a rows.jsonl.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Directory for report.html, report.md and a PNG for each figure.")],
    paper: Annotated[
        str, typer.Option(help="Published curves to draw beside: 350m, llama-7b, pi-32k, with commas between them.")
    ] = "",
    title: Annotated[str, typer.Option(help="Of the page.")] = "Evaluation",
) -> None:
    """Turn the rows of several runs into one page: HTML that needs nothing else, Markdown, and PNG figures."""
    from coca_hf.report import write_report

    page = write_report(runs, out, [name.strip() for name in paper.split(",") if name.strip()], title)
    say(f"report: {page}")


@app.command("card")
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
    say(f"card: {path}\nnext: hf upload OWNER/NAME {model}")
