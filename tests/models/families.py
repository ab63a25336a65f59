"""Every family at tiny size, and its independent reference: transformers' own model with only its
scores replaced.

The stock model runs as it is, with projections, norms, masks and residuals of its own. Its keys are
made to carry the coefficients, each written to both rows of its pair; its attention function, which
is handed rotated queries and keys, rotates them back and contracts three operands.
"""

import importlib
import itertools

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import coca_hf
from coca_hf.models.attention import NO_CONTENT
from coca_hf.models.reference import coca_scores

MENDED_CACHES = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason="transformers' own caches keep their length in reset, and rolled-back windows fit no mask",
)
SHAPE = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "vocab_size": 89}
SHAPE |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64}
SHAPE |= {"initializer_range": 0.2, "pad_token_id": 0, "eos_token_id": None}
NEOX = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": ...}  # head_dim 32
WINDOW = 7  # shorter than any sequence of the tests
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
SIX_OF_EIGHT = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}
TIED, HEADS_OF_14 = {"tie_word_embeddings": True}, {"head_dim": 14}
WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
MULTIPLIERS = {"embedding_multiplier": 3.0, "attention_multiplier": 0.5, "residual_multiplier": 0.7}
MULTIPLIERS["logits_scaling"] = 1.3
CASES = {
    "llama": ("llama", {}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 1} | TIED),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True} | HEADS_OF_14),
    "mistral": ("mistral", {"sliding_window": None} | HEADS_OF_14),
    "mistral-window": ("mistral", {"sliding_window": WINDOW} | HEADS_OF_14),
    "qwen2": ("qwen2", TIED),
    "qwen2-window": ("qwen2", WINDOWS | {"max_window_layers": 1}),
    "qwen3": ("qwen3", HEADS_OF_14 | TIED),
    "qwen3-window": (
        "qwen3",
        HEADS_OF_14 | WINDOWS | {"attention_bias": True, "layer_types": MIXED},
    ),
    "granite": ("granite", MULTIPLIERS | {"attention_bias": True} | TIED),
    # the last layer is not rotated, and kept
    "smollm3": ("smollm3", {"no_rope_layer_interval": 3}),
    "phi3-window": ("phi3", {"sliding_window": WINDOW} | TIED),
    "phi3-partial": ("phi3", {"rope_parameters": SIX_OF_EIGHT}),
    # 12 of 32 are rotated
    "neox-partial": ("gpt_neox", NEOX | {"rotary_pct": 0.375, "use_parallel_residual": True}),
    "neox-sequential": ("gpt_neox", NEOX | {"rotary_pct": 1.0, "use_parallel_residual": False}),
    "neox-no-bias": (
        "gpt_neox",
        NEOX | {"rotary_pct": 0.25, "attention_bias": False, "rotary_emb_base": 500},
    ),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES)
# the first case of each family, for what does not depend on its other fields
ONE_CASE_EACH = {family: case for case, (family, _) in reversed(CASES.items())}
CONSTRAINTS = pytest.mark.parametrize("constraint", ["slack", "strict"])
# where a family has several cases, both constraints are among them
EVERY_CASE_UNDER_ONE_CONSTRAINT = pytest.mark.parametrize(
    ("case", "constraint"), [*zip(CASES, itertools.cycle(["slack", "strict"]))]
)


def stock_config(case, **changes):
    """Transformers' own configuration, eager, because the reference takes the place of eager
    attention.
    """
    family, fields = CASES[case]
    fields = {name: value for name, value in (SHAPE | fields | changes).items() if value is not ...}
    return CONFIG_MAPPING[family](**fields, attn_implementation="eager")


def stock_model(case, **changes):
    """Random weights, biases and norms included: none is 0 or 1, where it could be left out and
    nobody would see.
    """
    torch.manual_seed(6)
    model = AutoModelForCausalLM.from_config(
        stock_config(case, **changes), attn_implementation="eager"
    ).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
    return model


def rotated_dims(config):
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return head_dim, int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))


def pairs(config):
    """Where the family keeps the first and the second of every pair of a head: two index lists of
    length j.
    """
    head_dim, rotated = rotated_dims(config)
    first = [*range(rotated // 2), *range(rotated, (rotated + head_dim) // 2)]
    second = [*range(rotated // 2, rotated), *range((rotated + head_dim) // 2, head_dim)]
    return torch.tensor(first), torch.tensor(second)


def key_rows(stock, layer):
    """The rows of the layer's key projection, and of its bias, as views by head: (g, d, ...)."""
    config = stock.config
    head_dim, _ = rotated_dims(config)
    if config.model_type == "gpt_neox":
        fused = stock.gpt_neox.layers[layer].attention.query_key_value
        return {
            name: p.data.unflatten(0, (-1, 3, head_dim))[:, 1]
            for name, p in fused.named_parameters()
        }
    attention = stock.model.layers[layer].self_attn
    if config.model_type == "phi3":
        heads = attention.qkv_proj.weight.data.unflatten(0, (-1, head_dim))
        queries, groups = config.num_attention_heads, config.num_key_value_heads
        return {"weight": heads[queries : queries + groups]}
    projection = attention.k_proj
    return {name: p.data.unflatten(0, (-1, head_dim)) for name, p in projection.named_parameters()}


def carry_t_(stock, coca):
    """Write the coefficients' projections of `coca` to both rows of their pairs in the stock
    model's keys.
    """
    first, second = pairs(stock.config)
    for layer, coca_layer in enumerate(coca.model.layers):
        attention = coca_layer.self_attn
        if layer in coca.config.coca_kept_layers:
            continue
        for name, rows in key_rows(stock, layer).items():
            t = getattr(attention.t_proj, name).data.unflatten(0, (rows.shape[0], -1))
            rows[:, first] = rows[:, second] = t.to(rows.dtype)
        if stock.config.model_type == "qwen3":
            stock.model.layers[layer].self_attn.k_norm = torch.nn.Identity()
    return stock


def reference_logits(stock, constraint, ids, mask, content_of=lambda layer: NO_CONTENT):
    """Logits of a stock model whose keys carry coefficients, with CoCA's scores in the place of its
    own. content_of: the content pairs of a layer, by its number.
    """
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    base = stock.base_model
    first, second = pairs(stock.config)
    _, width = rotated_dims(stock.config)
    file = importlib.import_module(type(stock).__module__)
    plain = file.eager_attention_forward

    def attend(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        if not getattr(module, "use_rope", True):
            return plain(module, query, key, value, attention_mask, scaling, dropout, **kwargs)
        cos, sin = base.rotary_emb(query, position_ids)
        still = len(first) - width // 2
        cos = torch.nn.functional.pad(cos[:, None, :, : width // 2], (0, still), value=1.0)
        sin = torch.nn.functional.pad(sin[:, None, :, : width // 2], (0, still))
        straight = []
        for rotated in (query, key):
            real, imag = rotated[..., first], rotated[..., second]
            length = cos.square() + sin.square()
            straight += [(real * cos + imag * sin) / length, (imag * cos - real * sin) / length]
        # both rows of a pair carry one coefficient
        assert (straight[2] - straight[3]).abs().max() < 1e-4
        q, t = torch.cat(straight[:2], dim=-1), straight[2]
        content = content_of(module.layer_idx)
        scores = coca_scores(q, t, cos, sin, constraint, content) * scaling
        weights = (scores + attention_mask).softmax(-1)
        value = value.repeat_interleave(q.shape[1] // value.shape[1], dim=1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    with pytest.MonkeyPatch.context() as replaced:
        replaced.setattr(file, "eager_attention_forward", attend)
        return stock(ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits


def coca_model(
    case,
    constraint="slack",
    keep_layers=(),
    content_pairs=0,
    content_layers=(),
    attn_implementation="sdpa",
    keep_window=None,
    **changes,
):
    """The CoCA model of a stock model, patched (so with the start), and with other t weights than
    the start's.
    """
    content = {"content_pairs": content_pairs, "content_layers": content_layers}
    kept = {"keep_layers": keep_layers, "keep_window": keep_window}
    model = coca_hf.patch_(stock_model(case, **changes), constraint, **kept, **content)
    generator = torch.Generator().manual_seed(4)
    for number, layer in enumerate(model.model.layers):
        if number not in model.config.coca_kept_layers:
            for parameter in layer.self_attn.t_proj.parameters():
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    model.set_attn_implementation(attn_implementation)
    return model


def tiny_model(constraint="slack", **fields):
    """A CoCA LLaMA with random weights."""
    torch.manual_seed(5)
    config = coca_hf.CocaLlamaConfig(**(SHAPE | {"coca_constraint": constraint} | fields))
    return coca_hf.CocaLlamaForCausalLM(config).eval()


def tokens(rows=2, length=23, seed=7):
    return torch.randint(1, 89, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(padding=slice(6)):
    """`tokens()`, and a mask that leaves out `padding` of the second row."""
    mask = torch.ones_like(tokens())
    mask[1, padding] = 0
    return tokens(), mask
