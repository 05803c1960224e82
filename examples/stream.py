"""Sample with the bundled pair and print each token as soon as it is final. Runs offline."""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import hf_dflow
from hf_dflow.bench.smollm2 import smollm2_folder

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--drafter", default="smollm2-135m-instruct-b8", help="folder or Hub name")
parser.add_argument("--max-new-tokens", type=int, default=64)
parser.add_argument("--temperature", type=float, default=0.7)
parser.add_argument("prompt", nargs="?", default="Tell me something about lighthouses.")
arguments = parser.parse_args()

target = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
drafter = hf_dflow.DFlowDrafter.from_pretrained(arguments.drafter, dtype="float32")

torch.manual_seed(0)
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": arguments.prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
config = hf_dflow.DFlowGenerationConfig(
    do_sample=True,
    temperature=arguments.temperature,
    verification="block",  # the default when sampling: exact, and never fewer accepted drafts than "token"
    max_new_tokens=arguments.max_new_tokens,
)
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
target.generate(**inputs, assistant_model=drafter, generation_config=config, streamer=streamer)
