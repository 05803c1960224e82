"""Pairs, scenarios and engines for the comparison of blocks."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import block_recorder
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dflow import DFlowDrafter
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_PROMPTS, TINY_TARGET
from hf_dflow.checkpoints.export import export_drafter
from hf_dflow.model.heads import CausalCorrection

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DRAFTS = 7  # of a block
MAX_MODEL_LEN = 160


@dataclass
class Pair:
    """A target and a drafter in float32, as they are here and as vLLM reads them."""

    target: Any
    drafter: Any
    target_folder: Path
    drafter_folder: Path


@dataclass
class Answers:
    """What an engine said: `answers[scenario][request]`, and its counters and seconds for each scenario."""

    answers: dict[str, list[dict]]
    metrics: dict[str, dict[str, float]]
    seconds: dict[str, float]


def tiny_pair(folder: Path, *, relay: bool = True, correction: bool = False, even_heads: bool = False) -> Pair:
    """The bundled tiny pair, or a variant of it.

    Args:
        folder (`Path`): For what vLLM reads.
        relay (`bool`): Whether the drafter keeps its relay.
        correction (`bool`): Whether it gets a causal correction, of random weights.
        even_heads (`bool`): Four heads and two key-value heads instead of three and one, for two ranks. The fourth
            adds nothing, and the second key-value head is the first one again: all states stay the same.
    """
    target = AutoModelForCausalLM.from_pretrained(TINY_TARGET, dtype=torch.float32).eval()
    drafter = DFlowDrafter.from_pretrained(str(TINY_DRAFTER), dtype=torch.float32).eval()
    target_folder = TINY_TARGET
    if even_heads:
        for model in (target, drafter):
            _make_heads_even(model)
        target_folder = folder / "target"
        target.save_pretrained(target_folder)
        AutoTokenizer.from_pretrained(TINY_TARGET).save_pretrained(target_folder)
        target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
        drafter.save_pretrained(folder / "even_drafter")
        drafter = DFlowDrafter.from_pretrained(str(folder / "even_drafter"), dtype=torch.float32).eval()
    if not relay:
        drafter.relay, drafter.config.use_relay = None, False
    if correction:
        drafter.config.correction_intermediate_size, drafter.config.correction_top_k = 64, 32
        torch.manual_seed(0)
        drafter.causal_correction = CausalCorrection(drafter.config)
        nn.init.normal_(drafter.causal_correction.down_proj.weight, std=0.5)
    export_drafter(drafter, folder / "drafter", "vllm")
    return Pair(target, drafter.requires_grad_(False), target_folder, folder / "drafter")


def _make_heads_even(model) -> None:
    width = model.config.head_dim
    layers = model.model.layers if hasattr(model, "model") else model.layers
    for layer in layers:
        attention = layer.self_attn
        for name in ("k_proj", "v_proj"):
            linear = getattr(attention, name)
            linear.weight = nn.Parameter(torch.cat([linear.weight, linear.weight]))
        queries, output = attention.q_proj.weight, attention.o_proj.weight
        attention.q_proj.weight = nn.Parameter(torch.cat([queries, queries[:width]]))
        attention.o_proj.weight = nn.Parameter(torch.cat([output, torch.zeros_like(output[:, :width])], dim=1))
    model.config.num_attention_heads, model.config.num_key_value_heads = 4, 2


# -- scenarios


def tiny_prompts() -> list[list[int]]:
    """Nine prompts of 8 to 24 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_TARGET)
    texts = [text for kind in json.loads(TINY_PROMPTS.read_text()).values() for text in kind]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [*prompts, prompts[0] + prompts[1], prompts[2] + prompts[3], prompts[4] + prompts[5] + prompts[0]]


def requests(prompts: list[list[int]], max_tokens: int | None = 60, **params: Any) -> list[dict]:
    """A request of each prompt, to be decoded to its end."""
    return [{"prompt": prompt, "params": {"max_tokens": max_tokens, **params}} for prompt in prompts]


# -- engines


def run_engine(
    folder: Path,
    pair: Pair,
    scenarios: dict[str, dict],
    *,
    is_plain: bool = False,
    own_process: bool = False,
    **options: Any,
) -> Answers:
    """Let vLLM answer `scenarios` in a process of its own; what it drafts is recorded in `folder / "records"`.

    Args:
        folder (`Path`): For plan, answers and records.
        pair (`Pair`): What decodes.
        scenarios (`dict`): As `engine_child.py` takes them.
        is_plain (`bool`): Whether to decode without the drafter.
        own_process (`bool`): Whether the engine core gets a process of its own.
        options: Arguments of `LLM`.
    """
    (folder / "records").mkdir(parents=True)
    block_recorder.advertise(folder / "plugins")
    speculative = {"method": "dflash", "model": str(pair.drafter_folder), "num_speculative_tokens": DRAFTS}
    engine = {
        "model": str(pair.target_folder),
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 3,
        "block_size": 32,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "speculative_config": None if is_plain else speculative,
        **options,
    }
    (folder / "plan.json").write_text(json.dumps({"engine": engine, "scenarios": scenarios}))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, folder / "plugins"))),
        "BLOCK_RECORDS": str(folder / "records"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(own_process)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    environment.pop("TRITON_INTERPRET", None)  # for our own kernels
    if not is_plain and any(scenario.get("fault") for scenario in scenarios.values()):
        environment["BLOCK_FAULTS"] = "1"
    command = [sys.executable, str(HERE / "engine_child.py"), str(folder / "plan.json"), str(folder / "answers.json")]
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=600)
    assert done.returncode == 0, (folder / "log.txt").read_text()[-4000:]
    return Answers(**json.loads((folder / "answers.json").read_text()))
