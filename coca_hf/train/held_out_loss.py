"""The loss on blocks that training never sees, of a model as it trains: wrapped, sharded, compiled, in bfloat16."""

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn


@torch.no_grad()
def held_out_loss(model: nn.Module, head: nn.Module, blocks: Tensor, batch_size: int) -> float:
    """Mean loss, in nats, over every predicted token of `blocks` (num_blocks, seq_len).

    head: the model's, which keeps out of memory in training alone the logits that a fused cross-entropy does not need.
    Every process calls this with all blocks and computes its share; the number of processes does not change the mean.
    """
    state = PartialState()
    share = blocks[state.process_index :: state.num_processes]
    most_blocks = -(-len(blocks) // state.num_processes)
    was_training = model.training
    model.eval()
    head.train()
    total = 0.0
    for start in range(0, most_blocks, batch_size):  # all as often: where the model is sharded, a forward takes all
        rows = share[start : start + batch_size]
        batch = (rows if len(rows) else blocks[:1]).to(state.device)
        total += model(input_ids=batch, labels=batch, use_cache=False).loss.item() * len(rows)
    model.train(was_training)
    return sum(gather_object([total])) / len(blocks)
