"""`--calibrate`: W_Q and W_T fitted to the original's attention, layer by layer, on text."""

import copy
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import parquet
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from coca_hf import CocaError, convert_checkpoint, patch_
from coca_hf.convert import calibration as calibration_module
from coca_hf.convert.calibration import CalibrationProgress, CalibrationRun
from coca_hf.convert.calibration_text import (
    TRAINING_HELD_OUT_TOKENS,
    calibration_blocks,
    copies,
    reach,
    repeated_blocks,
)
from coca_hf.convert.layer_fit import (
    AttentionInputs,
    FitTask,
    Keys,
    Strata,
    backward,
    divergences,
    expected_seconds,
    fit,
    fold,
    run_original,
    scores,
)
from coca_hf.convert.layer_pairs import Angles, LayerPairs
from coca_hf.convert.layout import CODE
from coca_hf.convert.writer import Staging, WeightsWriter
from coca_hf.documents import TextSource, read_documents
from coca_hf.held_out import most_held_out
from coca_hf.models.attention import NO_CONTENT, ContentPairs, scaled_key
from coca_hf.precision import matrix_dtype
from coca_hf.tokens import Encoder, skipped_positions
from tests.conftest import refused
from tests.convert.checkpoints import (
    assert_same_weights,
    edit_config,
    edit_weights,
    exit_code_of,
    record_of,
    refuses,
    weights_of,
    write_text,
)
from tests.hub import serving_data_set
from tests.models.families import WINDOW, stock_model, tokens

CONTENT = ({}, {"content_pairs": 2, "content_layers": [0]})
# one of every family: of every case, test_refit.py compares the layers with those of whole models
FITTED = [
    *((case, "slack") for case in ("llama", "qwen3-window", "smollm3", "phi3-partial")),
    *((case, "strict") for case in ("mistral", "qwen2", "granite", "neox-partial")),
]


def calibrate(pairs, blocks, held_out, folder, passes, seed=0, report=lambda progress: None):
    task = FitTask(blocks, held_out, passes, seed)
    return CalibrationRun(pairs, task, folder).fit_layers(report)


def seen_in_first_layer(original, coca, ids, positions):
    layer = copy.deepcopy(original.base_model.layers[0])
    states = original.get_input_embeddings()(ids).detach()
    return run_original(layer, states, states, positions, Angles(original.base_model, coca, "cpu"))


def perplexity(model, ids):
    return math.exp(model(input_ids=ids, labels=ids).loss.item())


@pytest.mark.parametrize(("case", "constraint"), FITTED)
def test_attention_gets_closer_except_in_kept_layers_and_perplexities_are_those_of_the_models(
    case, constraint, pairs_of, tmp_path
):
    original, ids = stock_model(case), tokens(24, WINDOW)
    kept = [1] if case in ("qwen3-window", "neox-partial") else []
    pairs = pairs_of(original, constraint, kept)
    result = calibrate(pairs, ids, ids[:8], tmp_path / "layers", passes=3)
    coca = patch_(copy.copy(original), constraint, keep_layers=kept).eval()
    fitted = {0, 1, 2} - {*coca.config.coca_kept_layers}
    assert {name.split(".")[-2] for name in result.tensors} == {"q_proj", "t_proj"}
    assert {int(name.split(".")[2]) for name in result.tensors} == fitted
    for number, layer in enumerate(result.layers):
        if number in fitted:
            assert layer.kl_fitted < 0.9 * layer.kl_start
        else:
            assert layer.kl_fitted == layer.kl_start
    expected = {"original": perplexity(original, ids[:8]), "start": perplexity(coca, ids[:8])}
    assert not coca.load_state_dict(result.tensors, strict=False).unexpected_keys
    assert result.perplexity == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def test_a_loss_whose_perplexity_no_number_holds_does_not_end_a_calibration(pairs_of, tmp_path):
    original, ids = stock_model("llama"), tokens(6, WINDOW)
    original.lm_head.weight.mul_(1e6)
    with torch.enable_grad():
        result = calibrate(pairs_of(original), ids, ids[:2], tmp_path / "layers", passes=1)
    assert result.perplexity["original"] == math.exp(700)


@pytest.mark.parametrize(
    ("case", "trained_length", "length", "crowd"),
    [("llama", 64, 40, 1.6), ("qwen3-window", 64, WINDOW, 1.0), ("neox-partial", 4096, 40, 16.0)],
)
def test_a_layer_at_a_time_gives_the_bits_of_fits_in_a_whole_model(
    case, trained_length, length, crowd, pairs_of, tmp_path
):
    """Blocks of 40 tokens skip positions, so that some of their keys count for many, at most 16."""
    original = stock_model(case, max_position_embeddings=trained_length)
    ids = tokens(9, length)
    found = calibrate(pairs_of(original), ids, ids[:3], tmp_path / "layers", seed=5, passes=2)
    coca = patch_(copy.copy(original)).eval()
    angles = Angles(original.base_model, coca, "cpu")
    positions = skipped_positions(9, length, reach(original.config), seed=5)
    states = original.get_input_embeddings()(ids).detach()
    for number, layer in enumerate(original.base_model.layers):
        seen = run_original(copy.deepcopy(layer), states, states, positions, angles)
        attention = copy.deepcopy(coca.model.layers[number].self_attn)
        fit(attention, seen, passes=2, seed=5 + number, crowd=crowd)
        for name, tensor in attention.state_dict().items():
            if name.startswith(("q_proj", "t_proj")):
                assert torch.equal(found.tensors[f"model.layers.{number}.self_attn.{name}"], tensor)


def test_a_fit_in_bfloat16_gets_as_close(pairs_of, tmp_path):
    original, ids = stock_model("qwen3"), tokens(24, WINDOW)
    exact, rounded = (
        calibrate(pairs_of(original, dtype=dtype), ids, ids, tmp_path / str(dtype), passes=2)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert rounded.tensors["model.layers.1.self_attn.q_proj.weight"].dtype == torch.float32
    for one, other in zip(exact.layers, rounded.layers, strict=True):
        assert one != other
        assert one.kl_start == pytest.approx(other.kl_start, rel=0.03)
        assert other.kl_fitted < one.kl_fitted + 0.01 * one.kl_start
    assert rounded.perplexity == pytest.approx(exact.perplexity, rel=0.03)


def test_the_start_of_w_t_is_exact_under_autocast(pairs_of):
    pairs = pairs_of(stock_model("neox-partial").half(), dtype=torch.bfloat16)
    _, expected = pairs.load(1)
    with torch.autocast("cpu", torch.bfloat16):
        _, found = pairs.load(1)
    assert torch.equal(found.self_attn.t_proj.weight, expected.self_attn.t_proj.weight)
    assert found.self_attn.t_proj.weight.dtype == torch.float32
    assert found.mlp.dense_h_to_4h.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("capability", ["amx_bf16", "avx512_bf16"])
@pytest.mark.parametrize("has_it", [True, False])
def test_matrices_are_multiplied_in_bfloat16_if_the_processor_can(capability, has_it, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {capability: has_it})
    assert matrix_dtype("cpu") == (torch.bfloat16 if has_it else torch.float32)
    assert matrix_dtype("cuda") == torch.float32


@pytest.mark.parametrize("content", CONTENT)
def test_divergence_is_that_of_the_two_models_maps(content, pairs_of, tmp_path):
    original, ids = stock_model("llama"), tokens(14, 300)  # more than a batch
    coca = patch_(copy.copy(original), "slack", **content).eval()
    pairs = pairs_of(original, **content)
    result = calibrate(pairs, ids[:2], ids, tmp_path / "layers", passes=1)
    # only in the first layer do both models see the same inputs
    coca.set_attn_implementation("eager")
    ours, theirs = (  # of every second query, because a block has more than are measured
        model(ids, output_attentions=True).attentions[0][:, :, 1::2].double()
        for model in (coca, original)
    )
    expected = (torch.xlogy(theirs, theirs) - torch.xlogy(theirs, ours)).sum(-1).mean().item()
    assert result.layers[0].kl_start == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("content", CONTENT)
@pytest.mark.parametrize("case", ["llama-biases", "mistral", "qwen3", "neox-partial"])
def test_gradients_are_those_of_the_divergence_of_the_models_maps(case, content):
    original, ids = stock_model(case), tokens(5, 13)
    coca = patch_(copy.copy(original), "strict", **content).eval()
    positions = torch.tensor([0, 1, 2, 7, 8, 9, 30, 31, 32, 33, 40, 41, 60]).expand(5, -1)
    seen = seen_in_first_layer(original, coca, ids, positions)
    blocks, rows = torch.tensor([3, 1]), torch.tensor([[2, 3, 7], [5, 6, 12]])
    attention = coca.model.layers[0].self_attn
    attention.zero_grad()
    backward(attention, seen, blocks, rows, [(slice(0, 1), 6), (slice(1, 3), 13)], crowd=1)
    gradient = attention.q_proj.weight.grad.clone()

    attention.zero_grad()
    for model in (coca, original):
        model.set_attn_implementation("eager")
    ours, theirs = (
        model(ids, position_ids=positions, output_attentions=True).attentions[0][
            blocks[:, None], :, rows
        ]
        for model in (coca, original)
    )
    (-theirs.detach() * ours.clamp(min=1e-30).log()).sum(-1).mean().backward()
    assert (attention.coefficients(seen.inputs) > 0).any()
    torch.testing.assert_close(gradient, attention.q_proj.weight.grad, rtol=1e-4, atol=1e-6)


def test_a_key_before_the_skipped_positions_counts_for_a_crowd_of_equal_ones_in_both_maps():
    original, ids = stock_model("llama"), tokens(1, 9)
    coca = patch_(copy.copy(original)).eval()
    attention = coca.model.layers[0].self_attn
    positions = torch.tensor([0, 1, 2, 3, 50, 51, 90, 91, 92])
    copies_of = torch.tensor([0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 7, 8])
    # a query and the keys of row 7, and a query in the first run, where each key counts once
    seen = seen_in_first_layer(original, coca, ids, positions[None])
    assert seen.skipped.tolist() == [[0, 0, 0, 0, 46, 46, 84, 84, 84]]
    gradients = []
    for row, keys in ((7, copies_of[:-1]), (2, torch.arange(3))):
        attention.zero_grad()
        rows = torch.tensor([[row]])
        backward(attention, seen, torch.tensor([0]), rows, [(slice(0, 1), 9)], crowd=3.0)
        found = attention.t_proj.weight.grad.clone()
        attention.zero_grad()
        query, key = fold(attention, seen.inputs, (seen.cos, seen.sin), rows)
        ours = scores(query, key)[..., keys].log_softmax(-1)
        theirs = scores(seen.queries[:, [row]].transpose(1, 2), seen.keys)[..., keys].softmax(-1)
        (-theirs * ours).sum(-1).mean().backward()
        torch.testing.assert_close(found, attention.t_proj.weight.grad, rtol=1e-4, atol=1e-7)
        gradients.append(found)
    assert gradients[0].abs().max() > 1e-4


@pytest.mark.parametrize("content", [NO_CONTENT, ContentPairs(1), ContentPairs(1, True)], ids=str)
def test_a_coefficient_below_zero_has_a_tenth_of_the_gradient_that_makes_it_grow(content):
    generator = torch.Generator().manual_seed(0)
    t, unit, upstream = (
        torch.randn(shape, generator=generator)
        for shape in ((2, 3, 5, 4), (2, 1, 5, 2, 4), (2, 3, 5, 8))
    )
    t.requires_grad_(True)
    key = Keys.apply(t, unit, content)
    rotated = ~content.mask(t)
    assert torch.equal(key, scaled_key(torch.where(rotated, t.relu(), t), unit))
    key.backward(upstream)
    linear = t.detach().requires_grad_(True)
    scaled_key(linear, unit).backward(upstream)
    tenth = 0.1 * linear.grad.clamp(max=0)
    expected = torch.where((t > 0) | ~rotated, linear.grad, tenth)
    torch.testing.assert_close(t.grad, expected)
    assert (t.grad[t < 0] < 0).any()
    assert (t.grad[t < 0] == 0).any()


@pytest.mark.parametrize("length", [5, 100, 2048])
def test_drawn_queries_have_the_weights_of_the_loss_and_see_all_keys_in_any_number_of_parts(length):
    strata = Strata(length)
    rows = strata.draw(3000, 2, generator=torch.Generator().manual_seed(0))
    assert rows.shape == (3000, 2, min(48, length))
    assert (rows.diff() >= 0).all()
    expected = torch.arange(1, length + 1) ** -0.5
    expected[0] = 0
    found = rows.flatten().bincount(minlength=length) / rows.numel()
    bins = torch.arange(length) * 5 // length
    sums = [
        torch.zeros(5).index_add_(0, bins, weights)
        for weights in (found, expected / expected.sum())
    ]
    torch.testing.assert_close(sums[0], sums[1], rtol=0.02, atol=0.002)
    for number in (1, 4):
        parts = list(strata.parts(number))
        assert torch.equal(torch.cat([rows[..., part] for part, _ in parts], -1), rows)
        for part, visible in parts:
            assert part.stop == part.start or rows[..., part].max() < visible <= length


def test_positions_skip_at_a_few_places_and_stay_within_reach():
    positions = skipped_positions(200, 256, reach=8192, seed=1)
    assert torch.equal(positions, skipped_positions(200, 256, reach=8192, seed=1))
    assert not torch.equal(positions, skipped_positions(200, 256, reach=8192, seed=2))
    steps = positions.diff(prepend=torch.full((200, 1), -1))
    assert positions.min() == 0
    assert steps.min() == 1
    assert (steps > 1).sum(1).max() == 8
    last = positions[:, -1].double()
    assert last.max() <= 8191
    shares = (last - 255).div(8192 - 256).quantile(torch.linspace(0, 1, 5).double())
    torch.testing.assert_close(shares, torch.linspace(0, 1, 5).double(), rtol=0, atol=0.1)
    for length, reached in ((256, 256), (256, 64), (31, 8192)):
        assert torch.equal(
            skipped_positions(2, length, reached), torch.arange(length).expand(2, -1)
        )


def test_positions_are_in_order_if_zeros_are_drawn(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.zeros(shape))
    for length in (32, 256):
        assert torch.equal(skipped_positions(1, length, reach=8192)[0], torch.arange(length))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 4096),
        ({"rope_type": "dynamic", "factor": 8.0, "original_max_position_embeddings": 512}, 512),
        ({"rope_type": "dynamic", "factor": 8.0, "original_max_position_embeddings": 8192}, 4096),
        ({"original_max_position_embeddings": 512}, 512),
        ({"sliding_window": 1024, "layer_types": ["full_attention"] * 2}, 4096),
        ({"sliding_window": 1024, "layer_types": ["full_attention", "sliding_attention"]}, 1024),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}, 4096),
    ],
)
def test_reach_is_how_far_every_layer_attends_with_trained_angles(fields, expected):
    window = {name: fields.get(name) for name in ("sliding_window", "layer_types")}
    rope = {name: value for name, value in fields.items() if name not in window}
    config = Qwen3Config(
        max_position_embeddings=4096,
        num_hidden_layers=2,
        use_sliding_window=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0} | rope,
        **window,
    )
    assert reach(config) == expected


def test_coefficients_that_are_negative_for_every_token_come_back():
    original, ids = stock_model("qwen2"), tokens(24, WINDOW)
    coca = patch_(copy.copy(original), "strict").eval()
    seen = seen_in_first_layer(original, coca, ids, torch.arange(WINDOW).expand(24, -1))
    attention = coca.model.layers[0].self_attn
    nn.init.constant_(attention.t_proj.bias, -2)
    assert attention.coefficients(seen.inputs).max() < 0
    before = divergences(attention, seen).mean()
    fit(attention, seen, passes=10, seed=0, crowd=1)
    # the share of pairs that some token activates
    assert (attention.coefficients(seen.inputs) > 0).any((0, 2)).float().mean() > 0.8
    assert divergences(attention, seen).mean() < 0.9 * before


@pytest.mark.gpu
@pytest.mark.parametrize("content", CONTENT)
def test_a_graph_of_steps_fits_as_single_steps_do(content, monkeypatch):
    original, ids = stock_model("llama"), tokens(24, WINDOW)
    coca = patch_(copy.copy(original), **content).eval()
    seen = seen_in_first_layer(original, coca, ids, torch.arange(WINDOW).expand(24, -1))
    on_gpu = AttentionInputs(*(part.cuda() for part in seen))

    def fitted(inputs, eager):
        monkeypatch.setattr("coca_hf.convert.layer_fit.EAGER_STEPS", eager)
        attention = copy.deepcopy(coca.model.layers[0].self_attn).to(inputs.inputs.device)
        fit(attention, inputs, passes=10, seed=0, crowd=1)
        return attention

    graph, single, on_cpu = fitted(on_gpu, 3), fitted(on_gpu, 240), fitted(seen, 3)
    for one, other in zip(graph.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    found = [divergences(graph, on_gpu).mean().item(), divergences(on_cpu, seen).mean().item()]
    assert found[0] == pytest.approx(found[1], rel=0.05)
    start = divergences(coca.model.layers[0].self_attn, seen).mean().item()
    assert found[0] < 0.9 * start


@pytest.fixture
def of_source(tiny_llama_dir):
    return AutoTokenizer.from_pretrained(tiny_llama_dir), AutoConfig.from_pretrained(tiny_llama_dir)


def fixed_by_its_seed(make, blocks, of_source):
    once, again, other = (make(blocks, *of_source, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    return once


def test_repeated_blocks_repeat_passages_of_the_text_and_random_ones(of_source):
    tokenizer, config = of_source
    blocks = torch.arange(20 * 300).view(20, 300) % 41
    repeated = fixed_by_its_seed(repeated_blocks, blocks, of_source)
    assert repeated.shape == blocks.shape
    periods = []
    for number, row in enumerate(repeated):
        is_text = (row.diff() == 1) | (row.diff() == -40)
        if number % 4 < 2:  # the passage fills the block
            periods.append(next(p for p in range(1, 301) if torch.equal(row[p:], row[:-p])))
            assert is_text[: periods[-1] - 1].all() == (number % 2 == 0)
        else:  # the block has it twice, 16 tokens or more of it
            assert len({tuple(row[i : i + 16].tolist()) for i in range(285)}) < 285
            assert 10 < is_text.sum() < 299
    assert all(16 <= period <= 150 for period in periods)
    assert sum(period <= 128 for period in periods) >= 2
    assert repeated.max() < config.vocab_size
    assert not set(repeated[1::4].flatten().tolist()) & set(tokenizer.all_special_ids)


def test_copies_are_halves_of_text_and_random_ones_each_read_twice(of_source):
    blocks = torch.arange(3 * 301).view(3, 301) % 41
    found = fixed_by_its_seed(copies, blocks, of_source)
    assert found.shape == (6, 300)
    assert torch.equal(found[:, :150], found[:, 150:])
    assert torch.equal(found[:3, :150], blocks[:, :150])
    random = found[3:, :150]
    assert len(random.unique()) > 100
    assert not set(random.flatten().tolist()) & set(of_source[0].all_special_ids)


def convert(src, dst, text, **options):
    options = {"calibrate_tokens": 256, "calibrate_passes": 2} | options
    return convert_checkpoint(src, dst, calibrate_on=str(text), **options)


def test_only_queries_coefficients_and_outputs_differ_and_the_record_says_what_was_done(
    tiny_llama_dir, tmp_path, whole
):
    dst, record = whole
    plain_record = convert_checkpoint(tiny_llama_dir, tmp_path / "plain")
    ours, plain = weights_of(dst), weights_of(tmp_path / "plain")
    changed = {name for name in plain if not torch.equal(ours[name], plain[name])}
    fitted = ("q_proj", "t_proj", "o_proj")
    assert changed == {name for name in plain if name.split(".")[-2] in fitted}
    assert record == record_of(dst)
    facts = record["calibration"]
    expected = {"tokens": 256, "repeated_tokens": 256, "block_tokens": 64, "reach": 64}
    expected |= {"held_out_tokens": 512, "seed": 0, "text": "text.txt"}
    assert {name: facts[name] for name in expected} == expected
    assert len(facts["attention_kl"]) == 3
    assert all(layer["kl_fitted"] < layer["kl_start"] for layer in facts["attention_kl"])
    model = AutoModelForCausalLM.from_pretrained(dst)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(model.get_parameter(name), ours[name])
    values = facts["perplexity"]
    start, after, before = (values[name] for name in ("start", "calibrated", "original"))
    line = f"{start:,.4g} before, {after:,.4g} after, {before:,.4g} of the original"
    assert line in (dst / "README.md").read_text()
    assert record["source_xxh3_128"] == plain_record["source_xxh3_128"]


def test_a_baked_ntk_base_changes_neither_blocks_nor_positions(
    tiny_llama_dir, text, tmp_path, whole
):
    record = convert(tiny_llama_dir, tmp_path / "baked", text, ntk_length=4096)
    assert record["calibration"]["block_tokens"] == record["calibration"]["reach"] == 64
    assert record["calibration"]["attention_kl"] == whole[1]["calibration"]["attention_kl"]


def interrupt(*arguments, **options):
    """Convert until the first layer is done."""

    def stop(progress):
        if progress.layers_done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(*arguments, **options, calibrate_progress=stop)


@pytest.fixture(scope="module")
def interrupted_staging(tiny_llama_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("interrupted")
    interrupt(tiny_llama_dir, directory / "dst", write_text(directory))
    return directory / ".dst.incomplete"


@pytest.fixture
def calibrated(interrupted_staging, tmp_path):
    """What a conversion to `tmp_path / "dst"`, interrupted after its first layer, left of it."""
    return Path(shutil.copytree(interrupted_staging, tmp_path / ".dst.incomplete")) / "calibrated"


def convert_killed(*arguments):
    """Convert until the process is killed, in the second layer's fit."""

    def killed(attention, *others):
        if attention.layer_idx == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return fit(attention, *others)

    calibration_module.fit = killed
    convert(*arguments)


@pytest.fixture(scope="module")
def whole(tiny_llama_dir, tmp_path_factory):
    """A conversion that nothing interrupted: the directory and the record."""
    directory = tmp_path_factory.mktemp("whole")
    return directory / "dst", convert(tiny_llama_dir, directory / "dst", write_text(directory))


@pytest.fixture
def loads(monkeypatch):
    """The numbers of the layers that were loaded."""
    found, load = [], LayerPairs.load

    def noted(pairs, number, *fitted):
        found.append(number)
        return load(pairs, number, *fitted)

    monkeypatch.setattr(LayerPairs, "load", noted)
    return found


@pytest.mark.real
def test_killed_in_a_layer_it_continues_with_that_layer_to_the_same_bits(
    tiny_llama_dir, text, tmp_path, fits, loads, whole
):
    arguments = tiny_llama_dir, tmp_path / "cut", text
    assert exit_code_of(convert_killed, *arguments) == -signal.SIGKILL
    [file] = tmp_path.glob(".cut.incomplete/*/seconds.json")
    spent = json.loads(file.read_text())
    spent["seconds"]["steps"] += 1000
    file.write_text(json.dumps(spent))
    record = convert(*arguments)
    assert (
        record["calibration"]["seconds"] > record["calibration"]["seconds_by_part"]["steps"] > 1000
    )
    assert fits == [1, 2]
    assert 0 not in loads[:-3]  # in which all layers get their W_O
    assert_same_weights(tmp_path / "cut", whole[0])
    for fact in ("perplexity", "attention_kl"):
        assert record["calibration"][fact] == whole[1]["calibration"][fact]
    assert not (tmp_path / ".cut.incomplete").exists()


def test_finished_shards_stay_while_a_rerun_chooses_layers(
    tiny_llama_dir, text, tmp_path, monkeypatch
):
    written, finished = [], []
    write, record = WeightsWriter._write_shard, Staging.record

    def stop_after_two(staging, one):
        record(staging, one)
        finished.append(one.shard)
        if len(finished) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Staging, "record", stop_after_two)
    monkeypatch.setattr("coca_hf.convert.layer_fit.TRIAL_STEPS", 8)
    options = {"keep_layers": 1, "content_layers": "auto"}
    options |= {"max_shard_size": "64KB", "calibrate_passes": 1}
    with pytest.raises(KeyboardInterrupt):
        convert(tiny_llama_dir, tmp_path / "dst", text, **options)
    monkeypatch.setattr(Staging, "record", record)
    monkeypatch.setattr(
        WeightsWriter,
        "_write_shard",
        lambda writer, shard: written.append(shard) or write(writer, shard),
    )
    convert(tiny_llama_dir, tmp_path / "dst", text, **options)
    assert not {*finished} & {*written}


@pytest.mark.parametrize("damage", [lambda data: data[:-1] + b"?", lambda data: data[:-1000]])
def test_damaged_states_are_recomputed_and_fitted_layers_reused(
    damage, tiny_llama_dir, text, tmp_path, calibrated, fits, loads, whole
):
    for states in (calibrated / "states-0", calibrated / "states-1"):
        states.write_bytes(damage(states.read_bytes()))
    convert(tiny_llama_dir, tmp_path / "dst", text)
    assert fits == [1, 2]
    assert loads[-6:] == [0, 1, 2, 0, 1, 2]
    assert_same_weights(tmp_path / "dst", whole[0])


def test_too_little_room_for_the_hidden_states_is_refused_before_any_layer(
    tiny_llama_dir, text, tmp_path, fits, monkeypatch
):
    free = shutil.disk_usage(tmp_path)._replace(free=400_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    convert_checkpoint(tiny_llama_dir, tmp_path / "plain")
    message = (
        r"dst: not written: disk full: 0\.40 MB free, expected \d\.\d\d MB; free some or choose "
        "another destination, or fewer --calibrate-tokens"
    )
    refused(message, convert, tiny_llama_dir, tmp_path / "dst", text, calibrate_tokens=1024)
    assert fits == []


def test_progress_has_layers_and_divergence_and_hidden_states_are_on_the_disk_meanwhile(
    pairs_of, tmp_path
):
    found, sizes, ids = [], [], tokens(24, WINDOW)

    def look(progress):
        found.append(progress)
        states = sorted((tmp_path / "layers").glob("states-*"))
        sizes.append([file.stat().st_size for file in states])

    pairs = pairs_of(stock_model("llama"), kept_layers=[0])
    result = calibrate(pairs, ids, ids[:5], tmp_path / "layers", passes=1, report=look)
    fitted = [layer.kl_fitted for layer in result.layers]
    assert [progress[:3] for progress in found] == [
        (0, 3, None),
        (1, 3, None),
        (2, 3, fitted[1]),
        (3, 3, pytest.approx(sum(fitted[1:]) / 2)),
    ]
    first, *others = (progress.notice for progress in found)
    assert re.fullmatch(
        r"calibrating 2 of 3 layers: about \d+ s, .* of memory and .* of disk in .*/layers", first
    )
    assert others == [None, None, None]
    assert isinstance(found[0], CalibrationProgress)
    whole = (24 + 2 * 5) * WINDOW * 48 * 4
    assert sizes == [[whole], [whole, whole], [whole, whole], [whole, whole]]
    files = sorted(file.name for file in (tmp_path / "layers").iterdir())
    assert files == ["layer-00001.safetensors", "layer-00002.safetensors", "seconds.json"]


def test_the_time_is_known_before_the_first_layer_and_measuring_it_changes_nothing(
    pairs_of, tmp_path
):
    pairs, ids = pairs_of(stock_model("llama"), kept_layers=[0]), tokens(24, WINDOW)
    generator, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = expected_seconds(pairs, FitTask(ids, ids[:4], passes=10), missing=[1, 2])
        assert torch.equal(torch.get_rng_state(), generator)
        began = time.perf_counter()
        calibrate(pairs, ids, ids[:4], tmp_path / "layers", passes=10)
        assert expected / 5 < time.perf_counter() - began < 5 * expected
    finally:
        torch.set_num_threads(threads)


def test_the_time_counts_layers_that_are_not_fitted_and_the_ranking(pairs_of):
    pairs, ids = pairs_of(stock_model("neox-partial").half()), tokens(24, WINDOW)
    clock = itertools.count()  # every timed part takes one second

    def seconds(*missing, first=0, **options):
        task = FitTask(ids, ids[:4], passes=0, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("coca_hf.convert.layer_fit.time.perf_counter", clock.__next__)
            return expected_seconds(pairs, task, missing, first)

    read, forward, measure, held_out = 1, 1, 2 * 4, 2 * 4 / 24  # a batch has all 24 blocks
    outputs = 3 * (read + 3 * forward + 4 / 24)
    assert seconds(0) == pytest.approx(3 * read + forward + 3 * held_out + measure + outputs)
    assert seconds(2) == pytest.approx(seconds(0) + 2 * forward)
    assert seconds(1, 2, first=1) == pytest.approx(seconds(2) - read - held_out - forward + measure)
    measured_twice, blocks = 2 * 4, 24  # 336 steps are 14 passes over 24 blocks
    chosen = seconds(0, chooses_content=True) - seconds(0)
    assert chosen == pytest.approx(measured_twice + 2 * 14 * blocks)
    ranked = seconds(0, ranked_tokens=2 * WINDOW) - seconds(0)
    assert ranked == pytest.approx(6 * read + 2 / 24 * 9 * forward + 3 * held_out)


@pytest.fixture
def fits(monkeypatch):
    """The numbers of the layers that were fitted, not reused from an interrupted run."""
    found = []

    def counted(attention, *arguments):
        found.append(attention.layer_idx)
        return fit(attention, *arguments)

    monkeypatch.setattr("coca_hf.convert.calibration.fit", counted)
    return found


def damaged_layer(damage):
    def change(source, *_):
        file = source.parent / ".dst.incomplete/calibrated/layer-00000.safetensors"
        file.write_bytes(damage(file.read_bytes()))

    return change


def other_code(source, text, monkeypatch):
    places = {path.name: path for path in CODE}
    assert {"layer_fit.py", "rotary.py", "tokens.py"} < places.keys()
    other = source.parent / "tokens.py"
    other.write_text(places["tokens.py"].read_text() + "# of another version")
    code = [*(places | {"tokens.py": other}).values()]
    monkeypatch.setattr("coca_hf.convert.layout.CODE", code)


def other_numbers(source, *_):
    """As a copy or an archive may leave them, with the size and the time of those before."""
    file = source / "model.safetensors"
    times = file.stat()
    edit_weights(source, lambda tensors: tensors["model.norm.weight"].mul_(2))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_size == times.st_size


OTHERS = {
    "seed": lambda *_: {"seed": 1},
    "passes": lambda *_: {"calibrate_passes": 1},
    "text": lambda _, text, __: [text.write_text(text.read_text().replace("times", "plus"))],
    "numbers": other_numbers,
    "config": lambda source, *_: edit_config(source, rms_norm_eps=1e-5),
    "a shorter layer": damaged_layer(lambda data: data[:-100]),
    "another byte": damaged_layer(lambda data: data[:-1] + b"?"),
    "code": other_code,
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS.keys())
def test_layers_of_another_fit_and_damaged_ones_are_fitted_again(
    source, text, tmp_path, calibrated, fits, monkeypatch, change
):
    options = change(source, text, monkeypatch)
    interrupt(source, tmp_path / "dst", text, **(options if isinstance(options, dict) else {}))
    assert fits == [0]


def test_layers_outlive_a_refusal_that_comes_after_them_and_serve_another_dtype_and_other_shards(
    tiny_llama_dir, text, tmp_path, fits, monkeypatch
):
    def refuse(writer):
        raise CocaError("a fitted tensor that float16 cannot hold")

    with monkeypatch.context() as patch:
        patch.setattr(WeightsWriter, "write", refuse)
        refused("cannot hold", convert, tiny_llama_dir, tmp_path / "dst", text, dtype="float16")
    convert(tiny_llama_dir, tmp_path / "dst", text, dtype="float32", max_shard_size="20KB")
    assert fits == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir() if "dst" in path.name] == ["dst"]


@pytest.mark.parametrize(
    ("change_", "message"),
    [
        (lambda up, *_: up[3, 4].fill_(1e5), "dense_h_to_4h.weight: got numbers up to 100000"),
        (lambda up, *_: up[3, 4].fill_(torch.nan), "dense_h_to_4h.weight: got NaN or infinity"),
        (lambda _, __, bias: bias[1, 0, 5].fill_(1040), "q_proj.bias: got numbers up to 1040"),
        (lambda _, weight, __: weight[2, 1].fill_(torch.nan), "layer 1: queries or keys"),
    ],
    ids=["copied", "copied NaN", "fused query bias", "fused key"],
)
@torch.no_grad()
def test_tensors_that_the_dtype_cannot_hold_are_refused_before_any_layer(
    change_, message, tiny_tokenizer, text, tmp_path, fits
):
    model = stock_model("neox-partial", vocab_size=len(tiny_tokenizer))
    layer = model.gpt_neox.layers[1]
    fused = layer.attention.query_key_value
    parts = (part.unflatten(0, (3, 3, 32)) for part in (fused.weight, fused.bias))
    change_(layer.mlp.dense_h_to_4h.weight, *parts)
    model.save_pretrained(tmp_path / "source")
    tiny_tokenizer.save_pretrained(tmp_path / "source")
    refused(message, convert, tmp_path / "source", tmp_path / "dst", text, dtype="float16")
    assert fits == []


def test_fields_that_leave_the_weights_as_they_are_change_no_calibration(
    source, text, tmp_path, whole
):
    edit_config(source, seq_len=5, neuron_cores=2, dtype="float8_e4m3fn")
    options = {"ignore_fields": ["seq_len", "neuron_cores"], "dtype": "float32"}
    convert(source, tmp_path / "dst", text, **options)
    configs = (record_of(made, "config.json") for made in (tmp_path / "dst", whole[0]))
    assert next(configs) == next(configs)
    assert_same_weights(tmp_path / "dst", whole[0])


def rows_of(path, rows, column="text"):
    path.write_text("".join(json.dumps({column: row}) + "\n" for row in rows))
    return TextSource(str(path), column, skip_empty=True)


def test_blocks_come_from_all_files_and_from_no_copy_of_a_held_out_document(of_source, tmp_path):
    tokenizer = of_source[0]
    draw = random.Random(5)
    for name, letters in (("a", "abcdefgh"), ("b", "stuvwxyz")):
        rows = ["".join(draw.choices(letters, k=150)) for _ in range(50)]
        rows_of(tmp_path / f"{name}.jsonl", rows + rows)
    place = TextSource(str(tmp_path / "*.jsonl"), skip_empty=True)
    asked = place, *of_source, 40 * 32, 32
    blocks, held_out = calibration_blocks(*asked)
    assert blocks.shape == (40, 32)
    assert held_out.shape == (8, 32)
    text = "\n".join(tokenizer.decode(block) for block in blocks)
    of_a, of_b = (sum(letter in letters for letter in text) for letters in ("abcdefgh", "stuvwxyz"))
    assert 0.7 < of_a / of_b < 1.4
    grams = [
        {tuple(row[i : i + 12].tolist()) for row in part for i in range(21)}
        for part in (blocks, held_out)
    ]
    assert not grams[0] & grams[1]
    again, other = calibration_blocks(*asked), calibration_blocks(*asked, seed=1)
    assert torch.equal(again[0], blocks)
    assert not torch.equal(other[0], blocks)
    assert torch.equal(other[1], held_out)


def test_a_data_set_on_the_hub_is_read_and_recorded_at_its_commit(
    tiny_llama_dir, tmp_path, monkeypatch
):
    draw, commit = random.Random(5), "1" * 40
    rows = ["".join(draw.choices("abcdefgh", k=150)) for _ in range(150)]
    parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "train.parquet")
    files = {"train.parquet": (tmp_path / "train.parquet").read_bytes()}
    with serving_data_set("somebody/lines", files, tmp_path, monkeypatch) as server:
        record = convert(tiny_llama_dir, tmp_path / "dst", "somebody/lines", calibrate_passes=1)
    facts = record["calibration"]
    assert (facts["text"], facts["text_commit"]) == ("somebody/lines", commit)
    read = [path for path in server.asked if "/resolve/" in path]
    assert read
    assert all(f"/resolve/{commit}/" in path for path in read)


def test_short_texts_of_another_column_are_joined_with_the_end_token(of_source, tmp_path):
    tokenizer = of_source[0]
    rows = [f"row {number} of chat" for number in range(400)]
    place = rows_of(tmp_path / "chat.jsonl", rows, "answer")
    blocks, _ = calibration_blocks(place, *of_source, num_tokens=640, block_tokens=64)
    assert blocks.shape == (10, 64)
    rule = most_held_out(
        lambda: read_documents(*place), Encoder(tokenizer, len(tokenizer)), TRAINING_HELD_OUT_TOKENS
    )
    fitted = {rule.split(row)[0] for row in rows}
    for block in blocks:
        ends = (block == tokenizer.eos_token_id).nonzero().flatten()
        whole = tokenizer.decode(block[ends[0] + 1 : ends[1]], skip_special_tokens=True)
        assert whole in fitted


def test_a_text_that_names_an_added_token_which_the_model_has_not_is_refused(of_source, tmp_path):
    tokenizer, config = of_source
    tokenizer.add_tokens(["[NEW]"])
    place = rows_of(tmp_path / "a.jsonl", [f"a [NEW] word and {number}" for number in range(400)])
    message = (
        r"got token 259 \('\[NEW\]'\) in the text, expected ids below .* of 259; take it out of"
    )
    refused(message, calibration_blocks, place, tokenizer, config, num_tokens=640, block_tokens=64)


REFUSED = {
    "short": ({"calibrate_on": "short.txt"}, "got 0 blocks of 64 tokens to hold out, and about 9 "),
    "device": ({"device": "gpu"}, "--device: got 'gpu', expected cpu, or cuda"),
    "no text": ({"calibrate_on": "none.txt"}, "got no such file"),
    "hub alone": ({"split": "test", "subset": "en"}, "got --split, --subset, which only data"),
    "block": ({"calibrate_block": 3}, "got blocks of 3 tokens, expected at least 4; they have"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_too_little_text_and_wrong_options_are_refused(
    source, text, tmp_path, monkeypatch, options, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("too short")
    refuses(message, source, "dst", **{"calibrate_on": str(text)} | options)
    assert not list(tmp_path.glob("*dst*"))


def test_the_shortest_blocks_can_be_fitted(tiny_llama_dir, text, tmp_path):
    options = {"calibrate_block": 4, "calibrate_tokens": 60, "calibrate_passes": 1}
    record = convert(tiny_llama_dir, tmp_path / "dst", text, device="cpu", **options)
    assert record["calibration"]["block_tokens"] == 4


def test_the_command_prints_perplexities_or_one_line_of_error(
    tiny_llama_dir, text, tmp_path, converts, refusal
):
    options = "--calibrate", text, "--calibrate-passes", 2, "--calibrate-tokens"
    printed = converts(tiny_llama_dir, tmp_path / "dst", *options, 256)
    values = record_of(tmp_path / "dst")["calibration"]["perplexity"]
    assert f"{values['start']:,.4g} before, {values['calibrated']:,.4g} after" in printed
    needed = r"about \d+ s, 7\d\d\.\d\d MB of memory and \d\.\d\d MB of disk in"
    assert re.match(f"calibrating 3 of 3 layers: {needed}", printed)
    assert "\nfitting W_O to the residual stream\n" in printed
    trained = f"coca-train recipes/recover.yaml model={tmp_path}/dst teacher=ORIGINAL"
    assert trained in printed
    assert "calibrated" in (tmp_path / "dst/README.md").read_text().partition("\n## ")[0]
    printed = refusal(tiny_llama_dir, tmp_path / "other", *options, 10**6)
    assert "give more text, or a smaller --calibrate-tokens" in printed
