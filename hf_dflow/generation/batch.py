"""The rows of a call: made from its inputs, decoded together or one by one, and put together as its result."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from hf_dflow.generation import _compat
from hf_dflow.generation.checks import BATCHED, check_rows_alone
from hf_dflow.generation.configuration import DFlowOptions
from hf_dflow.generation.output import GenerateDFlowOutput
from hf_dflow.generation.path import PathProcessor
from hf_dflow.generation.policy.lengths import ROW_PRECISION, LengthPlanner, StepCosts
from hf_dflow.generation.policy.monitor import RoutePolicy
from hf_dflow.generation.policy.pausing import DraftPolicy
from hf_dflow.generation.records import Records, combine
from hf_dflow.generation.row_processors import for_row
from hf_dflow.generation.rows import DecodeState, Row
from hf_dflow.generation.statistics import AcceptanceStatistics
from hf_dflow.generation.uniforms import generator_of, row_seeds

logger = logging.getLogger(__name__)


def make_rows(
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    options: DFlowOptions,
    processors: LogitsProcessorList,
    rule: str,
    costs: StepCosts | None = None,
) -> list[Row]:
    """One row for each of `input_ids` `(B, T)`, with processors, acceptance processors and random numbers of its own.

    Raises:
        UnsupportedGenerationError: A processor cannot be had once for each row, or seeds do not fit.
    """
    batch_size = input_ids.shape[0]
    generators: list[torch.Generator | None] = [None] * batch_size
    paths = [PathProcessor(for_row(processors, i, batch_size)) for i in range(batch_size)]
    if generation_config.do_sample:
        generators = [generator_of(seed, input_ids.device) for seed in row_seeds(options.seeds, batch_size)]
    lossy = [type(one).__name__ for one in options.all_processors if one.is_lossy]
    if lossy:
        logger.warning("%s makes acceptance lossy: the text may differ from the target's own.", ", ".join(lossy))
    kind = "sampled" if generation_config.do_sample else "greedy"
    made = []
    for i in range(batch_size):
        statistics = AcceptanceStatistics(verification=rule, lossless=not lossy)
        row = Row(
            index=i,
            ids=input_ids[i : i + 1],
            path=paths[i],
            acceptance_processors=copy.deepcopy(options.all_processors),  # what they learn belongs to this row
            policy=DraftPolicy() if options.monitor is None else RoutePolicy(options.monitor),
            records=Records(generation_config),
            generator=generators[i],
            statistics=statistics,
            planner=None if costs is None else _planner(costs, options.fitted, kind, statistics),
        )
        made.append(row)
    return made


def _planner(costs: StepCosts, fitted: dict[str, Any], kind: str, statistics: AcceptanceStatistics) -> LengthPlanner:
    calibration = fitted.get("calibration", {}).get(kind)
    precision = fitted.get("row_precision", {}).get(kind, ROW_PRECISION)
    return LengthPlanner(costs, calibration, outcomes=statistics.predictions, precision=precision)


def decode_all(
    decode: Callable[[list[Row], dict[str, Any]], DecodeState],
    rows: list[Row],
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> GenerateDFlowOutput | torch.Tensor:
    """Run `decode` on all rows at once where the target allows it, else on one after the other.

    Either way a row's text, statistics and random numbers are those of a call for it alone.

    Raises:
        UnsupportedGenerationError: The target needs rows one by one, for which a filled cache or the images of a whole
            batch cannot be taken apart.
    """
    cache = _compat.get_cache(model_kwargs)
    assert cache is not None  # checked before
    if len(rows) == 1 or _compat.holds_holes(model, cache):
        state = decode(list(rows), model_kwargs)
        return _result(rows, [state], state.cache, generation_config)
    check_rows_alone(model, model_kwargs)
    logger.warning(
        "%s with %s decodes a batch row by row: its rows cannot keep their own pace in one cache.",
        type(model).__name__,
        type(cache).__name__,
    )
    states = [decode([row], _inputs_of(row.index, model, generation_config, model_kwargs)) for row in rows]
    return _result(rows, states, None, generation_config)


def _inputs_of(
    row: int, model: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> dict[str, Any]:
    """What the target gets for one row alone, with a fresh cache of the kind that was asked for."""
    kwargs = dict(model_kwargs)
    for name in BATCHED:
        value = kwargs.get(name)
        if value is not None and value.shape[-2] > 1:  # positions may have a leading dimension of their own
            kwargs[name] = value[..., row : row + 1, :]
    if kwargs.get("attention_mask") is not None and bool((kwargs["attention_mask"] == 1).all()):
        kwargs["attention_mask"] = None  # as generate does: a mask of ones costs time
    _compat.fresh_cache(model, generation_config, kwargs)
    return kwargs


def _result(
    rows: list[Row], states: list[DecodeState], cache: Any, generation_config: GenerationConfig
) -> GenerateDFlowOutput | torch.Tensor:
    sequences = _padded([row.ids for row in rows], generation_config)
    if not generation_config.return_dict_in_generate:
        return sequences
    statistics = AcceptanceStatistics.total(
        [row.statistics for row in rows],
        num_target_forwards=sum(state.num_target_forwards for state in states),
        num_draft_forwards=sum(state.num_draft_forwards for state in states),
    )
    fields = combine([row.records for row in rows])
    fields[next(name for name in _compat.CACHE_NAMES if name in GenerateDFlowOutput.__dataclass_fields__)] = cache
    return GenerateDFlowOutput(sequences=sequences, statistics=statistics, **fields)  # type: ignore[arg-type]


def _padded(ids: list[torch.Tensor], generation_config: GenerationConfig) -> torch.Tensor:
    """Sequences `[B, longest]` of rows `[1, T]`, padded on the right behind their ends."""
    if len(ids) == 1:
        return ids[0]
    longest = max(one.shape[1] for one in ids)
    pad = getattr(generation_config, "_pad_token_tensor", None)  # `check_call` saw to it that one is there if needed
    value = 0 if pad is None else int(pad)
    return torch.cat([torch.nn.functional.pad(one, (0, longest - one.shape[1]), value=value) for one in ids])
