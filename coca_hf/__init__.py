"""CoCA for Hugging Face models. Importing this registers `coca_llama` with transformers' Auto classes."""

from importlib.metadata import version

import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

SUPPORTED_TRANSFORMERS = ("5.16", "5.24")

if not Version(SUPPORTED_TRANSFORMERS[0]) <= Version(transformers.__version__) < Version(SUPPORTED_TRANSFORMERS[1]):
    raise ImportError(
        f"coca_hf: got transformers {transformers.__version__}, expected >={SUPPORTED_TRANSFORMERS[0]},"
        f"<{SUPPORTED_TRANSFORMERS[1]}; pip install 'transformers>={SUPPORTED_TRANSFORMERS[0]},"
        f"<{SUPPORTED_TRANSFORMERS[1]}'"
    )

from coca_hf.convert import convert_checkpoint, patch_  # noqa: E402
from coca_hf.errors import CocaError  # noqa: E402
from coca_hf.models.llama import CocaLlamaConfig, CocaLlamaForCausalLM, CocaLlamaModel  # noqa: E402

__version__ = version("coca-hf")
__all__ = [
    "CocaError",
    "CocaLlamaConfig",
    "CocaLlamaForCausalLM",
    "CocaLlamaModel",
    "__version__",
    "convert_checkpoint",
    "patch_",
]

AutoConfig.register("coca_llama", CocaLlamaConfig)
AutoModel.register(CocaLlamaConfig, CocaLlamaModel)
AutoModelForCausalLM.register(CocaLlamaConfig, CocaLlamaForCausalLM)
