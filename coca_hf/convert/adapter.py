"""LoRA adapters of peft, added to the weights of their base as these are read."""

import contextlib
import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash
from torch import Tensor
from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME

from coca_hf.convert.config import is_coca
from coca_hf.convert.initialise import Shape
from coca_hf.errors import CocaError, short
from coca_hf.files import file_hash
from coca_hf.weights import FLOATS, HEADS, WeightsFile, checkpoint_file, read_json

REMEDY = "merge it with peft's merge_and_unload first, and convert the result"
# Fields that do not change what is merged. Fields that are off (null, false, empty) do not, either,
# and the rest is refused.
INERT = set(
    """
    auto_mapping base_model_name_or_path exclude_modules inference_mode layers_pattern
    layers_to_transform lora_dropout megatron_core peft_version qalora_group_size revision
    runtime_config target_modules task_type
    """.split()  # noqa: SIM905
)
EXPECTED = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),  # others change the base
    "use_rslora": (True, False),
}


class Adapter:
    """A directory with plain LoRA on linear layers: W + B A alpha / r, or / sqrt(r) with rslora.

    weights: its open file. targets: the names of the base's tensors that it changes. record: its
    entry in `conversion.json`.

    Raises CocaError for an adapter of any other kind.
    """

    def __init__(self, directory: Path):
        self.config_file = checkpoint_file(directory, ADAPTER_CONFIG_NAME)
        config = read_json(self.config_file)
        self.rank, self.scale = self._rank_and_scale(config)
        self.weights = WeightsFile(checkpoint_file(directory, ADAPTER_SAFE_WEIGHTS_NAME))
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            self.targets = self._check_names()
            self.record = {"name": directory.absolute().name, "xxh3_128": self._hash()}
            self._is_of_coca = _is_of_coca(config)
            if base := str(config.get("base_model_name_or_path") or ""):
                is_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base)
                self.record["trained_on"] = base if is_id else Path(base).name
            on_error.pop_all()

    def check(self, shapes: Mapping[str, Shape], tied: bool, of_coca: bool) -> None:
        """Raise CocaError if the adapter does not fit a base whose tensors have `shapes`.

        tied: whether the base's head is its embedding. of_coca: whether it is a CoCA checkpoint.
        """
        if self._is_of_coca and not of_coca:
            raise CocaError(
                f"{self.config_file}: got an adapter that was trained on a CoCA model, expected one "
                "of SRC, which is no CoCA checkpoint; merge it into its own base with peft "
                "(merge_and_unload), or, if SRC is its base, correct base_model_name_or_path"
            )
        for name in sorted(self.targets):
            lora_a, lora_b = (self.weights.tensors[stored].shape for stored in self._pair(name))
            if tied and name in HEADS:
                raise CocaError(
                    f"{self.weights.file}: got weights for {name}, which the base ties to its "
                    f"embedding; {REMEDY}"
                )
            expected = (*lora_b[:1], *lora_a[1:])
            if shapes.get(name) != expected:
                raise CocaError(
                    f"{self.weights.file}: got weights for {name} of shape {expected}, expected "
                    f"{shapes.get(name, 'a tensor of the base')}; is the base another model?"
                )

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """`weight`, of the given `name`, with the adapter added: rounded once, as peft does."""
        lora_a, lora_b = map(self.weights.read, self._pair(name))
        wide = torch.promote_types(torch.promote_types(lora_a.dtype, lora_b.dtype), torch.float32)
        lora_a, lora_b = lora_a.to(wide), lora_b.to(wide)
        return (weight + (lora_b @ lora_a) * self.scale).to(weight.dtype)

    def close(self) -> None:
        self.weights.close()

    def _rank_and_scale(self, config: dict) -> tuple[int, float]:
        for field, value in {"peft_type": None, **config}.items():
            known = EXPECTED.get(field)
            is_plain = value in known if known else not value or field in INERT
            if not is_plain and field not in ("r", "lora_alpha"):
                raise CocaError(
                    f"{self.config_file}: got {field}={short(value)}, expected plain LoRA on "
                    f"linear layers; {REMEDY}"
                )
        rank, alpha = config.get("r"), config.get("lora_alpha")
        if not (
            (isinstance(rank, int) and rank >= 1)
            and (isinstance(alpha, int | float) and abs(alpha) < 1e308)  # not NaN, not 10**400
        ):
            raise CocaError(
                f"{self.config_file}: got r={short(rank)}, lora_alpha={short(alpha)}, expected a "
                "rank from 1 and a number"
            )
        return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    def _check_names(self) -> set[str]:
        targets = set()
        for stored, tensor in self.weights.tensors.items():
            found = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", stored)
            if not found or len(tensor.shape) != 2 or tensor.dtype not in FLOATS:
                raise CocaError(
                    f"{self.weights.file}: got {stored}, {tensor.dtype} of shape {tensor.shape}, "
                    f"expected plain LoRA on linear layers; {REMEDY}"
                )
            targets.add(f"{found[1]}.weight")
        for name in sorted(targets):
            found_ranks = [
                self.weights.tensors[stored].shape[axis] if stored in self.weights.tensors else None
                for axis, stored in enumerate(self._pair(name))
            ]
            if found_ranks != [self.rank, self.rank]:
                raise CocaError(
                    f"{self.weights.file}: got ranks {found_ranks} of lora_A and lora_B for "
                    f"{name}, expected {self.rank} from {ADAPTER_CONFIG_NAME}; is the adapter "
                    "complete?"
                )
        if not targets:
            raise CocaError(f"{self.weights.file}: got no tensors, expected those of an adapter")
        return targets

    def _pair(self, name: str) -> tuple[str, str]:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        return f"{module}.lora_A.weight", f"{module}.lora_B.weight"

    def _hash(self) -> str:
        """xxh3_128 of the factor and the file of weights."""
        content = f"{self.scale!r} {file_hash(self.weights.file)}"
        return xxhash.xxh3_128_hexdigest(content.encode())


def _is_of_coca(config: Mapping) -> bool:
    """Whether an adapter was trained on a CoCA model: by the class that peft notes where no task is
    given, or by the base that it names, if that is on this machine.
    """
    noted = config.get("auto_mapping")
    if isinstance(noted, dict) and str(noted.get("base_model_class")).startswith("Coca"):
        return True
    base = config.get("base_model_name_or_path")
    with contextlib.suppress(CocaError, OSError, ValueError):
        return isinstance(base, str) and is_coca(read_json(Path(base, "config.json")))
    return False
