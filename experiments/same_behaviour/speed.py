"""`python -m experiments.same_behaviour.speed --old FOLDER --new FOLDER`: does the loop of two commits cost alike?

Both checkouts decode the same prompts of the bundled tiny pair, by turns, each in a process of its own with one thread.
What counts is processor time, which other work on the machine lengthens less than the clock, and the ratio of the two
within a turn. The target is small (3.4M), so that most of a step is the loop's own work.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from experiments.same_behaviour.__main__ import ROOT, start

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, no relay": {"use_relay": False},
    "greedy, mixture": {"stale_mixture": True},
    "greedy, tree of 8": {"tree_budget": 8},
    "sampled": {"do_sample": True},
    "greedy, batch of 4": {"batch": 4},
}
PROMPTS = [" ".join(f"{word} {number}" for word in ("airport", "city", "runway")) for number in range(8)]


def serve(folder: str) -> None:
    """Decode what standard input asks for, a JSON line each, and answer with processor seconds and tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_dflow

    torch.set_num_threads(1)
    pair = Path(folder) / "hf_dflow" / "drafters" / "tiny-airports-b8"
    target = AutoModelForCausalLM.from_pretrained(pair / "target")
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    drafter = hf_dflow.DFlowDrafter.from_pretrained(pair / "drafter")
    for line in sys.stdin:
        asked = json.loads(line)
        options = dict(asked["options"])
        ids = tokenizer(asked["prompt"], return_tensors="pt").input_ids.repeat(options.pop("batch", 1), 1)
        config = hf_dflow.DFlowGenerationConfig(
            max_new_tokens=asked["tokens"], pad_token_id=0, eos_token_id=None, return_dict_in_generate=True, **options
        )
        torch.manual_seed(0)
        started = time.process_time()
        output = target.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, generation_config=config
        )
        seconds = time.process_time() - started
        print(json.dumps({"seconds": seconds, "ids": output.sequences.tolist()}), flush=True)


def ask(process: subprocess.Popen, prompt: str, tokens: int, options: dict) -> dict:
    """One call of a process."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps({"prompt": prompt, "tokens": tokens, "options": options}) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def interval(ratios: list[float], seed: int = 0) -> tuple[float, float]:
    """95% bootstrap interval of a median."""
    samples = np.random.default_rng(seed).choice(ratios, (4000, len(ratios)))
    low, high = np.quantile(np.median(samples, axis=1), [0.025, 0.975])
    return float(low), float(high)


def main(
    old: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Checkout of the old commit.")],
    new: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Checkout of the new commit.")] = ROOT,
    turns: Annotated[int, typer.Option(min=1, help="Calls of each commit and way, after one to warm up.")] = 24,
    tokens: Annotated[int, typer.Option(min=8, help="New tokens of a call.")] = 96,
) -> None:
    """Print the new commit's processor time over the old one's, for each way to decode."""
    code = "from experiments.same_behaviour.speed import serve; serve(sys.argv[1])"
    processes = [start(checkout.resolve(), code=code, piped=True) for checkout in (old, new)]
    console = Console()
    for way, options in WAYS.items():
        ratios = []
        for turn in range(turns + 1):
            order = (0, 1) if turn % 2 else (1, 0)  # whoever comes second may find warmer caches
            answers = {i: ask(processes[i], PROMPTS[turn % len(PROMPTS)], tokens, options) for i in order}
            if answers[0]["ids"] != answers[1]["ids"]:
                raise typer.Exit(2)
            if turn:
                ratios.append(answers[1]["seconds"] / answers[0]["seconds"])
        low, high = interval(ratios)
        console.print(f"{way}: {np.median(ratios):.3f} [{low:.3f}, {high:.3f}] of the old commit's time, n = {turns}")
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    typer.run(main)
