"""The kernels compile to machine code for GPUs that this machine has not, without what would make
them slow there.
"""

import json
import sys

import pytest

from tests.conftest import output_of

pytestmark = pytest.mark.real
SHARED = {89: 99 << 10, 90: 227 << 10}  # bytes that a program may have, by CUDA's programming guide

# The kernels are compiled as models launch them, with Triton's own specialisation of the arguments, for
# a GPU that is pretended.
COMPILE = """
import json, re, subprocess, tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from coca_hf.kernels import decode, fold

class PretendedGpu:
    class utils:
        get_device_properties = staticmethod(lambda device: {"max_shared_mem": 227 << 10})

    def __init__(self, arch):
        self.arch = arch

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return self.arch

    def get_current_stream(self, device):
        return 0

class Launch:
    # stands for a kernel: compiles what would be launched, and runs nothing
    def __init__(self, kernel, name):
        self.kernel, self.name = kernel, name

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            made = self.kernel.warmup(*arguments, grid=grid, **options)
            found[f"{self.name} {driver.active.arch}{case}"] = facts(made)
        return launch

def spilled(cubin):
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(cubin)
        tool = Path(triton.__path__[0], "backends/nvidia/bin/cuobjdump")
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"LOCAL:(\\d+)", usage)[1])

def facts(made):
    ptx = made.asm["ptx"]
    loads = [line for line in ptx.splitlines() if "ld.global" in line]
    return {
        "shared": made.metadata.shared,
        "spilled": spilled(made.asm["cubin"]),
        "wide loads": sum("v4" in line for line in loads),
        "narrow loads": sum("v4" not in line for line in loads),
        "copies": [line.split("],")[-1].split(",")[0].strip() for line in ptx.splitlines() if "cp.async.cg" in line],
        "products on tensor cores": ptx.count("mma.sync"),
        "layouts changed": made.asm["ttgir"].split("scf.for")[-1].split("scf.yield")[0].count("convert_layout"),
    }

found, case = {}, ""
for module in (decode, fold):
    for name in [name for name in vars(module) if name.endswith("_kernel")]:
        setattr(module, name, Launch(getattr(module, name), name))
b, h, n, d = 2, 32, 300, 128
decode._gpu = lambda device: (132, SHARED[driver.active.arch])
query, value, q = torch.zeros(b, h, 1, d), torch.zeros(b, h, n, d), torch.zeros(b, h, n, d)
t, angle = torch.zeros(b, h, n, d // 2), torch.zeros(b, 1, n, d // 2)
query, value, q, t, angle = (x.bfloat16() for x in (query, value, q, t, angle))
mask = torch.ones(b, 1, 1, n, dtype=torch.bool)
for arch, strict in ((89, True), (90, False)):
    driver.set_active(PretendedGpu(arch))
    decode.decode_attention(query, t, value, angle, angle, mask if arch == 89 else None, 1.0, strict)
    key, grad = torch.zeros_like(q), torch.zeros_like(q)
    fold._fold(q, t[:, :8], angle, angle, strict, 16, strict)
    fold._fold_backward(grad, key[:, :8], q, t[:, :8], angle, angle, strict, 16, strict)
# a program of one head, with angles in fp32
driver.set_active(PretendedGpu(89))
case = ", autocast"
odd = query[:, :3], t[:, :3], value[:, :3]
decode.decode_attention(*odd, angle.float(), angle.float(), mask, 1.0, False)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    environment = {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    printed = output_of(
        sys.executable, "-c", f"{SHARED = }" + COMPILE, TRITON_INTERPRET="0", **environment
    )
    return json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize("arch", SHARED)
def test_every_kernel_compiles_and_fits(found, arch):
    of_arch = [one for name, one in found.items() if f" {arch}" in name]
    assert len(of_arch) == {89: 6, 90: 4}[arch]  # decoding under autocast, too
    assert all(one["shared"] <= SHARED[arch] and one["spilled"] == 0 for one in of_arch)


def test_the_fold_reads_16_bytes_at_a_time(found):
    assert all(one["narrow loads"] == 0 for name, one in found.items() if name.startswith("_fold"))


def test_decoding_copies_16_bytes_at_a_time_and_multiplies_on_tensor_cores(found):
    masked, without = found["_split_kernel 89"], found["_split_kernel 90"]
    for one in (masked, without):
        assert set(one["copies"]) == {"0x10"}
        assert one["products on tensor cores"] > 0
        assert one["layouts changed"] == 0
    # the halves of the queries; before the loop and in it, a byte of the mask for each row of a product
    # that a thread has
    assert (masked["wide loads"], masked["narrow loads"]) == (0, 2 + 2 * 4)
    assert (without["wide loads"], without["narrow loads"]) == (0, 2)
