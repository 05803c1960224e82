"""What stands beside every figure, and which records may be compared: those measured under the same conditions."""

import hashlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_dflow._version import __version__
from hf_dflow.bench.workloads import Prompt
from hf_dflow.errors import DFlowError

# Engine and strategy are what is compared; versions are stated beside the figures.
MUST_AGREE = (
    "target",
    "quantization",
    "dtype",
    "device",
    "cpu",
    "threads",
    "drafter",
    "block_size",
    "chat_template",
    "thinking",
    "prompts_sha256",
    "output_tokens",
    "modes",
    "concurrency",
)
# What the client of an endpoint decides; the server's target, dtype and machine are stated beside the figures.
LOAD = {"prompts_sha256": "prompts", "output_tokens": "output tokens", "concurrency": "concurrency"}
ENDPOINT = "endpoint"  # the engine of records of `hf-dflow bench endpoint`
NOT_STATED = "not stated"


def run_conditions(**more: Any) -> dict[str, Any]:
    """Versions, processor and threads of this process, and whatever the caller adds or knows better."""
    return {
        "versions": {
            "hf_dflow": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "decoding": "greedy",
        "dtype": "float32",
        **more,
    }


def cpu_name() -> str:
    """The processor's model name where the system provides it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """A digest of prompts in any order; it does not reveal their texts."""
    texts = "\0".join(sorted(f"{prompt.task} {prompt.digest}" for prompt in prompts))
    return hashlib.sha256(texts.encode()).hexdigest()[:16]


def is_endpoint(record: Mapping[str, Any]) -> bool:
    """Whether a record is one of `hf-dflow bench endpoint`."""
    return record.get("conditions", {}).get("engine") == ENDPOINT


def temperatures_of(record: Mapping[str, Any]) -> list[str]:
    """The temperatures of a record's modes, as "T=0", without verification rules."""
    return list(dict.fromkeys(mode.split(",")[0] for mode in record["conditions"]["modes"]))


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The conditions in which two records differ, with both values. A condition that is not stated is a difference."""
    pairs = {name: (first.get(name, NOT_STATED), second.get(name, NOT_STATED)) for name in MUST_AGREE}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] or NOT_STATED in pair}


def refuse_unequal(
    records: Sequence[Mapping[str, Any]], names: Sequence[str], *, except_for: Sequence[str] = ()
) -> None:
    """Refuse to compare runs of this process that were measured under different conditions.

    Args:
        records (`list[dict]`): Each with its `conditions`.
        names (`list[str]`): What to call them.
        except_for (`list[str]`, *optional*): Conditions that may differ.
    """
    for record, name in zip(records[1:], names[1:], strict=True):
        pairs = differences(records[0].get("conditions", {}), record.get("conditions", {}))
        _refuse(names[0], name, {key: pair for key, pair in pairs.items() if key not in except_for})


def refuse_other_loads(
    records: Sequence[Mapping[str, Any]], names: Sequence[str], *, except_for: Sequence[str] = ()
) -> None:
    """Refuse records of runs and endpoints without the same prompts, output tokens, concurrency, and a common
    temperature. Runs of this process must agree in everything, see [`refuse_unequal`].
    """
    own = [(record, name) for record, name in zip(records, names, strict=True) if not is_endpoint(record)]
    refuse_unequal([record for record, _ in own], [name for _, name in own], except_for=[*except_for, "modes"])
    for record, name in zip(records[1:], names[1:], strict=True):
        both = (records[0], record)
        pairs = {
            words: tuple(each["conditions"].get(key, NOT_STATED) for each in both)
            for key, words in LOAD.items()
            if key not in except_for
        }
        temperatures = [temperatures_of(each) for each in both]
        if not set(temperatures[0]) & set(temperatures[1]):
            pairs["temperature"] = tuple(", ".join(names) for names in temperatures)
        _refuse(names[0], name, {words: pair for words, pair in pairs.items() if pair[0] != pair[1]})


def _refuse(first: str, second: str, different: Mapping[str, tuple[Any, ...]]) -> None:
    if different:
        values = "; ".join(f"{name}: {value!r} / {other!r}" for name, (value, other) in different.items())
        raise DFlowError(
            f"{first} and {second} were measured under different conditions, so they are not compared. {values}. "
            "Measure both again with the same options."
        )
