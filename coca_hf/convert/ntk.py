"""Bake the base of dynamic NTK for one total length into a configuration, for engines that know static RoPE only."""

import math

import torch
from transformers import PreTrainedConfig

from coca_hf.errors import CocaError
from coca_hf.models.rotary import ntk_base, rotary_dim


def bake_ntk_(config: PreTrainedConfig, length: int, factor: float | None, where: str) -> dict:
    """Give `config` the rotary base that dynamic NTK has for sequences of `length` tokens; returns what was done.

    Afterwards `rope_type` is `default`, `max_position_embeddings` is `length`, and the trained length stays known as
    `rope_parameters["original_max_position_embeddings"]`. factor: dynamic NTK's; by default that of a config which is
    dynamic already, else length / trained length, which is what transformers says a factor means: the number of times
    the trained length that the model is to reach. Where perplexity was measured with another (the paper's are 2, 4 and
    8), that one gives the function that was measured.

    Raises CocaError where the configuration's RoPE is scaled otherwise or baked already, the length is no longer
    than the trained one, or the base is no float32 number. `where` names the configuration in errors.
    """
    rope = config.rope_parameters
    trained_len = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    if rope["rope_type"] == "default" and "original_max_position_embeddings" in rope:
        raise CocaError(
            f"{where}: --ntk-length: got a checkpoint with an NTK base for {config.max_position_embeddings} tokens "
            f"already, expected the one it was made from"
        )
    if rope["rope_type"] not in ("default", "dynamic"):
        raise CocaError(f"{where}: --ntk-length: got rope_type {rope['rope_type']!r}, expected default or dynamic")
    if length <= trained_len:
        raise CocaError(
            f"{where}: --ntk-length: got {length}, expected more than the {trained_len} tokens of training; up to "
            f"those the base does not change"
        )
    if rotary_dim(config) <= 2:
        raise CocaError(
            f"{where}: --ntk-length: got {rotary_dim(config)} rotary dimensions, expected more than one rotary pair"
        )
    try:
        if factor is None:
            factor = rope["factor"] if rope["rope_type"] == "dynamic" else length / trained_len
        base = ntk_base(rope["rope_theta"], factor, length, trained_len, rotary_dim(config))
    except OverflowError:
        base = math.inf
    if not base <= torch.finfo(torch.float32).max:  # what models compute angles in
        raise CocaError(f"{where}: --ntk-length: got {length} and factor {factor}, whose base is beyond float32")
    done = {
        "ntk_length": length,
        "trained_length": trained_len,
        "factor": factor,
        "rope_theta": {"before": rope["rope_theta"], "after": base},
    }
    kept = {name: rope[name] for name in ("partial_rotary_factor",) if name in rope}
    config.rope_parameters = kept | {
        "rope_type": "default",
        "rope_theta": base,
        "original_max_position_embeddings": trained_len,
    }
    config.max_position_embeddings = length
    return done
