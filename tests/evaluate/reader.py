"""A model that answers a prompt as a function of its text says, teacher-forced or generating."""

import re

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from coca_hf.evaluate.loaded_model import LoadedModel

PROMPT = re.compile(r".*(?:passkey\?|key\? The pass key is|:)", re.DOTALL)  # up to its end


class Reader(PreTrainedModel, GenerationMixin):
    """Certain of the next token of `reply(prompt)` after a prompt and a part of that reply."""

    config_class = PreTrainedConfig

    def __init__(self, tokenizer, reply):
        super().__init__(PreTrainedConfig(eos_token_id=tokenizer.eos_token_id, num_hidden_layers=1))
        self.tokenizer, self.reply = tokenizer, reply
        self.embed = nn.Embedding(len(tokenizer), 2)

    def get_input_embeddings(self):
        return self.embed

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return {"input_ids": input_ids}  # all of them, as there is no cache

    def forward(self, input_ids, attention_mask=None, use_cache=False, **options):
        logits, eos = torch.zeros(*input_ids.shape, len(self.tokenizer)), self.config.eos_token_id
        for row, ids in enumerate(input_ids.tolist()):
            padding = next(place for place, token in enumerate(ids) if token != eos)
            prompt = PROMPT.match(self.tokenizer.decode(ids[padding:]))[0]
            first = padding + len(self.tokenizer(prompt)["input_ids"]) - 1
            reply = [*self.tokenizer(self.reply(prompt))["input_ids"], *[eos] * len(ids)]
            for place, token in enumerate(reply[: len(ids) - first], first):
                logits[row, place, token] = 50
        return CausalLMOutput(logits=logits)


def reads(tokenizer, reply):
    return LoadedModel(Reader(tokenizer, reply).eval(), tokenizer, "reader", "/reader", "0123")
