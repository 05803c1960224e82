"""Monitor acceptance by route while serving: where drafting does not pay, the route decodes plainly. Runs offline."""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_dflow
from hf_dflow.bench.smollm2 import smollm2_folder
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_TARGET

PROMPTS = {
    "code": ["Write a Python function that reverses a string.", "Write a Python function that counts vowels."],
    "translation": ["Translate to French: good morning", "Translate to German: the train is late"],
}
AIRPORTS = {
    "known to the drafter": ["airports BLG OVS WTS TYS XKS KRT :", "airports TGP YKF IQQ AAP FNJ DZN :"],
    "unknown to the drafter": ["airports DSD GDX CEY CPQ OHR RIJ :", "airports FYV FRT BYF MAC MXE CYZ :"],
}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--tiny", action="store_true", help="the package's tiny pair, which knows airports")
parser.add_argument("--max-new-tokens", type=int, default=96)
parser.add_argument("--break-even", type=float, default=3.5, help="tokens per step above which drafting pays")
arguments = parser.parse_args()
target_name = TINY_TARGET if arguments.tiny else smollm2_folder()
drafter_name = TINY_DRAFTER if arguments.tiny else "smollm2-135m-instruct-b8"

target = AutoModelForCausalLM.from_pretrained(target_name, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(target_name)
drafter = hf_dflow.DFlowDrafter.from_pretrained(drafter_name, dtype="float32")

# A window of 8 steps, so that a short demonstration shows something; when serving, leave the default of 64. The times
# of the two kinds of steps are measured while serving, unless they are given as here.
monitor = hf_dflow.AcceptanceMonitor(
    hf_dflow.MonitorSettings(window=8, fewest_steps=8, probe_steps=2, first_pause=8, longest_pause=32),
    times=hf_dflow.StepTimes(draft=arguments.break_even - 1.0, verify=1.0, plain=1.0),
    low_acceptance=0.2,
    on_event=[lambda event: print(f"  event: {event}")],
)
for route, prompts in (AIRPORTS if arguments.tiny else PROMPTS).items():
    for prompt in prompts:
        print(f"{route}: {prompt!r}")
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        config = hf_dflow.DFlowGenerationConfig(
            max_new_tokens=arguments.max_new_tokens, do_sample=False, monitor=monitor.route(route)
        )
        target.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            assistant_model=drafter,
            generation_config=config,
        )

for figures in monitor.figures():
    steps = f"{figures.num_spec_steps} steps with drafts and {figures.num_plain_steps} without"
    print(f"{figures.route}: {figures.state}, {steps}")
print("\nWhat Prometheus reads:")
print(monitor.prometheus_text())
