"""Runs and cases as the commands make them, and the options of the commands."""

import pyarrow.parquet as pq

from coca_hf.evaluate import passkey, recall
from coca_hf.evaluate.answers import fit_case
from coca_hf.evaluate.loaded_model import parse_ropes
from coca_hf.evaluate.rows import RowStore, Run

OPTIONS = {  # of the command of each measurement
    "perplexity": "--data BOOKS --lengths 30,60 --stride 25 --rope default,dynamic:4 --batch-size 4",
    "position-loss": "--data BOOKS --lengths 30,60 --bucket 10 --batch-size 2",
    "passkey": "--lengths 300 --cases 7 --new-tokens 3 --batch-size 2",
    "boundary": "--data BOOKS --lengths 60 --pairs 50",
    "copying": "--lengths 60 --cases 5 --batch-size 2",
    "recall": "--lengths 300 --cases 5 --batch-size 2",
    "attention-maps": "--data BOOKS --lengths 30,60 --baseline LLAMA",
    "speed": "--lengths 30,60 --modes prefill --repeats 2 --warmup 0 --baseline LLAMA "
    "--baseline-name plain",
    "tasks": "--tasks coca_likelihood,coca_answer --batch-size 2 --include-path TASKS",
}


def run_of(loaded, out, *lengths, ropes="default", batch_size=None):
    """Rows of `loaded` at `lengths`, in the directory `out`, beside those that are there."""
    return Run(loaded, [*lengths], parse_ropes(ropes), RowStore(out), batch_size)


def raw_of(row, out, name):
    """The lines of a raw table of a row in the directory `out`."""
    return pq.read_table(out / row["raw"][name]).to_pylist()


def passkey_case(tokenizer, length, seed, number, variant="paper", depths=None):
    return fit_case(tokenizer, length, passkey.draw(length, seed, number, variant, depths))


def recall_case(tokenizer, length, seed, number, pairs):
    return fit_case(tokenizer, length, recall.draw(length, seed, number, pairs))
