"""`python -m experiments.relay_profile`: is a fused kernel for the relay's inputs worth writing?

Between the target's forward and the drafter's, the relay gathers rejected rows, shifts them to their slots, projects
them, runs its MLP, applies LayerNorm and modulation and adds the result to the mask embeddings. A fused kernel could
take over everything but the matrix products. What it can save at most is what those other ops cost: their launches,
and the bytes that they pass through memory. This counts both, at the sizes of a published target, beside the weights
that one step has to read anyway.
"""

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hf_dflow.bench.conditions import run_conditions
from hf_dflow.console import JsonOption, errors_in_words, write_json
from hf_dflow.generation.step import shift_left
from hf_dflow.model.configuration import DFlowDrafterConfig
from hf_dflow.model.drafter import DFlowDrafter

# Qwen3-4B and its published drafter: hidden 2560, five layers, five taps, block 16.
TARGET_PARAMETERS = 4_022_468_096
SIZES: dict[str, Any] = {
    "vocab_size": 1024,  # the embedding is read row by row: its height does not matter
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "layer_types": ["full_attention"] * 5,
    "block_size": 16,
    "mask_token_id": 1023,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "num_target_layers": 36,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "use_relay": True,
}
BYTES_PER_SECOND = 4.8e12  # an H200's memory, by its data sheet
LAUNCH_SECONDS = {"eager": 5e-6, "CUDA graph": 1.5e-6}  # per op: host-bound, and back to back on the device
PAPER_STEP_SECONDS, PAPER_RELAY_SECONDS = 43.6e-3, 0.51e-3  # arXiv 2609.06498, Qwen3-8B
MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "linear")
NO_WORK = (
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "expand",
    "unsqueeze",
    "slice",
    "select",
    "alias",
    "split",
    "detach",
)


class OpCount(TorchDispatchMode):
    """Ops that would be launched on a device, by kind, and the bytes that each reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in NO_WORK:
            kind = "matrix products" if name in MATRIX_PRODUCTS else "everything else"
            self.count[kind] += 1
            for leaf in tree_iter((args, kwargs, result)):
                if isinstance(leaf, torch.Tensor):
                    # A table that is indexed is read only where it is asked.
                    is_table = name in ("embedding", "index") and leaf is args[0]
                    self.bytes[kind] += result.nbytes if is_table else leaf.nbytes
        return result


def relay_inputs(
    drafter: DFlowDrafter, embedding: nn.Embedding, features: torch.Tensor, accepted: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """What the loop does from the tapped rows `[B, N + 1, taps * H]` to the block's mask embeddings `[B, N, H]`."""
    rejected, is_fed = shift_left(features[:, 1:], accepted)
    additions = drafter.relay_additions(rejected, ids[:, 0], ids[:, 1], embedding)
    masks = drafter.embed(torch.full_like(ids[:, :1], SIZES["mask_token_id"]), embedding)
    return masks + torch.where(is_fed[..., None], additions, 0.0)


def _setting(device: str, sizes: dict[str, Any]) -> tuple[DFlowDrafter, Callable[[], torch.Tensor]]:
    """A drafter on `device`, and a call of its relay's inputs."""
    with torch.device(device):
        drafter: Any = DFlowDrafter(DFlowDrafterConfig(**sizes))
        drafter = drafter.to(torch.bfloat16).eval()
        embedding = nn.Embedding(sizes["vocab_size"], sizes["hidden_size"]).to(torch.bfloat16)
        width = len(sizes["target_layer_ids"]) * sizes["hidden_size"]
        features = torch.randn(1, sizes["block_size"], width, dtype=torch.bfloat16)
        accepted, ids = torch.tensor([3]), torch.tensor([[5, 6]])
    return drafter, lambda: relay_inputs(drafter, embedding, features, accepted, ids)


def profile(device: str = "cpu", **overrides: Any) -> dict[str, Any]:
    """Count the relay's ops and bytes, on tensors without storage, and on a GPU time them; `overrides` are sizes."""
    sizes = {**SIZES, **overrides}
    drafter, call = _setting("meta", sizes)
    with torch.no_grad(), OpCount() as seen:
        call()
    drafter_bytes = sum(parameter.nbytes for parameter in drafter.parameters())
    step_bytes = 2 * TARGET_PARAMETERS + drafter_bytes
    shortest_step = step_bytes / BYTES_PER_SECOND
    others, others_bytes = seen.count["everything else"], seen.bytes["everything else"]
    saved = {how: (others - 1) * launch + others_bytes / BYTES_PER_SECOND for how, launch in LAUNCH_SECONDS.items()}
    return {
        "sizes": {"hidden": sizes["hidden_size"], "drafts": sizes["block_size"] - 1, "batch": 1},
        "launches": dict(seen.count),
        "bytes": dict(seen.bytes),
        "step_weight_bytes": step_bytes,
        "shortest_step_seconds": shortest_step,
        "most_that_fusing_saves_seconds": saved,
        "share_of_shortest_step": {how: value / shortest_step for how, value in saved.items()},
        "share_of_paper_step": {how: value / PAPER_STEP_SECONDS for how, value in saved.items()},
        "paper_relay_share": PAPER_RELAY_SECONDS / PAPER_STEP_SECONDS,
        "measured_seconds": _measured(sizes) if device == "cuda" else None,
    }


def _measured(sizes: dict[str, Any], repeats: int = 30) -> float:
    _, call = _setting("cuda", sizes)
    times = []
    with torch.no_grad():
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def main(
    json_path: JsonOption = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda to time it too.")] = "cpu",
) -> None:
    """Count the ops and bytes of the relay's inputs, beside the rest of a step."""
    record = {**run_conditions(decoding="none: the relay's inputs alone", dtype="bfloat16"), **profile(device)}
    typer.echo(json.dumps(record, indent=1))
    write_json(json_path, record)


if __name__ == "__main__":
    typer.run(errors_in_words()(main))
