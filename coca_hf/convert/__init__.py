"""Turn a checkpoint, or a model in memory, into a CoCA one."""
