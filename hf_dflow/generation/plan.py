"""What a call decides once, before its first forward: options, checks, pair, rule, costs."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from hf_dflow.errors import UnsupportedGenerationError
from hf_dflow.generation import _compat, checks
from hf_dflow.generation.configuration import DFlowOptions, refuse_misspelt_fields, resolve_options
from hf_dflow.generation.measure import step_costs
from hf_dflow.generation.pair import check_pair
from hf_dflow.generation.policy.base import BackOff, DraftPolicy
from hf_dflow.generation.policy.costs import StepCosts
from hf_dflow.generation.policy.lengths import ROW_PRECISION, AdaptiveLength, LengthPlanner
from hf_dflow.generation.policy.monitor import RoutePolicy
from hf_dflow.generation.policy.trees import AUTO, LARGEST_AUTO, TreeDrafts
from hf_dflow.generation.processors import PathProcessor, for_row
from hf_dflow.generation.records import COLLECTED, Records
from hf_dflow.generation.rows import Row
from hf_dflow.generation.statistics import AcceptanceStatistics
from hf_dflow.generation.stopping import StopPlan
from hf_dflow.generation.uniforms import row_generators
from hf_dflow.kernels import check_backend
from hf_dflow.logs import get_logger
from hf_dflow.model.drafter import DFlowDrafter

logger = get_logger(__name__)


@dataclass(frozen=True)
class CallPlan:
    """One call of `generate`. Nothing in it changes while the call decodes."""

    model: PreTrainedModel
    drafter: DFlowDrafter
    generation_config: GenerationConfig
    options: DFlowOptions
    processors: LogitsProcessorList
    stop: StopPlan
    rule: str  # "greedy", "token" or "block"
    backend: str  # of the kernels
    costs: StepCosts | None  # where a policy weighs drafts against them
    device: torch.device  # of ids and logits; the model itself may be spread over devices, or offloaded
    streamer: Any
    row_by_row: str | None = None  # why rows cannot advance at their own pace, "" for the cache's kind

    @property
    def do_sample(self) -> bool:
        return self.rule != "greedy"

    @property
    def returns_dict(self) -> bool:
        """Whether the caller gets a [`GenerateDFlowOutput`], with the cache."""
        return bool(self.generation_config.return_dict_in_generate)

    @property
    def collected(self) -> frozenset[str]:
        """Which of `COLLECTED` the output holds for each token."""
        names = COLLECTED if self.returns_dict else ()
        return frozenset(name for name in names if getattr(self.generation_config, f"output_{name}", False))

    def make_rows(self, input_ids: torch.Tensor) -> list[Row]:
        """One row for each of `input_ids` `(B, T)`, with processors, policy and random numbers of its own.

        Raises:
            UnsupportedGenerationError: A processor cannot be copied for each row, or seeds do not fit.
        """
        batch_size = input_ids.shape[0]
        paths = [PathProcessor(for_row(self.processors, row, batch_size)) for row in range(batch_size)]
        generators: list[Any] = [None] * batch_size
        if self.do_sample:
            generators = row_generators(self.options.seeds, batch_size, input_ids.device)
        lossy = self.options.lossy_names
        if lossy:
            logger.warning_once(
                f"{', '.join(lossy)} makes acceptance lossy: the text may differ from the target's own."
            )
        rows = []
        for index in range(batch_size):
            statistics = AcceptanceStatistics(verification=self.rule, lossless=not lossy)
            row = Row(
                index=index,
                ids=input_ids[index : index + 1],
                path=paths[index],
                acceptance_processors=copy.deepcopy(self.options.all_processors),  # what they learn is this row's
                policy=self._policy(statistics),
                records=Records(self.collected),
                generator=generators[index],
                statistics=statistics,
            )
            rows.append(row)
        return rows

    def _policy(self, statistics: AcceptanceStatistics) -> DraftPolicy:
        options = self.options
        pausing = BackOff() if options.monitor is None else RoutePolicy(options.monitor)
        if options.adaptive_length:
            assert self.costs is not None
            kind = "sampled" if self.do_sample else "greedy"
            planner = LengthPlanner(
                self.costs,
                options.fitted.get("calibration", {}).get(kind),
                outcomes=statistics.predictions,
                precision=options.fitted.get("row_precision", {}).get(kind, ROW_PRECISION),
            )
            return AdaptiveLength(planner, pausing)
        if options.tree_budget == AUTO:
            return TreeDrafts(pausing, LARGEST_AUTO, self.costs)
        if isinstance(options.tree_budget, int):
            return TreeDrafts(pausing, options.tree_budget)
        return pausing


def make_plan(
    drafter: DFlowDrafter,
    overrides: dict[str, Any],
    *,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    streamer: Any = None,
    tokenizer: Any = None,
) -> CallPlan:
    """Resolve the options of a call, and refuse what it cannot do.

    Args:
        overrides (`dict`): Options that win over those of `generation_config`.
        model_kwargs (`dict`): What `generate` prepared for the target's forward.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's, to compare with the drafter's.

    Raises:
        UnsupportedGenerationError, PairMismatchError: Before any forward.
    """
    checks.check_mode(generation_config, drafter)
    checks.check_target(model)
    refuse_misspelt_fields(generation_config, model.generation_config)
    options = resolve_options(drafter, generation_config, overrides)
    check_pair(model, drafter, tokenizer, options.chat_mode)
    stop = StopPlan(criteria, generation_config.max_length)
    batch_size, do_sample = input_ids.shape[0], bool(generation_config.do_sample)
    checks.check_inputs(model, input_ids, generation_config.max_length, model_kwargs)
    if batch_size > 1:
        has_padding = not stop.asks_criteria or getattr(generation_config, "_pad_token_tensor", None) is not None
        checks.check_batch(batch_size, model_kwargs, has_streamer=streamer is not None, has_padding=has_padding)
    if generation_config.prefill_chunk_size is not None:
        checks.refuse_tensors(model_kwargs, "which chunk of the prompt needs which part of it")
    if options.tree_budget is not None:
        returns = generation_config.return_dict_in_generate
        asked = generation_config.output_hidden_states or generation_config.output_attentions
        cache = _compat.get_cache(model_kwargs)
        checks.check_tree(model, cache, batch_size, do_sample=do_sample, returns_states=bool(returns and asked))
    rule = _choose_rule(do_sample, options, PathProcessor(processors))
    backend = _choose_backend(options, input_ids.device)
    has_tree = options.tree_budget is not None
    return CallPlan(
        row_by_row=checks.check_measured(model, drafter, input_ids, model_kwargs, has_tree=has_tree),
        model=model,
        drafter=drafter,
        generation_config=generation_config,
        options=options,
        processors=processors,
        stop=stop,
        rule=rule,
        backend=backend,
        costs=_find_costs(model, drafter, options, input_ids.device),
        device=input_ids.device,
        streamer=streamer,
    )


def _choose_rule(do_sample: bool, options: DFlowOptions, path: PathProcessor) -> str:
    """The verification rule: a processor of unknown kind, and relaxed acceptance, judge token by token."""
    if not do_sample:
        return "greedy"
    if path.is_lazy and options.verification == "block":
        raise UnsupportedGenerationError(
            f"verification='block' judges all rows at once, which {', '.join(path.unknown)} may not survive (it is not "
            "known to be a pure function); use verification='token'."
        )
    needs_token = path.is_lazy or bool(options.lossy_names)
    return options.verification or ("token" if needs_token else "block")


def _choose_backend(options: DFlowOptions, device: torch.device) -> str:
    backend = options.kernel_backend or "auto"
    try:
        check_backend(backend, device)
    except ValueError as error:
        raise UnsupportedGenerationError(f"kernel_backend='{backend}': {error}") from error
    return backend


def _find_costs(
    model: PreTrainedModel, drafter: DFlowDrafter, options: DFlowOptions, device: torch.device
) -> StepCosts | None:
    """The costs that were given, else measured, where a policy needs them."""
    if options.tree_budget != AUTO and not options.adaptive_length:
        return None
    longest = LARGEST_AUTO if options.tree_budget == AUTO else drafter.config.drafts_per_block
    if options.step_costs is None:
        return step_costs(model, drafter, longest, device)
    return StepCosts.read(options.step_costs, longest)
