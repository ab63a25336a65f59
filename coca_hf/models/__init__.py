"""The CoCA models. Modules are flat siblings, because most of them travel inside checkpoints."""
