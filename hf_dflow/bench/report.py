"""What every benchmark says beside its numbers, and how sure it is of them."""

import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import hf_dflow
from hf_dflow.generation.statistics import AcceptanceStatistics


def run_conditions(**more: Any) -> dict[str, Any]:
    """Versions, processor and threads of this process, and whatever the caller adds or knows better."""
    return {
        "versions": {
            "hf_dflow": hf_dflow.__version__,
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
    """The processor's own name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def bootstrap_interval(
    count: int, statistic: Callable[[np.ndarray], float], *, resamples: int = 2000, seed: int = 0
) -> list[float]:
    """95% percentile interval of `statistic(indices)` over resamples of `count` items, drawn with replacement."""
    generator = np.random.default_rng(seed)
    values = [statistic(generator.integers(0, count, count)) for _ in range(resamples)]
    low, high = np.percentile(values, [2.5, 97.5])
    return [float(low), float(high)]


def resampled_sums(values: np.ndarray, *, resamples: int = 2000, seed: int = 0) -> np.ndarray:
    """Sums over items, and over as many items drawn with replacement; all rows are read on the same items.

    Args:
        values (`np.ndarray` of shape `(rows, items)`): What is summed.

    Returns:
        `np.ndarray` of shape `(rows, 1 + resamples)`: The sums of the items themselves come first.
    """
    count = values.shape[1]
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
    return np.concatenate([values.sum(axis=1, keepdims=True), values @ draws.T], axis=1)


def figure(samples: np.ndarray) -> dict[str, Any]:
    """A statistic of [`resampled_sums`]: its value, and the 95% percentile interval of its resamples."""
    low, high = np.percentile(samples[1:], [2.5, 97.5])
    return {"value": float(samples[0]), "interval_95": [float(low), float(high)]}


def pooled(statistics: Sequence[AcceptanceStatistics]) -> AcceptanceStatistics:
    """One record of all steps, so that long answers weigh as much as they are long."""
    total = AcceptanceStatistics()
    for one in statistics:
        total.per_step_accepted += one.per_step_accepted
        total.per_step_drafted += one.per_step_drafted
        total.predictions += one.predictions
        total.num_target_forwards += one.num_target_forwards
        total.num_draft_forwards += one.num_draft_forwards
        total.num_output_tokens += one.num_output_tokens
    return total
