"""How far a model's attention is from that of the model it was made of, layer by layer and head by head (issue 7).

Perplexity can come back while attention does not, because the rest of the network learns to live without it. Here both
models read the same text, each layer sees what its own model's layers below make of it, and maps are compared:

    KL(baseline's map || model's map), nats, mean over heads and queries, of every layer

in float64, of the probabilities that attention gives; one that rounds to zero counts as the smallest float32 above it.
A head's sink is its mass on the first token, and `previous` that on the token before the query's, each a mean over all
queries but the first: a strict CoCA score of like keys is largest at distance 0, so that a head which looks one token
back is what it is furthest from.

A row, task `attention-maps`, has besides what `rows.py` lists: `value`, the mean of the divergences over layers;
`sink` and `baseline_sink`; `baseline`, a name; what `Sample.describe` says. Its raw table `heads`, of the first
`length` tokens of all documents: layer, head, divergence, sink, baseline_sink, previous, baseline_previous, and entropy
and baseline_entropy in nats.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from coca_hf.errors import CocaError
from coca_hf.evaluate.batches import compute_all
from coca_hf.evaluate.load import Subject, check_vocabulary
from coca_hf.evaluate.perplexity import failed
from coca_hf.evaluate.rope import Rope, use_rope_
from coca_hf.evaluate.rows import UNSEEN, Raw, RowStore, Track, rows_over, subject_settings
from coca_hf.evaluate.sample import Sample

COLUMNS = ("divergence", "sink", "baseline_sink", "previous", "baseline_previous", "entropy", "baseline_entropy")


def attention_map_rows(
    subject: Subject,
    baseline: Subject,
    sample: Sample,
    lengths: list[int],
    ropes: list[Rope],
    store: RowStore,
    track: Track = UNSEEN,
) -> Iterator[dict]:
    """Yield a row for every RoPE setting, of both models, and length; those that `store` has are not measured again.

    Holds the maps of one document, (layers, h, length, length), of both models.

    Raises CocaError where the baseline is not of the model's family, layers, heads and vocabulary.
    """
    check_baseline(subject, baseline, sample, f"--baseline {baseline.path}")
    settings = {
        "task": "attention-maps",
        "stride": None,
        **sample.describe(),
        **subject_settings(subject),
        "baseline": baseline.name,
        "baseline_fingerprint": baseline.fingerprint,
    }
    return rows_over(
        ropes,
        lengths,
        store,
        lambda length: settings,
        lambda rope, settings: _measure(subject, baseline, sample, rope, settings, track),
        track,
    )


def check_baseline(subject: Subject, baseline: Subject, sample: Sample, where: str) -> None:
    """Raise CocaError where `baseline` is not of the subject's family, layers, heads and tokens."""
    shapes = [_shape(one) for one in (subject, baseline)]
    for key, expected in shapes[0].items():
        if shapes[1][key] != expected:
            raise CocaError(
                f"{where}: got {key} {shapes[1][key]}, expected {expected} as {subject.path} has; give the model that "
                f"it was converted from"
            )
    for ids, name in zip(sample.token_ids, sample.names, strict=True):
        check_vocabulary(baseline, ids, name)
        read, other = (one.tokenizer.convert_ids_to_tokens(ids.unique().tolist()) for one in (subject, baseline))
        if read != other:
            raise CocaError(
                f"{where}: got a tokenizer that takes the tokens of {name} for others, expected that of "
                f"{subject.path}; give the model that it was converted from"
            )


def _shape(subject: Subject) -> dict[str, Any]:
    """What a model has in common with the one that it was converted from."""
    config = subject.model.config.get_text_config(decoder=True)
    if getattr(config, "num_attention_heads", None) is None:
        raise CocaError(f"{subject.path}: got {type(subject.model).__name__}, expected a model with attention heads")
    shape = {key: getattr(config, key) for key in ("num_hidden_layers", "num_attention_heads")}
    return shape | {"model_type": config.model_type.removeprefix("coca_")}


def _measure(
    subject: Subject, baseline: Subject, sample: Sample, rope: Rope, settings: dict, track: Track
) -> tuple[dict, Raw]:
    length = settings["length"]
    for one in (subject, baseline):
        use_rope_(one.model, rope, length)

    def compute(batch: list[int]) -> list[Tensor]:
        return [_compare(subject.model, baseline.model, sample.token_ids[number][:length]) for number in batch]

    with _giving_maps(subject.model), _giving_maps(baseline.model):
        found, error, _ = compute_all(
            [(list(range(len(sample.token_ids))), 1)],
            compute,
            lambda batches: track(batches, f"attention-maps  {rope}  {length}"),
        )
    tokens = sum(len(ids[:length]) for ids in sample.token_ids)
    if error:
        return {"value": None, "error": failed(error, length), "tokens": tokens}, {}
    heads = torch.stack(found).mean(0)  # (layers, h, columns)
    if not heads.isfinite().all():
        return {"value": None, "error": "an attention map is not finite", "tokens": tokens}, {}
    lines = [
        {"layer": layer, "head": head, **dict(zip(COLUMNS, numbers, strict=True))}
        for layer, of_layer in enumerate(heads.tolist())
        for head, numbers in enumerate(of_layer)
    ]
    divergence, sink, baseline_sink, *_ = heads.mean((0, 1)).tolist()
    results = {"value": divergence, "sink": sink, "baseline_sink": baseline_sink, "tokens": tokens, "error": None}
    return results, {"heads": lines}


@contextmanager
def _giving_maps(model: Any) -> Iterator[None]:
    """Of the implementations of attention only the eager one returns them."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.inference_mode()
def _compare(model: Any, baseline: Any, token_ids: Tensor) -> Tensor:
    """The `COLUMNS` of one document, (layers, h, columns), float64."""
    inputs = {"input_ids": token_ids[None].to(model.device), "output_attentions": True, "use_cache": False}
    theirs = baseline.base_model(**inputs).attentions
    ours = model.base_model(**inputs).attentions
    return torch.stack([_numbers(*maps) for maps in zip(ours, theirs, strict=True)]).cpu()


def _numbers(ours: Tensor, theirs: Tensor) -> Tensor:
    """The `COLUMNS` of a layer's maps, each (1, h, m, m): (h, columns)."""
    p, q = theirs[0].double(), ours[0].double()
    log_q = q.clamp(min=torch.finfo(torch.float32).smallest_normal).log()
    divergence = (torch.xlogy(p, p) - p * log_q).sum(-1).mean(-1)
    sinks = [maps[:, 1:, 0].mean(-1) for maps in (q, p)]
    previous = [maps.diagonal(offset=-1, dim1=1, dim2=2).mean(-1) for maps in (q, p)]
    entropies = [-torch.xlogy(maps, maps).sum(-1).mean(-1) for maps in (q, p)]
    return torch.stack([divergence, *sinks, *previous, *entropies], -1)
