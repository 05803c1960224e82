"""`python -m experiments.hybrid_targets FOLDER`: drafters from scratch for small targets with recurrent layers.

Each target is made on the spot and learns to count modulo 60: "from 12 by 3 : 15 18 21 …". It then answers prompts
(`hf-dflow data`), and a DFlash and a DFlow drafter learn from a part of them (`hf-dflow train`), with equally many
updates. The others, held out, are decoded greedily with each drafter. A few minutes for each family on one core; what
is in FOLDER is not made again.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from experiments.common import markdown_table, with_interval
from experiments.lab.experiment import Lab, measure
from hf_dflow import DFlowDrafter
from hf_dflow.bench.conditions import run_conditions
from hf_dflow.bench.intervals import figure, resampled_sums
from hf_dflow.console import JsonOption, ThreadsOption, errors_in_words, use_threads, writable, write_json
from hf_dflow.errors import DFlowError
from hf_dflow.training import run
from hf_dflow.training.commands import data
from hf_dflow.training.config import PRESETS, TrainingConfig
from hf_dflow.training.data import read_rows, split_rows

NUMBERS, SERIES = 60, 28
PROMPTS = [f"from {start} by {step} :" for start in range(NUMBERS) for step in range(1, 8)]
WORDS = ["<pad>", "<unused>", "from", "by", ":", *map(str, range(NUMBERS))]
HELD_OUT = 0.2  # of the prompts, by their hash
ANSWER = 24  # tokens
LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
DELTA_RULE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": LAYERS,
}
STATE_SPACE = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA_RULE,
    "qwen3_next": {
        **DELTA_RULE,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "olmo_hybrid": DELTA_RULE,
    "lfm2": {"layer_types": ["conv", "conv", "conv", "full_attention"], "block_ff_dim": 128},
    "falcon_h1": {**STATE_SPACE, "mamba_d_ssm": 128},
    "granitemoehybrid": {
        **STATE_SPACE,
        "layer_types": ["mamba", "mamba", "mamba", "attention"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 64,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention", "mamba", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 1,
        "conv_kernel": 4,
        "chunk_size": 16,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_d_state": 16,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "chunk_size": 16,
        "num_mem_blocks": 1,
        "adapter_rank": 8,
    },
}
KINDS = ("dflash", "dflow")


def new_target(family: str) -> Any:
    """A random model of `family`, of about 0.2M weights."""
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": len(WORDS),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
            **FAMILIES[family],
        },
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def make_target(folder: Path, family: str, updates: int) -> None:
    """Teach a new target to count, and save it with its tokenizer of whole words."""
    vocabulary = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, pad_token=WORDS[0], extra_special_tokens=[WORDS[1]]
    )
    torch.manual_seed(0)
    model = new_target(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    heads = torch.tensor(tokenizer(PROMPTS)["input_ids"])
    first = heads[0, 1].item()  # the token of 0
    for update in range(updates):
        chosen = torch.randint(len(PROMPTS), (32,))
        start, step = heads[chosen, 1:2] - first, heads[chosen, 3:4] - first
        series = (start + step * torch.arange(1, SERIES + 1)) % NUMBERS
        token_ids = torch.cat([heads[chosen], series + first], dim=1)
        loss = model(token_ids, labels=token_ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if update % 100 == 99:
            typer.echo(f"{family}: loss {loss.item():.3f} after {update + 1} updates")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def training_of(kind: str, updates: int) -> TrainingConfig:
    """The `cpu` preset with so many updates; DFlash differs in the relay and its rounds alone."""
    training = replace(PRESETS["cpu"].with_updates(updates), evaluate_every=0)
    if kind == "dflow":
        return training
    stages = [replace(stage, relay_rounds=0) for stage in training.stages]
    return replace(training, stages=stages, use_relay=False)


def drafters_for(folder: Path, family: str, target_updates: int, updates: int) -> dict[str, Any]:
    """Target, data, and a drafter of each kind; returns what decoding held-out prompts counts."""
    target_folder, rows_file = folder / "target", folder / "rows.jsonl"
    if not (target_folder / "tokenizer_config.json").exists():  # written last
        make_target(target_folder, family, target_updates)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    data(str(target_folder), rows_file, prompts=[str(folder / "prompts.txt")], plain=True, max_new_tokens=ANSWER)
    rows, held_out = split_rows(read_rows(rows_file), HELD_OUT)
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    lab = Lab(folder, target, AutoTokenizer.from_pretrained(target_folder), rows, held_out)
    record: dict[str, Any] = {
        "target_class": type(target).__name__,
        "target_parameters": sum(weight.numel() for weight in target.parameters()),
        "layers": [type(layer).__name__ for layer in cache_of(target).layers],
        "rows": len(rows),
        "prompts": len(held_out),
        "kinds": {},
    }
    for kind in KINDS:
        output = folder / kind
        report = run.train(
            str(target_folder), [rows_file], output, training_of(kind, updates), held_out_share=HELD_OUT, report_to=[]
        )
        typer.echo(report)
        drafter = DFlowDrafter.from_pretrained(output / "drafter", dtype=torch.float32).eval()
        record["kinds"][kind] = _figures(measure(lab, drafter, held_out))
        if kind == "dflow":
            record["kinds"]["dflow, relay off"] = _figures(measure(lab, drafter, held_out, use_relay=False))
    return record


def cache_of(target: Any) -> Any:
    token_ids = torch.ones(1, 2, dtype=torch.long)
    output = target(token_ids, use_cache=True)
    return output.get("cache") or output.get("past_key_values")


def _figures(counts: dict[str, list[int]]) -> dict[str, Any]:
    tokens, steps = resampled_sums(torch.tensor([counts["tokens"], counts["steps"]]).numpy())
    return {"tokens_per_step": figure(tokens / steps), "identical": sum(counts["identical"])}


def table_of(record: dict[str, Any]) -> str:
    """Tokens per step on held-out prompts, by family."""
    headings = ("target (model_type)", "DFlash", "DFlow, relay off", "DFlow", "texts equal to the target's")
    rows = []
    for family, found in record["families"].items():
        kinds = found["kinds"]
        shown = [
            with_interval(kinds[kind]["tokens_per_step"], ".2f") for kind in ("dflash", "dflow, relay off", "dflow")
        ]
        identical = min(kind["identical"] for kind in kinds.values())
        rows.append([f"`{family}`", *shown, f"{identical} of {found['prompts']}"])
    return markdown_table(headings, rows)


def main(
    folder: Annotated[Path, typer.Argument(help="For targets, data and drafters; resumed.")],
    family: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(FAMILIES)}; all by default.")] = None,
    target_updates: Annotated[int, typer.Option(min=1)] = 600,
    updates: Annotated[int, typer.Option(min=2, help="Of each drafter.")] = 600,
    threads: ThreadsOption = 1,
    json_path: JsonOption = None,
) -> None:
    """Train small hybrid targets and drafters for them; print tokens per step on held-out prompts."""
    with errors_in_words():
        unknown = sorted(set(family or []) - set(FAMILIES))
        if unknown:
            raise DFlowError(f"--family {', '.join(unknown)} is unknown; use one or more of {', '.join(FAMILIES)}")
        writable(json_path)
        use_threads(threads)
        record: dict[str, Any] = {
            "families": {},
            "conditions": run_conditions(
                target_updates=target_updates, updates=updates, max_new_tokens=ANSWER, training="preset cpu"
            ),
        }
        for name in family or FAMILIES:
            (folder / name).mkdir(parents=True, exist_ok=True)
            record["families"][name] = drafters_for(folder / name, name, target_updates, updates)
        typer.echo(table_of(record))
        if json_path is not None:
            write_json(json_path, record)


if __name__ == "__main__":
    typer.run(main)
