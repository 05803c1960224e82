"""`python -m experiments.static_cache`: a static cache, compiled or not, against the dynamic one.

Same target, drafter, prompt and steps, in one process, in turn. The target is a randomly initialised Llama, since the
time of a step does not depend on weights. Run it on an idle machine.
"""

import math
import time
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

from hf_dflow import DFlowDrafter, DFlowDrafterConfig, DFlowGenerationConfig
from hf_dflow.bench.conditions import run_conditions
from hf_dflow.bench.intervals import bootstrap_interval
from hf_dflow.console import JsonOption, ThreadsOption, use_threads, write_json

WAYS = ("dynamic", "static", "static, compiled")
NEW_TOKENS = 32  # and as many steps, since random drafts are wrong; with more, a useless drafter would pause
PROMPT_LENGTH = 32


def random_pair(hidden_size: int, layers: int, vocab_size: int, block_size: int) -> tuple[LlamaForCausalLM, Any]:
    """A target and its drafter, randomly initialised."""
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": hidden_size // 8,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    torch.manual_seed(0)
    tokens: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    target = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, num_hidden_layers=layers))
    drafter = DFlowDrafter(
        DFlowDrafterConfig(
            **sizes,
            num_hidden_layers=2,
            layer_types=["full_attention"] * 2,
            block_size=block_size,
            mask_token_id=vocab_size - 1,
            target_layer_ids=[0, layers // 2, layers - 1],
            num_target_layers=layers,
        )
    )
    return target.eval().requires_grad_(False), drafter.eval().requires_grad_(False)


def decode(target: Any, drafter: Any, prompt: torch.Tensor, way: str, mode: str) -> tuple[float, list[int]]:
    """Seconds per target forward of one call, the prefill included, and its text."""
    compile_config = CompileConfig(mode=mode)
    compile_config._compile_all_devices = True  # type: ignore[assignment] # transformers compiles on GPUs only
    config = DFlowGenerationConfig(
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        pad_token_id=0,
        cache_implementation=None if way == "dynamic" else "static",
        compile_config=compile_config if way == "static, compiled" else None,
        disable_compile=way != "static, compiled",
    )
    start = time.perf_counter()
    output = target.generate(prompt, assistant_model=drafter, generation_config=config)
    text = output.sequences[0, prompt.shape[1] :].tolist()  # waits for the device
    return (time.perf_counter() - start) / output.statistics.num_target_forwards, text


def measure(target: Any, drafter: Any, repeats: int, mode: str) -> dict[str, Any]:
    """Time the three ways in turn."""
    prompt = torch.randint(1, target.config.vocab_size - 1, (1, PROMPT_LENGTH), device=target.device)
    first = {way: decode(target, drafter, prompt, way, mode) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way in WAYS:
            seconds[way].append(decode(target, drafter, prompt, way, mode)[0])
    compiled = seconds["static, compiled"]
    ratios = {
        way: [ours / other for ours, other in zip(compiled, seconds[way], strict=True)]
        for way in WAYS
        if way != "static, compiled"
    }
    compiling = NEW_TOKENS * (first["static, compiled"][0] - median(compiled))
    saved = median(seconds["dynamic"]) - median(compiled)
    return {
        "milliseconds_per_step": {way: 1e3 * median(values) for way, values in seconds.items()},
        "compiled_over": {
            way: {
                "median_ratio": median(values),
                "interval_95": bootstrap_interval(repeats, lambda i, values=values: median(values[j] for j in i)),  # type: ignore[misc]
            }
            for way, values in ratios.items()
        },
        "seconds_of_compiling": compiling,
        "steps_until_compiling_pays": math.ceil(compiling / saved) if saved > 0 else None,
        "same_text": len({tuple(text) for _, text in first.values()}) == 1,
    }


def show(record: dict[str, Any], console: Console) -> None:
    """Print the figures."""
    for way, milliseconds in record["milliseconds_per_step"].items():
        console.print(f"{way}: {milliseconds:.1f} ms a step")
    for way, figure in record["compiled_over"].items():
        low, high = figure["interval_95"]
        console.print(f"static, compiled over {way}: {figure['median_ratio']:.2f} [{low:.2f}, {high:.2f}]")
    steps = record["steps_until_compiling_pays"]
    console.print(
        f"compiling takes {record['seconds_of_compiling']:.0f} s, "
        + ("which never pays off" if steps is None else f"which pays off after {steps} steps")
        + f"; same text: {'yes' if record['same_text'] else 'no'}"
    )


def main(
    json_path: JsonOption = None,
    hidden_size: Annotated[int, typer.Option(min=64)] = 512,
    layers: Annotated[int, typer.Option(min=4)] = 12,
    vocab_size: Annotated[int, typer.Option(min=8)] = 8192,
    block_size: Annotated[int, typer.Option(min=2)] = 8,
    repeats: Annotated[int, typer.Option(min=1)] = 9,
    device: Annotated[str, typer.Option(help="'cpu', or 'cuda' for bfloat16 and CUDA graphs.")] = "cpu",
    threads: ThreadsOption = None,
) -> None:
    """Measure what compiling on a static cache saves, and what it costs."""
    use_threads(threads)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    target, drafter = random_pair(hidden_size, layers, vocab_size, block_size)
    mode = "default" if device == "cpu" else "reduce-overhead"
    record = measure(target.to(device, dtype), drafter.to(device, dtype), repeats, mode)  # type: ignore[arg-type]
    record["conditions"] = run_conditions(
        target=f"random Llama, {layers} layers, hidden {hidden_size}, vocabulary {vocab_size}",
        block_size=block_size,
        new_tokens=NEW_TOKENS,
        repeats=repeats,
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        compile_mode=mode,
    )
    show(record, Console())
    write_json(json_path, record)


if __name__ == "__main__":
    typer.run(main)
