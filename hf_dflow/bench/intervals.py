"""Bootstrap intervals and percentiles: how sure a figure is."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

MIN_ITEMS = 5  # prompts (or batches of them) from which a bootstrap interval means anything


def bootstrap_interval(
    count: int, statistic: Callable[[np.ndarray], float], *, resamples: int = 2000, seed: int = 0
) -> list[float]:
    """95% percentile interval of `statistic(indices)` over resamples of `count` items, drawn with replacement."""
    generator = np.random.default_rng(seed)
    values = [statistic(generator.integers(0, count, count)) for _ in range(resamples)]
    low, high = np.percentile(values, [2.5, 97.5])
    return [float(low), float(high)]


def resampled_sums(values: np.ndarray, *, resamples: int = 2000, seed: int = 0) -> np.ndarray:
    """Sums over items, and over as many items drawn with replacement; all rows are summed over the same items.

    Args:
        values (`np.ndarray` of shape `(rows, items)`): What is summed.

    Returns:
        `np.ndarray` of shape `(rows, 1 + resamples)`: The first column holds the sums over the items themselves.
    """
    count = values.shape[1]
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
    return np.concatenate([values.sum(axis=1, keepdims=True), values @ draws.T], axis=1)


def figure(samples: np.ndarray, count: int | None = None) -> dict[str, Any]:
    """The value of a statistic of [`resampled_sums`], and the 95% percentile interval over its resamples.

    Args:
        count (`int`, *optional*): The items that were resampled, stated as `n`; below [`MIN_ITEMS`] there is no
            interval. Records of before this was stated are recounted without.
    """
    low, high = np.percentile(samples[1:], [2.5, 97.5])
    found: dict[str, Any] = {"value": float(samples[0]), "interval_95": [float(low), float(high)]}
    if count is None:
        return found
    return {**found, "interval_95": found["interval_95"] if count >= MIN_ITEMS else None, "n": count}


def grouped_median(values: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """The median of values, and its 95% interval over resamples of the groups that they belong to.

    Args:
        values (`list[tuple[str, float]]`): The name of each value's group, and the value.
    """
    groups: dict[str, list[float]] = {}
    for name, value in values:
        groups.setdefault(name, []).append(value)
    members = list(groups.values())

    def median_of(chosen: Any) -> float:
        return float(median(value for index in chosen for value in members[index]))

    return {
        "value": median_of(range(len(members))),
        "interval_95": bootstrap_interval(len(members), median_of, resamples=500)
        if len(members) >= MIN_ITEMS
        else None,
        "n": len(members),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99, interpolated."""
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 95, 99)}


def with_interval(figure: dict[str, Any], form: str = ".2f") -> str:
    """A figure and its interval as text: "1.84 [1.71, 1.99]"; without one, how few it was measured on: "1.84 (n=3)"."""
    if figure["interval_95"] is None:
        return f"{figure['value']:{form}} (n={figure['n']})"
    low, high = figure["interval_95"]
    return f"{figure['value']:{form}} [{low:{form}}, {high:{form}}]"
