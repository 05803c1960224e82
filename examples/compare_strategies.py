"""Every way to decode on one's own prompts, by turns, in a few lines. Runs offline.

`hf-dflow bench run` does the same with intervals over more prompts, a plot and a JSON record.
"""

import argparse

from hf_dflow.bench import run_view, suite
from hf_dflow.bench.runners import Mode, load_pair
from hf_dflow.bench.tiny import TINY_PROMPTS, given_or_tiny
from hf_dflow.bench.workloads import DEMO, Prompt, first_of_each_task, read_prompts
from hf_dflow.console import report_console

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tiny", action="store_true", help="the package's tiny pair in place of SmolLM2")
parser.add_argument("--target", help="folder or Hub name")
parser.add_argument("--drafter", help="folder or Hub name of a drafter for it")
parser.add_argument("--max-new-tokens", type=int, default=32)
parser.add_argument("--temperature", type=float, default=0.0)
parser.add_argument("--concurrency", type=int, default=1, help="prompts in a batch")
parser.add_argument("prompts", nargs="*")
arguments = parser.parse_args()

target, drafter, _ = given_or_tiny(arguments.tiny, arguments.target, arguments.drafter)
pair = load_pair(target, drafter)
prompts = [Prompt("own", text) for text in arguments.prompts]
prompts = prompts or first_of_each_task(read_prompts(TINY_PROMPTS if arguments.tiny else DEMO))

names = ["prompt_lookup", "transformers_dflash", "dflash"] + (["dflow"] if pair.drafter.relay is not None else [])
mode = Mode(arguments.temperature, "token" if arguments.temperature else None)
record = suite.run(
    pair,
    suite.contestants_of(pair, names),
    [mode],
    prompts,
    output_tokens=arguments.max_new_tokens,
    concurrency=arguments.concurrency,
)
run_view.show(record, report_console())

rates = record["modes"][mode.name]["latency"]
fastest = max(rates, key=lambda name: rates[name]["effective_tps_with_bonus"])
print(f"\nFastest here: {fastest}. Its greedy text is the target's own: {record['identity']['identical_to_plain']}")
