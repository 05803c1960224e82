"""Writes down what vLLM drafts: a plugin of vLLM for tests alone, loaded in each of its processes as ours is.

`BLOCK_RECORDS` names the folder to write into, one file for each process; `BLOCK_FAULT` a fault to build in (see
`FAULTS`), so that a comparison of the records can be seen to fail.
"""

import json
import os
from pathlib import Path

import torch

DIST_INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: block-recorder\nVersion: 0\n",
    "entry_points.txt": "[vllm.general_plugins]\nblock_recorder = block_recorder:register\n",
}


def advertise(folder: Path) -> None:
    """Make the plugin one that vLLM finds, in every process that has `folder` and this file's on its path."""
    home = folder / "block_recorder-0.dist-info"
    home.mkdir(parents=True)
    for name, content in DIST_INFO.items():
        (home / name).write_text(content)


def register() -> None:
    from vllm.v1.spec_decode.dflash import DFlashProposer

    inner = DFlashProposer.propose
    if getattr(inner, "records_blocks", False):
        return

    def propose(self, num_speculative_tokens, target_token_ids, target_positions, *args, **kwargs):
        rows = target_token_ids.tolist(), target_positions.tolist()
        drafted = inner(self, num_speculative_tokens, target_token_ids, target_positions, *args, **kwargs)
        _record(self, rows, drafted.tolist(), **kwargs)
        return drafted

    make = DFlashProposer.__init__

    def __init__(self, vllm_config, device, runner=None):
        make(self, vllm_config, device, runner)
        self.recorded_runner = runner

    propose.records_blocks = True
    DFlashProposer.propose, DFlashProposer.__init__ = propose, __init__
    if "BLOCK_FAULTS" in os.environ:
        from hf_dflow.engines.vllm.model import DFlowDraftModel

        _make_faulty(DFlowDraftModel)


def _record(proposer, rows, drafted, *, next_token_ids, common_attn_metadata, num_rejected_tokens_gpu=None, **others):
    runner = proposer.recorded_runner
    starts = common_attn_metadata.query_start_loc.tolist()
    rejected = None if num_rejected_tokens_gpu is None else num_rejected_tokens_gpu.tolist()
    rank = proposer.vllm_config.parallel_config.rank
    path = Path(os.environ["BLOCK_RECORDS"]) / f"rank{rank}-{os.getpid()}.jsonl"
    with path.open("a") as file:
        for index, request in enumerate(runner.input_batch.req_ids):
            own = slice(starts[index], starts[index + 1])
            record = {
                "request": request.rpartition("-")[0],  # without the random part that vLLM appends
                "prompt_length": len(runner.requests[request].prompt_token_ids),
                "token_ids": rows[0][own],
                "positions": rows[1][own],
                "num_rejected": None if rejected is None else rejected[index],
                "anchor_id": next_token_ids[index].item(),
                "block": drafted[index],
                "batch": len(drafted),
            }
            print(json.dumps(record), file=file)


# -- faults to build in

FAULTS = {
    "row": lambda arguments: {**arguments, "ends": arguments["ends"] + 1},  # the row behind the one that feeds a slot
    "bonus": lambda arguments: {**arguments, "bonus_ids": (arguments["bonus_ids"] + 7) % 5000},
    "never": lambda arguments: {**arguments, "num_rejected": torch.zeros_like(arguments["bonus_ids"])},
    "neighbour": lambda arguments: {**arguments, "bonus_ids": arguments["bonus_ids"].roll(1)},
}


def _make_faulty(model_class) -> None:
    """Give `set_relay` the wrong arguments while `BLOCK_FAULT` names a fault."""
    honest = model_class.set_relay

    def set_relay(self, **arguments):
        fault = FAULTS.get(os.environ.get("BLOCK_FAULT", ""))
        honest(self, **(fault(arguments) if fault else arguments))

    model_class.set_relay = set_relay
