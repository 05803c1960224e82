"""`python -m experiments.rollback`: what a step costs on a target with recurrent layers, by the way it rolls back.

*State advance* is what the package does (generation/recurrent.py). *Replay* puts the states back and begins the
next block with the accepted tokens, until they are more than two blocks, which a forward of their own then settles. A
target of the same sizes with full attention in all layers has nothing to roll back. All three run in turn, step by
step, on random weights and tokens and on the same accepted lengths; drafting and verification are not counted.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3_5TextConfig

from experiments.common import RESULTS, with_interval
from hf_dflow.bench.conditions import run_conditions
from hf_dflow.bench.intervals import bootstrap_interval
from hf_dflow.console import JsonOption, ThreadsOption, use_threads, write_json
from hf_dflow.generation import _compat
from hf_dflow.generation import cache as caches
from hf_dflow.generation.recurrent import RecurrentStates

WAYS = ("state advance", "replay", "full attention")
PROMPT_LENGTH, BLOCK_SIZE = 64, 8
MOST_REPLAYED = 2 * BLOCK_SIZE


def build_target(layer_types: list[str], hidden_size: int) -> Any:
    """A random target of `layer_types`, Qwen3.5's kinds of layers."""
    config = Qwen3_5TextConfig(
        vocab_size=32_000,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=len(layer_types),
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=hidden_size // 64,
        linear_num_value_heads=hidden_size // 64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        layer_types=layer_types,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)


@dataclass
class Arm:
    """One way of rolling back, with a cache of its own."""

    way: str
    target: Any
    seconds: list[float] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)  # tokens that the next block begins with
    num_replay_forwards: int = 0

    def __post_init__(self) -> None:
        self.cache = DynamicCache(config=self.target.config)
        self.states = RecurrentStates(self.target, self.cache)
        self._run(torch.arange(PROMPT_LENGTH).tolist(), is_recorded=False)
        self.states.advance([self.states.length])

    def step(self, tokens: list[int], accepted: int) -> None:
        """One block of `tokens`, anchor first, of which the anchor and `accepted` drafts are kept."""
        started = time.process_time()
        if self.way == "replay":
            self._replay(tokens, accepted)
        else:
            self._run(tokens, is_recorded=True)
            caches.crop(self.cache, len(tokens) - 1 - accepted)
            self.states.advance([accepted + 1])
        self.seconds.append(time.process_time() - started)

    def _replay(self, tokens: list[int], accepted: int) -> None:
        block = [*self.replayed, *tokens]
        self._run(block, is_recorded=False)
        if accepted == len(tokens) - 1:
            self.states.advance([len(block)])
            self.replayed = []
            return
        self.states.take_back()
        caches.crop(self.cache, len(block))
        self.replayed += tokens[: accepted + 1]
        if len(self.replayed) > MOST_REPLAYED:
            self._run(self.replayed, is_recorded=False)
            self.states.advance([len(self.replayed)])
            self.num_replay_forwards, self.replayed = self.num_replay_forwards + 1, []

    def _run(self, tokens: list[int], *, is_recorded: bool) -> None:
        named: Any = {_compat.cache_argument(self.target): self.cache}
        with self.states.forward(len(tokens), is_recorded=is_recorded):
            self.target(torch.tensor([tokens]), use_cache=True, output_hidden_states=True, **named)


@torch.no_grad()
def measure(num_layers: int, hidden_size: int, steps: int, acceptance: float) -> dict[str, Any]:
    """Times of a step for each way, and their ratios step by step."""
    hybrid = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(num_layers)]
    targets = {
        "hybrid": build_target(hybrid, hidden_size),
        "full": build_target(["full_attention"] * num_layers, hidden_size),
    }
    arms = [Arm(way, targets["full" if way == "full attention" else "hybrid"]) for way in WAYS]
    random = np.random.default_rng(0)
    lengths = [min(int(random.geometric(1 - acceptance)) - 1, BLOCK_SIZE - 1) for _ in range(steps)]
    for number, accepted in enumerate(lengths):
        tokens = random.integers(32_000, size=BLOCK_SIZE).tolist()
        for arm in arms[number % 3 :] + arms[: number % 3]:
            arm.step(tokens, accepted)
    times = {arm.way: np.array(arm.seconds[3:]) for arm in arms}  # the first steps pay for allocations
    return {
        "milliseconds_per_step": {
            way: _figure(lambda chosen, one=one: 1000 * one[chosen].mean(), len(one)) for way, one in times.items()
        },
        "ratio_to_state_advance": {
            way: _figure(lambda chosen, one=one: one[chosen].sum() / times[WAYS[0]][chosen].sum(), len(one))
            for way, one in times.items()
        },
        "num_replay_forwards": next(arm.num_replay_forwards for arm in arms if arm.way == "replay"),
        "accepted_lengths": lengths,
        "parameters": {name: sum(p.numel() for p in target.parameters()) for name, target in targets.items()},
        "conditions": run_conditions(
            time="processor time", block_size=BLOCK_SIZE, layers=num_layers, hidden_size=hidden_size, dtype="float32"
        ),
    }


def _figure(statistic: Any, n: int) -> dict[str, Any]:
    return {
        "value": float(statistic(np.arange(n))),
        "interval_95": bootstrap_interval(n, lambda chosen: float(statistic(chosen))),
        "n": n,
    }


def main(
    layers: Annotated[int, typer.Option(help="Layers, every fourth with full attention.")] = 12,
    hidden_size: Annotated[int, typer.Option(help="A multiple of 64.")] = 512,
    steps: Annotated[int, typer.Option(help="Blocks.")] = 123,
    acceptance: Annotated[float, typer.Option(help="Chance that a draft is accepted behind accepted ones.")] = 0.6,
    threads: ThreadsOption = 1,
    json: JsonOption = RESULTS / "rollback.json",
) -> None:
    """Time a step on a hybrid target: state advance against replay, and against full attention."""
    use_threads(threads)
    record = measure(layers, hidden_size, steps, acceptance)
    table = Table("way", "ms per step", "over state advance")
    for way in WAYS:
        table.add_row(
            way,
            with_interval(record["milliseconds_per_step"][way], ".1f"),
            with_interval(record["ratio_to_state_advance"][way], ".3f"),
        )
    Console().print(table)
    if json is not None:
        write_json(Path(json), record)


if __name__ == "__main__":
    typer.run(main)
