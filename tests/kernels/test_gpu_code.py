"""The kernels compile to machine code for GPUs that this machine has not, without what would make
them slow there.
"""

import json
import sys

import pytest

from tests.conftest import output_of

pytestmark = pytest.mark.real

# The arguments that are not compile-time constants are typed by their names: pointers, numbers, and
# strides, of which the last axis's is 1, as they are where models call.
COMPILE = """
import json, sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from coca_hf.kernels import decode, fold

POINTERS = {"mask_ptr": "*u8", "partial_ptr": "*fp32", "log_sum_ptr": "*fp32"}

def loop(ptx):
    # the lines from a label that is jumped back to, to that jump
    lines = ptx.splitlines()
    labels = {line.strip().split(":")[0]: number for number, line in enumerate(lines) if line.startswith("$")}
    jumps = [(number, line.split()[-1].strip(";")) for number, line in enumerate(lines) if "bra" in line]
    return [line for end, label in jumps for line in lines[labels[label] : end]]

def compiled(kernel, arch, num_warps, num_stages, **constants):
    signature, aligned = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name.endswith("_d") or name == "mask_n":
            constants[name] = 1
        if name in constants:
            signature[name] = "constexpr"
            continue
        pointer = POINTERS.get(name, "*bf16") if name.endswith("_ptr") else None
        signature[name] = pointer or ("fp32" if name == "scale" else "i32")
        if pointer or name[-2:] in ("_b", "_h", "_m", "_g", "_n") or name == "split_keys":
            aligned[(place,)] = [["tt.divisibility", 16]]
    constants = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, GPUTarget("cuda", arch, 32), {"num_warps": num_warps, "num_stages": num_stages})
    ptx = made.asm["ptx"]
    return {
        "shared": made.metadata.shared,
        "cubin": len(made.asm["cubin"]),
        "wide loads": sum("v4" in line for line in ptx.splitlines() if "ld.global" in line),
        "loop barriers": sum("bar.sync" in line for line in loop(ptx)),
        "wide": all("v4" in line for line in ptx.splitlines() if "ld.global" in line),
    }

found = {}
for arch, strict in ((89, True), (90, False)):
    for name in ("_fold_kernel", "_fold_backward_kernel"):
        found[f"{name} {arch}"] = compiled(
            getattr(fold, name), arch, 8, 3, QUERY_HEADS=32, T_HEADS=8, PAIRS=64, STRICT=strict,
            SLOWEST=16, EVERY_SECOND=strict, BLOCK_ROWS=64, BLOCK_PAIRS=64, COMPUTE=tl.float32,
        )
    found[f"_split_kernel {arch}"] = compiled(
        decode._split_kernel, arch, decode.WARPS, 3, KV_HEADS=32, GROUPS=1, PAIRS=64, HEADS=decode.HEADS,
        SHARES=decode.SHARES, BLOCK_GROUPS=1, KEYS=4, BLOCK_PAIRS=64, MASKED=True, STRICT=strict,
    )
    found[f"_join_kernel {arch}"] = compiled(
        decode._join_kernel, arch, 8, 3, HEAD_DIM=128, BLOCK_DIM=decode.JOINED_DIMS, BLOCK_SPLITS=decode.JOINED
    )
print(json.dumps(found))
"""
SHARED = {89: 99 << 10, 90: 227 << 10}  # bytes that a program may have, by CUDA's programming guide


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    environment = {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    printed = output_of(sys.executable, "-c", COMPILE, TRITON_INTERPRET="0", **environment)
    return json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize("arch", SHARED)
def test_every_kernel_compiles_and_fits(found, arch):
    of_arch = [one for name, one in found.items() if f" {arch}" in name]
    assert len(of_arch) == 4
    assert all(one["cubin"] > 0 and one["shared"] <= SHARED[arch] for one in of_arch)


def test_the_fold_reads_16_bytes_at_a_time(found):
    assert all(one["wide"] for name, one in found.items() if name.startswith("_fold"))


def test_decoding_reads_t_and_values_16_bytes_at_a_time(found):
    # of a thread, before the loop and in it: t and the halves of values, for two heads; cos and sin;
    # the halves of two queries
    loads = 2 * (3 * 2 + 2) + 2 * 2
    assert all(
        one["wide loads"] == loads for name, one in found.items() if name.startswith("_split")
    )


def test_threads_exchange_nothing_while_they_decode(found):
    assert all(
        one["loop barriers"] == 0 for name, one in found.items() if name.startswith("_split")
    )
