"""How a model scores the known answer to a prompt: one forward a case, and nothing is generated.

Every token of the answer is predicted from the prompt and the answer's tokens before it. Where each of them is the
likeliest token, greedy decoding answers with exactly these tokens, so the share of such cases is its exact match.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from coca_hf.evaluate.batches import auto_batch_size, compute_all
from coca_hf.evaluate.load import Subject
from coca_hf.evaluate.perplexity import keeps_logits


class Scored(NamedTuple):
    nll: float  # nats, summed over the answer's tokens
    likeliest: list[int]  # the likeliest token at every place of the answer


def score_answers(
    subject: Subject,
    cases: list[tuple[list[int], list[int]]],
    batch_size: int | None = None,
    track: Callable[[list], Iterable] = iter,
) -> tuple[list[Scored], str | None, int]:
    """The scores of the answers, and what else `compute_all` returns.

    cases: token ids of a prompt and of its answer. batch_size: `auto_batch_size`, by default. All cases are padded on
    the right to one width, which causal attention never looks at, so a score does not depend on the batch.
    """
    width = max(len(prompt) + len(answer) for prompt, answer in cases) - 1
    kept = width + 1 - min(len(prompt) for prompt, _ in cases)
    model = subject.model

    @torch.inference_mode()
    def compute(batch: list[tuple[list[int], list[int]]]) -> list[Scored]:
        read = [prompt + answer[:-1] for prompt, answer in batch]
        input_ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in read], device=model.device)
        only_kept = {"logits_to_keep": kept} if keeps_logits(model) else {}
        logits = model(input_ids=input_ids, use_cache=False, **only_kept).logits[:, -kept:]  # (b, k, vocab)
        scores = []
        for (prompt, answer), of_case in zip(batch, logits, strict=True):
            first = len(prompt) - 1 - (width - kept)
            log_probs = of_case[first : first + len(answer)].float().log_softmax(-1)
            nll = -log_probs.double().gather(1, torch.tensor(answer, device=model.device)[:, None]).sum()
            scores.append(Scored(nll.item(), log_probs.argmax(-1).tolist()))
        return scores

    return compute_all([(cases, batch_size or auto_batch_size(width))], compute, track)
