"""The attention backends and loaders of transformers that run CoCA as they run LLaMA."""

import copy
import shutil
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from coca_hf import CocaLlamaConfig, convert_checkpoint
from coca_hf.models.alibi import AlibiLlamaConfig, AlibiLlamaModel
from coca_hf.models.rotary import CocaRotaryEmbedding
from tests.conftest import output_of
from tests.models.families import (
    EVERY_CASE_UNDER_ONE_CONSTRAINT,
    coca_model,
    padded,
    stock_model,
    tiny_model,
    tokens,
)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gives_the_logits_of_eager():
    fields = {"hidden_size": 96, "initializer_range": 0.1, "coca_kept_layers": [1]}
    fields |= {"coca_content_pairs": 3, "coca_content_layers": [2]}
    model = tiny_model("strict", **fields, attn_implementation="eager")
    ids, mask = padded()
    expected = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("flex_attention")
    # compiling it takes a minute, and is PyTorch's; on a GPU it is compiled below
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        got = model(ids, attention_mask=mask).logits
    assert (got - expected)[mask.bool()].abs().max() < 2e-5


@pytest.mark.parametrize(("constraint", "attention"), [("slack", "coca"), ("strict", "sdpa")])
def test_continuous_batching_gives_the_tokens_of_generate(constraint, attention):
    model = tiny_model(constraint, attn_implementation=attention)
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (5, 19, 11)]
    config = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)  # and not all of the memory
    results = model.generate_batch(prompts, config, small, progress_bar=False)
    expected = [
        model.generate(torch.tensor([p]), max_new_tokens=9, do_sample=False)[0, len(p) :].tolist()
        for p in prompts
    ]
    assert sorted(result.generated_tokens for result in results.values()) == sorted(expected)
    assert model.config._attn_implementation == attention


def test_many_sequences_in_one_row_are_refused_where_the_base_depends_on_the_sequence():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    said = "continuous batching computes many sequences as one row; bake one base in"
    with pytest.raises(ValueError, match=said):
        tiny_model(rope_parameters=rope).generate_batch([[1, 2, 3]])
    config = CocaLlamaConfig(rope_parameters=rope)
    config._attn_implementation = "vllm"  # what vLLM sets before it builds the model
    with pytest.raises(ValueError, match="vLLM computes many sequences as one row"):
        CocaRotaryEmbedding(config)


def test_vllm_is_refused_for_alibi_which_its_attention_would_leave_out():
    config = AlibiLlamaConfig()
    config._attn_implementation = "vllm"
    with (
        torch.device("meta"),
        pytest.raises(ValueError, match="whose bias vLLM's attention does not"),
    ):
        AlibiLlamaModel(config)


class Missing(torch.nn.Identity):
    """vLLM's stand-in for a layer that another stage of the pipeline has."""

    def forward(self, hidden_states, **kwargs):
        return hidden_states


@EVERY_CASE_UNDER_ONE_CONSTRAINT
def test_two_stages_of_a_pipeline_have_the_outputs_of_the_whole_model(case, constraint):
    """As vLLM splits it: the second stage is handed hidden states as `inputs_embeds`."""
    first = coca_model(case, constraint).model
    second = copy.deepcopy(first)
    expected = first(tokens()).last_hidden_state
    first.layers[1], first.layers[2], first.norm = Missing(), Missing(), Missing()
    second.layers[0] = Missing()
    got = second(inputs_embeds=first(tokens()).last_hidden_state).last_hidden_state
    assert torch.equal(got, expected)


DISTRIBUTED = """
import sys
import torch
import coca_hf
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

ids = torch.arange(20)[None]
torch.distributed.init_process_group("gloo")
for directory in sys.argv[1:]:
    for kind, how in (
        ("tensor-parallel", {"tp_plan": "auto"}),
        ("fsdp", {"distributed_config": DistributedConfig(fsdp_size=2)}),
    ):
        model = AutoModelForCausalLM.from_pretrained(directory, **how)
        assert all(isinstance(layer, FSDPModule) == (kind == "fsdp") for layer in model.model.layers)
        weight = model.model.layers[0].self_attn.t_proj.weight
        assert weight.to_local().shape[0] * 2 == weight.shape[0], weight  # half of it
        outputs = model.eval()(ids, labels=ids)
        outputs.loss.backward()
        gradient = weight.grad.full_tensor()
        generated = model.generate(ids, max_new_tokens=9, do_sample=False)
        model.save_pretrained(f"{directory}/{kind}")
        if torch.distributed.get_rank() == 0:
            results = outputs.logits.detach(), gradient, generated
            torch.save(results, f"{directory}/{kind}/results.pt")
torch.distributed.destroy_process_group()
"""


@pytest.mark.real
def test_loaded_over_two_processes_it_has_the_logits_gradients_and_tokens_of_one_and_saves_whole(
    tiny_coca_dir, tmp_path
):
    shutil.copytree(tiny_coca_dir, tmp_path / "llama")
    kept = {"keep_layers": [1], "keep_window": 9}
    for case, changes in (("qwen3", {}), ("neox-partial", {"hidden_size": 64})):
        stock_model(case, num_attention_heads=4, **changes).save_pretrained(tmp_path / "stock")
        convert_checkpoint(tmp_path / "stock", tmp_path / case, "strict", **kept)
        shutil.rmtree(tmp_path / "stock")
    directories = [*tmp_path.iterdir()]
    (tmp_path / "distributed.py").write_text(DISTRIBUTED)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    output_of(*torchrun, tmp_path / "distributed.py", *directories)
    ids = torch.arange(20)[None]
    for directory in directories:
        model = AutoModelForCausalLM.from_pretrained(directory)
        expected = model(ids, labels=ids)
        expected.loss.backward()
        tokens_of_one = model.generate(ids, max_new_tokens=9, do_sample=False)
        for place in (directory / "tensor-parallel", directory / "fsdp"):
            logits, gradient, generated = torch.load(place / "results.pt")
            assert (logits - expected.logits).abs().max() < 1e-4
            of_one = model.model.layers[0].self_attn.t_proj.weight.grad
            assert (gradient - of_one).abs().max() < 1e-5
            assert torch.equal(generated, tokens_of_one)
            assert generated.shape == (1, 29)
            saved = AutoModelForCausalLM.from_pretrained(place).state_dict()
            for name, tensor in model.state_dict().items():
                assert torch.equal(saved[name], tensor)


def test_heads_that_tensor_parallelism_split_are_refused_in_one_line():
    """What a process of two has of three heads: 48 of 96 rows."""
    model = coca_model("neox-partial", "slack")
    for layer in model.model.layers:
        for parameter in layer.self_attn.v_proj.parameters():
            parameter.data = parameter.data[:48]
    message = "left 48 rows of a projection to this process, and a head has 32; load on a number of processes that "
    with pytest.raises(ValueError, match=message):
        model(tokens())


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention", "coca"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("constraint", ["slack", "strict"])
def test_half_precision_on_a_gpu_is_near_float32_on_a_cpu(constraint, dtype, attention):
    fields = {"hidden_size": 192, "initializer_range": 0.05, "attn_implementation": "eager"}
    model = tiny_model(constraint, **fields)
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[1, :6] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits[mask.bool()]
        model = model.to("cuda", dtype)
        model.set_attn_implementation(attention)
        got = model(ids.cuda(), attention_mask=mask.cuda()).logits.cpu().float()[mask.bool()]
    assert (got - expected).norm() < 0.03 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["sdpa", "coca"])
@pytest.mark.parametrize("mode", [{"do_sample": False}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_a_model_half_on_a_gpu_and_half_on_the_cpu_has_the_same_tokens(mode, attention, tmp_path):
    model, ids = tiny_model().double(), tokens(1, 9)
    expected = model.generate(ids, max_new_tokens=12, **mode)
    model.save_pretrained(tmp_path)
    places = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.layers.0"], 0)
    places |= dict.fromkeys(["model.layers.1", "model.layers.2", "model.norm", "lm_head"], "cpu")
    how = {"device_map": places, "attn_implementation": attention}
    split = AutoModelForCausalLM.from_pretrained(tmp_path, **how)
    got = split.generate(ids.cuda(), max_new_tokens=12, **mode)
    assert torch.equal(got.cpu(), expected)
