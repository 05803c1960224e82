"""Use a drafter that somebody published in DFlash's layout: a name is enough, and nothing but safetensors is read.

Online, any name of `hf-dflow drafters` works, e.g. `--target Qwen/Qwen3-4B --drafter z-lab/Qwen3-4B-DFlash-b16`. With
`--tiny` nothing is downloaded: the tiny drafter is written in that layout, into a cache as huggingface_hub lays it out.
"""

import argparse
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_dflow
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_TARGET
from hf_dflow.checkpoints.export import export_drafter

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tiny", action="store_true", help="offline, with the package's tiny pair")
parser.add_argument("--target", default="Qwen/Qwen3-4B")
parser.add_argument("--drafter", help="the one listed for the target by default")
parser.add_argument("--max-new-tokens", type=int, default=64)
parser.add_argument("prompt", nargs="?", default="airports BLG OVS WTS TYS XKS KRT :")
arguments = parser.parse_args()

target_name, name, cache = arguments.target, arguments.drafter, None
if arguments.tiny:
    # What `hf-dflow export DRAFTER FOLDER --to dflash` writes, where the Hub's client would put a download of it.
    target_name, name, cache, commit = TINY_TARGET, "somebody/tiny-DFlash-b8", Path(tempfile.mkdtemp()), "0" * 40
    repository = cache / f"models--{name.replace('/', '--')}"
    tiny = hf_dflow.DFlowDrafter.from_pretrained(TINY_DRAFTER)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    export_drafter(tiny, repository / "snapshots" / commit, "dflash")

target = AutoModelForCausalLM.from_pretrained(target_name, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(target_name)
if name is None:
    drafter = hf_dflow.DFlowDrafter.for_target(target_name, dtype="auto")
else:
    drafter = hf_dflow.DFlowDrafter.from_pretrained(
        name, dtype="auto", cache_dir=cache, local_files_only=arguments.tiny
    )
print(f"{name or 'the drafter listed'}: blocks of {drafter.config.block_size}, relay: {drafter.relay is not None}")

chat = [{"role": "user", "content": arguments.prompt}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
options = {"do_sample": False, "max_new_tokens": arguments.max_new_tokens, "return_dict_in_generate": True}
ids = {key: inputs[key] for key in ("input_ids", "attention_mask")}
output = target.generate(**ids, assistant_model=drafter, speculation_type="dflow", **options)
print(tokenizer.decode(output.sequences[0], skip_special_tokens=True))
print(output.statistics)
