"""Options for how a step is computed do not change its result, and do what they are for."""

import functools
import json
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

from coca_hf import CocaGraniteConfig, CocaGraniteForCausalLM
from coca_hf.train import objectives
from coca_hf.train.model import load_model
from coca_hf.train.objectives import linear_cross_entropy
from coca_hf.train.preflight import check_kernels, resolve_stages
from coca_hf.train.recipe import load_recipe
from coca_hf.train.stages import run_recipe
from coca_hf.train.trainer import StageTrainer, held_out_loss
from tests.conftest import TINY, refused
from tests.train.conftest import make_recipe_tree
from tests.train.results import assert_same_weights, logged, weights

TOKENS, VOCABULARY = 4 * 20, 259  # of a step


@pytest.fixture(scope="module")
def run(tiny_coca_dir, texts, tmp_path_factory):
    """Train everything for 3 steps with these options, once; returns the directory, and the shapes
    and bytes that the last forward saved, with the calls of SDPA.
    """
    path = tmp_path_factory.mktemp("options") / "recipe.yaml"
    path.write_text(yaml.safe_dump(make_recipe_tree(tiny_coca_dir, texts)))
    plain_step, plain_sdpa = StageTrainer.training_step, functional.scaled_dot_product_attention

    @functools.cache
    def run(*options: str):
        computed = SimpleNamespace(shapes=[], bytes=0, sdpa_calls=0)

        def pack(tensor):
            computed.shapes.append(tensor.shape)
            computed.bytes += tensor.numel() * tensor.element_size()
            return tensor

        def step(self, *arguments):
            computed.shapes.clear()
            computed.bytes = 0
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return plain_step(self, *arguments)

        def sdpa(query, *arguments, **kwargs):
            computed.sdpa_calls += not query.is_meta  # where recipes are checked before a run
            return plain_sdpa(query, *arguments, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StageTrainer, "training_step", step)
            patch.setattr(functional, "scaled_dot_product_attention", sdpa)
            recipe = load_recipe(path, ["stages.k.train=all", *options])
            return run_recipe(recipe, tmp_path_factory.mktemp("out"), stage="k"), computed

    return run


def assert_same(ours, theirs, atol: float) -> None:
    assert logged(ours) == pytest.approx(logged(theirs), abs=atol)
    assert_same_weights(ours, theirs, atol)


def test_recomputed_activations_are_not_kept(run):
    """Frozen embeddings would stop all gradients if checkpointing were careless."""
    for options in ((), ("stages.k.train=[t_proj]",)):
        plain, before = run(*options)
        ours, computed = run(*options, "training.gradient_checkpointing=true")
        assert_same(ours, plain, atol=0)
        assert computed.bytes < before.bytes / 2


def test_eager_attention_is_that_of_sdpa(run):
    sdpa, of_sdpa = run()
    eager, of_eager = run("training.attn_implementation=eager")
    assert (of_sdpa.sdpa_calls, of_eager.sdpa_calls) == (3 * 3, 0)  # steps, layers
    assert logged(eager) == pytest.approx(logged(sdpa), abs=1e-5)


def test_bfloat16_computes_close_to_float32_and_keeps_float32_weights(run):
    plain, _ = run()
    ours, _ = run("training.bf16=true")
    assert logged(ours) != logged(plain)
    assert logged(ours) == pytest.approx(logged(plain), abs=2e-2)
    assert {tensor.dtype for tensor in weights(ours).values()} == {torch.float32}


def test_a_compiled_run_is_the_plain_one_also_in_its_second_stage(recipe_tree, tmp_path):
    """One layer, with a backend that traces both passes but does not compile C++ for minutes.
    Forwards on held-out and on other blocks are compiled each, and torch keeps to a limit.
    """
    small = {"model_type": "coca_llama", **TINY, "num_hidden_layers": 1}
    recipe_tree |= {"tokenizer": recipe_tree.pop("model"), "config": small}
    recipe_tree["data"]["held_out_blocks"] = 2
    recipe_tree["training"] |= {"max_steps": 1, "per_device_train_batch_size": 2}
    stages = [{"name": "k", "train": ["t_proj"]}, {"name": "full", "train": "all"}]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_tree | {"stages": stages}))
    run_recipe(load_recipe(path), tmp_path / "plain")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = ["training.torch_compile=true", "training.torch_compile_backend=aot_eager"]
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        run_recipe(load_recipe(path, compiled), tmp_path / "out")
    assert torch._dynamo.utils.counters["aot_autograd"]["ok"] > 0
    for stage in ("1-k", "2-full"):
        assert_same(tmp_path / "out" / stage, tmp_path / "plain" / stage, atol=1e-6)


@pytest.mark.parametrize("settings", [[], ["training.tf32=true"]], ids=["not asked", "asked"])
def test_compilation_leaves_float32_as_it_is_unless_the_recipe_asks_for_tf32(
    train, monkeypatch, settings
):
    """Where torch_compile is set, TrainingArguments and Accelerator turn TF32 on on a GPU, for all
    stages that follow.
    """
    whole, in_steps = [], []
    make, step = StageTrainer.create_accelerator_and_postprocess, StageTrainer.training_step

    def make_as_on_a_gpu(self):
        make(self)
        torch.backends.cuda.matmul.allow_tf32 = True

    def watched(self, *arguments):
        in_steps.append(torch.backends.cuda.matmul.allow_tf32)
        return step(self, *arguments)

    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: True)
    monkeypatch.setattr("transformers.training_args.enable_tf32", whole.append)
    monkeypatch.setattr(StageTrainer, "create_accelerator_and_postprocess", make_as_on_a_gpu)
    monkeypatch.setattr(StageTrainer, "training_step", watched)
    monkeypatch.setattr("accelerate.Accelerator.prepare_model", lambda self, model, **_: model)
    try:
        train("training.torch_compile=true", "stages.k.max_steps=1", *settings)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert whole[-1] is bool(settings)
    assert in_steps == [bool(settings)]


@pytest.mark.parametrize(
    "options", [[], ["training.bf16=true"], ["stages.k.lora={r: 3, alpha: 6}"]]
)
def test_a_fused_cross_entropy_never_holds_the_logits_of_all_tokens(run, monkeypatch, options):
    monkeypatch.setattr(objectives, "_CHUNK_TOKENS", 7)  # does not divide 80
    plain, before = run(*options)
    ours, computed = run(*options, "training.fused_cross_entropy=true")
    plain_rows, our_rows = (
        [shape.numel() // VOCABULARY for shape in run.shapes if shape[-1:] == (VOCABULARY,)]
        for run in (before, computed)
    )
    assert TOKENS in plain_rows
    assert max(our_rows, default=0) <= 7
    assert_same(ours, plain, atol=1e-2 if "training.bf16=true" in options else 1e-5)


def test_a_fused_cross_entropy_of_a_model_that_caps_its_logits_is_refused(
    recipe_path, tiny_coca_dir, tmp_path
):
    """It would cap hidden states instead."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    Gemma2ForCausalLM(Gemma2Config(**sizes)).save_pretrained(tmp_path / "gemma")
    AutoTokenizer.from_pretrained(tiny_coca_dir).save_pretrained(tmp_path / "gemma")
    fused = "training.fused_cross_entropy=true"
    settings = [f"model={tmp_path / 'gemma'}", "stages=[{name: a, train: all, max_steps: 1}]"]
    check_kernels(load_recipe(recipe_path, settings))
    message = (
        r"stages\.a: got fused_cross_entropy with final_logit_softcapping 30\.0, which would cap"
    )
    refused(message, check_kernels, load_recipe(recipe_path, [*settings, fused]))


class Largest(TorchDispatchMode):
    """The size of the largest tensor made with the vocabulary as its last dimension."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and result.shape[-1:] == (VOCABULARY,):
            self.numbers = max(self.numbers, result.numel())
        return result


def test_the_held_out_loss_of_a_fused_cross_entropy_never_holds_all_logits_and_is_the_plain_one(
    tiny_coca_dir, monkeypatch
):
    monkeypatch.setattr(objectives, "_CHUNK_TOKENS", 7)
    model, blocks = load_model(str(tiny_coca_dir)), torch.arange(3, 183).view(3, 60)
    plain = held_out_loss(model, model.get_output_embeddings(), blocks, 2)
    objectives.fuse_cross_entropy_(model)
    with Largest() as largest:
        fused = held_out_loss(model, model.get_output_embeddings(), blocks, 2)
    assert fused == pytest.approx(plain, rel=1e-6)
    # the head itself; all logits are 120 * VOCABULARY
    assert largest.numbers == TINY["hidden_size"] * VOCABULARY


def test_a_fused_cross_entropy_scales_the_logits_of_granite():
    config = CocaGraniteConfig(**TINY, vocab_size=53, logits_scaling=0.25, initializer_range=0.4)
    model, ids = CocaGraniteForCausalLM(config).train(), torch.arange(40).view(2, 20)
    plain = model(ids, labels=ids).loss.item()
    objectives.fuse_cross_entropy_(model)
    assert model(ids, labels=ids).loss.item() == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("num_items", [None, 5, torch.tensor(23)])
def test_a_fused_cross_entropy_is_the_plain_one_with_its_gradients(num_items, monkeypatch):
    monkeypatch.setattr(objectives, "_CHUNK_TOKENS", 4)  # does not divide 3 x 5
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = torch.nn.Linear(7, 11, device=device)
    hidden = torch.randn(3, 5, 7, requires_grad=True, device=device)
    labels = torch.randint(11, (3, 5), device=device)
    labels[1, 2:] = -100
    targets = labels[:, 1:].flatten()
    logits = head(hidden)[:, :-1].flatten(0, 1).float()
    expected = functional.cross_entropy(logits, targets, reduction="sum")
    expected = expected / ((targets >= 0).sum() if num_items is None else num_items)
    inputs = (hidden, head.weight, head.bias)
    wanted = torch.autograd.grad(expected, inputs)
    loss = linear_cross_entropy(head, hidden, labels, num_items)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, inputs), wanted)


FSDP, BF16 = {"ACCELERATE_USE_FSDP": "true"}, {"ACCELERATE_MIXED_PRECISION": "bf16"}
MIXED = ["training.bf16=true", "stages.qkv.bf16=false", "stages.qkv.fp16=true"]
GOT_BF16 = "got mixed_precision bf16 from accelerate launch, expected"
GOT_FP16 = "got fp16 on a CPU, where losses are not scaled; expected bf16, or neither"
LAUNCHES = [  # the environment, as `accelerate launch` sets it, and settings
    *(
        (
            {f"PARALLELISM_CONFIG_{kind}_SIZE": "2"},
            [],
            f"parallelism_config_{kind.lower()}_size: got 2, expected 1",
        )
        for kind in ("CP", "SP", "TP")
    ),
    # FSDP 1 rounds rotary frequencies
    (FSDP | {"FSDP_VERSION": "1"}, [], r"fsdp_version: got 1, expected 2: .* fsdp_version: 2 in "),
    (FSDP, [], r"fsdp_version: got 1, expected 2: .* fsdp_version: 2 in "),
    (BF16, [], rf"stages\.k: {GOT_BF16} no: the recipe"),
    (BF16, MIXED, rf"stages\.qkv: {GOT_BF16} fp16"),
    ({}, ["training.fp16=true"], rf"stages\.k: {GOT_FP16}"),
]


@pytest.mark.parametrize(("environment", "settings", "message"), LAUNCHES)
def test_a_launch_that_would_train_otherwise_than_the_recipe_says_is_refused(
    train, tmp_path, monkeypatch, environment, settings, message
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    refused(message, train, *settings, stage=None)
    assert not (tmp_path / "out").exists()


def test_a_launcher_with_the_precision_of_the_stages_is_not_refused(
    recipe_path, tmp_path, monkeypatch
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert len(resolve_stages(load_recipe(recipe_path, ["training.bf16=true"]), tmp_path)) == 3


@pytest.mark.parametrize("has_it", [True, False])
def test_bf16_on_a_cpu_that_has_to_emulate_it_is_announced(
    recipe_path, tmp_path, monkeypatch, capsys, has_it
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_it})
    for settings in (["training.bf16=true", "stages.qkv.bf16=false"], []):
        resolve_stages(load_recipe(recipe_path, settings), tmp_path)
    stages = ("k", "full") if not has_it else ()
    said = [line.partition(" may take")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == [f"stages.{name}: bf16" for name in stages]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_mixed_precision_on_a_gpu_trains_as_float32_does(dtype, train, tmp_path):
    """fp16's loss scaler skips the first steps, so its last loss is only compared roughly."""
    losses = {}
    for name, options in {"mixed": [f"training.{dtype}=true"], "full": []}.items():
        out = tmp_path / name
        train("training.use_cpu=false", *options, stage=None, out=out)
        lines = [line for log in sorted(out.glob("*/log.jsonl")) for line in log.open()]
        losses[name] = torch.tensor([json.loads(line)["loss"] for line in lines])
    assert losses["mixed"].isfinite().all()
    difference = (losses["mixed"] - losses["full"]).abs()
    assert difference[slice(None) if dtype == "bf16" else slice(1)].max() < 0.05
    assert difference[-1] < 0.3
