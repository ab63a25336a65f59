"""`coca-train RECIPE`."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from coca_cli.main import BadOption, PlainConsole, console, refuse_other_encodings, say

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

# Options that only some of the command's tasks take, and these tasks
TAKEN_BY = {
    **dict.fromkeys(("out", "stage", "resume"), ("a run",)),
    **dict.fromkeys(("gpu_memory", "gpu", "mfu"), ("--plan",)),
    "world_size": ("--plan", "--prepare"),
}


@app.command()
def train_command(
    context: typer.Context,
    recipe: Annotated[
        Path,
        typer.Argument(
            help="A recipe: one YAML file, such as those in recipes/.", show_default=False
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Overrides, such as training.learning_rate=1e-4 stages.full.max_steps=10.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for the stages; runs/<name of the recipe> by default."),
    ] = None,
    stage: Annotated[
        str | None, typer.Option(help="Run this stage only; the stage before it must be complete.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in OUT.")] = False,
    prepare: Annotated[
        bool,
        typer.Option(
            "--prepare",
            help="Do not train; write the blocks of all stages to data.prepared, as a run would.",
        ),
    ] = False,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Do not train; print what each stage costs on the GPUs described below."
        ),
    ] = False,
    world_size: Annotated[
        int,
        typer.Option(
            min=1,
            help="With --plan or --prepare: number of processes that will train, one per GPU.",
        ),
    ] = 1,
    gpu_memory: Annotated[float, typer.Option(help="With --plan: memory of each GPU in GiB.")] = 80,
    gpu: Annotated[
        str,
        typer.Option(
            help="With --plan: the GPU, for its peak FLOPS: A100, H100, H200, L40S, RTX 4090 …"
        ),
    ] = "H100",
    mfu: Annotated[
        float, typer.Option(help="With --plan: share of the peak FLOPS that training reaches.")
    ] = 0.4,
) -> None:
    """Train a CoCA checkpoint in the stages of a recipe, each from directory to directory.

    Before the first stage, blocks of tokens are prepared in the recipe's data.prepared (./prepared).
    """
    if plan and prepare:
        raise BadOption("--plan, --prepare: got both, expected one of them")
    refuse_other_encodings()
    _refuse_unused(context, "--plan" if plan else "--prepare" if prepare else "a run")
    from coca_hf.train.recipe import load_recipe

    checked = load_recipe(recipe, settings or [])
    if plan:
        from coca_hf.train.gpu_plan import plan_recipe, plan_table

        with console.status("planning"):
            planned = plan_recipe(checked, world_size, gpu_memory, gpu, mfu)
        PlainConsole().print(plan_table(planned))
        for line in planned.advice():
            say(line)
        return
    from accelerate import PartialState
    from transformers.utils.logging import disable_progress_bar

    from coca_hf.errors import CocaError
    from coca_hf.train.processes import EXIT_STOPPED, Stopped, ignore_signals
    from coca_hf.train.stages import prepare_recipe, run_recipe

    disable_progress_bar()  # of loading and saving; training has its own
    out = out or Path("runs") / recipe.stem
    try:
        if prepare:
            blocks, wanted = prepare_recipe(checked, world_size)
            say(
                f"prepared: {len(blocks):,} blocks, {len(blocks) * checked.data.seq_len:,} tokens "
                f"in {blocks.directory}: all stages on {world_size} processes take {wanted:,} blocks"
            )
            return
        directory = run_recipe(checked, out, stage, resume)
    except CocaError:
        if "RANK" in os.environ:  # a launcher's SIGTERM, after another process died, may be first
            ignore_signals()
        raise
    except Stopped as stopped:
        ignore_signals()
        if PartialState().is_main_process:
            console.print(str(stopped))
        PartialState().destroy_process_group()
        raise typer.Exit(EXIT_STOPPED) from None
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # the processes may not have met yet
            console.print(
                f"{checked.data.prepared}: interrupted; the same command continues"
                if prepare
                else f"{out}: interrupted; continue with --resume (SIGTERM would also have written a "
                "checkpoint)"
            )
        raise
    if PartialState().is_main_process:
        lengths = f"{checked.data.seq_len},{2 * checked.data.seq_len}"
        say(f"checkpoint: {directory}")
        trained, rows = (shlex.quote(str(path)) for path in (directory, directory.parent / "rows"))
        say(f"next: coca-eval perplexity {trained} --data TEXT --lengths {lengths} --out {rows}")
    PartialState().destroy_process_group()  # gloo's threads may abort a process that exits


def _refuse_unused(context: typer.Context, task: str) -> None:
    """Raises BadOption for a given option that `task` does not take."""
    for option in context.command.params:
        name = str(option.name)
        takers, source = TAKEN_BY.get(name, (task,)), context.get_parameter_source(name)
        if task not in takers and source and source.name == "COMMANDLINE":
            raise BadOption(
                f"{option.opts[0]}: {task} does not take it, only {' or '.join(takers)} does; "
                "leave it out"
            )
