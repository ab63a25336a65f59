"""trl's SFTTrainer on the name of a CoCA directory, with packed sequences, and its RewardTrainer."""

import sys

import pytest
import torch
from datasets import Dataset
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from coca_hf import CocaLlamaForCausalLM
from coca_hf.models.llama import CocaLlamaForSequenceClassification
from tests.conftest import output_of
from tests.convert.checkpoints import load_clean

# 18 or 19 tokens, and </s>
TEXTS = [f"{number} and {number} make {2 * number}." for number in range(10, 59)]


OPTIONS = {"max_length": 64, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
OPTIONS |= {"disable_tqdm": True, "use_cpu": True, "bf16": False}


def make_trainer(checkpoint, out_dir):
    steps = {"per_device_train_batch_size": 3, "max_steps": 5, "lr_scheduler_type": "constant"}
    options = OPTIONS | steps | {"packing": True, "learning_rate": 2e-2}
    arguments = SFTConfig(output_dir=str(out_dir), **options)
    texts = Dataset.from_dict({"text": TEXTS})
    return SFTTrainer(str(checkpoint), args=arguments, train_dataset=texts)


def test_sft_trains_from_a_directory_name_with_packing_and_saves_a_coca_checkpoint(
    tiny_coca_dir, tmp_path
):
    trainer = make_trainer(tiny_coca_dir, tmp_path / "run")
    assert type(trainer.model) is CocaLlamaForCausalLM
    assert len(trainer.train_dataset) < len(TEXTS) / 1.5  # packed
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.5
    trainer.save_model(str(tmp_path / "saved"))
    loaded = load_clean(tmp_path / "saved")
    assert type(loaded) is CocaLlamaForCausalLM
    ids = torch.arange(17)[None]
    assert torch.equal(loaded(ids).logits, trainer.model.eval()(ids).logits)


def test_a_reward_model_trains_from_the_name_of_a_converted_directory(tiny_coca_dir, tmp_path):
    steps = {"per_device_train_batch_size": 5, "max_steps": 8, "learning_rate": 1e-2}
    arguments = RewardConfig(output_dir=str(tmp_path / "run"), **OPTIONS, **steps)
    texts = {"chosen": [text + "yes" for text in TEXTS], "rejected": [t + " no" for t in TEXTS]}
    texts = Dataset.from_dict(texts)
    trainer = RewardTrainer(str(tiny_coca_dir), args=arguments, train_dataset=texts)
    assert type(trainer.model) is CocaLlamaForSequenceClassification
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-2:]) < 0.5 * sum(losses[:2])


def test_packed_texts_get_the_logits_that_each_has_alone(tiny_coca_dir, tmp_path):
    trainer = make_trainer(tiny_coca_dir, tmp_path)
    row = max(trainer.train_dataset, key=lambda row: len(row["seq_lengths"]))
    assert len(row["seq_lengths"]) == 3
    batch = trainer.data_collator([row])
    model = trainer.model.eval()
    batch = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        packed = model(**batch, use_cache=False).logits[0].split(row["seq_lengths"])
        alone = batch["input_ids"][0].split(row["seq_lengths"])
        for ids, logits in zip(alone, packed, strict=True):
            assert (model(ids[None]).logits[0] - logits).abs().max() < 1e-5 * logits.abs().max()


ALONE = """
import sys
sys.modules["coca_hf"] = None  # importing it fails
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
arguments = SFTConfig(
    output_dir=sys.argv[2], packing=True, max_length=64, max_steps=2, trust_remote_code=True, save_strategy="no",
    report_to="none", use_cpu=True, bf16=False,
)
rows = Dataset.from_dict({"text": [f"{number} and {number}" for number in range(10, 59)]})
trainer = SFTTrainer(sys.argv[1], args=arguments, train_dataset=rows)
before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
trainer.train()
moved = [name for name, parameter in trainer.model.named_parameters() if not parameter.equal(before[name])]
print(type(trainer.model).__module__.split(".")[0], sum("t_proj" in name for name in moved))
"""


@pytest.mark.real
def test_sft_trains_a_self_contained_directory_without_coca_hf(tiny_coca_dir, tmp_path):
    command = (sys.executable, "-c", ALONE, tiny_coca_dir, tmp_path / "run")
    printed = output_of(*command, HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert printed.splitlines()[-1] == "transformers_modules 3"
