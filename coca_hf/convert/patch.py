"""Make a model in memory a CoCA model, and back: `patch_`, `unpatch_`."""

import torch
from transformers import PreTrainedModel

from coca_hf.convert.families import FAMILIES, coca_config, family_of
from coca_hf.convert.tensors import Maker, check_tensors
from coca_hf.errors import CocaError
from coca_hf.models.decoder import CocaForCausalLM
from coca_hf.models.rotary import CocaRotaryEmbedding

ORIGINAL = "_original_of_patch"  # in the model's __dict__: class and __dict__ before patch_, or None


@torch.no_grad()
def patch_(model: PreTrainedModel, constraint: str = "slack", keep_original: bool = False) -> CocaForCausalLM:
    """Turn `model` into its family's CoCA model, in place, with the same start as `convert_checkpoint`; returns it.

    All weights but the key's stay the very same parameters; GPT-NeoX's fused projection is split, so that those of
    queries and values are new, too. No other model of the process changes. keep_original: hold on to what is replaced,
    with the memory it takes, so that `unpatch_` can bring it back.

    Raises CocaError where the model is not a plain causal LM of a supported family (already CoCA, quantized, compiled,
    wrapped).
    """
    if isinstance(model, CocaForCausalLM):
        raise CocaError("patch_: got a CoCA model already; there is nothing to patch")
    supported = {family.causal_lm for family in FAMILIES.values()}
    if type(model) not in supported:
        names = sorted(causal_lm.__name__ for causal_lm in supported)
        raise CocaError(f"patch_: got {type(model).__name__}, expected one of {', '.join(names)}; unwrap it first")
    if getattr(model, "hf_quantizer", None) is not None:
        raise CocaError("patch_: got a quantized model, expected plain weights; load it with dequantize=True")

    config = coca_config(model.config.to_dict(), constraint, where="patch_: model.config")
    config._attn_implementation = model.config._attn_implementation
    source = dict(model.named_parameters())
    pieces, _ = check_tensors({name: tuple(p.shape) for name, p in source.items()}, config, where="patch_")
    maker = Maker(config, pieces, lambda name: source[name].cpu(), where="patch_")
    with torch.device("meta"):
        coca = family_of(config).coca_causal_lm(config)
    for piece in pieces:
        parameter = source[piece.source]
        if not piece.is_carried_over:
            made = maker.make(piece).to(parameter.device)
            parameter = torch.nn.Parameter(made, requires_grad=parameter.requires_grad)
        setattr(coca.get_submodule(piece.name.rpartition(".")[0]), piece.name.rpartition(".")[2], parameter)
    coca.tie_weights()
    coca.model.rotary_emb = CocaRotaryEmbedding(config).to(model.device)
    coca.generation_config = model.generation_config
    coca.train(model.training)
    original = (type(model), model.__dict__) if keep_original else None
    model.__class__, model.__dict__ = type(coca), coca.__dict__
    model.__dict__[ORIGINAL] = original
    return model


def unpatch_(model: CocaForCausalLM) -> PreTrainedModel:
    """Undo `patch_(model, keep_original=True)`, in place: the original's class, modules and parameters; returns it.

    What the two share was trained, moved or cast together; what only the original has (its key projections) is as it
    was when it was patched.

    Raises CocaError where the original was not kept: it cannot be computed from the CoCA model.
    """
    if not isinstance(model, CocaForCausalLM):
        raise CocaError(f"unpatch_: got {type(model).__name__}, expected a model that patch_ changed")
    if model.__dict__.get(ORIGINAL) is None:
        raise CocaError(
            "unpatch_: got a model without its original projections, expected patch_(model, keep_original=True); load "
            "the original again"
        )
    training = model.training
    model.__class__, model.__dict__ = model.__dict__[ORIGINAL]
    return model.train(training)
