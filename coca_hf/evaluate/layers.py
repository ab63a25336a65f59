"""The harm that converting each layer does, alone and beside all others: which layers should be kept.

Every layer is swapped alone, both ways: it is converted in the original model, and put back into the
converted one. The result is measured on three texts: a passage, the second copy of random tokens, and
a passage that is read again (see `copying.py`). The measures are the loss on each, and the divergence
of the predictions from the original model's, a mean over tokens and over the three texts:

    KL(original's prediction || the other's), in nats

A layer's harm is what its conversion adds to the divergence, averaged over two situations: it is the
first of all layers to be converted, or the last. `order` lists the layers by harm, the greatest first:
keep these first. It does not say how layers that are kept together help each other.

A row, task `layers`, has besides what `rows.py` lists: `value`, the divergence of the converted model;
its `perplexity`, `copy` and `again` (nats per token of the second copies), and the original's as
`baseline_perplexity`, …; `order`; `baseline`, a name; `cases`; `seed`; what `Sample.describe` says. Its
raw table `layers` has a line per layer: layer, harm, and the four measures as `alone_…`, where only this
layer is converted, and as `back_…`, where only this layer is the original's.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from coca_hf.errors import CocaError
from coca_hf.evaluate.attention_maps import check_baseline
from coca_hf.evaluate.batches import auto_batch_size, compute_all
from coca_hf.evaluate.copying import passages, repeated_sequences
from coca_hf.evaluate.load import Subject
from coca_hf.evaluate.perplexity import failed, keeps_logits
from coca_hf.evaluate.rope import Rope, use_rope_
from coca_hf.evaluate.rows import UNSEEN, Raw, RowStore, Track, rows_over, subject_settings
from coca_hf.evaluate.sample import Sample

TEXTS = ("perplexity", "copy", "again")
MEASURES = ("divergence", *TEXTS)


def layer_rows(
    original: Subject,
    converted: Subject,
    sample: Sample,
    lengths: list[int],
    ropes: list[Rope],
    store: RowStore,
    num_cases: int = 6,
    seed: int = 0,
    batch_size: int | None = None,
    track: Track = UNSEEN,
) -> Iterator[dict]:
    """Yield a row for every RoPE setting, of both models, and length; those that `store` has are not measured again.

    Holds the states of a batch between the layers of both models.

    Raises CocaError where the models are not of one family, size and vocabulary, and for lengths below 5.
    """
    check_baseline(converted, original, sample, original.path)
    if min(lengths) < 5:
        raise CocaError(
            f"--lengths: got {min(lengths)}, expected at least 5: two copies of two tokens, and a beginning"
        )
    settings = {
        "task": "layers",
        "stride": None,
        **sample.describe(),
        "cases": num_cases,
        "seed": seed,
        **subject_settings(converted),
        "batch_size": batch_size,
        "baseline": original.name,
        "baseline_fingerprint": original.fingerprint,
    }
    return rows_over(
        ropes,
        lengths,
        store,
        lambda length: settings,
        lambda rope, settings: _measure(original, converted, sample, rope, settings, track),
        track,
    )


def _measure(
    original: Subject, converted: Subject, sample: Sample, rope: Rope, settings: dict, track: Track
) -> tuple[dict, Raw]:
    length, num_cases, seed = settings["length"], settings["cases"], settings["seed"]
    for one in (original, converted):
        use_rope_(one.model, rope, length)
    copies, copy_len = repeated_sequences(converted, length, num_cases, seed)
    read_again, _ = repeated_sequences(converted, length, num_cases, seed, sample)
    texts = {"perplexity": passages(converted, length, num_cases, seed, sample), "copy": copies, "again": read_again}

    def compute(batch: list[tuple[str, Tensor]]) -> list[Tensor]:
        scored_len = len(batch[0][1]) - 1 if batch[0][0] == "perplexity" else copy_len - 1
        return list(_swapped(original.model, converted.model, torch.stack([ids for _, ids in batch]), scored_len))

    groups = [
        ([(text, ids) for ids in cases], settings["batch_size"] or auto_batch_size(len(cases[0])))
        for text, cases in texts.items()
    ]
    found, error, batch_size = compute_all(groups, compute, lambda batches: track(batches, f"layers  {rope}  {length}"))
    results: dict[str, Any] = {
        "value": None,
        "tokens": sum(len(ids) for cases in texts.values() for ids in cases),
        "error": failed(error, length) if error else None,
        "batch_size": batch_size,
    }
    if error:
        return results, {}
    sums = torch.stack(found).view(len(texts), num_cases, -1, 2).mean(1)  # (texts, models, nll and divergence)
    if not sums.isfinite().all():
        return results | {"error": "the loss of a model is not finite"}, {}
    numbers = [_numbers(of_model) for of_model in sums.transpose(0, 1)]
    first, last, swapped = numbers[0], numbers[1], numbers[2:]
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
    results |= {
        "value": last["divergence"],
        **{name: last[name] for name in TEXTS},
        **{f"baseline_{name}": first[name] for name in TEXTS},
        "order": [line["layer"] for line in sorted(lines, key=lambda line: -line["harm"])],
    }
    return results, {"layers": lines}


def _numbers(of_model: Tensor) -> dict[str, float]:
    """The `MEASURES` of a model from its means over tokens, (texts, nll and divergence)."""
    losses, divergences = of_model.T.tolist()
    perplexity = math.exp(min(losses[0], 700))
    return {"divergence": sum(divergences) / len(divergences), "perplexity": perplexity} | dict(
        zip(TEXTS[1:], losses[1:], strict=True)
    )


@torch.inference_mode()
def _swapped(original: Any, converted: Any, input_ids: Tensor, scored_len: int) -> Tensor:
    """Loss and divergence, each a mean over the last `scored_len` targets: (b, models, 2), float64.

    Models: the original, the converted one, the original with each layer converted, the converted one with each layer
    put back. A model with a swapped layer begins there, from what its own layers below made of the text.
    """
    input_ids = input_ids.to(original.device)
    theirs, their_calls = _recorded(original, input_ids, scored_len)
    ours, our_calls = _recorded(converted, input_ids, scored_len)
    reference = theirs.float().log_softmax(-1)
    targets = input_ids[:, -scored_len:]
    found = [_scores(logits, targets, reference) for logits in (theirs, ours)]
    ways = ((original, their_calls, converted, our_calls), (converted, our_calls, original, their_calls))
    for host, host_calls, guest, guest_calls in ways:
        for number, layer in enumerate(_layers(guest)):
            states = layer(host_calls[number][0].to(guest.dtype), **guest_calls[number][1]).to(host.dtype)
            found.append(_scores(_from_layer(host, number, states, input_ids, scored_len), targets, reference))
    return torch.stack(found, 1).cpu()


def _scores(logits: Tensor, targets: Tensor, reference: Tensor) -> Tensor:
    """Mean loss and mean KL(reference || logits) of each sequence: (b, k, vocab) and (b, k) to (b, 2), float64."""
    predicted = logits.float().log_softmax(-1)
    loss = -predicted.gather(-1, targets[..., None])[..., 0]
    divergence = (reference.exp() * (reference - predicted)).sum(-1)
    return torch.stack([loss.double().mean(-1), divergence.double().mean(-1)], -1)


def _recorded(model: Any, input_ids: Tensor, scored_len: int) -> tuple[Tensor, list[tuple[Tensor, dict]]]:
    """The last logits before the end, and what every layer was called with: its states, and the rest by name."""
    calls: list[tuple[Tensor, dict]] = []

    def recording(forward: Callable) -> Callable:
        def run(states: Tensor, *others: Any, **kwargs: Any) -> Tensor:
            calls.append((states, kwargs))
            output = forward(states, *others, **kwargs)
            if others or not isinstance(output, Tensor):
                raise CocaError(_not_understood(model))
            return output

        return run

    with ExitStack() as stack:
        for layer in _layers(model):
            stack.enter_context(_running(layer, recording(layer.forward)))
        return _last_logits(model, input_ids, scored_len), calls


def _from_layer(model: Any, number: int, states: Tensor, input_ids: Tensor, scored_len: int) -> Tensor:
    """The last logits where layer `number` gave `states`, whatever the layers before it do."""
    with ExitStack() as stack:
        for layer in _layers(model)[: number + 1]:
            stack.enter_context(_running(layer, lambda *_, **__: states))
        return _last_logits(model, input_ids, scored_len)


@contextmanager
def _running(layer: nn.Module, function: Callable) -> Iterator[None]:
    """`function` in the place of the layer's forward."""
    layer.forward = function
    try:
        yield
    finally:
        del layer.forward


def _layers(model: Any) -> Any:
    if not isinstance(getattr(model.base_model, "layers", None), nn.ModuleList):
        raise CocaError(_not_understood(model))
    return model.base_model.layers


def _not_understood(model: Any) -> str:
    return f"coca-eval layers: got {type(model).__name__}, whose layers it does not understand; expected a CoCA family"


def _last_logits(model: Any, input_ids: Tensor, scored_len: int) -> Tensor:
    only_kept = {"logits_to_keep": scored_len + 1} if keeps_logits(model) else {}
    return model(input_ids=input_ids, use_cache=False, **only_kept).logits[:, -scored_len - 1 : -1]
