"""Watch acceptance by route while serving: where drafting does not pay, that route decodes plainly. Runs offline."""

import argparse

import hf_dflow
from hf_dflow.bench.runners import load_pair
from hf_dflow.bench.tiny import TINY_PROMPTS, given_or_tiny
from hf_dflow.bench.workloads import HELD_OUT, read_prompts, select
from hf_dflow.generation.policy.monitor_report import in_words

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--tiny", action="store_true", help="the package's tiny pair in place of SmolLM2")
parser.add_argument("--max-new-tokens", type=int, default=96)
parser.add_argument("--break-even", type=float, default=3.5, help="tokens per step from which drafting pays")
arguments = parser.parse_args()

target, drafter, _ = given_or_tiny(arguments.tiny, None, None)
pair = load_pair(target, drafter)

# A window of 8 steps, so that a short demonstration shows something; when serving, leave the default of 64. Times too
# are measured while serving, unless they are given as here.
monitor = hf_dflow.AcceptanceMonitor(
    hf_dflow.MonitorSettings(window=8, fewest_steps=8, probe_steps=2, first_pause=8, longest_pause=32),
    times=hf_dflow.StepTimes(draft=arguments.break_even - 1.0, verify=1.0, plain=1.0),
    low_acceptance=0.2,
    on_event=[lambda event: print(f"  event: {in_words(event)}")],
)
for prompt in select(read_prompts(TINY_PROMPTS if arguments.tiny else HELD_OUT), [], 2):
    print(f"{prompt.task}: {prompt.text[:60]!r}")
    config = hf_dflow.DFlowGenerationConfig(
        max_new_tokens=arguments.max_new_tokens, do_sample=False, monitor=monitor.route(prompt.task)
    )
    pair.target.generate(**pair.encode(prompt.text), assistant_model=pair.drafter, generation_config=config)

for route in monitor.figures():
    print(f"{route.route}: {route.state}, {route.num_spec_steps} steps with drafts and {route.num_plain_steps} without")
print("\nWhat Prometheus reads:")
print(monitor.prometheus_text())
