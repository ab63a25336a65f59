"""What a stage minimises: the loss on the text's next token, the distance from the original model's
predictions, or a mix.

    lm       cross-entropy with the text
    distill  KL(original || student), per token (Hinton et al., arXiv 1503.02531)

With `answer_weight`, the answers of synthetic lookups count once more: this weight times their mean
is added to the mean over a block's tokens. The log then has their mean as `loss_answers`; a block
without answers has 0.

The original model, the teacher, runs once per batch on the same tokens, without gradients; every
GPU has all its weights and computes in the stage's precision.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, log_softmax, pad
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

_CHUNK_TOKENS = 1024  # of logits in float32 at a time
_CHUNK_TOKENS_OF_CPU = 16  # of a vocabulary of 50k: 3 MB, which stays in the cache
_IGNORED = -100


def fuse_cross_entropy_(model: PreTrainedModel) -> None:
    """Let a model in training mode compute its loss from hidden states by `linear_cross_entropy`,
    in place.

    Its outputs then hold the hidden states as `logits`. Nothing changes for a head in evaluation
    mode.
    """
    head, plain_loss = model.get_output_embeddings(), model.loss_function
    plain_head = head.forward

    def loss(
        logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch=None, **kwargs
    ) -> Tensor:
        if not head.training:
            return plain_loss(logits, labels, vocab_size, num_items_in_batch, **kwargs)
        shift_labels = kwargs.get("shift_labels")
        return linear_cross_entropy(head, logits, labels, num_items_in_batch, shift_labels)

    head.forward = lambda hidden: hidden if head.training else plain_head(hidden)
    model.loss_function = loss


def linear_cross_entropy(
    head: nn.Linear,
    hidden: Tensor,
    labels: Tensor,
    num_items: Tensor | int | None = None,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of `head(hidden)` with the next label, in float32: the sum over `num_items`, or
    the mean.

    hidden: (b, m, hidden); labels: (b, m), -100 where nothing is predicted; shift_labels: (b, m),
    the label after every position, used instead of labels. The backward computes the head again,
    so only the logits of one chunk exist at a time. Returns a scalar.
    """
    targets, num_items = _targets(labels, shift_labels, num_items)
    parts = (tensor.split(_CHUNK_TOKENS) for tensor in (hidden.flatten(0, 1), targets))
    chunks = zip(*parts, strict=True)
    total = sum(checkpoint(_cross_entropy, head, *chunk, use_reentrant=False) for chunk in chunks)
    return total / num_items


def _targets(
    labels: Tensor, shift_labels: Tensor | None, num_items: Tensor | int | None
) -> tuple[Tensor, Tensor | int]:
    """The label after every position, (b * m,), and the divisor of a sum over them."""
    if shift_labels is None:
        shift_labels = pad(labels, (0, 1), value=_IGNORED)[:, 1:]
    targets = shift_labels.flatten()
    return targets, (targets != _IGNORED).sum() if num_items is None else num_items


def _cross_entropy(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = linear(hidden, head.weight, head.bias)
    return cross_entropy(logits.float(), targets, ignore_index=_IGNORED, reduction="sum")


def answer_weights(answers: Tensor) -> Tensor:
    """Weights of the predictions, (b, m), that turn a mean over tokens into one over the answers of
    each block.

    answers: (b, m), which tokens are answers; the position before one predicts it. A block without
    answers has weights 0.
    """
    predicts = pad(answers[:, 1:], (0, 1))
    return predicts * (predicts.shape[1] / predicts.sum(1, keepdim=True).clamp(min=1))


def answer_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Cross-entropy with the next label, mean over the answers of each block, then over blocks, in
    float32.

    logits: (b, m, vocabulary); labels: (b, m); weights: (b, m), of `answer_weights`. Returns a
    scalar.
    """
    predicts = weights > 0
    losses = cross_entropy(logits[predicts].float(), labels.roll(-1, 1)[predicts], reduction="none")
    return (losses * weights[predicts]).sum() / labels.numel()  # autocast would round a @


def distillation_loss(student: Tensor, teacher: Tensor, weights: Tensor | None = None) -> Tensor:
    """KL(teacher || student), mean over tokens, in float32.

    student, teacher: (b, m, vocabulary), logits of any dtype; weights: (b, m), of the predictions,
    by default 1. No gradient reaches the teacher or the weights. Returns a scalar.
    """
    if weights is None:
        weights = student.new_ones(student.shape[:-1], dtype=torch.float32)
    divergence = _Chunked.apply(
        _divergence_of_chunk, student.flatten(0, 1), teacher.flatten(0, 1), weights.flatten()
    )
    return divergence / student.shape[:-1].numel()


def chunk_cross_entropy_(model: PreTrainedModel) -> None:
    """Let a model compute its loss from logits in chunks, as `distillation_loss` does, in place."""

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch=None, **kwargs):
        targets, num_items = _targets(labels, kwargs.get("shift_labels"), num_items_in_batch)
        return _Chunked.apply(_cross_entropy_of_chunk, logits.flatten(0, 1), targets) / num_items

    model.loss_function = loss


def _divergence_of_chunk(
    student: Tensor, gradient: Tensor, teacher: Tensor, weights: Tensor
) -> Tensor:
    """Sum over tokens of weights * KL(softmax(teacher) || softmax(student)); its gradient, weights *
    (softmax(student) - softmax(teacher)), goes into `gradient`.
    """
    log_p, log_q = (log_softmax(logits.float(), -1) for logits in (student, teacher))
    q = log_q.exp()
    total = (log_q.sub_(log_p).mul_(q).sum(-1) * weights).sum()  # autocast would round a @
    gradient.copy_(log_p.exp_().sub_(q).mul_(weights[:, None]))
    return total


def _cross_entropy_of_chunk(logits: Tensor, gradient: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropy with targets (tokens,); its gradient goes into `gradient`."""
    log_p = log_softmax(logits.float(), -1)
    counts = (targets != _IGNORED).float()[:, None]
    targets = targets.clamp(min=0)[:, None]
    total = -(log_p.gather(1, targets) * counts).sum()
    p = log_p.exp_().scatter_add_(1, targets, -torch.ones_like(counts))
    gradient.copy_(p.mul_(counts))
    return total


class _Chunked(torch.autograd.Function):
    """Sum of `loss(logits, gradient, *tensors)` over chunks of the tokens, in float32.

    The forward computes the gradient of the logits (tokens, vocabulary) a few tokens at a time. In
    addition to the logits and the gradient, in their dtype (float32 for float16, whose gradient is
    scaled before it is rounded), only one chunk is in float32, and it fits in a CPU's cache.
    """

    @staticmethod
    def forward(ctx: Any, loss: Callable[..., Tensor], logits: Tensor, *tensors: Tensor):
        ctx.dtype, ctx.num_tensors = logits.dtype, len(tensors)
        is_half = logits.dtype == torch.float16
        gradient = torch.empty_like(logits, dtype=torch.float32 if is_half else logits.dtype)
        rows = _CHUNK_TOKENS if logits.is_cuda else _CHUNK_TOKENS_OF_CPU
        chunks = (tensor.split(rows) for tensor in (logits, gradient, *tensors))
        total = logits.new_zeros((), dtype=torch.float32)
        for chunk in zip(*chunks, strict=True):
            total += loss(*chunk)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, to_total: Tensor):
        (gradient,) = ctx.saved_tensors
        to_logits = (gradient * to_total.to(gradient.dtype)).to(ctx.dtype)
        return None, to_logits, *[None] * ctx.num_tensors


_MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")


class Objective:
    """A weighted sum of losses, `distill` against a teacher; keeps their means for the log."""

    def __init__(
        self,
        weights: Mapping[Any, float],
        teacher: PreTrainedModel | None,
        answer_weight: float = 0.0,
    ):
        self.weights = dict(weights)
        if answer_weight:
            self.weights["answers"] = answer_weight * weights.get("lm", 0.0)
        self.answer_weight = answer_weight
        self._logged = list({"lm": 0.0} | self.weights)  # `lm` for curves that can be compared
        self._teacher = teacher.requires_grad_(False).eval() if teacher else None
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, int] = defaultdict(int)

    def __call__(
        self, text_loss: Tensor, logits: Tensor, inputs: Mapping, accumulated: int
    ) -> Tensor:
        """The loss of one of `accumulated` batches, from the loss of its text and its logits."""
        losses, token_weights = {"lm": text_loss}, None
        if self.answer_weight:
            of_answers = answer_weights(inputs["answers"])
            answers = answer_loss(logits, inputs["input_ids"], of_answers)
            losses["answers"] = answers / accumulated
            token_weights = 1 + self.answer_weight * of_answers
        if (teacher := self._teacher) is not None:
            given = {name: inputs[name] for name in _MODEL_INPUTS if name in inputs}
            with torch.no_grad():
                theirs = teacher.to(logits.device)(**given, use_cache=False).logits
            divergence = distillation_loss(logits, theirs, token_weights)
            losses["distill"] = divergence / accumulated
        for name in self._logged:
            loss = losses[name].item() * accumulated
            if math.isfinite(loss):  # that of a bad step would hide the mean of all others
                self._sums[name] += loss
                self._counts[name] += 1
        return sum(weight * losses[name] for name, weight in self.weights.items())

    def take_means(self) -> dict[str, float]:
        """Each loss, and that of the text, as `loss_<name>`, mean over the steps since the last
        call and all processes; without losses that are not numbers, unless there are no others.
        Every process calls this.
        """
        found = [(self._sums[name], float(self._counts[name])) for name in self._logged]
        sums, counts = reduce(torch.tensor(found, device=PartialState().device), "sum").T
        means = (sums / counts).tolist()
        self._sums.clear()
        self._counts.clear()
        return {f"loss_{name}": mean for name, mean in zip(self._logged, means, strict=True)}
