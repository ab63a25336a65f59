"""Two processes that share every block, against one process. torch's ring attention has no kernel
for a CPU: attention that gathers all keys and values replaces it, and everything else is what runs
on GPUs.
"""

import functools
import json

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, MistralConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import coca_hf
from coca_hf import CocaError
from coca_hf.train import preflight
from coca_hf.train.preflight import check_model_for_context_parallel, resolve_stages
from coca_hf.train.recipe import load_recipe
from coca_hf.train.stages import run_recipe
from coca_hf.train.trainer import StageTrainer
from tests.conftest import TINY, refused
from tests.train.corpora import corpus_of, tokens_of
from tests.train.layouts import DDP, FSDP2, Run, interrupt_in_step, launch, succeed
from tests.train.results import assert_same_weights, logged, record

SEQ_LEN = 72  # beyond the trained 64, so that dynamic NTK turns by other angles
SHARED = "training.context_parallel_size=2"
FRUGAL = ["training.fused_cross_entropy=true", "training.gradient_checkpointing=true"]
KINDS = {
    "slack": (coca_hf.CocaLlamaConfig, "dynamic"),
    "strict": (coca_hf.CocaLlamaConfig, "linear"),
    "llama": (LlamaConfig, "linear"),
}


@pytest.fixture(scope="module")
def recipes(tiny_tokenizer, real_recipe, tmp_path_factory):
    """For each kind, a recipe of one stage, 4 blocks a step; `lora` is slack with adapters."""
    directory = tmp_path_factory.mktemp("kinds")
    tree = yaml.safe_load(real_recipe.read_text())
    tree["data"]["seq_len"] = SEQ_LEN
    # otherwise Adam amplifies the rounding of gradients that are nearly zero
    tree["training"]["adam_epsilon"] = 1e-4
    tree["training"]["learning_rate"] = 1e-4  # rounding of a step moves the next one's gradient
    stage = {"name": "k", "train": "all", "max_steps": 2}

    def write(name, model, stage):
        own = {"model": str(directory / model), "stages": [stage]}
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(tree | own))

    for kind, (config, rope_type) in KINDS.items():
        torch.manual_seed(1)
        rope = {"rope_type": rope_type, "factor": 4.0, "rope_theta": 10000.0}
        own = {"coca_constraint": kind} if kind in ("slack", "strict") else {}
        sizes = {**TINY, "initializer_range": 0.3, "vocab_size": len(tiny_tokenizer)}
        model = AutoModelForCausalLM.from_config(config(**sizes, **own, rope_parameters=rope))
        model.save_pretrained(directory / kind)
        tiny_tokenizer.save_pretrained(directory / kind)
        write(kind, kind, stage)
    write("lora", "slack", stage | {"lora": {"r": 3, "alpha": 6}})
    return directory


def gathering_attention(
    module, query, key, value, mask, scaling, position_ids, is_causal=None, **kwargs
):
    """Causal attention of the tokens here with those of all processes. (b, h, m, d) each."""
    if query.shape[2] == SEQ_LEN:  # the held-out loss, on whole blocks
        kwargs |= {"scaling": scaling, "is_causal": is_causal}
        return plain_sdpa(module, query, key, value, mask, **kwargs)
    assert mask is None
    assert is_causal
    groups = query.shape[1] // key.shape[1]
    key, value = (
        torch.cat(all_gather(part.contiguous()), dim=2).repeat_interleave(groups, 1)
        for part in (key, value)
    )
    positions = torch.cat(all_gather(position_ids.contiguous()), dim=1)
    seen = positions[:, None, None] <= position_ids[:, None, :, None]
    scores = (query @ key.mT * scaling).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


plain_sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]


def on_a_cpu(report=None):
    """Pretend that ring attention has a kernel here; write what is dealt to `report`."""
    preflight.RING_DEVICES = ("cuda", "cpu")
    ALL_ATTENTION_FUNCTIONS.register("sdpa", gathering_attention)
    plain = StageTrainer.compute_loss

    def compute_loss(self, model, inputs, *arguments, **kwargs):
        if report:
            tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
            line = {name: value.tolist() for name, value in tensors.items()}
            with open(f"{report}-{dist.get_rank()}.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
        return plain(self, model, inputs, *arguments, **kwargs)

    StageTrainer.compute_loss = compute_loss


def interrupted_on_a_cpu():
    on_a_cpu()
    interrupt_in_step(2)


@pytest.fixture(scope="module")
def runs(recipes, tmp_path_factory):
    """OUT of each recipe on two processes that share blocks; strict with the memory savers."""
    directory = tmp_path_factory.mktemp("shared")
    watch = functools.partial(on_a_cpu, str(directory / "dealt"))
    runs = []
    for kind in [*KINDS, "lora"]:
        arguments = [recipes / f"{kind}.yaml", "--out", directory / kind, SHARED]
        arguments += FRUGAL if kind == "strict" else []
        runs.append(Run(arguments, FSDP2, watch if kind == "slack" else on_a_cpu))
    succeed(directory, runs)
    return directory


@pytest.mark.real
@pytest.mark.parametrize("kind", [*KINDS, "lora"])
def test_processes_that_share_blocks_train_as_one_with_whole_ones(recipes, runs, tmp_path, kind):
    run_recipe(load_recipe(recipes / f"{kind}.yaml"), tmp_path / "one")
    ours, theirs = runs / kind / "1-k", tmp_path / "one/1-k"
    for key, bound in {"loss": 2e-6, "grad_norm": 2e-5, "tokens_seen": 0}.items():
        assert logged(ours, key) == pytest.approx(logged(theirs, key), rel=bound), key
    records = [record(ours), record(theirs)]
    for key in ("tokens", "end_block", "blocks_per_step"):
        assert records[0][key] == records[1][key]
    assert records[0]["hardware"]["processes"] == 2
    for key in ("before", "after"):
        assert records[0]["held_out"][key] == pytest.approx(records[1]["held_out"][key], abs=1e-4)
    assert_same_weights(ours, theirs, atol=1e-5)


@pytest.mark.real
def test_two_processes_that_share_blocks_resume_to_the_same_bits(recipes, runs, tmp_path):
    arguments = [recipes / "slack.yaml", "--out", tmp_path / "out", SHARED, "stages.k.save_steps=1"]
    interrupted = Run(arguments, FSDP2, interrupted_on_a_cpu)
    resumed = Run([*arguments, "--resume"], FSDP2, on_a_cpu)
    assert "continues after step 1" in succeed(tmp_path, [interrupted, resumed])
    ours, theirs = tmp_path / "out/1-k", runs / "slack/1-k"
    for key in ("step", "loss", "grad_norm", "tokens_seen"):
        assert logged(ours, key) == logged(theirs, key)
    assert_same_weights(ours, theirs)


@pytest.mark.real
def test_the_parts_have_the_positions_and_labels_that_they_have_in_the_block(recipes, runs):
    stream = iter(tokens_of(corpus_of(load_recipe(recipes / "slack.yaml")).blocks()))
    files = [(runs / f"dealt-{rank}.jsonl").read_text().splitlines() for rank in (0, 1)]
    dealt = [list(map(json.loads, lines)) for lines in files]
    assert len(dealt[0]) == len(dealt[1]) == 2 * 2  # steps, batches of 2 blocks
    for parts in zip(*dealt, strict=True):
        for row in range(2):
            block = next(stream)
            positions = [part["position_ids"][row] for part in parts]
            assert sorted(positions[0] + positions[1]) == list(range(SEQ_LEN))
            assert len(positions[0]) == SEQ_LEN // 2
            for part in parts:
                places = part["position_ids"][row]
                assert part["input_ids"][row] == [block[place] for place in places]
                assert part["shift_labels"][row] == [[*block, -100][place + 1] for place in places]


def test_steps_count_groups_and_not_processes(recipes):
    recipe = load_recipe(recipes / "slack.yaml", ["training.context_parallel_size=4"])
    del recipe.training["global_batch_size"]
    stage = recipe.stages[0]
    assert recipe.blocks_per_step(stage, 32) == 8 * 2
    assert recipe.num_blocks(32) == 2 * 8 * 2
    assert recipe.accumulation(stage, 32) == 1
    message = r"stages\.k: got context_parallel_size 4 on 6 processes, expected a divisor"
    refused(message, recipe.num_blocks, 6)


def test_a_block_of_more_gpus_than_there_are_is_refused_in_one_line(recipes, tmp_path, monkeypatch):
    recipe = load_recipe(recipes / "slack.yaml", [SHARED])
    with pytest.raises(CocaError, match=r"on a cpu, for which torch has no ring attention"):
        resolve_stages(recipe, tmp_path / "out")
    monkeypatch.setattr(preflight, "RING_DEVICES", ("cpu",))
    for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION"):
        monkeypatch.setenv(name, FSDP2[name])
    message = r"stages\.k: got context_parallel_size 2 on 1 processes, expected a divisor"
    refused(message, resolve_stages, recipe, tmp_path / "out")


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
MODELS = {
    "attention without SDPA": ({"attn_implementation": "eager"}, coca_hf.CocaLlamaConfig(**TINY)),
    "sliding windows": ({}, MistralConfig(**TINY, sliding_window=8)),
    "positions in its mask": ({}, coca_hf.AlibiLlamaConfig(**TINY)),
    "does not find by the name self_attn": ({}, GPTNeoXConfig(num_hidden_layers=2)),
    "attention with dropout": (
        {"attn_implementation": "sdpa"},
        coca_hf.CocaLlamaConfig(**TINY, attention_dropout=0.1),
    ),
    "rope_type dynamic of transformers' own": ({}, LlamaConfig(**TINY, rope_parameters=DYNAMIC)),
}


@pytest.mark.parametrize("reason", MODELS)
def test_a_model_whose_blocks_cannot_be_split_is_refused(reason):
    options, config = MODELS[reason]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **options)
    message = f"stages.k: context_parallel_size cannot be used with .*{reason}"
    refused(message, check_model_for_context_parallel, model, "stages.k")


@pytest.mark.real
def test_without_fsdp2_it_is_refused_in_one_line(recipes, tmp_path):
    arguments = [recipes / "slack.yaml", SHARED, "--out", tmp_path / "out"]
    launched = launch(tmp_path, [Run(arguments, DDP, on_a_cpu)])
    assert launched.wait() != 0
    assert "got context_parallel_size 2 without FSDP2, expected it" in launched.printed()
    assert not (tmp_path / "out").exists()
