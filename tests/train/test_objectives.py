"""Losses against plain formulas; teachers, which never change; stages that use them."""

import pytest
import torch
from torch.nn.functional import kl_div
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from coca_hf.train import objectives
from coca_hf.train.model import load_model, load_teacher
from coca_hf.train.objectives import Objective, chunk_cross_entropy_, distillation_loss
from coca_hf.train.recipe import load_recipe
from coca_hf.train.stages import run_recipe
from tests.conftest import TINY
from tests.train.results import log_lines


def test_distillation_is_the_mean_divergence_with_its_gradient(monkeypatch):
    monkeypatch.setattr(objectives, "_CHUNK_TOKENS_OF_CPU", 7)  # does not divide 3 x 5
    student, teacher = torch.randn(3, 5, 11, requires_grad=True), torch.randn(3, 5, 11)
    ours, theirs = student.log_softmax(-1).view(-1, 11), teacher.softmax(-1).view(-1, 11)
    expected = kl_div(ours, theirs, reduction="batchmean")
    (wanted,) = torch.autograd.grad(expected, student)
    loss = distillation_loss(student, teacher)
    (gradient,) = torch.autograd.grad(loss, student)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("num_items", [None, 23, torch.tensor(23)])
@pytest.mark.parametrize("shifted", [False, True])
def test_cross_entropy_in_chunks_is_the_plain_one_with_its_gradient(
    num_items, shifted, monkeypatch
):
    monkeypatch.setattr(objectives, "_CHUNK_TOKENS_OF_CPU", 7)
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    logits, labels = torch.randn(3, 5, 11, requires_grad=True), torch.randint(11, (3, 5))
    labels[1, 2:] = -100
    kwargs = {"shift_labels": labels.roll(-2, 1)} if shifted else {}
    expected = model.loss_function(logits, labels, 11, num_items, **kwargs)
    (wanted,) = torch.autograd.grad(3 * expected, logits)
    chunk_cross_entropy_(model)
    loss = model.loss_function(logits, labels, 11, num_items, **kwargs)
    (gradient,) = torch.autograd.grad(3 * loss, logits)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("loss", ["distillation", "cross-entropy"])
def test_small_gradients_are_scaled_before_float16_rounds_them(loss):
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    chunk_cross_entropy_(model)
    teacher, labels = torch.zeros(1, 2, 11), torch.zeros(1, 2, dtype=torch.long)
    teacher[..., 0] = 18  # all other predictions are below float16's smallest number
    gradients = []
    for dtype in (torch.float16, torch.float32):
        student = (teacher * 0.99).to(torch.float16).to(dtype).requires_grad_()
        if loss == "distillation":
            value = distillation_loss(student, teacher.to(dtype))
        else:
            value = model.loss_function(student, labels, 11)
        gradients.append(torch.autograd.grad(value * 2.0**16, student)[0].float())
    torch.testing.assert_close(*gradients, rtol=2e-3, atol=0)


def test_autocast_leaves_the_divergence_in_float32():
    student, teacher = torch.randn(3, 50, 11), torch.randn(3, 50, 11)
    with torch.autocast("cpu", torch.bfloat16):
        found = distillation_loss(student, teacher)
    assert torch.equal(found, distillation_loss(student, teacher))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_teacher_kept_in_half_precision_predicts_the_same_bits_under_autocast(
    dtype, tied, tiny_tokenizer, tmp_path
):
    config = LlamaConfig(vocab_size=len(tiny_tokenizer), **TINY, tie_word_embeddings=tied)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    whole, half = load_model(str(tmp_path)), load_teacher(str(tmp_path), dtype)
    kept = {parameter.dtype for parameter in half.parameters() if parameter.dim() == 2}
    assert kept == {dtype, torch.float32}  # float32: the embeddings
    assert half.lm_head.weight.dtype == (torch.float32 if tied else dtype)
    with torch.autocast("cpu", dtype), torch.no_grad():
        ids = torch.arange(4, 64).view(2, 30)
        assert torch.equal(half(input_ids=ids).logits, whole(input_ids=ids).logits)


def test_a_teacher_with_longrope_predicts_the_same_for_a_block_alone_and_beside_longer_ones(
    tmp_path,
):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0, 4.0, 8.0, 16.0]}
    lengths = {"original_max_position_embeddings": rope["original_max_position_embeddings"]}
    config = Phi3Config(**TINY, **lengths, vocab_size=11, pad_token_id=0, rope_parameters=rope)
    config.initializer_range = 0.5
    Phi3ForCausalLM(config).save_pretrained(tmp_path)
    teacher, ids = load_teacher(str(tmp_path)), torch.randint(11, (2, 9))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["position_ids"] = torch.arange(9) + torch.tensor([[0], [50]]) * (torch.arange(9) > 4)
    alone = [{name: given[row : row + 1] for name, given in inputs.items()} for row in (0, 1)]
    with torch.no_grad():
        expected = torch.cat([teacher(**block, use_cache=False).logits for block in alone])
        torch.testing.assert_close(teacher(**inputs, use_cache=False).logits, expected)


def test_a_student_that_is_its_teacher_has_nothing_to_learn_from_it(tiny_llama_dir):
    student, teacher = load_model(str(tiny_llama_dir)).train(), load_model(str(tiny_llama_dir))
    ids = torch.arange(4, 24)[None]
    objective = Objective({"distill": 0.5}, teacher)
    outputs = student(input_ids=ids, labels=ids)
    loss = objective(outputs.loss, outputs.logits, {"input_ids": ids}, 1)
    assert loss.item() == pytest.approx(0, abs=1e-6)
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert not teacher.training
    assert set(objective.take_means()) == {"loss_lm", "loss_distill"}


def test_a_stage_logs_each_loss_and_saves_no_teacher(recipe_path, tiny_llama_dir, tmp_path):
    before = (tiny_llama_dir / "model.safetensors").read_bytes()
    out, mixed = tmp_path / "out", "stages.qkv.objective={lm: 0.5, distill: 0.25}"
    settings = [f"teacher={tiny_llama_dir}", mixed, "stages.qkv.logging_steps=1"]
    recipe = load_recipe(recipe_path, settings)
    for stage in ("k", "qkv"):
        run_recipe(recipe, out, stage, resume=True)
    for line in log_lines(out / "2-qkv"):
        parts = 0.5 * line["loss_lm"] + 0.25 * line["loss_distill"]
        assert line["loss"] == pytest.approx(parts, rel=1e-4)
        assert line["loss_distill"] > 0
    assert "loss_lm" not in (out / "1-k/log.jsonl").read_text()
    states = (load_model(str(out / stage)).state_dict() for stage in ("1-k", "2-qkv"))
    one, other = ({name: value.shape for name, value in state.items()} for state in states)
    assert one == other
    assert (tiny_llama_dir / "model.safetensors").read_bytes() == before


def test_the_weight_of_the_only_objective_counts(recipe_path, unbroken, tmp_path):
    half = load_recipe(recipe_path, ["stages.k.objective={lm: 0.5}"])
    ours = log_lines(run_recipe(half, tmp_path / "out", stage="k"))
    plain = log_lines(unbroken / "1-k")
    for key in ("loss", "grad_norm"):
        assert ours[0][key] == pytest.approx(0.5 * plain[0][key], rel=1e-5)
    assert ours[0]["loss_lm"] == pytest.approx(plain[0]["loss"], rel=1e-5)
