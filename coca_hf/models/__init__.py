"""The CoCA models. The modules are flat siblings, because most of them travel inside checkpoints."""
