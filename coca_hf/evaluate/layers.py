"""The harm of converting each layer, alone and beside all others: which layers should be kept.

Every layer is swapped alone, both ways: converted in the original model, and put back into the
converted one. The result is measured on three texts: a passage, the second copy of random tokens,
and a passage that is read again (see `copying.py`). The measures are the loss on each, and the
divergence of the predictions from the original model's, a mean over tokens and the three texts:

    KL(original's prediction || the other's), in nats

A layer's harm is what its conversion adds to the divergence, averaged over two situations: it is
the first of all layers to be converted, or the last. `order` lists the layers by harm, the greatest
first: keep these first. It does not say how layers that are kept together help each other.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from coca_hf.errors import CocaError
from coca_hf.evaluate.attention_maps import check_baseline
from coca_hf.evaluate.batches import Batches, NoValue
from coca_hf.evaluate.copying import check_copy_lengths, passages, repeated_sequences
from coca_hf.evaluate.loaded_model import LoadedModel, Rope, use_rope_
from coca_hf.evaluate.perplexity import last_logits
from coca_hf.evaluate.rows import (
    Count,
    Identity,
    Raw,
    Run,
    Setting,
    Shared,
    TextRow,
    about_model,
)
from coca_hf.evaluate.sample import Sample
from coca_hf.evaluate.tables import Measurement, Table, each_table, text_settings
from coca_hf.page import Bullets, Fold, Grid, Part

TEXTS = ("perplexity", "copy", "again")
MEASURES = ("divergence", *TEXTS)
SWAPPED = [f"{way}_{measure}" for way in ("alone", "back") for measure in MEASURES]


class LayersRow(TextRow):
    """`TEXTS` are the converted model's measures, and `baseline_...` the original's.

    The raw table `layers` has layer, harm and `SWAPPED`: the measures if only this layer is
    converted (`alone_...`), and if only this layer is the original's (`back_...`).
    """

    length: Identity[Count]
    value: float | None  # the divergence of the converted model, in nats
    perplexity: float | None
    copy: float | None  # nats per token of the second copies of random tokens
    again: float | None  # nats per token of passages that are read again
    baseline_perplexity: float | None
    baseline_copy: float | None
    baseline_again: float | None
    order: list[int] | None  # layers by harm, the greatest first
    baseline: Shared[str]  # a name
    baseline_fingerprint: Setting[str | None]
    baseline_dtype: Setting[str | None]  # null if it is the model's
    cases: Setting[int]


def layer_rows(
    run: Run, original: LoadedModel, sample: Sample, num_cases: int = 6
) -> Iterator[dict]:
    """Yield the rows of a run, whose model is the converted one.

    RoPE settings apply to both models. The states of a batch between all layers are in memory for
    both models. Passages and random tokens are drawn with the sample's seed.

    Raises CocaError if the models differ in family, size or vocabulary or are in the wrong order,
    and for lengths below 5.
    """
    converted, seed = run.loaded, sample.settings["seed"]
    is_coca = [hasattr(one.model.config, "coca_constraint") for one in (original, converted)]
    if is_coca == [True, False]:
        raise CocaError(
            f"{original.path}: got a CoCA model before {converted.path}, which is none; expected "
            "the original first"
        )
    check_baseline(converted, original, sample, original.path)
    ours, theirs = (
        one.model.get_input_embeddings().weight.shape[0] for one in (converted, original)
    )
    if ours != theirs:
        raise CocaError(
            f"{original.path}: got {theirs} rows of embeddings, expected {ours} as {converted.path} "
            "has; give the model that it was converted from"
        )
    check_copy_lengths(run.lengths)

    def measure(rope: Rope, length: int, batches: Batches) -> tuple[dict, Raw]:
        for one in (original, converted):
            use_rope_(one.model, rope, length)
        copies, copy_len = repeated_sequences(converted, length, num_cases, seed)
        again, _ = repeated_sequences(converted, length, num_cases, seed, sample)
        passage = passages(converted, length, num_cases, seed, sample)
        texts = {"perplexity": passage, "copy": copies, "again": again}

        def compute(batch: list[tuple[str, Tensor]]) -> list[Tensor]:
            (text, first), *_ = batch
            scored_len = len(first) - 1 if text == "perplexity" else copy_len - 1
            input_ids = torch.stack([ids for _, ids in batch])
            return list(_swapped(original.model, converted.model, input_ids, scored_len))

        groups = [([(text, ids) for ids in cases], len(cases[0])) for text, cases in texts.items()]
        found = batches.compute(groups, compute)
        sums = torch.stack(found).view(len(texts), num_cases, -1, 2).mean(1)
        if not sums.isfinite().all():
            raise NoValue("the loss of a model is not finite")
        lines, measures = _harms(sums)
        tokens = sum(len(ids) for cases in texts.values() for ids in cases)
        return measures | {"tokens": tokens}, {"layers": lines}

    settings = {"task": "layers", **sample.describe(), "cases": num_cases}
    settings |= {"baseline": original.name, "baseline_fingerprint": original.fingerprint}
    its_dtype = about_model(original)["dtype"]
    settings["baseline_dtype"] = its_dtype if its_dtype != run.about["dtype"] else None
    return run.rows(LayersRow, settings, measure)


def _harms(sums: Tensor) -> tuple[list[dict], dict[str, Any]]:
    """The lines of the raw table, and the row's measures. sums: (texts, models, 2)."""
    first, last, *swapped = (_numbers(of_model) for of_model in sums.transpose(0, 1))
    alone, back = swapped[: len(swapped) // 2], swapped[len(swapped) // 2 :]
    lines = [
        {
            "layer": layer,
            "harm": (a["divergence"] + last["divergence"] - b["divergence"]) / 2,
            **{f"alone_{name}": a[name] for name in MEASURES},
            **{f"back_{name}": b[name] for name in MEASURES},
        }
        for layer, (a, b) in enumerate(zip(alone, back, strict=True))
    ]
    measures = {
        "value": last["divergence"],
        **{name: last[name] for name in TEXTS},
        **{f"baseline_{name}": first[name] for name in TEXTS},
        "order": [line["layer"] for line in sorted(lines, key=lambda line: -line["harm"])],
    }
    return lines, measures


def _numbers(of_model: Tensor) -> dict[str, float]:
    """The `MEASURES` of a model from its means over tokens, (texts, nll and divergence)."""
    losses, divergences = of_model.T.tolist()
    numbers = [sum(divergences) / len(divergences), math.exp(min(losses[0], 700)), *losses[1:]]
    return dict(zip(MEASURES, numbers, strict=True))


@torch.inference_mode()
def _swapped(original: Any, converted: Any, input_ids: Tensor, scored_len: int) -> Tensor:
    """Loss and divergence, each a mean over the last `scored_len` targets: (b, models, 2), float64.

    Models: the original, the converted one, the original with each layer converted, the converted
    one with each layer put back. A model with a swapped layer runs from there, on what its own
    layers below made of the text.
    """
    input_ids = input_ids.to(original.device)
    theirs, their_calls = _recorded(original, input_ids, scored_len)
    ours, our_calls = _recorded(converted, input_ids, scored_len)
    reference = theirs.float().log_softmax(-1)
    targets = input_ids[:, -scored_len:]
    found = [_scores(logits, targets, reference) for logits in (theirs, ours)]
    both = (original, their_calls), (converted, our_calls)
    for (host, host_calls), (guest, guest_calls) in (both, both[::-1]):
        for number, layer in enumerate(_layers(guest)):
            (given, _), (_, options) = host_calls[number], guest_calls[number]
            states = layer(given.to(guest.dtype), **options).to(host.dtype)
            logits = _from_layer(host, number, states, input_ids, scored_len)
            found.append(_scores(logits, targets, reference))
    return torch.stack(found, 1).cpu()


def _scores(logits: Tensor, targets: Tensor, reference: Tensor) -> Tensor:
    """Mean loss and mean KL(reference || logits) of each sequence: (b, 2), float64.

    logits, reference: (b, k, vocab); targets: (b, k).
    """
    predicted = logits.float().log_softmax(-1)
    loss = -predicted.gather(-1, targets[..., None])[..., 0]
    divergence = (reference.exp() * (reference - predicted)).sum(-1)
    return torch.stack([loss.double().mean(-1), divergence.double().mean(-1)], -1)


def _recorded(
    model: Any, input_ids: Tensor, scored_len: int
) -> tuple[Tensor, list[tuple[Tensor, dict]]]:
    """The logits of the last targets, and the arguments of every layer: its states, and the others
    by name.
    """
    calls: list[tuple[Tensor, dict]] = []

    def recording(forward: Callable) -> Callable:
        def run(states: Tensor, *others: Any, **kwargs: Any) -> Tensor:
            calls.append((states, kwargs))
            output = forward(states, *others, **kwargs)
            if others or not isinstance(output, Tensor):
                raise _not_understood(model)
            return output

        return run

    with _running({layer: recording(layer.forward) for layer in _layers(model)}):
        return _target_logits(model, input_ids, scored_len), calls


def _from_layer(
    model: Any, number: int, states: Tensor, input_ids: Tensor, scored_len: int
) -> Tensor:
    """The logits of the last targets if layer `number` returns `states`, whatever the layers before
    it do.
    """
    with _running({layer: lambda *_, **__: states for layer in _layers(model)[: number + 1]}):
        return _target_logits(model, input_ids, scored_len)


@contextmanager
def _running(forwards: dict[nn.Module, Callable]) -> Iterator[None]:
    """Functions instead of the forward of layers."""
    try:
        for layer, forward in forwards.items():
            layer.forward = forward
        yield
    finally:
        for layer in forwards:
            vars(layer).pop("forward", None)


def _layers(model: Any) -> Any:
    if not isinstance(getattr(model.base_model, "layers", None), nn.ModuleList):
        raise _not_understood(model)
    return model.base_model.layers


def _not_understood(model: Any) -> CocaError:
    found = f"got {type(model).__name__}, whose layers it does not understand"
    return CocaError(f"coca-eval layers: {found}; expected a CoCA family")


def _target_logits(model: Any, input_ids: Tensor, scored_len: int) -> Tensor:
    """The logits that predict the last `scored_len` tokens."""
    return last_logits(model, input_ids, scored_len + 1)[:, :-1]


def _parts(table: Table) -> Iterator[Part]:
    """Harm against layer, at one length, and the order to keep layers in."""
    found = table.raw_of_longest("layers")
    if found:
        yield table.by_layer(
            "layers",
            "Harm against layer: the table beside it has the divergence of the whole model.",
            f"Harm of each layer's conversion{table.at}: {table.settings}.",
            {name: [(e["layer"], e["harm"]) for e in some] for name, some in found.items()},
            "harm (nats per token)",
        )
    yield from [table.grid(), _whole(table), *_orders(table), *table.missing()]
    for name, lines in found.items():
        yield Fold(f"Layers of {name}, swapped alone", [_swaps(lines)])


def _whole(table: Table) -> Grid:
    """The measures of both models as they are, the original's first."""
    lines = []
    for name, row in table.longest.items():
        for label, prefix in ((row["baseline"], "baseline_"), (name, "")):
            numbers = [row[f"{prefix}{text}"] for text in TEXTS]
            cells = ["" if number is None else f"{number:.2f}" for number in numbers]
            lines.append([label, *cells])
    header = [f"as they are{table.at}", "perplexity", "second copy (nats)", "read again (nats)"]
    return Grid(header, lines, numbers_from=1)


def _orders(table: Table) -> list[Bullets]:
    items = [
        f"{name}: keep first {', '.join(map(str, row['order']))}"
        for name, row in table.longest.items()
        if row["order"]
    ]
    return [Bullets(items)] if items else []


def _swaps(lines: list[dict]) -> Grid:
    """The measures if only one layer is converted, and if only one layer is the original's."""
    header = ["layer", "harm", *(name.replace("_", ", ") for name in SWAPPED)]
    cells = [[str(e["layer"]), *(f"{e[name]:.3f}" for name in ("harm", *SWAPPED))] for e in lines]
    return Grid(header, cells, numbers_from=0)


def _settings(row: dict) -> str:
    dtype = f" in {row['baseline_dtype']}" if row["baseline_dtype"] else ""
    beside = f"beside {row['baseline']}{dtype}"
    return f"{text_settings(row)}, {beside}, {row['cases']} cases of each text"


MEASUREMENT = Measurement(
    task="layers",
    title="Harm of each layer",
    explanation="Divergence of the converted model's predictions from the original's, in nats per "
    "token, mean over a passage, a second copy of random tokens and a passage that is read again; "
    "lower is nearer. A layer's harm is what its conversion adds to that: the mean over converting "
    "it alone and converting it last.",
    row=LayersRow,
    settings=_settings,
    cell=lambda row: f"{row['value']:.3f}",
    parts=each_table(_parts),
    raw={"layers": {"layer": int, "harm": float, **dict.fromkeys(SWAPPED, float)}},
)
