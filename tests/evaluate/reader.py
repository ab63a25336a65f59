"""A model that answers a prompt with what a function of its text says, teacher-forced or not."""

from types import SimpleNamespace

import torch
from torch import nn
from transformers import PreTrainedConfig

from coca_hf.evaluate.loaded_model import LoadedModel


class Reader(nn.Module):
    """Certain, after a prompt and the beginning of a reply, of the next token of `reply(prompt)`.

    A prompt ends where `reply` finds an answer for the longest beginning of the text that ends with
    a colon or "is".
    """

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, tokenizer, reply):
        super().__init__()
        self.config = PreTrainedConfig(num_hidden_layers=1)
        self.tokenizer, self.reply = tokenizer, reply
        self.embed = nn.Embedding(len(tokenizer), 2)

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, use_cache=False):
        logits = torch.zeros(*input_ids.shape, len(self.tokenizer))
        for row, ids in enumerate(input_ids.tolist()):
            text = self.tokenizer.decode(ids)
            prompt = text[: max(text.rfind(":") + 1, text.rfind(" is") + 3)]
            first = len(self.tokenizer(prompt)["input_ids"]) - 1
            for place, token in enumerate(self.tokenizer(self.reply(prompt))["input_ids"]):
                if first + place < len(ids):
                    logits[row, first + place, token] = 50
        return SimpleNamespace(logits=logits)


def reads(tokenizer, reply):
    return LoadedModel(Reader(tokenizer, reply), tokenizer, "reader", "/reader", "0123")
