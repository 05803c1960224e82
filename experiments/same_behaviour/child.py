"""The process of one checkout: makes the tiny models, or makes the calls and writes a record of each."""

import json
import logging
import sys
import warnings
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

import hf_dflow
from experiments.same_behaviour.calls import all_calls
from experiments.same_behaviour.models import build
from experiments.same_behaviour.pairs import observe


def run(
    folder: Path,
    output: Path,
    *,
    smollm2: str | None = None,
    groups: list[str] | None = None,
    sabotage: str | None = None,
) -> None:
    """Make the calls of `groups`, or all; `sabotage` spoils one record, to show that it is noticed."""
    with output.open("w", encoding="utf-8") as file:
        for call in all_calls(folder, smollm2):
            if groups and call.group not in groups:
                continue
            try:
                record = observe(call.run())
            except Exception as error:
                record = {"error": type(error).__name__, "message": str(error)}
            accepted = (record.get("statistics") or {}).get("per_step_accepted", [])
            if any(accepted):
                if sabotage == "length":
                    accepted[accepted.index(max(accepted))] -= 1
                elif sabotage == "token":
                    record["texts"][0][-1] += 1
                sabotage = None
            print(json.dumps({"group": call.group, "name": call.name, "record": record}), file=file, flush=True)


def main(checkout: str, command: str, folder: str, output: str = "", options: str = "{}") -> None:
    """What the command line of the process says; `options` is a JSON object."""
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("hf_dflow").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if Path(checkout) not in Path(hf_dflow.__file__).resolve().parents:
        sys.exit(f"{hf_dflow.__file__} was imported, which does not lie in {checkout}")
    if command == "build":
        build(Path(folder))
    else:
        run(Path(folder), Path(output), **json.loads(options))
