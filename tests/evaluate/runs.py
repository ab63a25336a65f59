"""A run as the commands make it."""

from coca_hf.evaluate.rope import parse_ropes
from coca_hf.evaluate.rows import RowStore, Run


def run_of(loaded, out, *lengths, ropes="default", batch_size=None):
    """Rows of `loaded` at `lengths`, in the directory `out`, beside those that are there."""
    return Run(loaded, [*lengths], parse_ropes(ropes), RowStore(out), batch_size)
