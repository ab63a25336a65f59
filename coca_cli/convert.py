"""`coca-convert SRC DST`."""

import functools
import re
import shlex
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.progress import Progress

from coca_cli.main import BadOption, console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


CALIBRATION = "With --calibrate"
fit_option = functools.partial(typer.Option, rich_help_panel=CALIBRATION)


def chosen(kinds: Any, expected: str) -> Callable[[typer.CallbackParam, str | None], Any]:
    """A callback for `auto`, which stays as it is, the number `6`, or the layers `8,17,18`.

    It raises BadOption for what is not of the type `kinds`.
    """
    number = r"\s*\d{1,9}\s*"

    def parse(option: typer.CallbackParam, text: str | None) -> Any:
        found: Any = None
        if text in ("auto", None):
            return text
        if re.fullmatch(r"\d{1,9}", text):
            found = int(text)
        elif re.fullmatch(rf"({number},)+({number})?", text):
            found = [int(layer) for layer in re.findall(r"\d+", text)]
        if not isinstance(found, kinds):
            raise BadOption(f"{option.opts[0]}: got {text!r}, expected {expected}")
        return found

    return parse


@app.command()
def convert_command(
    context: typer.Context,
    src: Annotated[
        str, typer.Argument(help="Checkpoint to convert: a directory, a .gguf file or a hub id.")
    ],
    dst: Annotated[str, typer.Argument(help="Directory to write. It appears when it is complete.")],
    calibrate_on: Annotated[
        str | None,
        typer.Option(
            "--calibrate",
            help="Fit W_Q, W_T and W_O to the original's attention on this text; the model starts far "
            "better. Text: a .txt, .jsonl, .json, .parquet or .arrow file, a directory or glob of them, "
            "or a data set on the hub.",
        ),
    ] = None,
    keep_layers: Annotated[
        str | None,
        typer.Option(
            callback=chosen(
                list | int | str,
                "layers by number, from 0, as in 8,17,18 (one layer: '8,'), or with --calibrate how "
                "many, as in 6, or auto",
            ),
            help="Keep the original's attention in these layers, numbered from 0, as in 8,17,18 "
            "(one layer: '8,'). With --calibrate, 6 keeps the six layers whose conversion harms "
            "lookups most, and auto the fewest that cause half of the harm.",
        ),
    ] = None,
    keep_window: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=2**31 - 1,
            help="Let kept layers attend only to this many last tokens. With the trained length or "
            "fewer, a longer text has no distance that these layers were not trained for.",
        ),
    ] = None,
    content_pairs: Annotated[
        str | None,
        typer.Option(
            callback=chosen(int | str, "how many of a head's pairs, as in 12, or auto"),
            help="How many of a head's rotary pairs, the slowest ones, are content pairs, which do "
            "not rotate and may have negative coefficients: a number, or auto, those that do not "
            "complete a rotation within the trained length. None by default, as in the paper.",
        ),
    ] = None,
    content_layers: Annotated[
        str | None,
        typer.Option(
            callback=chosen(
                list | str,
                "layers by number, from 0, as in 17,18 (one layer: '17,'), or auto with --calibrate",
            ),
            help="Layers in which every second of the other pairs is a content pair, too: their numbers, as in "
            "17,18,20, or, with --calibrate, auto: those that a short fit with them brings nearer to the original.",
        ),
    ] = None,
    constraint: Annotated[
        Literal["slack", "strict"] | None,
        typer.Option(help="Form of CoCA. The default, slack, gave the paper's main results."),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Type of the written weights; auto keeps the source's."),
    ] = "auto",
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace the checkpoint at DST, and delete all other files there."
        ),
    ] = False,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest size of a weights file, such as 500MB or 5GB.")
    ] = "1GB",
    ntk_length: Annotated[
        int | None,
        typer.Option(
            help="Write dynamic NTK's base for this many tokens into the config, for engines that "
            "know static RoPE only. Its factor is the config's, or the ratio of the lengths. If SRC is "
            "a CoCA checkpoint, its layers stay as they are."
        ),
    ] = None,
    released: Annotated[
        bool,
        typer.Option(
            "--released", help="Read SRC as a GPT-NeoX checkpoint of the authors' CoCA code."
        ),
    ] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of SRC on the hub.")
    ] = None,
    ignore_fields: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore-field",
            help="Leave out a field of config.json that is not understood; repeatable.",
        ),
    ] = None,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle",
            help="Read pytorch_model.bin if SRC has no safetensors; only tensors are read, and "
            "nothing in it is run.",
        ),
    ] = False,
    adapter: Annotated[
        str | None,
        typer.Option(
            help="Merge this peft directory (plain LoRA on linear layers) into SRC as it is read."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything that can be checked and print what would be read, written and needed; "
            "write nothing, and download no weights.",
        ),
    ] = False,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="Upload the result to a new private repository on the hub. Login and name are "
            "checked first.",
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Make the repository of --push-to-hub public.")
    ] = False,
    calibrate_tokens: Annotated[
        int,
        fit_option(
            min=1, help="Tokens of text to fit on; as many tokens of repeated passages are added."
        ),
    ] = 32768,
    calibrate_block: Annotated[
        int,
        fit_option(
            min=4, help="Tokens in a block; at most the trained length and the attention window."
        ),
    ] = 2048,
    calibrate_passes: Annotated[
        int | None,
        fit_option(
            min=1,
            help="Passes over the blocks. A step is a visit to a block; the default makes at least 1,280.",
        ),
    ] = None,
    column: Annotated[str, fit_option(help="Column that holds the text.")] = "text",
    split: Annotated[str, fit_option(help="Split of a data set on the hub.")] = "train",
    subset: Annotated[str | None, fit_option(help="Subset of a data set on the hub.")] = None,
    device: Annotated[
        str | None,
        fit_option(
            help="Device to fit on: cpu, cuda, cuda:1 or mps; by default cuda or, without it, cpu."
        ),
    ] = None,
    seed: Annotated[
        int, fit_option(min=0, max=2**32 - 1, help="Seed for drawing the text to fit on.")
    ] = 0,
) -> None:
    """Convert a LLaMA, Mistral, Qwen2, Qwen3, Phi-3, Granite, SmolLM3 or GPT-NeoX checkpoint to CoCA.

    If it is interrupted, run the same command again to continue.
    """
    if public and push_to_hub is None:
        raise BadOption("--public: got it without --push-to-hub, expected both")
    for option in context.command.params if calibrate_on is None else ():
        given = context.get_parameter_source(str(option.name))
        is_given = given is not None and given.name == "COMMANDLINE"
        if is_given and getattr(option, "rich_help_panel", None) == CALIBRATION:
            raise BadOption(f"{option.opts[0]}: got it without --calibrate, expected both")
    options = {name: value for name, value in context.params.items() if value is not None}
    options["private"] = not options.pop("public")
    from coca_hf.convert.calibration import CalibrationProgress, in_words
    from coca_hf.convert.conversion import convert_checkpoint

    is_silent = not console.is_terminal
    with Progress(console=console, transient=True, disable=is_silent) as bar:
        layers = bar.add_task("calibrating layers", visible=calibrate_on is not None, total=None)
        task = bar.add_task(f"converting {escape(src)}", visible=False)

        begun, since = 0, time.monotonic()

        def show_layers(progress: CalibrationProgress) -> None:
            nonlocal begun, since
            done, total, text = progress.layers_done, progress.num_layers, "calibrating layers"
            if progress.notice:
                console.print(progress.notice)
                begun, since = done, time.monotonic()
            if progress.divergence is not None:
                text += f", divergence {progress.divergence:.3g} nats"
            bar.update(layers, description=text, completed=done, total=total)
            if is_silent and done and not progress.notice:
                left = (time.monotonic() - since) / max(done - begun, 1) * (total - done)
                text += f": {done} of {total}" + f", about {in_words(left)} left" * (done < total)
                console.print(text, soft_wrap=True)

        # Options have the names of its arguments
        record = convert_checkpoint(
            **options,
            progress=lambda done, total: bar.update(
                task, completed=done, total=total, visible=True
            ),
            calibrate_progress=show_layers,
        )
    if dry_run:
        _print_plan(record, dst)
    else:
        _print_conversion(record, dst)
        if push_to_hub:
            console.print(f"Uploaded to {push_to_hub}, {'public' if public else 'private'}.")


def _print_plan(plan: dict, dst: str) -> None:
    from coca_hf.card import kept_in_words
    from coca_hf.convert.calibration import in_words
    from coca_hf.files import size_in_words

    def files(what: dict) -> str:
        return f"{size_in_words(what['bytes'])} of weights, files: {what['files']}"

    def needs(what: dict, measured: str) -> str:
        seconds, memory = what["seconds"], size_in_words(what["memory_bytes"])
        time = f"{in_words(seconds)} ({measured})" if seconds is not None else "an unknown time"
        disk = f", {size_in_words(what['disk_bytes'])} of disk" if "disk_bytes" in what else ""
        return f"about {memory} of memory (from the shapes){disk} and {time}"

    kept, free = plan["kept_layers"], size_in_words(plan["free_bytes"])
    commit = f" at commit {plan['source_commit']}" if "source_commit" in plan else ""
    console.print(f"{dst}: not written (--dry-run)")
    _line("would read", f"{plan['source']}{commit}: {plan['source_format']}, {files(plan['read'])}")
    form = f"{plan['constraint']}, {plan['dtype']}"
    _line("would write", f"{form}, {files(plan['written'])}; {free} free")
    _line("would take", needs(plan, "from the time to read the weights"))
    _print_sizes(plan)
    uncounted = "; the sizes above count none of them" if kept == "auto" else ""
    words = kept_in_words(plan) + uncounted if kept else "no layer"
    _line("original attention", f"kept in {words}")
    _print_attention(plan)
    _print_tokenizer(plan, dst)
    if calibration := plan.get("calibration"):
        _line(
            "would calibrate",
            f"{calibration['tokens']:,} tokens, {calibration['passes']} passes, on "
            f"{calibration['device']}, with {needs(calibration, 'from a timed step')}",
        )
    if not plan["numbers_checked"]:
        _line("not checked", "the numbers of the weights, which only the hub has")
    for head in plan["undecided_heads"]:
        _line(
            "not decided",
            f"whether {head} is the embedding, as tie_word_embeddings says; if its numbers differ, "
            "it is written too",
        )


def _print_conversion(record: dict, dst: str) -> None:
    from coca_hf.card import kept_in_words, needs_training, perplexity_in_words

    shares = record["trainable_fraction"]
    console.print(f"{dst}: {record['constraint']}, {record['dtype']}")
    _print_sizes(record)
    k, qkv, full = f"{shares['k']:.1%}", f"{shares['qkv']:.1%}", f"{shares['full']:.0%}"
    _line("trained per stage", f"k {k}, qkv {qkv}, full {full} of the parameters")
    if record["kept_layers"]:
        _line("original attention", f"kept in {kept_in_words(record)}")
    _print_attention(record)
    _print_tokenizer(record, dst)
    _line("start of W_T", record["start"]["rule"])
    if calibration := record.get("calibration"):
        words = perplexity_in_words(calibration, record)
        _line("calibrated", f"{words}; {calibration['seconds']:,.0f} s")
        # recover.yaml's epsilon is for models of SmolLM2-135M's size
        of_that_size = 1e8 < record["parameters"]["after"] < 2e8
        console.print(
            "Retrieval comes back with training. Next: coca-train recipes/recover.yaml "
            f"model={shlex.quote(dst)} teacher=ORIGINAL data.sources.0.path=TEXT "
            f"data.skip_positions={calibration['reach']}"
            + ("" if of_that_size else " training.adam_epsilon=1e-8")
        )
    elif needs_training(record):
        console.print(
            "The attention has to be trained before the model is useful, which takes far less after "
            f"--calibrate TEXT. Next: coca-train RECIPE model={shlex.quote(dst)} "
            "(recipes/llama-7b/three-stage.yaml is the paper's)"
        )


def _print_sizes(facts: dict) -> None:
    parameters, cache = facts["parameters"], facts["kv_cache_bytes_per_token"]
    _line("parameters", f"{parameters['before']:,} before, {parameters['after']:,} after")
    before, after = f"{cache['before']:,}", f"{cache['after']:,}"
    windows = facts["kv_cache_bytes_of_windows"]
    more = f", and {windows:,} for sliding windows" if windows else ""
    _line("key/value cache", f"{before} bytes per token before, {after} after{more}")


def _print_attention(facts: dict) -> None:
    from coca_hf.card import base_in_words, content_in_words

    if content := content_in_words(facts):
        _line("content pairs", content)
    if "rope" in facts:
        _line("RoPE", base_in_words(facts["rope"]))


def _print_tokenizer(facts: dict, dst: str) -> None:
    if missing := facts.get("tokenizer_not_taken"):
        _line("tokenizer", f"without {missing}: copy its files into {dst} to have it")


def _line(label: str, text: str) -> None:
    console.print(f"  {label:<21} {text}")
