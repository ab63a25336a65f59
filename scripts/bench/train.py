"""A training step (forward, backward, AdamW) of some layers of a shape, CoCA beside HF's LLaMA with
the same options.

    python scripts/bench/train.py --out docs/results/h200/train.json            # layers of LLaMA-7B's shape
    python scripts/bench/train.py --train t qkv all --batch 8 --checkpointing   # the stages of the paper's recipe

`--train` says what is trained; LLaMA's k_proj stands for t_proj. First, CoCA's gradients with this
machine's fastest fold are compared with those of the plain fold. `layer_seconds`, which
projection.py adds up, is the difference between two depths, per layer, so it leaves out the head
and the loss.
"""

import copy
import functools

import measure
import torch
from measure import (
    DEVICE,
    check,
    clear,
    compare,
    make_model,
    parse,
    plain_folds,
    ratio,
    relative_error,
    run_all,
)

TRAINED = {"t": ("t_proj", "k_proj"), "qkv": ("q_proj", "t_proj", "k_proj", "v_proj"), "all": ("",)}


def main() -> None:
    parser = measure.arguments(__doc__, [2048])
    parser.add_argument(
        "--layers", type=int, nargs=2, default=[2, 6], help="two depths; the rows are of the second"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--train", nargs="+", choices=TRAINED, default=["all"])
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    options = parse(parser)
    if options.smoke:
        options.layers, options.batch = [1, 2], 1
    title = f"training step, {options.layers[1]} layers, batch {options.batch}"
    columns = {
        **{"rival": "rival", "learns": "train", "length": "length", "s": "seconds"},
        **{"tokens/s": "tokens_per_second", "x LLaMA": "over_llama"},
        **{"s per layer": "layer_seconds", "GiB added": ("peak_bytes", 2**-30)},
    }
    measured = functools.partial(measure_step, options=options)
    run_all("train-bench", title, columns, measured, options, options.lengths, options.train)


def measure_step(length: int, what: str, options) -> list[dict]:
    vocab_size = measure.SHAPES[options.shape]["vocab_size"]
    ids = [torch.randint(vocab_size, (options.batch, length), device=DEVICE) for _ in range(4)]
    by_depth = []
    for layers in options.layers:
        steps, error = {}, None
        for name in ("LLaMA", "CoCA slack"):
            model = make_model(name, options.shape, options.dtype, num_hidden_layers=layers).train()
            if options.checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            for parameter_name, parameter in model.named_parameters():
                parameter.requires_grad_(any(part in parameter_name for part in TRAINED[what]))
            if name != "LLaMA":
                error = check_gradients(model, ids[0][:, :64])
            steps[name] = step_of(model, ids)
        by_depth.append(compare(steps, options.repeats, options.warmup, sets=4))
        del steps, model
        clear()
    shallow, deep = by_depth
    extra = options.layers[1] - options.layers[0]
    about = {"shape": options.shape, "train": what, "length": length, "batch": options.batch}
    about |= {"layers": options.layers[1], "checkpointing": options.checkpointing}
    return [
        {
            **{"rival": name, **about, **result},
            "tokens_per_second": ratio(options.batch * length, result["seconds"]),
            "over_llama": ratio(deep["LLaMA"]["seconds"], result["seconds"]),
            "layer_seconds": (result["seconds"] - shallow[name]["seconds"]) / extra
            if result["seconds"]
            else None,
            "relative_error": None if name == "LLaMA" else error,
        }
        for name, result in deep.items()
    ]


def step_of(model, ids: list[torch.Tensor]):
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-6, fused=DEVICE == "cuda")

    def step(i: int) -> None:
        model(input_ids=ids[i], labels=ids[i], use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def check_gradients(model, ids: torch.Tensor) -> float:
    """The relative error of all gradients together: this machine's fold against the plain one, in
    float64, so that the rounding of other operations does not count.
    """
    exact = copy.deepcopy(model).double()

    def gradients() -> torch.Tensor:
        exact.zero_grad()
        exact(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])

    got = gradients()
    with plain_folds():
        return check("gradients", relative_error(got, gradients()), torch.float32)


if __name__ == "__main__":
    main()
