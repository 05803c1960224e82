"""Train a drafter for your own model, from nothing to fewer target forwards. Runs offline in about a minute.

The model is made on the spot and counts: "from 12 by 3 : 15 18 21 …". With a real one, drop `make_target` and give its
name; the rest stays. The same from a shell: `hf-dflow data TARGET rows.jsonl --prompts prompts.txt`, then
`hf-dflow train TARGET rows.jsonl --output run`.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hf_dflow
from hf_dflow.training.commands import data, train

NUMBERS, LENGTH = 60, 28
PROMPTS = [f"from {start} by {step} :" for start in range(NUMBERS) for step in range(1, 8)]


def make_target(folder: Path, updates: int) -> None:
    """A small Llama that learns to count modulo 60, and its tokenizer of whole words."""
    words = ["<pad>", "<unused>", "from", "by", ":", *map(str, range(NUMBERS))]
    vocabulary = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, pad_token="<pad>", extra_special_tokens=["<unused>"]
    )
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(updates):
        start, step = torch.randint(NUMBERS, (32, 1)), torch.randint(1, 8, (32, 1))
        series = (start + step * torch.arange(1, LENGTH + 1)) % NUMBERS
        first = tokenizer("0")["input_ids"][0]
        heads = torch.tensor([tokenizer(f"from {a} by {b} :")["input_ids"] for a, b in zip(start, step, strict=True)])
        token_ids = torch.cat([heads, series + first], dim=1)
        loss = model(token_ids, labels=token_ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"the target's loss is {loss:.2f}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--folder", type=Path, help="where to write everything; a temporary folder by default")
parser.add_argument("--target-updates", type=int, default=600)
parser.add_argument("--updates", type=int, default=300)
parser.add_argument("--rows", type=int, default=len(PROMPTS))
arguments = parser.parse_args()
folder = arguments.folder or Path(tempfile.mkdtemp())
torch.manual_seed(0)

target_folder = folder / "target"
make_target(target_folder, arguments.target_updates)

# 1. What the drafter learns from: the target's own answers.
(folder / "prompts.txt").write_text("\n".join(PROMPTS[:: len(PROMPTS) // arguments.rows]))
data(str(target_folder), folder / "rows.jsonl", prompts=[str(folder / "prompts.txt")], plain=True, max_new_tokens=24)

# 2. Train; an interrupted run resumes.
train(str(target_folder), [folder / "rows.jsonl"], folder / "run", updates=arguments.updates)

# 3. Use it.
target = AutoModelForCausalLM.from_pretrained(target_folder)
tokenizer = AutoTokenizer.from_pretrained(target_folder)
drafter = hf_dflow.DFlowDrafter.from_pretrained(folder / "run" / "drafter", dtype="float32")
inputs = tokenizer("from 7 by 5 :", return_tensors="pt", return_token_type_ids=False)
output = target.generate(
    **inputs, assistant_model=drafter, speculation_type="dflow", max_new_tokens=24, return_dict_in_generate=True
)
print(tokenizer.decode(output.sequences[0]))
print(output.statistics)
