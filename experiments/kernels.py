"""`python -m experiments.kernels`: the verification kernels on a GPU, correctness first, then speed.

Nothing is timed unless every gate case decides as the torch reference does. Times are medians of CUDA-graph replays,
each after a cache flush, which excludes the host's launch overhead on both sides; `eager_us` includes it. It takes less
than 8 minutes on one H200. With `--device cpu` the interpreter runs tiny shapes, to try the script out; its times mean
nothing.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import typer

from experiments.kernel_agreement import compare_decisions
from hf_dflow.bench.conditions import run_conditions
from hf_dflow.console import JsonOption, errors_in_words, write_json
from hf_dflow.errors import DFlowError
from hf_dflow.kernels import VerifyInputs, torch_ops, verify_block

MAX_EXCLUDED = 1e-3  # share of gate rows that may differ where rounding decides
GOAL_BANDWIDTH = 0.8  # of a device copy, at B = 64
GOAL_US = 30.0  # at B = 1, N = 15, V = 151,936
GOAL_SPEEDUP = 5.0  # over the torch reference
FLUSH_BYTES = 256 * 2**20  # beyond any level-2 cache


@dataclass(frozen=True)
class Plan:
    """The shapes of a real run, or of a try-out on a CPU."""

    batches: tuple[int, ...]
    drafts: tuple[int, ...]
    vocabularies: tuple[int, ...]
    gate_rows: int
    gate_vocabularies: tuple[int, ...]
    repeats: int
    copy_bytes: int


REAL = Plan((1, 8, 64), (7, 15), (49_152, 151_936), 10_000, (257, 49_152, 151_669, 151_936, 262_144), 30, 2**30)
TRY_OUT = Plan((1,), (1,), (40,), 36, (40,), 1, 2**16)


def make_inputs(
    batch: int,
    num_drafts: int,
    vocab: int,
    rule: str,
    *,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> VerifyInputs:
    """A peaked target, a drafter that is somewhat off, drafts drawn from its law."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    target = 6 * normal(batch, num_drafts + 1, vocab)
    draft = (target[:, :-1] + 2 * normal(batch, num_drafts, vocab)).to(dtype)
    noise = torch.rand(draft.shape, generator=generator, device=device).log_().neg_().log_()
    return VerifyInputs(
        rule=rule,
        draft_ids=(draft - noise).argmax(-1),
        draft_logits=draft,
        target_logits=target.to(dtype),
        uniforms=torch.rand(batch, num_drafts + 1, generator=generator, device=device, dtype=torch.float64),
    )


def gate(plan: Plan, device: str) -> dict[str, Any]:
    """Compare decisions with the reference's on random rows of every rule, law, format and vocabulary."""
    rows = excluded = 0
    wrong = []
    configs = [(rule, law) for rule in ("token", "block") for law in ("dense", "mixed")] + [("greedy", "dense")]
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for vocab in plan.gate_vocabularies:
        for seed, (rule, law) in enumerate(configs):
            batch = max(4, plan.gate_rows // len(configs)) if vocab < 1000 else 8
            num_drafts = 1 + (3 * seed + vocab) % 16 if vocab > 40 else 2
            lengths = torch.randint(0, num_drafts + 1, (batch,), device=device)
            inputs = replace(
                make_inputs(batch, num_drafts, vocab, rule, device=device, dtype=dtypes[seed % 3], seed=seed),
                lengths=torch.where(lengths < 2, num_drafts, lengths),
                point_mass=torch.rand(batch, num_drafts, device=device) < 0.3 if law == "mixed" else None,
            )
            found = compare_decisions(verify_block(inputs, "triton"), inputs)
            rows, excluded = rows + found.num_rows, excluded + found.num_excluded
            if found.wrong_rows:
                wrong.append({"rule": rule, "law": law, "vocab": vocab, "rows": found.wrong_rows[:10]})
    passed = not wrong and excluded <= MAX_EXCLUDED * rows
    return {"passed": passed, "rows": rows, "excluded": excluded, "wrong": wrong}


class Clock:
    """Times a call on one device.

    Args:
        device (`str`): "cuda" or "cpu".
        repeats (`int`): Runs behind each median.
    """

    def __init__(self, device: str, repeats: int):
        self.device, self.repeats = device, repeats
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if device == "cuda" else None

    def graph_us(self, call: Callable[[], Any]) -> float:
        """Median microseconds of a replayed CUDA graph of `call`; on a CPU of `call` itself."""
        if self.device != "cuda":
            return self.eager_us(call)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return self.eager_us(graph.replay)

    def eager_us(self, call: Callable[[], Any]) -> float:
        """Median microseconds from the first to the last of the call's work on the device."""
        call()
        times = []
        for _ in range(self.repeats):
            if self._flush is None:
                start = time.perf_counter()
                call()
                times.append(1e6 * (time.perf_counter() - start))
                continue
            self._flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end))
        return statistics.median(times)

    def peak_bytes(self, call: Callable[[], Any]) -> int | None:
        """What `call` needs beside its inputs; `None` on a CPU."""
        if self.device != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def copy_bandwidth(clock: Clock, num_bytes: int) -> float:
    """Bytes per second of a device copy, reads and writes both counted."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=clock.device).zero_()
    target = torch.empty_like(source)
    return 2 * num_bytes / (1e-6 * clock.graph_us(lambda: target.copy_(source)))


def bytes_read(inputs: VerifyInputs) -> int:
    """What the rule has to read: both logits once for "token", twice for "block"."""
    assert inputs.draft_logits is not None
    return (2 if inputs.rule == "block" else 1) * (inputs.target_logits.nbytes + inputs.draft_logits.nbytes)


def vllm_sampler(inputs: VerifyInputs) -> Callable[[], Any]:
    """vLLM's own rejection sampling (token rule) on the same logits, softmax included as both sides need it.

    Raises:
        ImportError: vLLM is not installed, or not a version that has this function.
    """
    from types import SimpleNamespace

    from vllm.v1.sample.rejection_sampler import rejection_sample

    batch, num_drafts = inputs.draft_ids.shape
    assert inputs.draft_logits is not None
    draft_logits, target_logits = inputs.draft_logits.flatten(0, 1), inputs.target_logits[:, :-1].flatten(0, 1)
    ids = inputs.draft_ids.flatten().int().contiguous()
    ends = num_drafts * torch.arange(1, batch + 1, device=ids.device, dtype=torch.int32)
    bonus = torch.zeros(batch, 1, dtype=torch.int32, device=ids.device)
    metadata = SimpleNamespace(
        all_greedy=False, all_random=True, generators={}, temperature=torch.ones(batch, device=ids.device)
    )

    def call() -> Any:
        target = target_logits.softmax(-1, dtype=torch.float32)
        draft = draft_logits.softmax(-1, dtype=torch.float32)
        return rejection_sample(ids, [num_drafts] * batch, num_drafts, ends, draft, target, bonus, metadata)

    return call


def measure(clock: Clock, inputs: VerifyInputs, bandwidth: float, is_late: Callable[[], bool]) -> dict[str, Any]:
    """Time, bandwidth and memory of one shape, and of what it is compared with."""

    def in_triton() -> Any:
        return verify_block(inputs, "triton")

    def in_torch() -> Any:
        return torch_ops.verify_block(inputs)

    microseconds = clock.graph_us(in_triton)
    achieved = bytes_read(inputs) / (1e-6 * microseconds)
    row: dict[str, Any] = {
        "graph_us": microseconds,
        "eager_us": clock.eager_us(in_triton),
        "bytes_read": bytes_read(inputs),
        "bytes_per_second": achieved,
        "share_of_copy_bandwidth": achieved / bandwidth,
        "peak_bytes": clock.peak_bytes(in_triton),
        "torch_us": clock.graph_us(in_torch),
        "torch_peak_bytes": clock.peak_bytes(in_torch),
    }
    row["speedup_over_torch"] = row["torch_us"] / microseconds
    baselines = {"torch_compile_us": lambda: _compiled(inputs)}
    if inputs.rule == "token":
        baselines["vllm_us"] = lambda: vllm_sampler(inputs)
    for name, make in baselines.items():
        if is_late():
            row[name] = "not run: the time budget was spent"
            continue
        try:
            # Not captured: either may wait for the device or allocate outside a graph.
            row[name] = clock.eager_us(make())
        except Exception as error:  # a missing or broken baseline must not lose the rest of the record
            row[name] = f"not run: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return row


def _compiled(inputs: VerifyInputs) -> Callable[[], Any]:
    torch._dynamo.reset()  # after a handful of shapes it would quietly stop compiling
    compiled = torch.compile(torch_ops.verify_block, dynamic=False)
    return lambda: compiled(inputs)


def goals(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Which goals the measured rows reach."""
    largest = [row["share_of_copy_bandwidth"] for row in rows if row["batch"] == 64]
    single = [row["graph_us"] for row in rows if (row["batch"], row["drafts"], row["vocab"]) == (1, 15, 151_936)]
    return {
        "80% of copy bandwidth at B = 64": bool(largest) and min(largest) >= GOAL_BANDWIDTH,
        "30 us at B = 1, N = 15, V = 151,936": bool(single) and max(single) <= GOAL_US,
        "5 times the torch reference": min(row["speedup_over_torch"] for row in rows) >= GOAL_SPEEDUP,
    }


def main(
    json_path: JsonOption = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the script out under the interpreter.")] = "cuda",
    budget: Annotated[float, typer.Option(help="Seconds after which no further baseline starts.")] = 330.0,
) -> None:
    """Check decisions, then measure; exit code 1 if a decision is wrong, 2 if there is no GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise DFlowError("no CUDA device here, so nothing was measured; --device cpu tries the script on tiny shapes")
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    start = time.monotonic()
    plan = REAL if device == "cuda" else TRY_OUT
    import triton

    record: dict[str, Any] = run_conditions(
        decoding="none: verification alone",
        dtype="bfloat16",
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu, interpreted: times mean nothing",
    )
    record["versions"].update(triton=triton.__version__, cuda=torch.version.cuda)
    record["gate"] = gate(plan, device)
    print(f"gate: {json.dumps(record['gate'])}")
    if record["gate"]["passed"]:
        clock = Clock(device, plan.repeats)
        bandwidth = record["copy_bytes_per_second"] = copy_bandwidth(clock, plan.copy_bytes)
        record["rows"] = rows = []
        # The largest shapes first, so that baselines are missing where they matter least if time runs out.
        for vocab in sorted(plan.vocabularies, reverse=True):
            for num_drafts in sorted(plan.drafts, reverse=True):
                for batch in plan.batches:
                    for rule in ("block", "token"):
                        inputs = make_inputs(batch, num_drafts, vocab, rule, device=device)
                        row = measure(clock, inputs, bandwidth, lambda: time.monotonic() - start > budget)
                        rows.append({"batch": batch, "drafts": num_drafts, "vocab": vocab, "rule": rule, **row})
                        print(json.dumps(rows[-1]))
        record["goals"] = goals(rows)
        print(f"goals: {json.dumps(record['goals'])}")
    record["seconds"] = time.monotonic() - start
    write_json(json_path, record)
    raise typer.Exit(0 if record["gate"]["passed"] else 1)


if __name__ == "__main__":
    typer.run(errors_in_words()(main))
