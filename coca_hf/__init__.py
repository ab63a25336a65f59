"""CoCA for Hugging Face models. Importing this package registers its models with transformers' Auto
classes.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.utils.versions import require_version

SUPPORTED_TRANSFORMERS = "transformers>=5.17,<5.25"

require_version(SUPPORTED_TRANSFORMERS, f"coca_hf: pip install '{SUPPORTED_TRANSFORMERS}'")

from coca_hf.errors import CocaError  # noqa: E402
from coca_hf.kernels import register as register_kernels  # noqa: E402
from coca_hf.models.alibi import AlibiLlamaConfig, AlibiLlamaForCausalLM, AlibiLlamaModel  # noqa: E402
from coca_hf.models.gpt_neox import CocaGPTNeoXConfig, CocaGPTNeoXForCausalLM, CocaGPTNeoXModel  # noqa: E402
from coca_hf.models.granite import CocaGraniteConfig, CocaGraniteForCausalLM, CocaGraniteModel  # noqa: E402
from coca_hf.models.llama import CocaLlamaConfig, CocaLlamaForCausalLM, CocaLlamaModel  # noqa: E402
from coca_hf.models.mistral import CocaMistralConfig, CocaMistralForCausalLM, CocaMistralModel  # noqa: E402
from coca_hf.models.qwen2 import CocaQwen2Config, CocaQwen2ForCausalLM, CocaQwen2Model  # noqa: E402
from coca_hf.models.qwen3 import CocaQwen3Config, CocaQwen3ForCausalLM, CocaQwen3Model  # noqa: E402
from coca_hf.models.smollm3 import CocaSmolLM3Config, CocaSmolLM3ForCausalLM, CocaSmolLM3Model  # noqa: E402

__version__ = version("coca-hf")
__all__ = [
    "AlibiLlamaConfig",
    "AlibiLlamaForCausalLM",
    "AlibiLlamaModel",
    "CocaError",
    "CocaGPTNeoXConfig",
    "CocaGPTNeoXForCausalLM",
    "CocaGPTNeoXModel",
    "CocaGraniteConfig",
    "CocaGraniteForCausalLM",
    "CocaGraniteModel",
    "CocaLlamaConfig",
    "CocaLlamaForCausalLM",
    "CocaLlamaModel",
    "CocaMistralConfig",
    "CocaMistralForCausalLM",
    "CocaMistralModel",
    "CocaQwen2Config",
    "CocaQwen2ForCausalLM",
    "CocaQwen2Model",
    "CocaQwen3Config",
    "CocaQwen3ForCausalLM",
    "CocaQwen3Model",
    "CocaSmolLM3Config",
    "CocaSmolLM3ForCausalLM",
    "CocaSmolLM3Model",
    "__version__",
    "convert_checkpoint",
    "patch_",
    "unpatch_",
]

register_kernels()
for config, causal_lm in (
    (AlibiLlamaConfig, AlibiLlamaForCausalLM),
    (CocaGPTNeoXConfig, CocaGPTNeoXForCausalLM),
    (CocaGraniteConfig, CocaGraniteForCausalLM),
    (CocaLlamaConfig, CocaLlamaForCausalLM),
    (CocaMistralConfig, CocaMistralForCausalLM),
    (CocaQwen2Config, CocaQwen2ForCausalLM),
    (CocaQwen3Config, CocaQwen3ForCausalLM),
    (CocaSmolLM3Config, CocaSmolLM3ForCausalLM),
):
    AutoConfig.register(config.model_type, config)
    AutoModelForCausalLM.register(config, causal_lm)
AutoModel.register(AlibiLlamaConfig, AlibiLlamaModel)  # the others: `decoder.classifiers`
del config, causal_lm, register_kernels

if TYPE_CHECKING:
    from coca_hf.convert.conversion import convert_checkpoint
    from coca_hf.convert.patch import patch_, unpatch_
else:
    OF_CONVERSION = {"convert_checkpoint": "conversion", "patch_": "patch", "unpatch_": "patch"}

    def __getattr__(name):
        """Import conversion when it is used: loading a model and generating need none of it."""
        if name not in OF_CONVERSION:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"coca_hf.convert.{OF_CONVERSION[name]}"), name)
