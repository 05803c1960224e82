"""`python -m experiments.kernel_resources`: registers, spills and shared memory of each kernel, without a GPU.

Every kernel is compiled ahead of time for several architectures, exactly as it would be launched, and the assembler's
report is printed. No kernel may spill in the default configuration.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_dflow.kernels import VerifyInputs, triton_tiles
from hf_dflow.kernels.backends import is_interpreted
from hf_dflow.kernels.triton_compact import plan_compaction
from hf_dflow.kernels.triton_tiles import Launch
from hf_dflow.kernels.triton_verify import plan_verification

ARCHITECTURES = (80, 90, 100)
TYPE_NAMES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}
DIVISIBLE = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Resources:
    """The assembler's report on one kernel.

    Args:
        kernel (`str`): Its name.
        variant (`str`): The case it was compiled for.
        architecture (`str`): "sm_80" and so on.
        registers (`int`): Per thread.
        spill_bytes (`int`): Stores and loads of spilled registers, per thread.
        stack_bytes (`int`): Stack frame per thread.
        shared_bytes (`int`): Shared memory per program.
        num_warps (`int`): Warps per program.
    """

    kernel: str
    variant: str
    architecture: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    num_warps: int


def default_launches() -> dict[str, list[Launch]]:
    """The launches of typical cases at B = 1, N = 15 and V = 151,936, on tensors without storage."""
    batch, num_drafts, vocab = 1, 15, 151_936

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def verification(rule: str, dtype: torch.dtype, **more: Any) -> list[Launch]:
        inputs = VerifyInputs(
            rule=rule,
            draft_ids=meta(batch, num_drafts, dtype=torch.long),
            draft_logits=meta(batch, num_drafts, vocab, dtype=dtype),
            target_logits=meta(batch, num_drafts + 1, vocab, dtype=dtype),
            uniforms=meta(batch, num_drafts + 1, dtype=torch.float64),
        )
        return plan_verification(replace(inputs, **more)).launches

    ragged: dict[str, Any] = {
        "lengths": meta(batch, dtype=torch.long),
        "point_mass": meta(batch, num_drafts, dtype=torch.bool),
    }
    cases = {
        f"{rule}, {str(dtype).removeprefix('torch.')}": verification(rule, dtype)
        for rule in ("greedy", "token", "block")
        for dtype in (torch.float32, torch.bfloat16)
    }
    cases["block, float16, ragged, mixed"] = verification("block", torch.float16, **ragged)
    cases["token, float32, point mass"] = verification("token", torch.float32, draft_logits=None)
    states = meta(8, 8, 4096, 128, dtype=torch.bfloat16)
    cases["bfloat16 cache"] = [plan_compaction(states, meta(8, 4096, dtype=torch.long), meta(8, dtype=torch.long))]
    return cases


def compile_for(launch: Launch, architecture: int, variant: str = "") -> Resources:
    """Compile one launch for `sm_<architecture>` and read the assembler's report."""
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments[name]
        free = launch.kernel.params[place].do_not_specialize
        if isinstance(value, torch.Tensor):
            signature[name] = TYPE_NAMES[value.dtype]
            attributes[(place,)] = DIVISIBLE
        elif launch.kernel.params[place].is_constexpr or value is None or (value == 1 and not free):
            signature[name] = "constexpr"
            constants[name] = value
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not free:
                attributes[(place,)] = DIVISIBLE
    source = ASTSource(launch.kernel, signature, constants, attributes)
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options=launch.options)
    report = _assembler_report(compiled.asm["ptx"])
    return Resources(
        kernel=launch.kernel.__name__,
        variant=variant,
        architecture=f"sm_{architecture}",
        registers=report["registers"],
        spill_bytes=report["spills"],
        stack_bytes=report["stack"],
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
    )


def _assembler_report(ptx: str) -> dict[str, int]:
    """Registers, stack and spills, from the first bundled assembler that knows the code's version."""
    name = re.search(r"\.target (\w+)", ptx)
    if name is None:
        raise ValueError("the compiled kernel names no target architecture")
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    text = ""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "kernel.ptx"
        source.write_text(ptx)
        options: list[str | Path] = [
            "-v",
            "--fmad=false",
            f"--gpu-name={name[1]}",
            source,
            "-o",
            Path(scratch) / "kernel.cubin",
        ]
        for assembler in sorted(folder.glob("ptxas*")):
            done = subprocess.run([assembler, *options], capture_output=True, text=True)
            text += done.stderr
            if done.returncode == 0:
                text = done.stderr
                break
    patterns = {
        "registers": r"Used (\d+) registers",
        "stack": r"(\d+) bytes stack frame",
        "stores": r"(\d+) bytes spill stores",
        "loads": r"(\d+) bytes spill loads",
    }
    counts = {}
    for key, pattern in patterns.items():
        match = re.search(pattern, text)
        if match is None:
            raise ValueError(f"the assembler reports no {key}: {text}")
        counts[key] = int(match[1])
    return {**counts, "spills": counts["stores"] + counts["loads"]}


def report(architectures: tuple[int, ...] = ARCHITECTURES) -> list[Resources]:
    """Resources of every kernel in every default case; identical launches are listed once."""
    known, resources = set(), []
    for variant, launches in default_launches().items():
        for launch in launches:
            tensors = {k: v.dtype if isinstance(v, torch.Tensor) else v for k, v in launch.arguments.items()}
            key = (launch.kernel.__name__, str(sorted(tensors.items(), key=str)))
            if key not in known:
                known.add(key)
                resources += [compile_for(launch, architecture, variant) for architecture in architectures]
    return resources


def main() -> None:
    if is_interpreted():
        sys.exit("TRITON_INTERPRET is set: unset it, an interpreted kernel has nothing to compile.")
    rows = report()
    if "--json" in sys.argv[1:]:
        versions = {"triton": triton.__version__, "torch": torch.__version__}
        print(json.dumps({"versions": versions, "block": triton_tiles.BLOCK, "kernels": [asdict(row) for row in rows]}))
        return
    print(f"{'kernel':18}{'case':34}{'target':8}{'registers':>10}{'spills':>8}{'stack':>7}{'shared':>8}{'warps':>7}")
    for row in rows:
        print(
            f"{row.kernel:18}{row.variant:34}{row.architecture:8}{row.registers:10}{row.spill_bytes:8}"
            f"{row.stack_bytes:7}{row.shared_bytes:8}{row.num_warps:7}"
        )


if __name__ == "__main__":
    main()
