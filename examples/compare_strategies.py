"""Every way to decode, by turns on your own prompts: plain, prompt lookup, DFlash and DFlow. Runs offline.

`hf-dflow bench run` does the same under stated conditions, with intervals over more prompts, a plot and a JSON record.
"""

import argparse
import time
from collections import Counter

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_dflow
from hf_dflow.bench.smollm2 import smollm2_folder
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_TARGET

PROMPTS = ["List three tips related to batteries.", "What is supply and demand? Explain in a few sentences."]
AIRPORTS = ["airports ZRE MSL RKD :", "airports BLG OVS WTS :"]

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tiny", action="store_true", help="the package's tiny pair in place of SmolLM2")
parser.add_argument("--target", help="folder or Hub name")
parser.add_argument("--drafter", help="folder or Hub name of a drafter for it")
parser.add_argument("--max-new-tokens", type=int, default=32)
parser.add_argument("prompts", nargs="*")
arguments = parser.parse_args()
target_name = arguments.target or (TINY_TARGET if arguments.tiny else smollm2_folder())
drafter_name = arguments.drafter or (TINY_DRAFTER if arguments.tiny else "smollm2-135m-instruct-b8")
prompts = arguments.prompts or (AIRPORTS if arguments.tiny else PROMPTS)

target = AutoModelForCausalLM.from_pretrained(target_name, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(target_name)
drafter = hf_dflow.DFlowDrafter.from_pretrained(drafter_name, dtype="float32")

forwards = Counter()
target.register_forward_hook(lambda *_: forwards.update([way]))
ways = {
    "plain": {},
    "prompt lookup": {"prompt_lookup_num_tokens": drafter.config.block_size - 1},
    "DFlash": {"custom_generate": hf_dflow.DFlowDecoder(drafter, use_relay=False)},
}
if drafter.relay is not None:
    ways["DFlow"] = {"custom_generate": hf_dflow.DFlowDecoder(drafter)}

seconds, tokens, same = Counter(), Counter(), Counter()
for turn, prompt in enumerate([prompts[0], *prompts]):  # the first turn warms up and does not count
    chat = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    texts = {}
    for way, options in ways.items():
        started = time.perf_counter()
        output = target.generate(**inputs, **options, do_sample=False, max_new_tokens=arguments.max_new_tokens)
        seconds[way] += time.perf_counter() - started
        texts[way] = output[0, inputs["input_ids"].shape[1] :].tolist()
        tokens[way] += len(texts[way])
        same[way] += texts[way] == texts["plain"]
    if turn == 0:
        for counts in (forwards, seconds, tokens, same):
            counts.clear()

print(f"{'way':15}{'tokens/s':>10}{'tokens per target forward':>28}{'text as plain':>16}")
for way in ways:
    per_forward = tokens[way] / forwards[way]
    print(f"{way:15}{tokens[way] / seconds[way]:10.1f}{per_forward:28.2f}{same[way]:11} of {len(prompts)}")
print(f"\nFastest here: {min(ways, key=lambda way: seconds[way] / tokens[way])}.")
