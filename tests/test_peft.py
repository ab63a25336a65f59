"""LoRA adapters on CoCA's projections, by peft: trained, saved, loaded, merged into a plain CoCA
checkpoint.
"""

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    PeftModel,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from coca_hf import CocaLlamaForCausalLM
from tests.convert.checkpoints import load_clean

IDS = torch.arange(2 * 13).reshape(2, 13) * 7 % 251


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def train(base, steps, lr):
    """The base with an adapter of rank 3 after steps of AdamW, and the loss of each step."""
    torch.manual_seed(0)
    targets = ["q_proj", "t_proj", "v_proj"]
    lora = LoraConfig(r=3, lora_alpha=12, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for _ in range(steps):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.eval(), losses


@pytest.fixture(scope="module")
def trained(tiny_coca_dir):
    base = AutoModelForCausalLM.from_pretrained(tiny_coca_dir)
    model, _ = train(base, 2, 0.05)  # the first step moves B only, which starts at zero
    return model


def test_a_saved_adapter_loads_from_its_directory_and_over_its_base(
    trained, tiny_coca_dir, tmp_path
):
    trained.save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tiny_coca_dir)
    untouched = logits(base)
    for loaded in (
        AutoPeftModelForCausalLM.from_pretrained(tmp_path),
        PeftModel.from_pretrained(base, tmp_path),
    ):
        assert isinstance(loaded.get_base_model(), CocaLlamaForCausalLM)
        assert torch.equal(logits(loaded), logits(trained))
    assert (logits(trained) - untouched).abs().max() > 0.1


def test_a_merged_model_is_a_plain_coca_checkpoint_with_equal_logits_and_tokens(trained, tmp_path):
    expected = logits(trained)
    trained.save_pretrained(tmp_path / "adapter")
    merged = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    loaded = load_clean(tmp_path / "merged")
    assert type(loaded) is CocaLlamaForCausalLM
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    assert (logits(loaded) - expected).abs().max() < 1e-5 * expected.abs().max()
    greedy = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 9, "do_sample": False}
    found, expected = (model.generate(input_ids=IDS, **greedy) for model in (loaded, trained))
    assert torch.equal(found, expected)


def test_qlora_trains_over_four_bits_and_merges_into_the_full_model(tiny_coca_dir, tmp_path):
    pytest.importorskip("bitsandbytes", reason="QLoRA needs bitsandbytes")
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    how = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **nf4)}
    base = AutoModelForCausalLM.from_pretrained(tiny_coca_dir, **how, device_map="cpu")
    assert base.model.layers[0].self_attn.t_proj.weight.dtype == torch.uint8  # two numbers a byte
    model, losses = train(prepare_model_for_kbit_training(base), 8, 0.02)
    assert losses[-1] < losses[0] - 0.1
    model.save_pretrained(tmp_path / "adapter")
    full = AutoModelForCausalLM.from_pretrained(tiny_coca_dir)
    with torch.no_grad():
        before = full(IDS, labels=IDS).loss.item()
    merged = PeftModel.from_pretrained(full, tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(plain) is CocaLlamaForCausalLM
    with torch.no_grad():
        # what was learnt over four bits holds over all
        assert plain(IDS, labels=IDS).loss.item() < before - 0.1
