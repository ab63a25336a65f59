"""Blocks of a few sources, prepared in a directory of the test."""

from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer

from coca_hf.train.data import Blocks, Corpus
from coca_hf.train.recipe import Data, Recipe, Source


def make_corpus(
    sources: list[Source],
    tokenizer,
    seq_len: int,
    directory: Path,
    held_out_blocks: int = 0,
    check_stop: Callable[[], None] = lambda: None,
    **data,
):
    given = {"seq_len": seq_len, "held_out_blocks": held_out_blocks}
    given |= {"prepared": str(directory), **data}
    described = Data(sources=list(sources), **given)
    return Corpus(described, tokenizer, len(tokenizer), check_stop)


def corpus_of(recipe: Recipe) -> Corpus:
    tokenizer = AutoTokenizer.from_pretrained(recipe.model)
    return Corpus(recipe.data, tokenizer, len(tokenizer))


def tokens_of(blocks: Blocks, first: int = 0, end: int | None = None) -> list[tuple[int, ...]]:
    """The tokens of blocks `first`, … up to `end`."""
    numbers = range(first, end or len(blocks))
    return [tuple(blocks[number]["input_ids"].tolist()) for number in numbers]
