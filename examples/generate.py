"""Generate with the bundled pair: the same text as without a drafter, in fewer target forwards. Runs offline."""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_dflow
from hf_dflow.bench.smollm2 import smollm2_folder

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--drafter", default="smollm2-135m-instruct-b8", help="folder or Hub name")
parser.add_argument("--max-new-tokens", type=int, default=64)
parser.add_argument("prompt", nargs="?", default="Name three uses of a paper clip.")
arguments = parser.parse_args()

target = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
drafter = hf_dflow.DFlowDrafter.from_pretrained(arguments.drafter, dtype="float32")

inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": arguments.prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
output = target.generate(
    **inputs,
    assistant_model=drafter,
    speculation_type="dflow",
    max_new_tokens=arguments.max_new_tokens,
    return_dict_in_generate=True,
)
print(tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(f"\n{output.statistics}")
