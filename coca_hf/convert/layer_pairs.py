"""The layers of the original and of its CoCA model, one pair at a time, and hidden states on disk.

Neither model is ever whole in memory: both are built without numbers, and a layer gets its numbers
from the source when it is loaded.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coca_hf.convert.config import converted_config
from coca_hf.convert.layout import Layout
from coca_hf.models.rotary import CocaRotaryEmbedding

BATCH_TOKENS = 4096  # in memory at once, unless a block is longer
FITTED = ("q_proj", "t_proj")  # the projections that calibration fits to attention maps
# the name of the attention function that notes queries and keys
ATTENTION = "coca_calibration"


class Angles:
    """cos and sin of positions (b, m) in both models."""

    def __init__(self, base: Any, coca: Any, device: str):
        self.original, self.coca = (
            functools.partial(copy.deepcopy(rotary).to(device), torch.zeros(1, device=device))
            for rotary in (base.rotary_emb, coca.model.rotary_emb)
        )


class LayerPairs:
    """The layers of `layout`'s source and of the CoCA model, on `device`, in evaluation mode.

    dtype: of the matrices; those that calibration fits and all vectors are float32. config: of the
    CoCA model, without the NTK base that `layout` may write.
    """

    def __init__(self, layout: Layout, device: str, dtype: torch.dtype = torch.float32):
        self.layout, self.device, self.dtype = layout, device, dtype
        source = layout.source
        original_config = CONFIG_MAPPING[source.config["model_type"]].from_dict(source.config)
        kept, where = layout.config.coca_kept_layers, str(source.config_file)
        self.config = converted_config(source.config, layout.form, kept, where)
        with torch.device("meta"):
            original, self._coca = (  # whichever attention the file asks for
                AutoModelForCausalLM.from_config(
                    config, dtype=torch.float32, attn_implementation="eager"
                ).eval()
                for config in (original_config, self.config)
            )
        self._base: Any = original.base_model
        self._base_name = original.base_model_prefix
        self._base.rotary_emb = type(self._base.rotary_emb)(original_config)
        self._coca.model.rotary_emb = CocaRotaryEmbedding(self.config)
        self.angles = Angles(self._base, self._coca, device)
        self._targets = {target.name: target for target in layout.targets}

    def __len__(self) -> int:
        return self.config.num_hidden_layers

    @torch.autocast("cpu", enabled=False)  # keeps W_T's scale exact
    def load(
        self, number: int, fitted: Mapping[str, Tensor] = MappingProxyType({})
    ) -> tuple[Any, Any]:
        """Layer `number` of the original and of the CoCA model, which share equal tensors.

        fitted: tensors by name in the CoCA model, in place of their initial ones.
        """
        read = functools.cache(self.layout.source.read)
        carried_over = functools.cache(lambda name: self._on_device(read(name)))
        prefix = f"{self._base_name}.layers.{number}."
        theirs = _filled(self._base.layers[number], lambda name: carried_over(prefix + name))
        initialiser = self.layout.initialiser(read)

        def made(name: str) -> Tensor:
            target = self._targets[f"model.layers.{number}.{name}"]
            if number in self.layout.converted and target.module in FITTED:
                own = fitted[target.name] if target.name in fitted else initialiser.make(target)
                return own.to(self.device, torch.float32, copy=True)
            if target.is_carried_over:
                return carried_over(target.source)
            return self._on_device(initialiser.make(target))

        return theirs, _filled(self._coca.model.layers[number], made)

    def storage(self, blocks: Tensor) -> str:
        """The device for what a layer computes from `blocks`: the GPU if that takes half of it at most."""
        if not self.device.startswith("cuda"):
            return self.device
        heads = self.config.num_attention_heads + self.config.num_key_value_heads
        needed = blocks.numel() * (self.config.hidden_size + heads * self.config.head_dim) * 4
        free, _ = torch.cuda.mem_get_info(self.device)
        return self.device if needed < free / 2 else "cpu"

    def embeddings(self) -> Tensor:
        """The input of layer 0 for every token, (vocabulary, hidden), in the dtype of the source."""
        return self._coca.model.before_layers(self._read("model.embed_tokens.weight"))

    def norm_and_head(self) -> tuple[nn.Module, Tensor]:
        """The norm and the scaled head, (vocabulary, hidden), of both models, in float32."""
        norm = _filled(self._coca.model.norm, lambda name: self._read(f"model.norm.{name}").float())
        is_tied = "lm_head.weight" not in self._targets
        name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
        head = self._read(name).to(self.device, torch.float32)
        return norm.to(self.device), head / getattr(self.config, "logits_scaling", 1.0)

    def _read(self, name: str) -> Tensor:
        return self.layout.source.read(self._targets[name].source)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype if tensor.dim() == 2 else torch.float32)


def _filled(module: nn.Module, tensor_of: Callable[[str], Tensor]) -> Any:
    """A copy of `module`, which has no numbers, with the tensors that `tensor_of` returns by name."""
    copied = copy.deepcopy(module)
    copied.load_state_dict({name: tensor_of(name) for name in copied.state_dict()}, assign=True)
    return copied


class HiddenStates:
    """Blocks of hidden states, (n, m, hidden) in float32, in a file that is read and written.

    It is indexed by slices of blocks, like a tensor. The file is not mapped into memory, because its
    pages would count as ours, and a full disk would be a SIGBUS instead of an error. Reading raises
    OSError if the file is too short.
    """

    def __init__(self, file: Path, shape: tuple[int, int, int], first: int = 0):
        self.file, self.shape, self._first = file, shape, first

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, blocks: slice) -> Tensor:
        start, stop, _ = blocks.indices(len(self))
        count = (stop - start) * self._per_block
        numbers = np.fromfile(self.file, np.float32, count, offset=self._offset(start))
        if len(numbers) < count:
            raise OSError(f"{self.file} became shorter while it was read")
        return torch.from_numpy(numbers).view(-1, *self.shape[1:])

    def __setitem__(self, blocks: slice, states: Tensor) -> None:
        self.file.touch()
        with self.file.open("r+b") as stream:
            stream.seek(self._offset(blocks.indices(len(self))[0]))
            stream.write(states.float().cpu().contiguous().numpy().data)

    def split(self, *sizes: int) -> Iterator["HiddenStates"]:
        """Parts of `sizes` blocks each, in the same file."""
        first = self._first
        for size in sizes:
            yield HiddenStates(self.file, (size, *self.shape[1:]), first)
            first += size

    @property
    def _per_block(self) -> int:
        return self.shape[1] * self.shape[2]

    def _offset(self, block: int) -> int:
        return 4 * (self._first + block) * self._per_block


def batches(states: Tensor | HiddenStates) -> Iterator[slice]:
    """Slices of blocks with at most `BATCH_TOKENS` tokens, or of one block."""
    at_once = max(1, BATCH_TOKENS // states.shape[1])
    return (slice(start, start + at_once) for start in range(0, len(states), at_once))


def attention_of(layer: Any) -> Any:
    """The attention of a layer of either model."""
    return layer.self_attn if hasattr(layer, "self_attn") else layer.attention


@torch.no_grad()
def run_layer(
    layer: Any,
    states: Tensor | HiddenStates,
    after: Tensor | HiddenStates,
    positions: Tensor,
    angles: Callable[[Tensor], tuple[Tensor, Tensor]],
    note: Callable[..., None] | None = None,
) -> None:
    """Run `states`, (n, m, hidden), through `layer`, whose attention function is replaced.

    after: receives the output; may be `states`. positions: (n, m). angles: of the layer's model, as
    in `Angles`. note: called for every batch, before `after` has its output, with the slice of its
    blocks and with what their attention sees: inputs (b, m, hidden), queries (b, m, h, d), rotated
    and scaled, keys (b, g, m, d), rotated.
    """
    attention = attention_of(layer)
    attention.config._attn_implementation = ATTENTION
    for some in batches(states):
        batch, at = states[some].to(positions.device), positions[some]
        result = layer(batch, attention_mask=None, position_embeddings=angles(at))
        if note:
            note(some, layer.input_layernorm(batch), *attention.noted)
        after[some] = result
    del attention.noted


def attend_and_note(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **kwargs
):
    """Causal attention, as transformers calls it, which leaves queries and keys in `module.noted`."""
    module.noted = ((query * scaling).transpose(1, 2), key)
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return output.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend_and_note)
