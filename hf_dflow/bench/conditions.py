"""Which results may stand in one table: those that were measured under the same conditions."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_dflow.bench.workloads import Prompt
from hf_dflow.errors import DFlowError

# What must agree. Engine and strategy are what is compared; versions and processor are said beside the figures.
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


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """Tells workloads apart, whatever their order, without their texts."""
    texts = "\0".join(sorted(f"{prompt.task} {prompt.digest}" for prompt in prompts))
    return hashlib.sha256(texts.encode()).hexdigest()[:16]


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The conditions in which two records differ, with both values. What a record does not state is a difference."""
    nothing = "not stated"
    found = {name: (one.get(name, nothing), other.get(name, nothing)) for name in MUST_AGREE}
    return {name: pair for name, pair in found.items() if pair[0] != pair[1] or nothing in pair}


def refuse_unequal(
    records: Sequence[Mapping[str, Any]], names: Sequence[str], *, except_for: Sequence[str] = ()
) -> None:
    """Refuse to put records side by side that were measured under different conditions.

    Args:
        records (`list[dict]`): Each with its `conditions`.
        names (`list[str]`): What to call them.
        except_for (`list[str]`, *optional*): Conditions that are what is compared.

    Raises:
        DFlowError: Two of them differ, and in what.
    """
    for record, name in zip(records[1:], names[1:], strict=True):
        found = differences(records[0].get("conditions", {}), record.get("conditions", {}))
        told = [f"{key}: {ours!r} / {theirs!r}" for key, (ours, theirs) in found.items() if key not in except_for]
        if told:
            raise DFlowError(
                f"{names[0]} and {name} were measured under different conditions, so they are not compared. "
                f"{'; '.join(told)}. Measure both again with the same options."
            )
