"""Turn a checkpoint, or a model in memory, into a CoCA one."""

from coca_hf.convert.conversion import convert_checkpoint
from coca_hf.convert.patch import patch_, unpatch_

__all__ = ["convert_checkpoint", "patch_", "unpatch_"]
