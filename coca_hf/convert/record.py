"""What a conversion says of itself: the content of `conversion.json`."""

import json
import math
import platform
from collections.abc import Collection
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import xxhash
from transformers import PreTrainedTokenizerBase

from coca_hf.convert.plan import Plan
from coca_hf.convert.staging import FinishedShard
from coca_hf.convert.start import RULE
from coca_hf.convert.tensors import source_shapes


def conversion_record(plan: Plan, finished: Collection[FinishedShard]) -> dict:
    """Of `plan`, when all of its shards are `finished`."""
    layout = ", released CoCA layout" if plan.released else ", CoCA" if plan.from_coca else ""
    return {
        "source": str(Path(plan.src).absolute()) if Path(plan.src).exists() else plan.src,
        "source_format": plan.source.kind + layout,
        "source_xxh3_128": _source_hash(finished),
        **({"source_commit": plan.source.commit} if plan.source.commit else {}),
        **({"ignored_fields": plan.ignored_fields} if plan.ignored_fields else {}),
        "base": plan.base,
        "constraint": plan.config.coca_constraint,
        "kept_layers": plan.config.coca_kept_layers,
        "dtype": str(plan.config.dtype).removeprefix("torch."),
        "start": _start(plan, finished),
        **({"rope": plan.ntk} if plan.ntk else {}),
        **({"fix_mistral_regex": False} if _needs_its_regex_mended(plan.tokenizer) else {}),
        **_summary(plan),
        "versions": {name: version(name) for name in ("coca-hf", "transformers", "torch", "safetensors")}
        | {"python": platform.python_version()},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _needs_its_regex_mended(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether transformers notes on its backend that it is to be loaded with `fix_mistral_regex`."""
    return getattr(getattr(tokenizer, "backend_tokenizer", None), "fix_mistral_regex", None) is False


def _source_hash(finished: Collection[FinishedShard]) -> str:
    """The xxh3_128 of the names and xxh3_128 of all tensors read, in the order of their names."""
    read = {name: digest for facts in finished for name, digest in facts.read.items()}
    return xxhash.xxh3_128_hexdigest(json.dumps(read, sort_keys=True).encode())


def _start(plan: Plan, finished: Collection[FinishedShard]) -> dict:
    if plan.released:
        return {"rule": "the released t_proj, mean over the two rows of every rotary pair"}
    if plan.from_coca:
        return {"rule": "none: all weights are those of the source, which is a CoCA checkpoint"}
    scales = {layer: of_heads for facts in finished for layer, of_heads in facts.scales.items()}
    return {"rule": RULE, "scales": [scales.get(layer) for layer in range(plan.config.num_hidden_layers)]}


def _summary(plan: Plan) -> dict:
    """Parameters before and after, the fraction that each of the paper's stages trains, and cache bytes per token.

    The cache is the half-width one of `models/cache.py`; a CoCA source has it before as well as after.
    """
    before = {name: math.prod(shape) for name, shape in source_shapes(plan.targets, plan.config).items()}
    after = {target.name: math.prod(target.shape) for target in plan.targets}
    total = sum(after.values())

    def fraction(*modules: str) -> float:
        return sum(count for name, count in after.items() if name.split(".")[-2] in modules) / total

    d, itemsize = plan.config.head_dim, plan.config.dtype.itemsize
    layers, kept = plan.config.num_hidden_layers, len(plan.config.coca_kept_layers)
    width = plan.config.num_key_value_heads * d
    # Keys, of which CoCA's layers hold half, values, and the angles that all layers share
    cache = ((3 * layers + kept) * width // 2 + d) * itemsize
    return {
        "parameters": {"before": sum(before.values()), "after": total},
        "trainable_fraction": {
            "k": fraction("t_proj"),
            "qkv": fraction("q_proj", "k_proj", "t_proj", "v_proj"),
            "full": 1.0,
        },
        "kv_cache_bytes_per_token": {
            "before": cache if plan.from_coca else 2 * layers * width * itemsize,
            "after": cache,
        },
    }
