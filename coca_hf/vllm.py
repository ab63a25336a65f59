"""vLLM's plugin: with coca_hf installed beside it, vLLM serves CoCA checkpoints without
`--trust-remote-code`.
"""

BACKEND = "vllm.model_executor.models.transformers:TransformersForCausalLM"


def register() -> None:
    """Tell vLLM that its Transformers backend runs CoCA. This is the entry point `coca` of
    `vllm.general_plugins`.

    vLLM calls it in every process that it starts. The import of coca_hf before it registers the
    configuration.
    """
    from vllm import ModelRegistry

    from coca_hf import __all__ as public_names

    for name in public_names:
        if name.startswith("Coca") and name.endswith("ForCausalLM"):
            ModelRegistry.register_model(name, BACKEND)
