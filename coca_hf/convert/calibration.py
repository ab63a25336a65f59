"""The calibration that belongs to a conversion: on which text, what it takes, and its record."""

import json
import time
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from coca_hf import models
from coca_hf.checkout import versions
from coca_hf.convert.calibrate import (
    FittedLayers,
    Report,
    calibrate,
    default_passes,
    matrix_dtype,
    needs,
)
from coca_hf.convert.calibration_text import calibration_blocks, reach, repeated_blocks
from coca_hf.convert.config import head_of
from coca_hf.convert.harm import harm_bytes, layer_harms, most_harmful
from coca_hf.convert.layer_pairs import LayerPairs
from coca_hf.convert.layout import Layout
from coca_hf.convert.staging import Staging
from coca_hf.convert.writer import bytes_of
from coca_hf.errors import CocaError
from coca_hf.held_out import Place

# Layers that other code fitted are not reused. Initialisation, attention, rotary angles and the fit
# all decide what a fit is, so that any change in these directories counts.
CODE = (Path(__file__).parent, Path(models.__file__).parent)


class Calibration:
    """The calibration of the source of `layout` on the documents of `place`."""

    def __init__(
        self,
        layout: Layout,
        place: Place,
        num_tokens: int,
        block_tokens: int,
        passes: int | None,
        device: str,
        seed: int,
        ranks_layers: bool,
    ):
        if (layout.from_coca and not layout.converted) or layout.released:
            raise CocaError(
                "--calibrate: got a CoCA checkpoint, expected an original, or a layer that it "
                "keeps, whose attention is imitated; leave --ntk-length for another command"
            )
        if head_of(layout.config.architectures) != "ForCausalLM":
            raise CocaError(
                f"--calibrate: got {layout.source.config['architectures'][0]}, expected a causal "
                "language model, whose predictions it measures; leave --calibrate out, or "
                "calibrate the model that the classifier was trained from"
            )
        self.device = device
        self.text, self.text_commit, self.seed = place[0], place[4], seed
        self.tokenizer = layout.source.load_tokenizer()
        text_blocks, self.held_out = calibration_blocks(
            place, self.tokenizer, layout.config, num_tokens, block_tokens, seed
        )
        self.blocks = torch.cat(
            (text_blocks, repeated_blocks(text_blocks, self.tokenizer, layout.config, seed))
        )
        self.text_tokens = text_blocks.numel()
        self.passes = passes or default_passes(len(self.blocks))
        self.blocks_hash = xxhash.xxh3_128_hexdigest(bytes_of(self.blocks))
        self.dtype = matrix_dtype(device)
        files = [file for folder in CODE for file in sorted(folder.glob("*.py"))]
        settings = {
            "source": layout.source.states(),
            "blocks": [self.blocks.shape, self.blocks_hash],
            "held out": xxhash.xxh3_128_hexdigest(bytes_of(self.held_out)),
            "fit": [layout.config.coca_constraint, seed, self.passes, device, self.dtype],
            "code": [xxhash.xxh3_128_hexdigest(file.read_bytes()) for file in files],
            # Fitted tensors are float32, and do not depend on which other layers are kept.
            "config": layout.config.to_dict()
            | {"coca_kept_layers": None, "coca_kept_window": None, "dtype": None},
            "versions": versions("torch", "transformers"),
        }
        self.settings = json.dumps(settings, default=str)
        self.needs = needs(layout, self.blocks, self.held_out, self.dtype)
        if ranks_layers:
            ranked = 2 * self._ranking_blocks().numel()
            states = max(self.needs.disk_states, harm_bytes(layout.config, ranked))
            self.needs = self.needs._replace(disk_states=states)
        self.harms: list[float] | None = None
        self.seconds = 0.0

    def run(self, layout: Layout, staging: Staging, report: Report) -> None:
        """Fit the layers of `layout`, which gets the tensors; `record` gets what was done."""
        began = time.perf_counter()
        done = self._fit(layout, staging, report)
        layout.calibrated = done.tensors
        record = {
            "text": self.text,
            "text_commit": self.text_commit,
            "blocks_xxh3_128": self.blocks_hash,
            "tokens": self.text_tokens,
            "repeated_tokens": self.blocks.numel() - self.text_tokens,
            "block_tokens": self.blocks.shape[1],
            "reach": reach(layout.config),
            "held_out_tokens": self.held_out.numel(),
            "seed": self.seed,
            "passes": self.passes,
            "device": self.device,
            "perplexity": done.perplexity,
            "attention_kl": [layer._asdict() for layer in done.layers],
            "layer_harm": self.harms,
            "seconds": round(self.seconds + time.perf_counter() - began, 1),
            "seconds_by_part": {part: round(spent, 1) for part, spent in done.seconds.items()},
        }
        self.record = {name: value for name, value in record.items() if value is not None}

    def plan(self) -> dict:
        return {
            "tokens": self.blocks.numel(),
            "passes": self.passes,
            "device": self.device,
            "memory_bytes": self.needs.memory,
            "disk_bytes": self.needs.disk_states + self.needs.disk_layers,
        }

    def _ranking_blocks(self) -> Tensor:
        """The half of the held-out text that layers are ranked on; the same with repeats is added."""
        return self.held_out[: max(1, len(self.held_out) // 2)]

    def most_harmful(
        self, layout: Layout, number: int | str, staging: Staging, report: Report
    ) -> list[int]:
        """Fit all layers; returns the `number` (or `auto`) whose conversion harms most."""
        began = time.perf_counter()
        done = self._fit(layout, staging, report)
        text_blocks = self._ranking_blocks()
        repeated = repeated_blocks(text_blocks, self.tokenizer, layout.config, self.seed)
        blocks = torch.cat((text_blocks, repeated))
        pairs = LayerPairs(layout, self.device)
        self.harms = layer_harms(pairs, done.tensors, blocks, staging.calibrated)
        self.seconds = time.perf_counter() - began
        return most_harmful(self.harms, None if number == "auto" else int(number))

    def _fit(self, layout: Layout, staging: Staging, report: Report) -> FittedLayers:
        return calibrate(
            LayerPairs(layout, self.device, self.dtype),
            self.blocks,
            self.held_out,
            staging.calibrated,
            self.passes,
            self.seed,
            self.settings,
            report,
        )
