"""Measurements of any causal language model, each a generator of rows."""
