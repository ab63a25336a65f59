"""What a CoCA model is. The modules here are flat siblings, because some of them travel inside
checkpoints.
"""
