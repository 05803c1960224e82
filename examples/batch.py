"""Several prompts in one call: rows accept different lengths, and each decodes as if alone. Runs offline."""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_dflow
from hf_dflow.bench.smollm2 import smollm2_folder
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_TARGET

PROMPTS = ["Name three uses of a paper clip.", "Translate to French: good morning", "Write a haiku about rain."]
AIRPORTS = ["airports BLG OVS WTS TYS XKS KRT :", "airports ZRE MSL :", "airports DSD GDX CEY CPQ OHR RIJ :"]

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--tiny", action="store_true", help="the package's tiny pair, which knows airports")
parser.add_argument("--max-new-tokens", type=int, default=48)
parser.add_argument("prompts", nargs="*")
arguments = parser.parse_args()
target_name = TINY_TARGET if arguments.tiny else smollm2_folder()
drafter_name = TINY_DRAFTER if arguments.tiny else "smollm2-135m-instruct-b8"
prompts = arguments.prompts or (AIRPORTS if arguments.tiny else PROMPTS)

target = AutoModelForCausalLM.from_pretrained(target_name, dtype="float32")
drafter = hf_dflow.DFlowDrafter.from_pretrained(drafter_name, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(target_name, padding_side="left")  # as in plain decoding

chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
inputs = tokenizer.apply_chat_template(
    chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
)
output = target.generate(
    input_ids=inputs["input_ids"],
    attention_mask=inputs["attention_mask"],
    assistant_model=drafter,
    speculation_type="dflow",
    do_sample=False,
    max_new_tokens=arguments.max_new_tokens,
    return_dict_in_generate=True,
)
texts = tokenizer.batch_decode(output.sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
for prompt, text, row in zip(prompts, texts, output.statistics.per_row, strict=True):
    print(f"{prompt}\n  {text}\n  accepted drafts, step by step: {row.per_step_accepted}")
print(f"\nall rows: {output.statistics}")
