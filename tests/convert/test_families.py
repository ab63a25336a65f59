"""A checkpoint of every family converts to a CoCA model that loads anywhere."""

import shutil
import sys

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from coca_hf import AlibiLlamaConfig, AlibiLlamaForCausalLM, convert_checkpoint, patch_
from coca_hf.convert.config import FAMILIES, MODELS
from coca_hf.models.attention import QUERY_SCALE, coca_key, coca_query
from tests.conftest import output_of
from tests.convert.checkpoints import edit_config, edit_weights, load_clean, refuses
from tests.models.families import (
    CASES,
    EVERY_CASE_UNDER_ONE_CONSTRAINT,
    MIXED,
    SHAPE,
    carry_t_,
    key_rows,
    pairs,
    reference_logits,
    stock_model,
    tokens,
)
from tests.models.test_golden import write_golden


@EVERY_CASE_UNDER_ONE_CONSTRAINT
def test_converted_checkpoint_loads_clean_is_the_patched_model_and_has_the_reference_logits(
    converted, case, constraint
):
    src, dst, record = converted(case, constraint)
    model = load_clean(dst)
    assert type(model) is MODELS["ForCausalLM"][FAMILIES[CASES[case][0]].coca_config]
    assert model.config.coca_constraint == constraint
    assert sum(p.numel() for p in model.parameters()) == record["parameters"]["after"]

    stock = AutoModelForCausalLM.from_pretrained(src, attn_implementation="eager")
    assert sum(p.numel() for p in stock.parameters()) == record["parameters"]["before"]
    first, second = pairs(stock.config)
    for layer in {0, 1, 2} - {*model.config.coca_kept_layers}:
        attention = model.model.layers[layer].self_attn
        scales = torch.tensor(record["start"]["scales"][layer])
        for name, rows in key_rows(stock, layer).items():
            if stock.config.model_type == "qwen3":
                k_norm = stock.model.layers[layer].self_attn.k_norm.weight.data
                rows = rows * k_norm.view(1, -1, *[1] * (rows.dim() - 2))
            of_heads = scales.view(-1, *[1] * (rows.dim() - 1))
            folded = (rows[:, first] + rows[:, second]) / 2 * of_heads
            torch.testing.assert_close(getattr(attention.t_proj, name).data, folded.flatten(0, 1))

    original = AutoModelForCausalLM.from_pretrained(src)
    before, ids = dict(original.named_parameters()), tokens()
    patched = patch_(original, constraint)
    assert patched is original
    assert not any(tensor.is_meta for tensor in (*patched.parameters(), *patched.buffers()))
    assert torch.equal(patched(ids).logits, model(ids).logits)
    kept = {id(parameter) for parameter in patched.parameters()}
    layers = [f".{layer}." for layer in patched.config.coca_kept_layers]
    replaced = ("k_proj", "k_norm", "query_key_value", "qkv_proj", "gate_up_proj")
    assert all(
        (id(p) in kept)
        != (any(part in name for part in replaced) and not any(layer in name for layer in layers))
        for name, p in before.items()
    )

    mask = torch.ones(2, 23, dtype=torch.long)
    expected = reference_logits(carry_t_(stock, model).double(), constraint, ids, mask)
    assert (model.double()(ids).logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("case", "constraint"),
    [("llama", "slack"), ("qwen2", "strict"), ("qwen3", "slack"), ("neox-partial", "strict")],
)
def test_start_bounds_the_scores_by_the_originals_bound(converted, case, constraint):
    """No input of layer 0 exceeds the bound; the worst is searched for by gradient ascent."""
    src, dst, _ = converted(case, constraint)
    model = AutoModelForCausalLM.from_pretrained(dst).requires_grad_(False)
    stock = AutoModelForCausalLM.from_pretrained(src)
    layer, g = model.model.layers[0], model.config.num_key_value_heads
    hidden, d = model.config.hidden_size, layer.self_attn.head_dim
    generator = torch.Generator().manual_seed(9)
    heads = model.config.num_attention_heads
    # every head searches for its own input
    x = torch.randn(2, heads, 64, hidden, generator=generator).requires_grad_()
    angle = torch.randn(2, heads, 1, 64, d // 2, generator=generator).requires_grad_()
    optimizer = torch.optim.Adam([x, angle], lr=0.1)
    for _ in range(150):
        (q, *_), (_, t, _) = (layer.self_attn.project(layer.input_layernorm(side)) for side in x)
        query = coca_query(q, angle[0].cos(), angle[0].sin(), constraint)
        key = coca_key(t, angle[1].cos(), angle[1].sin(), constraint)
        key = key.repeat_interleave(heads // g, dim=1)
        scores = (query * key).sum(-1).diagonal() / QUERY_SCALE  # (64, h)
        optimizer.zero_grad()
        (-scores.sum()).backward()
        optimizer.step()
    largest = scores.detach().amax(0).unflatten(0, (g, -1)).amax(1)  # (g,)
    ratio = largest / original_bounds(stock, g, d)
    has_bias = case in ("qwen2", "neox-partial")
    # a bias is a column for an input of 1, on top of the sqrt(hidden) of the norm
    assert (ratio <= (1.05 if has_bias else 1 + 1e-4)).all()
    # a start 10 times too small, or one that is 0, would show
    assert (ratio > (0.3 if case == "llama" else 0.1)).all()


def original_bounds(stock, g, d):
    """The bound on the scores of layer 0 of a stock model, per key/value head."""
    config = stock.config
    if config.model_type == "qwen3":
        attention = stock.model.layers[0].self_attn
        bound = d * attention.q_norm.weight.abs().max() * attention.k_norm.weight.abs().max()
        return bound.detach().repeat(g)
    if config.model_type == "gpt_neox":
        layer = stock.gpt_neox.layers[0]
        fused = layer.attention.query_key_value
        weights = fused.weight.data.unflatten(0, (g, 3, d)).unbind(1)[:2]
        biases = fused.bias.data.unflatten(0, (g, 3, d)).unbind(1)[:2]
        biases = [
            bias + weight @ layer.input_layernorm.bias.data
            for weight, bias in zip(weights, biases, strict=True)
        ]
    else:
        layer = stock.model.layers[0]
        projections = layer.self_attn.q_proj, layer.self_attn.k_proj
        weights = [p.weight.data.unflatten(0, (-1, d)) for p in projections]
        biases = [
            w.new_zeros(w.shape[:2]) if p.bias is None else p.bias.data.unflatten(0, (-1, d))
            for w, p in zip(weights, projections, strict=True)
        ]
    norms = []
    for weight, bias in zip(weights, biases, strict=True):
        columns = torch.cat((weight * layer.input_layernorm.weight.data, bias[..., None]), dim=-1)
        norms.append(torch.linalg.matrix_norm(columns, 2).unflatten(0, (g, -1)).amax(1))
    return config.hidden_size * norms[0] * norms[1]


LOAD_WITHOUT_COCA_HF = """
import pickle
import sys
sys.modules["coca_hf"] = None
import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code=True" in str(error), error
else:
    sys.exit("its code was run without leave")
for source in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules"), type(model).__module__
    base = AutoModel.from_pretrained(source, trust_remote_code=True)
    assert type(base).__name__ == type(model.model).__name__
    model.save_pretrained(source + "-copy")
    again = AutoModelForCausalLM.from_pretrained(source + "-copy", trust_remote_code=True)
    ids = torch.arange(60).view(2, 30) * 5 % 89
    assert torch.equal(model(ids).logits, again(ids).logits)
    assert torch.equal(model(ids).logits, pickle.loads(pickle.dumps(model))(ids).logits)
    torch.save((model(ids).logits, model.generate(ids, max_new_tokens=9)), source + "-copy/outputs.pt")
    if source.endswith("alibi"):
        continue
    for auto in (AutoModelForSequenceClassification, AutoModelForTokenClassification):
        options = {"trust_remote_code": True, "output_loading_info": True}
        model, report = auto.from_pretrained(source, num_labels=1, **options)
        assert report["missing_keys"] - {"score.bias"} == {"score.weight"}, report
        copy = f"{source}-{auto.__name__}"
        model.save_pretrained(copy)
        again, report = auto.from_pretrained(copy, **options)
        assert not any(report.values()), report
        assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)
        torch.save(model(ids).logits, f"{copy}/logits.pt")
"""
WITHOUT_COCA_HF = [  # where layers are kept, the model has the code of both kinds
    *((case, "slack", ()) for case in ("llama", "granite")),
    *((case, "slack", (2, 0)) for case in ("mistral-window", "qwen3-window", "neox-partial")),
    *((case, "strict", (2, 0)) for case in ("qwen2-window", "smollm3")),
]


@pytest.mark.real
def test_it_loads_and_saves_without_coca_hf_if_its_own_code_is_allowed_also_as_a_classifier(
    tmp_path, converted
):
    directories = [tmp_path / str(number) for number in range(len(WITHOUT_COCA_HF))]
    for directory, options in zip(directories, WITHOUT_COCA_HF, strict=True):
        shutil.copytree(converted(*options)[1], directory)
    AlibiLlamaForCausalLM(AlibiLlamaConfig(**SHAPE)).save_pretrained(tmp_path / "alibi")
    directories.append(tmp_path / "alibi")
    output_of(sys.executable, "-c", LOAD_WITHOUT_COCA_HF, *directories)
    ids = torch.arange(60).view(2, 30) * 5 % 89
    for directory in directories:
        model = AutoModelForCausalLM.from_pretrained(directory)
        assert type(model).__module__.startswith("coca_hf.")
        logits, generated = torch.load(f"{directory}-copy/outputs.pt")
        assert torch.equal(model(ids).logits, logits)
        assert torch.equal(model.generate(ids, max_new_tokens=9), generated)
        if directory.name == "alibi":
            continue
        embeddings = model.get_input_embeddings().weight
        for auto in (AutoModelForSequenceClassification, AutoModelForTokenClassification):
            classifier = auto.from_pretrained(f"{directory}-{auto.__name__}").eval()
            logits = torch.load(f"{directory}-{auto.__name__}/logits.pt")
            assert torch.equal(classifier(ids).logits, logits)
            assert torch.equal(classifier.get_input_embeddings().weight, embeddings)


@pytest.mark.parametrize(
    ("found", "fields", "options"),
    [
        ("a rotary_pct below 1", {"rotary_pct": 0.5}, {}),
        ("--constraint strict", {}, {"constraint": "strict"}),
        ("--keep-layers", {}, {"keep_layers": [0]}),
        ("--content-pairs", {}, {"content_pairs": 1}),
        ("--content-layers", {}, {"content_layers": [0]}),
    ],
)
def test_what_the_released_layout_does_not_have_is_refused(tmp_path, found, fields, options):
    write_golden(tmp_path / "src", "neox", **fields)
    message = f"got the released CoCA layout with {found}, expected"
    refuses(message, tmp_path / "src", tmp_path / "dst", released=True, **options)


@pytest.mark.parametrize("case", ["mha", "dynamic"])
def test_a_rotary_base_that_the_released_llama_ignores_is_refused(tmp_path, case):
    write_golden(tmp_path / "src", case, rope_theta=500000.0)
    message = "rope_theta=500000, which the authors' code ignores: it computes with 10000; set that"
    refuses(message, tmp_path / "src", tmp_path / "dst")


def test_the_command_does_not_ask_to_train_a_checkpoint_of_the_authors(tmp_path, converts):
    write_golden(tmp_path / "src", "mha")
    assert "has to be trained" not in converts(tmp_path / "src", tmp_path / "dst")


def test_the_released_layout_of_another_family_is_refused(tmp_path, converted):
    message = "got the released CoCA layout with qwen2, expected a llama or gpt_neox"
    refuses(message, converted("qwen2")[0], tmp_path / "dst", released=True)


def partial_rope(factor):
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": factor}
    return {"rope_parameters": rope}


UNSUPPORTED = {
    "mistral": {
        "got model_type 'mixtral', supported: 'llama', 'mistral', 'qwen2', 'qw": (
            {"model_type": "mixtral"}
        ),
        "got a CoCA checkpoint already": {"model_type": "coca_mistral"},
        "is not understood for 'mistral'": {"layer_types": ["full_attention"] * 3},
    },
    "llama": {
        "'olmo2' is refused: its attention reads hidden states that no norm has bounded": (
            {"model_type": "olmo2"}
        ),
        "supported: a window of mistral, qwen2, qwen3": {"sliding_window": 7},
    },
    "phi3-window": {
        "resid_pdrop=0.1 .*: dropout of attention alone": {"resid_pdrop": 0.1},
        "mlp_bias=True .*: projections without biases": {"mlp_bias": True},
    },
    "qwen2": {
        "use_mrope=True is not .*: one position to a token": {"use_mrope": True},
        "got layer_types with sliding_attention, but no sliding_window in use": (
            {"layer_types": MIXED, "sliding_window": 7, "use_sliding_window": False}
        ),
        "'chunked_attention' is not supported with CoCA; suppor": (
            {"layer_types": ["chunked_attention"] * 3}
        ),
    },
    "qwen3": {
        "num_experts=4 is not understood for 'qwen3'": {"num_experts": 4},
        "factor 0.43 is not supported with CoCA for 'qwen3'; supported: 1, or less of gpt_neox": (
            partial_rope(0.43)
        ),
    },
    "neox-partial": {
        "is not .*; supported: plain float.*; load it deq": {"quantization_config": {"bits": 4}},
        r"head_dim 32 \* partial_rotary_factor 0.3 is 9, expected an even n": partial_rope(0.3),
    },
}


@pytest.mark.parametrize(
    ("case", "message"), [(case, message) for case in UNSUPPORTED for message in UNSUPPORTED[case]]
)
def test_what_coca_does_not_support_is_refused_by_name(tmp_path, converted, case, message):
    source = shutil.copytree(converted(case)[0], tmp_path / "src")
    edit_config(source, **UNSUPPORTED[case][message])
    refuses(message, source, tmp_path / "dst")


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.1.self_attn.k_norm.weight"),
        ("phi3-partial", "model.layers.1.self_attn.qkv_proj.weight"),
        ("neox-partial", "gpt_neox.layers.2.attention.query_key_value.weight"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path, converted, case, name):
    source = shutil.copytree(converted(case)[0], tmp_path / "src")
    edit_weights(source, lambda weights: weights.pop(name))
    refuses(f"tensor {name} is missing", source, tmp_path / "dst")


def test_phi3_as_microsoft_writes_it_has_the_logits_of_the_reference(tmp_path):
    """Microsoft's code, older fields, and a partial longrope; 12 of 23 tokens are trained."""
    rope = {"type": "longrope", "short_factor": [1.0, 1.2, 1.5], "long_factor": [2.0, 3.0, 5.0]}
    fields = {"rope_scaling": rope, "rope_theta": 500.0, "partial_rotary_factor": 0.75}
    fields["original_max_position_embeddings"] = 12
    stock = stock_model("phi3-partial", rope_parameters=..., **fields)
    stock.save_pretrained(tmp_path / "src")
    fields |= {"attention_bias": False, "auto_map": {"AutoConfig": "phi3.Phi3Config"}}
    edit_config(tmp_path / "src", rope_parameters=..., **fields)
    refuses("auto_map names the checkpoint's own code", tmp_path / "src", tmp_path / "dst")
    convert_checkpoint(tmp_path / "src", tmp_path / "dst", ignore_fields=["auto_map"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dst").double()
    carry_t_(stock, model).double()
    for ids in (tokens(), tokens(2, 11)):
        expected = reference_logits(stock, "slack", ids, torch.ones_like(ids))
        assert (model(ids).logits - expected).abs().max() < 1e-5


def test_older_gpt_neox_files_convert_to_the_same_weights(tmp_path, converted):
    """`embed_out`, stored masks and angles, and rotary fields of the transformers before version 5."""
    src, dst, _ = converted("neox-partial")
    source = shutil.copytree(src, tmp_path / "src")

    def age(weights):
        if "lm_head.weight" in weights:
            weights["embed_out.weight"] = weights.pop("lm_head.weight")
        weights["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 64, 64)
        weights["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)

    edit_weights(source, age)
    fields = {"rotary_pct": 0.375, "rotary_emb_base": 10000, "rope_scaling": None}
    edit_config(source, rope_parameters=..., **fields)
    convert_checkpoint(source, tmp_path / "dst")
    got, expected = (AutoModelForCausalLM.from_pretrained(d) for d in (tmp_path / "dst", dst))
    assert torch.equal(got(tokens()).logits, expected(tokens()).logits)
