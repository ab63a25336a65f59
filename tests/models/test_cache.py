"""The half-width key cache: three quarters of the bytes, the tokens of the standard cache in every
way of decoding.
"""

import copy
import itertools
import pickle
import weakref
from functools import partial
from unittest.mock import MagicMock

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from coca_hf.models.attention import CACHE
from coca_hf.models.cache import ROOM, CocaCache, CocaStaticCache, RoomyLayer
from tests.models.families import MENDED_CACHES, coca_model, padded, tiny_model, tokens
from tests.models.test_alibi import alibi_model


def bytes_of(cache, layers):
    return sum(x.nbytes for layer in cache.layers[:layers] for x in (layer.keys, layer.values))


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_keys_and_values_take_three_quarters_of_the_bytes(kv_heads):
    model, ids = tiny_model(num_key_value_heads=kv_heads), tokens()
    half, full = CocaCache(model.config), DynamicCache(config=model.config)
    for cache in (half, full):
        model(ids, **{CACHE: cache})
    assert bytes_of(half, 3) == 0.75 * bytes_of(full, 3)
    # k and v, layers, rows, heads, tokens, d, bytes
    assert bytes_of(full, 3) == 2 * 3 * 2 * kv_heads * 23 * 8 * 4
    (angles,) = half.angles.values()
    assert angles.keys.shape == angles.values.shape == (2, 1, 23, 4)


def test_forward_and_generate_use_it_unless_another_is_asked_for():
    model, ids = tiny_model(), tokens(1, 9)
    assert isinstance(model(ids, use_cache=True)[CACHE], CocaCache)

    def cache_of(**arguments):
        arguments |= {"max_new_tokens": 3, "return_dict_in_generate": True}
        return model.generate(ids, **arguments)[CACHE]

    assert isinstance(cache_of(), CocaCache)
    assert isinstance(cache_of(cache_implementation="static"), StaticCache)
    assert type(cache_of(**{CACHE: DynamicCache(config=model.config)})) is DynamicCache


@pytest.mark.parametrize("make", [tiny_model, alibi_model], ids=["coca", "alibi"])
def test_a_cache_of_a_name_that_the_code_does_not_know_is_refused(make):
    model = make()
    with pytest.raises(TypeError, match=f"got a cache as renamed, expected {CACHE}; .* save the"):
        model(tokens(1, 1), renamed=DynamicCache(config=model.config))


OTHER_KEYS = {
    "coca_constraint": ({"constraint": "strict"}, "strict, expected slack"),
    "coca_kept_layers": ({"coca_kept_layers": [1]}, r"\[1\], expected \[\]"),
    "coca_content_pairs": ({"coca_content_pairs": 2}, "2, expected 0"),
    "coca_content_layers": ({"coca_content_layers": [2]}, r"\[2\], expected \[\]"),
}


@pytest.mark.parametrize("make", [CocaCache, partial(CocaStaticCache, max_cache_len=32)])
@pytest.mark.parametrize("name", OTHER_KEYS)
def test_the_cache_of_a_model_with_other_keys_is_refused(name, make):
    fields, message = OTHER_KEYS[name]
    other, ids = tiny_model(**fields), tokens(1, 9)
    cache = make(other.config)
    other(ids[:, :8], **{CACHE: cache})
    other.generate(ids, max_new_tokens=2, **{CACHE: cache})
    for use in (
        lambda: tiny_model().generate(tokens(1, 12), max_new_tokens=2, **{CACHE: cache}),
        lambda: tiny_model()(tokens(1, 1), **{CACHE: cache}),
    ):
        refused = f"{CACHE}: got keys of a model with {name} {message}; start"
        with pytest.raises(ValueError, match=refused):
            use()


# a half-width cache has its angles from layer 0
KEPT = {"coca_kept_layers": [0], "coca_content_pairs": 2, "coca_content_layers": [2]}
MODES = [
    {"do_sample": False},
    {"num_beams": 3, "num_return_sequences": 2},
    {"do_sample": True, "top_k": 20, "num_return_sequences": 3},
    {"do_sample": True, "num_beams": 2},
    {"prompt_lookup_num_tokens": 2},
    {"assistant": True},
    {"prefill_chunk_size": 4},
    {"cache_implementation": "static"},
]


MODELS = {"slack": {}, "strict": {"constraint": "strict"}, "kept": KEPT}
ATTENTIONS = {"slack": "sdpa", "strict": "coca", "kept": "eager"}


@pytest.mark.parametrize(
    ("mode", "kind"),
    [*zip(MODES, itertools.cycle(["slack", "strict"])), *((mode, "kept") for mode in MODES)],
    ids=lambda value: "-".join([*value]) if isinstance(value, dict) else value,
)
def test_every_way_of_decoding_gives_the_tokens_of_the_standard_cache(mode, kind):
    model = tiny_model(**MODELS[kind]).double()
    if mode.get("assistant"):
        assistant = copy.deepcopy(model)
        with torch.no_grad():
            # agrees with the model, but not always
            assistant.model.layers[2].mlp.down_proj.weight.mul_(0.7)
        mode = {"assistant_model": assistant, "do_sample": False}
    prompt = tokens(1, 9).repeat(1, 2)

    def generated(**arguments):
        torch.manual_seed(0)
        return model.generate(prompt, max_new_tokens=20, **arguments)

    plain = {} if {"cache_implementation", "assistant_model"} & mode.keys() else mode
    expected = generated(**{CACHE: DynamicCache(config=model.config)}, **plain)
    model.set_attn_implementation(ATTENTIONS[kind])
    got = generated(**mode)
    assert torch.equal(got, expected)
    assert len(got[0, -20:].unique()) > 3


FIELDS = {
    "slack": {},
    "strict": {"constraint": "strict"},
    "kept": {"coca_kept_layers": [1], "coca_content_pairs": 1},
    "content": {"coca_content_layers": [1], "coca_content_pairs": 1},
}
OPERATIONS = {  # what is done, and the rows that are there afterwards
    "crop": (lambda cache: cache.crop(-4), [0, 1]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    "reset": (lambda cache: cache.reset(), [0, 1]),
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize(
    "operation", ["crop", "repeat", "select", "reorder", pytest.param("reset", marks=MENDED_CACHES)]
)
def test_what_is_done_to_the_cache_is_done_to_angles_and_keys_of_both_widths(operation, fields):
    model = tiny_model(**fields).double()
    ids, mask = padded()  # so that the rows' angles differ
    (do, rows), logits = OPERATIONS[operation], []
    for cache in (CocaCache(model.config), DynamicCache(config=model.config)):
        model(ids[:, :16], attention_mask=mask[:, :16], **{CACHE: cache})
        do(cache)
        # after a reset: whether zeros are part of it, transformers' versions differ in
        rest = ids[rows, cache.get_seq_length() :]
        logits.append(model(rest, attention_mask=mask[rows], **{CACHE: cache}).logits)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "copied_by", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))]
)
def test_a_copy_decodes_with_the_attention_that_the_model_has_later(copied_by):
    model, ids = tiny_model(), tokens(1, 9)
    with torch.no_grad():
        held = model(ids, use_cache=True)[CACHE]
        expected = model(ids[:, :2], **{CACHE: copy.deepcopy(held)}).logits
        model.set_attn_implementation("coca")
        copied = copied_by(held)
        model.set_attn_implementation("eager")
        logits = model(ids[:, :2], **{CACHE: copied}).logits
    assert copied.layers[0].keys is not held.layers[0].keys
    torch.testing.assert_close(logits, expected)


def test_new_tokens_are_written_behind_the_others_without_copying_them():
    model, ids = tiny_model().double(), tokens(2, 23)
    expected = model(ids).logits[:, 20:]
    cache, got, places = CocaCache(model.config), [], set()
    with torch.no_grad():
        model(ids[:, :20], **{CACHE: cache})
        for i in range(20, 23):
            got.append(model(ids[:, i : i + 1], **{CACHE: cache}).logits)
            held = [x for layer in cache.layers for x in (layer.keys, layer.values)]
            places.add(tuple(x.data_ptr() for x in held))
    assert len(places) == 1
    rows, kv_heads, pairs, num_bytes = 2, 2, 4, 8
    expected_bytes = rows * kv_heads * (21 + ROOM) * pairs * num_bytes
    assert held[0].untyped_storage().nbytes() == expected_bytes
    torch.testing.assert_close(torch.cat(got, dim=1), expected, rtol=0, atol=1e-11)


def test_room_for_new_tokens_is_nobody_elses():
    """Copies, crops, gradients, inference mode and full rooms: always the numbers of `torch.cat`."""
    torch.manual_seed(0)
    layer, plain = RoomyLayer(), DynamicLayer()

    def add(count, mode=torch.no_grad, layers=(layer, plain)):
        new = torch.randn(2, 3, count, 4), torch.randn(2, 3, count, 5)
        with mode():
            for one in layers:
                one.update(*new)
        for a, b in zip(*((one.keys, one.values) for one in layers), strict=True):
            assert torch.equal(a, b)

    add(5)
    add(1, torch.inference_mode)
    add(2)  # what inference mode made cannot be written to outside
    fork = copy.deepcopy(layer), pickle.loads(pickle.dumps(plain))
    other = pickle.loads(pickle.dumps(layer)), copy.deepcopy(plain)
    add(1)
    add(1, layers=fork)
    add(1, layers=other)
    add(ROOM + 1)
    for one in (layer, plain):
        one.crop(-3)
    add(1, torch.enable_grad)
    add(1)
    for one in (layer, plain):
        one.reset()
    add(2), add(1)
    add(1, layers=fork)
    add(1, layers=other)


def test_memory_of_beams_that_were_given_up_is_free():
    layer, token = RoomyLayer(), torch.randn(2, 3, 1, 4)
    with torch.no_grad():
        layer.update(token, token)
        layer.update(token, token)
        old = weakref.ref(layer.keys)
        layer.reorder_cache(torch.tensor([1, 1]))
    assert old() is None


@pytest.mark.parametrize("is_padded", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize(
    ("kind", "fields"),
    [(StaticCache, {"num_hidden_layers": 1}), (CocaStaticCache, KEPT | {"constraint": "strict"})],
    ids=["stock", "kept"],
)
def test_static_cache_decodes_compiled_as_one_graph(kind, fields, is_padded):
    torch.compiler.reset()
    model, (ids, mask) = tiny_model(**fields, attn_implementation="sdpa").double(), padded()
    mask = mask[:, :16] if is_padded else None
    expected = model(ids[:, :10], attention_mask=None if mask is None else mask[:, :10]).logits
    cache = kind(config=model.config, max_cache_len=16)
    model(ids[:, :8], attention_mask=mask, **{CACHE: cache})
    step = torch.compile(copy.deepcopy(model), fullgraph=True, backend="eager", dynamic=False)
    position = torch.tensor([[8], [2 if is_padded else 8]])
    got = []
    for i, given in (8, {"position_ids": position}), (9, {}):
        new = {"input_ids": ids[:, i : i + 1], "attention_mask": mask, **given}
        got.append(step(**new, **{CACHE: cache}).logits)
    assert (torch.cat(got, dim=1) - expected[:, 8:]).abs().max() < 1e-11


def test_a_static_cache_of_half_width_keys_refuses_windows():
    config = coca_model("mistral-window", "slack").config
    said = "CocaStaticCache: got a model with sliding windows, expected one without"
    with pytest.raises(ValueError, match=said):
        CocaStaticCache(config, max_cache_len=16)


def on_two_devices(model, second):
    """All but the embedding and the first layer on `second`, as `device_map="auto"` splits a model."""
    for module in (*model.model.layers[1:], model.model.norm, model.lm_head):
        add_hook_to_module(module.to(second), AlignDevicesHook(execution_device=second))
    return model


STATIC = partial(CocaStaticCache, max_cache_len=16)


@pytest.mark.parametrize(
    ("case", "make_cache"),
    [("llama", CocaCache), ("mistral-window", CocaCache), ("llama", STATIC)],
    ids=["llama", "mistral-window", "static"],
)
@pytest.mark.parametrize("backend", ["sdpa", "coca"])
@torch.no_grad()
def test_every_device_of_a_model_has_the_angles_of_its_keys(backend, case, make_cache):
    """The device `meta` has no numbers, and refuses those of another device."""
    model = on_two_devices(coca_model(case, "slack", attn_implementation=backend), "meta")
    ids, cache = tokens(2, 9), make_cache(model.config)
    model(ids, **{CACHE: cache})
    logits = model(ids[:, :1], position_ids=torch.tensor([[9]]), **{CACHE: cache}).logits
    assert logits.device.type == "meta"
    assert [device.type for device, _ in cache.angles] == ["cpu", "meta"]
    assert cache.layers[3:] == [*cache.angles.values()]  # what is done to the cache is done to them


def test_an_offloaded_cache_has_every_layer_back_before_it_is_used(monkeypatch):
    """Layers that are away hold nothing here, as on a GPU they would be on the wrong device."""
    for module, stream in ((torch, "Stream"), (torch.cuda, "default_stream")):
        monkeypatch.setattr(module, stream, lambda *_, **__: MagicMock())  # without a GPU
    away = {}

    def offload(layer):
        away[layer] = layer.keys, layer.values
        layer.keys = layer.values = None

    def prefetch(layer):
        if layer in away:
            layer.keys, layer.values = away.pop(layer)

    model, ids, greedy = tiny_model(), tokens(1, 9), {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, **greedy)
    monkeypatch.setattr(DynamicLayer, "offload", offload)
    monkeypatch.setattr(DynamicLayer, "prefetch", prefetch)
    options = greedy | {"cache_implementation": "offloaded", "return_dict_in_generate": True}
    output = model.generate(ids, **options)
    assert torch.equal(output.sequences, expected)
    assert isinstance(output[CACHE], CocaCache)
    assert len(away) == 2  # all but the one that is used next


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
def test_an_offloaded_cache_on_a_gpu_gives_the_tokens_of_the_standard_one(implementation):
    model, ids = tiny_model().cuda(), tokens(2, 9).cuda()
    greedy = {"max_new_tokens": 20, "do_sample": False}
    cache = DynamicCache(config=model.config)
    expected = model.generate(ids, **greedy, **{CACHE: cache})
    # PyTorch 2.11 crashes where it compiles the streams of a static offloaded cache, LLaMA's too
    options = {"cache_implementation": implementation, "disable_compile": True}
    output = model.generate(ids, **greedy, **options)
    assert torch.equal(output, expected)
