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
            min=1,
            help="Tokens between windows, 512 by default; a shorter length is its own stride, with a note.",
        ),
    ] = None,
    variant: Annotated[
        str,
        typer.Option(
            help="sliding; or yarn, yarn-truncate or longlora, which compute as those scripts do, stride 256."
        ),
    ] = "sliding",
    batch_size: BatchOption = "auto",
) -> None:
    """Perplexity with a sliding window (window = length), token-weighted, each token scored once."""
    wanted, size = parse_lengths(lengths), parse_batch_size(batch_size)
    from coca_hf.evaluate.perplexity import perplexity_rows
    from coca_hf.evaluate.windows import check_variant

    kind = check_variant(variant)
    loaded, ropes = run.load()
    sample = texts.draw(loaded, max(wanted), kind.special_tokens)
    warn_beyond_trained(loaded, ropes, wanted)
    stride = stride or kind.stride
    run.make_rows(perplexity_rows, loaded, sample, wanted, stride, ropes, batch_size=size, variant=variant)


@app.command("position-loss")
@grouped
def position_command(
    run: Run,
    lengths: LengthsOption,
    texts: Texts,
    bucket: Annotated[
        int,
        typer.Option(min=1, max=10**9, help="Number of consecutive token indices whose losses are summed."),
    ] = 64,
    batch_size: BatchOption = "auto",
) -> None:
    """Loss against the token's index in a window of LENGTH tokens: where the model's context really
    ends.
    """
    wanted, size = parse_lengths(lengths), parse_batch_size(batch_size)
    from coca_hf.evaluate.position import position_rows

    loaded, ropes = run.load()
    sample = texts.draw(loaded, max(wanted))
    warn_beyond_trained(loaded, ropes, wanted)
    run.make_rows(position_rows, loaded, sample, wanted, ropes, bucket=bucket, batch_size=size)


@app.command("passkey")
@grouped
def passkey_command(
    run: Run,
    lengths: LengthsOption,
    cases: Annotated[int, typer.Option(min=1, help="Number of prompts per length.")] = 100,
    depths: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1000,
            help="Number of depths on an even grid; by default depths are drawn uniformly.",
        ),
    ] = None,
    variant: Annotated[
        str,
        typer.Option(
            help="Prompt and scoring. paper: the paper's; yarn, longlora: those of the scripts; "
            "landmark: the scripts' prompt, which base models answer, scored in one forward "
            "without generation."
        ),
    ] = "paper",
    new_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=10**6, help="Most tokens of an answer; 64 by default, as in the paper."),
    ] = None,
    seed: SeedOption = 0,
    batch_size: BatchOption = "auto",
) -> None:
    """Passkey retrieval: the share of numbers that are found when hidden in a text of up to LENGTH
    tokens.
    """
    wanted, size = parse_lengths(lengths), parse_batch_size(batch_size)
    from coca_hf.evaluate.passkey import check_variant, passkey_rows

    kind = check_variant(variant)
    loaded, ropes = run.load()
    warn_beyond_trained(loaded, ropes, wanted, new_tokens or kind.new_tokens)
    run.make_rows(
        passkey_rows,
        loaded,
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
    pairs: Annotated[
        int, typer.Option(min=1, help="Pairs of positions (query, key) drawn from every document.")
    ] = 1024,
) -> None:
    """The angle between query and key that RoPE starts from, and where it breaks the order of
    scores.
    """
    wanted = parse_lengths(lengths)
    from coca_hf.evaluate.boundary import boundary_rows

    loaded, ropes = run.load()
    sample = texts.draw(loaded, max(wanted))
    warn_beyond_trained(loaded, ropes, wanted)
    run.make_rows(boundary_rows, loaded, sample, wanted, ropes, pairs_per_document=pairs, seed=texts.seed)


@app.command("copying")
@grouped
def copying_command(
    run: Run,
    lengths: LengthsOption,
    texts: PassageTexts,
    cases: Annotated[int, typer.Option(min=1, help="Number of sequences per length.")] = 16,
    batch_size: BatchOption = "auto",
) -> None:
    """Loss on the second copy of random tokens or, with --data, of passages: can the model look
    things up?
    """
    wanted, size = parse_lengths(lengths), parse_batch_size(batch_size)
    from coca_hf.evaluate.copying import copying_rows

    loaded, ropes = run.load()
    sample = texts.draw(loaded, max(wanted) // 2, special_tokens=False) if texts.given else None
    warn_beyond_trained(loaded, ropes, wanted)
    run.make_rows(
        copying_rows,
        loaded,
        wanted,
        ropes,
        num_cases=cases,
        seed=texts.seed,
        batch_size=size,
        sample=sample,
    )


@app.command("recall")
@grouped
def recall_command(
    run: Run,
    lengths: LengthsOption,
    cases: Annotated[int, typer.Option(min=1, help="Number of lists per length.")] = 100,
    pairs: Annotated[int, typer.Option(min=2, max=1000, help="Number of lines in a list.")] = 8,
    seed: SeedOption = 0,
    batch_size: BatchOption = "auto",
) -> None:
    """Key-value recall in a list that is spread over LENGTH tokens: share of exact answers, nats
    per token.
    """
    wanted, size = parse_lengths(lengths), parse_batch_size(batch_size)
    from coca_hf.evaluate.recall import recall_rows

    loaded, ropes = run.load()
    warn_beyond_trained(loaded, ropes, wanted)
    run.make_rows(recall_rows, loaded, wanted, ropes, num_cases=cases, pairs=pairs, seed=seed, batch_size=size)


@app.command("attention-maps")
@grouped
def attention_maps_command(
    run: Run,
    lengths: LengthsOption,
    texts: Texts,
    baseline: Annotated[
        str,
        typer.Option(
            help="The model that MODEL was converted from, as a directory or hub id.",
            show_default=False,
        ),
    ],
) -> None:
    """Divergence of every head's attention from the original model's."""
    wanted = parse_lengths(lengths)
    from coca_hf.evaluate.attention_maps import attention_map_rows

    loaded, ropes = run.load()
    other = run.load_one(baseline, ropes)
    sample = texts.draw(loaded, max(wanted))
    warn_beyond_trained(loaded, ropes, wanted)
    run.make_rows(attention_map_rows, loaded, other, sample, wanted, ropes)


@app.command("layers")
@grouped
def layers_command(
    original: Annotated[
        str,
        typer.Argument(
            help="The model that MODEL was converted from, as a directory or hub id.",
            show_default=False,
        ),
    ],
    run: Run,
    lengths: LengthsOption,
    texts: Texts,
    cases: Annotated[int, typer.Option(min=1, help="Number of sequences of each kind of text per length.")] = 6,
    batch_size: BatchOption = "auto",
) -> None:
    """The harm of converting each layer, alone and beside all others, and which layers to keep
    first.
    """
    wanted, size = parse_lengths(lengths), parse_batch_size(batch_size)
    from coca_hf.evaluate.layers import layer_rows

    loaded, ropes = run.load()
    other = run.load_one(original, ropes)
    sample = texts.draw(loaded, max(wanted), special_tokens=False)
    warn_beyond_trained(loaded, ropes, wanted)
    run.make_rows(
        layer_rows,
        other,
        loaded,
        sample,
        wanted,
        ropes,
        num_cases=cases,
        seed=texts.seed,
        batch_size=size,
    )


@app.command("tasks")
@grouped
def tasks_command(
    run: Run,
    tasks: Annotated[
        str,
        typer.Option(help="Names of lm-eval tasks, separated by commas; opencompass: those nearest to the paper's."),
    ] = "",
    ruler: Annotated[
        str,
        typer.Option(
            help="Lengths in tokens, separated by commas, at which to run RULER, or its tasks that --tasks names."
        ),
    ] = "",
    shots: Annotated[
        int | None,
        typer.Option(min=0, help="Examples before a question; the task's own number by default."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, max=10**9, help="Number of cases of every task; all by default."),
    ] = None,
    include_path: Annotated[str | None, typer.Option(help="Directory with lm-eval tasks of your own.")] = None,
    batch_size: BatchOption = "auto",
) -> None:
    """Tasks of lm-eval by name, and RULER: accuracy on short contexts and use of long ones."""
    wanted = parse_lengths(ruler, "--ruler") if ruler else []
    if not tasks and not wanted:
        raise BadOption("--tasks, --ruler: got neither, expected at least one of them")
    size = parse_batch_size(batch_size)
    from coca_hf.evaluate.tasks import parse_tasks, task_rows

    names = parse_tasks(tasks, include_path) if tasks else []
    loaded, ropes = run.load()
    warn_beyond_trained(loaded, ropes, wanted)
    run.make_rows(
        task_rows,
        loaded,
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
        str | None,
        typer.Option(help="Another model, such as the unconverted one, measured in turns with MODEL."),
    ] = None,
    baseline_name: Annotated[
        str | None,
        typer.Option(help="Name of the baseline in the rows; by default that of its directory."),
    ] = None,
    modes: Annotated[
        str, typer.Option(help="What to measure: prefill, decode, train, separated by commas.")
    ] = "prefill,decode,train",
    repeats: Annotated[
        int, typer.Option(min=1, max=10**6, help="Number of timed steps; the row has their median.")
    ] = 10,
    warmup: Annotated[int, typer.Option(min=0, max=10**6, help="Number of steps before the timed ones.")] = 3,
    batch_size: Annotated[int, typer.Option(min=1, max=10**9, help="Sequences per batch.")] = 1,
) -> None:
    """Seconds and memory of prefill, decoding and a training step against sequence length."""
    wanted = parse_lengths(lengths)
    if baseline_name is not None and baseline is None:
        raise BadOption(f"--baseline-name: got {baseline_name!r} without --baseline, expected both")
    from coca_hf.evaluate.speed import parse_modes, speed_rows

    chosen = parse_modes(modes)
    loaded, ropes = run.load()
    other = run.load_one(baseline, ropes, baseline_name) if baseline is not None else None
    warn_beyond_trained(loaded, ropes, wanted)
    run.make_rows(
        speed_rows,
        loaded,
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
        str | None,
        typer.Option(
            help="Memory, such as 24GB; prints the longest context that fits as well.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Describe a checkpoint and the memory of its key/value cache, from headers alone."""
    from coca_hf.evaluate.inspect import describe, inspect_checkpoint
    from coca_hf.weights import parse_size

    facts = inspect_checkpoint(model, parse_size(memory, "--memory") if memory is not None else None)
    print(json.dumps(facts, indent=2) if as_json else describe(facts))


@app.command("report")
def report_command(
    runs: Annotated[list[Path], typer.Argument(help="Directories with a rows.jsonl.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Directory for report.html, report.md and a PNG for each figure.")],
    paper: Annotated[
        str,
        typer.Option(help="The paper's curves to draw too: 350m, llama-7b, pi-32k, separated by commas."),
    ] = "",
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Evaluation",
) -> None:
    """Turn the rows of several runs into one page: self-contained HTML, Markdown and PNG figures."""
    from coca_hf.report import write_report

    page = write_report(runs, out, [name.strip() for name in paper.split(",") if name.strip()], title)
    say(f"report: {page}")


@app.command("card")
def card_command(
    model: Annotated[
        Path,
        typer.Argument(help="A directory that coca-convert or coca-train made.", show_default=False),
    ],
    rows: Annotated[
        list[Path] | None,
        typer.Option(help="Directory with a rows.jsonl; may be given several times."),
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Hub id of the original, if it was converted from a path.")
    ] = None,
) -> None:
    """Rewrite MODEL/README.md, the model card, from the records in MODEL and the tables of ROWS."""
    from coca_hf.card import write_card
    from coca_hf.report import tables_markdown

    path = write_card(model, measured=tables_markdown(rows) if rows else None, base_model=base_model)
    say(f"card: {path}\nnext: hf upload OWNER/NAME {model}")
