"""Small real things that many tests start from. Sizes are pairwise different, so that a swapped
axis cannot pass.
"""

import gc
import os
import subprocess
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch

if not torch.cuda.is_available():
    # before anything imports Triton, whose own functions follow it
    os.environ["TRITON_INTERPRET"] = "1"

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import coca_hf
from coca_hf import CocaError

# Nobody pulls the plug on a test: waiting for the disk is more than half of a small conversion.
os.fsync = lambda descriptor: None

TINY = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


# Files that take longest, the longest first: begun last, one of them would keep the other worker of
# xdist waiting.
LONGEST = (
    "test_real_checkpoint.py",
    "test_vllm.py",
    "train/test_fsdp.py",
    "train/test_kills.py",
    "train/test_slurm.py",
    "train/test_hosts.py",
    "train/test_cluster.py",
    "convert/test_destination.py",
    "evaluate/test_lm_eval.py",
    "evaluate/test_batches.py",
    "evaluate/test_tasks.py",
    "test_hub.py",
    "models/test_backends.py",
    "evaluate/test_speed.py",
    "train/test_context_parallel.py",
    "train/test_resume.py",
    "train/test_data.py",
    "train/test_processes.py",
    "train/test_start.py",
    "test_trl.py",
    "convert/test_interrupted.py",
)


def pytest_configure(config):
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # xdist would take the files with most tests first


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish():
    """Keep what imports made out of every later garbage collection, which took half of a small
    training run.
    """
    gc.collect()
    gc.freeze()


def output_of(*command, **environment):
    """What a process prints that ends well."""
    done = subprocess.run(
        [*map(str, command)], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def refused(message, function, *arguments, **options):
    """Claim that a call raises a CocaError of one line which matches `message`; returns that line."""
    with pytest.raises(CocaError, match=message) as caught:
        function(*arguments, **options)
    said = str(caught.value)
    assert "\n" not in said
    return said


def flip(file, place=-1):
    """Change a bit of a file."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte, and three special tokens: any text comes back as it was."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
    )


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory, tiny_tokenizer):
    """A random LLaMA checkpoint with grouped queries (6 heads, 2 key/value heads, head_dim 8),
    trained length 64.
    """
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("checkpoints") / "tiny-llama"
    config = LlamaConfig(vocab_size=len(tiny_tokenizer), **TINY, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(directory)
    tiny_tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_coca_dir(tiny_llama_dir):
    """`tiny_llama_dir`, converted (slack)."""
    directory = tiny_llama_dir.parent / "tiny-coca"
    coca_hf.convert_checkpoint(tiny_llama_dir, directory)
    return directory


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 6 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(
            "mounting a file system needs root; tests with a limit on the size of files take the "
            "same path"
        )
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)  # garbage may hold files open
