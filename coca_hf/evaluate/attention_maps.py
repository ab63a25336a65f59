"""How far a model's attention is from that of the model it was converted from, by layer and head.

Perplexity can recover while attention does not, because the rest of the network adapts. Both models
read the same text, each layer gets what its own model's layers below make of it, and maps are
compared by

    KL(baseline's map || model's map), nats, mean over heads and queries, of every layer

in float64, from the probabilities that attention gives; one that rounds to zero counts as the
smallest normal float32. A head's sink is its mass on the first token, and `previous` its mass on
the token before the query's, each a mean over all queries but the first. A strict CoCA score of
equal keys is largest at distance 0, so strict CoCA is furthest from heads that look one token back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from coca_hf.convert.config import FAMILIES
from coca_hf.errors import CocaError
from coca_hf.evaluate.batches import Batches, NoValue
from coca_hf.evaluate.loaded_model import (
    LoadedModel,
    Rope,
    check_same_dtype,
    check_vocabulary,
    use_rope_,
)
from coca_hf.evaluate.rows import Beside, Count, Identity, Raw, Run, Setting, Shared, TextRow
from coca_hf.evaluate.sample import Sample
from coca_hf.evaluate.tables import NBSP, Measurement, Table, each_table, text_settings
from coca_hf.page import Part

COLUMNS = ("divergence", "sink", "baseline_sink", "previous", "baseline_previous")
PAGE_COLUMNS = ("divergence", "baseline_sink", "baseline_previous")


class AttentionMapsRow(TextRow):
    """The raw table `heads` has layer, head and `COLUMNS`, means over the first `length` tokens of
    all documents; divergence in nats."""

    length: Identity[Count]
    value: float | None  # the mean of the divergences over layers, in nats
    sink: Beside[float | None]
    baseline_sink: Beside[float | None]
    baseline: Shared[str]  # a name
    baseline_fingerprint: Setting[str | None]


def attention_map_rows(run: Run, baseline: LoadedModel, sample: Sample) -> Iterator[dict]:
    """Yield the rows of a run.

    RoPE settings apply to both models. The maps of one document, (layers, h, length, length), are
    in memory for both models.

    Raises CocaError if the baseline's family, layers, heads, vocabulary or dtype differ from the
    model's.
    """
    check_same_dtype(run.loaded, baseline)
    check_baseline(run.loaded, baseline, sample, f"--baseline {baseline.path}")

    def measure(rope: Rope, length: int, batches: Batches) -> tuple[dict, Raw]:
        both = run.loaded.model, baseline.model
        for model in both:
            use_rope_(model, rope, length)
        with _giving_maps(both[0]), _giving_maps(both[1]):
            compared = batches.each(sample.token_ids, lambda ids: _compare(*both, ids[:length]))
        heads = torch.stack(compared).mean(0)
        if not heads.isfinite().all():  # (layers, h, columns)
            raise NoValue("an attention map is not finite")
        lines = [
            {"layer": layer, "head": head, **dict(zip(COLUMNS, numbers, strict=True))}
            for layer, of_layer in enumerate(heads.tolist())
            for head, numbers in enumerate(of_layer)
        ]
        divergence, sink, baseline_sink, *_ = heads.mean((0, 1)).tolist()
        results = {"value": divergence, "sink": sink, "baseline_sink": baseline_sink}
        tokens = sum(len(ids[:length]) for ids in sample.token_ids)
        return results | {"tokens": tokens}, {"heads": lines}

    settings = {"task": "attention-maps", **sample.describe()}
    settings |= {"baseline": baseline.name, "baseline_fingerprint": baseline.fingerprint}
    return run.rows(AttentionMapsRow, settings, measure)


def check_baseline(loaded: LoadedModel, baseline: LoadedModel, sample: Sample, where: str) -> None:
    """Raise CocaError if family, layers, heads or tokens of the two models differ."""
    shapes = [_shape(one) for one in (loaded, baseline)]
    for key, expected in shapes[0].items():
        if shapes[1][key] != expected:
            raise CocaError(
                f"{where}: got {key} {shapes[1][key]}, expected {expected} as {loaded.path} has; "
                f"give the model that it was converted from"
            )
    for ids, name in zip(sample.token_ids, sample.names, strict=True):
        check_vocabulary(baseline, ids, name)
        read, other = (
            one.tokenizer.convert_ids_to_tokens(ids.unique().tolist()) for one in (loaded, baseline)
        )
        if read != other:
            raise CocaError(
                f"{where}: got a tokenizer that takes the tokens of {name} for others, expected "
                f"that of {loaded.path}; give the model that it was converted from"
            )


def _shape(loaded: LoadedModel) -> dict[str, Any]:
    """The sizes that a model shares with the one that it was converted from."""
    config = loaded.model.config.get_text_config(decoder=True)
    if getattr(config, "num_attention_heads", None) is None:
        kind = type(loaded.model).__name__
        raise CocaError(f"{loaded.path}: got {kind}, expected a model with attention heads")
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    shape = {key: getattr(config, key) for key in names}
    family = FAMILIES.get(config.model_type)
    model_type = family.becomes if family else config.model_type
    return shape | {"model_type": model_type.removeprefix("coca_")}


@contextmanager
def _giving_maps(model: Any) -> Iterator[None]:
    """Eager attention, the only implementation that returns its maps."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.inference_mode()
def _compare(model: Any, baseline: Any, token_ids: Tensor) -> Tensor:
    """The `COLUMNS` of one document, (layers, h, columns), float64."""
    ids = token_ids[None].to(model.device)
    ours, theirs = (
        one.base_model(input_ids=ids, output_attentions=True, use_cache=False).attentions
        for one in (model, baseline)
    )
    return torch.stack([_numbers(*maps) for maps in zip(ours, theirs, strict=True)]).cpu()


def _numbers(ours: Tensor, theirs: Tensor) -> Tensor:
    """The `COLUMNS` of a layer's maps, each (1, h, m, m): (h, columns)."""
    p, q = theirs[0].double(), ours[0].double()
    log_q = q.clamp(min=torch.finfo(torch.float32).smallest_normal).log()
    divergence = (torch.xlogy(p, p) - p * log_q).sum(-1).mean(-1)
    sinks = [maps[:, 1:, 0].mean(-1) for maps in (q, p)]
    previous = [maps.diagonal(offset=-1, dim1=1, dim2=2).mean(-1) for maps in (q, p)]
    return torch.stack([divergence, *sinks, *previous], -1)


def _parts(table: Table) -> Iterator[Part]:
    """Divergence of attention against layer, at one length."""
    points = {}
    for name, heads in table.raw_of_longest("heads").items():
        layers: dict[int, list[float]] = {}
        for head in heads:
            layers.setdefault(head["layer"], []).append(head["divergence"])
        points[name] = [(layer, sum(some) / len(some)) for layer, some in layers.items()]
    if points:
        yield table.by_layer(
            "attention-maps",
            "Divergence of attention against layer: the table beside it has the means.",
            f"Divergence from the original's attention, mean over heads, against layer{table.at}: "
            f"{table.settings}.",
            points,
            "divergence (nats)",
        )
    yield from [table.grid(), *table.missing()]


def _cell(row: dict) -> str:
    sinks = f"{row['sink']:.2f},{NBSP}{row['baseline_sink']:.2f}"
    return f"{row['value']:.3f}{NBSP}({sinks})"


MEASUREMENT = Measurement(
    task="attention-maps",
    title="Attention beside the original's",
    explanation="Divergence of every head's attention from the original model's on the same text, "
    "in nats, mean over layers, heads and queries; in brackets the mass on the first token, and "
    "the original's. Lower is nearer.",
    row=AttentionMapsRow,
    settings=lambda row: f"{text_settings(row)}, beside {row['baseline']}",
    cell=_cell,
    parts=each_table(_parts),
    raw={"heads": {"layer": int, **dict.fromkeys(PAGE_COLUMNS, float)}},
)
