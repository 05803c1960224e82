"""The options of `speculation_type="dflow"` and the one place where their precedence is decided."""

import copy
import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from transformers import GenerationConfig

from hf_dflow.errors import UnsupportedGenerationError
from hf_dflow.generation import SPECULATION_TYPE
from hf_dflow.generation.acceptance import AcceptanceProcessor, AcceptanceThreshold
from hf_dflow.generation.mixture import LEARNED, StaleMixture
from hf_dflow.generation.policy.costs import StepCosts
from hf_dflow.generation.policy.monitor import MonitoredRoute
from hf_dflow.generation.policy.trees import AUTO, LARGEST_AUTO, LARGEST_TREE
from hf_dflow.kernels import BACKENDS
from hf_dflow.logs import get_logger
from hf_dflow.model.drafter import DFlowDrafter

logger = get_logger(__name__)
SAMPLING_RULES = ("token", "block")
SWITCHED_OFF = ("tree_budget", "acceptance_threshold")  # by False, whatever the drafter's defaults say
# Taken from the caller only, never from the files of a drafter or a target: what they would do, and nobody asked for.
CALLERS_OWN = {"acceptance_threshold": "make the output lossy", "seeds": "sample the same text at every call"}
CHAT_MODES = ("thinking", "non-thinking", "chat", "raw")


@dataclass
class DFlowOptions:
    """Resolved options of one call; see [`DFlowGenerationConfig`]."""

    use_relay: bool | None = None
    use_correction: bool | None = None
    verification: str | None = None
    num_draft_tokens: int | None = None
    adaptive_length: bool | None = None
    step_costs: Any = None
    tree_budget: int | str | None = None
    acceptance_threshold: float | None = None
    stale_mixture: bool | float | str | None = None
    acceptance_processors: list[AcceptanceProcessor] | None = None
    kernel_backend: str | None = None
    seeds: list[int] | None = None
    monitor: MonitoredRoute | None = None
    chat_mode: str | None = None
    fitted: dict[str, Any] = field(default_factory=dict, init=False)  # the drafter's own `fitted_decisions`

    @property
    def all_processors(self) -> list[AcceptanceProcessor]:
        """The caller's acceptance processors, behind them the stale mixture and the relaxed rule where they are on."""
        processors = list(self.acceptance_processors or [])
        if self.stale_mixture == LEARNED:
            processors.append(StaleMixture(coefficients=self.fitted["mixture"]))
        elif self.stale_mixture:
            processors.append(StaleMixture(None if self.stale_mixture is True else float(self.stale_mixture)))
        if self.acceptance_threshold is not None:
            processors.append(AcceptanceThreshold(self.acceptance_threshold))
        return processors

    @property
    def lossy_names(self) -> list[str]:
        """Classes of the processors that relax acceptance."""
        return [type(processor).__name__ for processor in self.all_processors if processor.is_lossy]


OPTION_NAMES = tuple(option.name for option in fields(DFlowOptions) if option.init)


class DFlowGenerationConfig(GenerationConfig):
    r"""
    A [`~generation.GenerationConfig`] with `speculation_type="dflow"` and the options below. `None` leaves an option to
    the drafter's recorded defaults; `False` switches off what they switch on.

    Args:
        use_relay (`bool`, *optional*, defaults to whether the drafter has a relay):
            Feed rejected target rows into the next draft. Never changes the output law.
        use_correction (`bool`, *optional*, defaults to whether the drafter has a causal correction):
            Draft the slots in order, each conditioned on the previous draft. Never changes the output law.
        verification (`str`, *optional*, defaults to `"block"` when sampling):
            `"token"` or `"block"`. Greedy decoding has one rule and ignores it. A logits processor of unknown kind
            (it may keep state) and relaxed acceptance need `"token"`, which is then the default.
        num_draft_tokens (`int`, *optional*, defaults to all of a block):
            How many drafts to verify each step, at most; the drafter drafts its full block anyway.
        adaptive_length (`bool`, *optional*, defaults to `False`):
            Verify, at each step, only as many of these as are expected to pay, and pause drafting where it does not pay
            ([`LengthPlanner`]). Lossless.
        step_costs (`dict`, *optional*):
            What `adaptive_length` and `tree_budget="auto"` weigh drafts against, `{"draft": seconds, "verify": [seconds
            of a forward over 1, 2, … tokens]}`; only ratios matter. By default measured once for a pair of models, so
            that sampled text depends on the machine.
        tree_budget (`int`, `"auto"` or `False`, *optional*, defaults to none):
            Verify this many drafts as a tree of paths in place of one chain; `"auto"` ends each step's tree where
            `step_costs` show that more nodes do not pay, at 64 at the latest. Greedy decoding of one sequence only, on
            full attention.
        acceptance_threshold (`float` or `False`, *optional*):
            **Lossy.** Also accept a draft whose target probability is at least this.
        stale_mixture (`bool`, `float` or `"learned"`, *optional*, defaults to `False`):
            Mix the verifier's distributions at rejected rows into the next draft law ([`StaleMixture`]): `True` learns
            the weight online, a number in (0, 1] fixes it, `"learned"` takes what `hf-dflow calibrate` fitted.
            Lossless.
        acceptance_processors (`list[AcceptanceProcessor]`, *optional*): See [`AcceptanceProcessor`]. Not serialised.
        kernel_backend (`str`, *optional*, defaults to `"auto"`):
            What verifies a block: `"torch"`, `"triton"` (never falls back), or `"auto"`: Triton on a CUDA device where
            it is installed.
        seeds (`list[int]`, *optional*):
            One seed for each sequence that is sampled. With the same seed a row samples the same tokens, whatever its
            neighbours in the batch are. By default seeds s, s + 1, … follow from one draw of torch's global generator.
        monitor (`MonitoredRoute`, *optional*):
            `AcceptanceMonitor().route(name)`: monitors this call together with others of its kind, and decides when
            drafting pauses. Not serialised.
        chat_mode (`str`, *optional*):
            How the prompt asks the target: `"thinking"`, `"non-thinking"`, `"chat"` (a template without such a switch)
            or `"raw"`. A mode that differs from the one the drafter was made for is warned about once.
    """

    def __init__(self, **kwargs):
        options = {name: kwargs.pop(name, None) for name in OPTION_NAMES}
        kwargs.setdefault("speculation_type", SPECULATION_TYPE)
        refuse_misspelt([name for name in kwargs if not _is_known(name)], "DFlowGenerationConfig")
        super().__init__(**kwargs)
        for name, value in options.items():
            setattr(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: without the monitor, which belongs to its process. `copy.deepcopy` keeps it."""
        return {**vars(self), "monitor": None}

    def __deepcopy__(self, memo: dict) -> "DFlowGenerationConfig":
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(vars(self), memo))
        return copied

    def __copy__(self) -> "DFlowGenerationConfig":
        copied = type(self).__new__(type(self))
        copied.__dict__.update(vars(self))
        return copied

    def to_dict(self) -> dict[str, Any]:
        record = super().to_dict()
        for name in ("acceptance_processors", "monitor"):
            record.pop(name, None)
        return record


def _is_known(name: str) -> bool:
    """Whether a [`~generation.GenerationConfig`] has such a field; private ones it writes into files itself."""
    return name.startswith("_") or name in vars(_PLAIN) or name in FILE_FIELDS


_PLAIN = GenerationConfig()
FILE_FIELDS = ("transformers_version", "return_unused_kwargs", "generation_kwargs")


def refuse_misspelt(unknown: Sequence[str], place: str, cutoff: float = 0.0) -> None:
    """Refuse names that are no options.

    Args:
        unknown (`Sequence[str]`): Names that nothing takes.
        place (`str`): Where they were given.
        cutoff (`float`, *optional*, defaults to 0): Only names that are at least so similar to an option's, 0 to 1.

    Raises:
        UnsupportedGenerationError: Naming the nearest option of each.
    """
    known = [*OPTION_NAMES, *(name for name in vars(_PLAIN) if not name.startswith("_"))]
    near = {name: difflib.get_close_matches(name, known, n=1, cutoff=cutoff) for name in unknown if name not in known}
    misspelt = [name for name, matches in near.items() if matches or cutoff == 0.0]
    if misspelt:
        hints = ", ".join(f"{name!r} (did you mean {near[name][0]!r}?)" for name in misspelt)
        raise UnsupportedGenerationError(
            f'{place} has no option {hints}; options of speculation_type="{SPECULATION_TYPE}" are '
            f"{', '.join(OPTION_NAMES)}."
        )


def refuse_without_flag(model_kwargs: dict[str, Any], model: Any) -> None:
    """Refuse options among the keywords of a call that does not ask for `speculation_type="dflow"`.

    Raises:
        UnsupportedGenerationError: Saying where they go.
    """
    names = [name for name in OPTION_NAMES if model_kwargs.get(name) is not None]
    if names and not set(names) <= set(inspect.signature(model.forward).parameters):
        raise UnsupportedGenerationError(
            f'{", ".join(names)}: an option of speculation_type="{SPECULATION_TYPE}", which this call does not ask '
            f"for; pass that as well, or give a DFlowGenerationConfig({names[0]}=…). With custom_generate it is bound: "
            f"DFlowDecoder(drafter, {names[0]}=…)."
        )


def refuse_misspelt_fields(generation_config: GenerationConfig, recorded: GenerationConfig) -> None:
    """Refuse what was set on a configuration under a name that is nearly an option's: nobody would read it.

    Args:
        generation_config (`GenerationConfig`): Of the call.
        recorded (`GenerationConfig`): The target's, whose file may hold fields for others.

    Raises:
        UnsupportedGenerationError: Naming the nearest option.
    """
    names = vars(generation_config).keys() - vars(recorded).keys()
    unknown = sorted(name for name in names if not _is_known(name))
    refuse_misspelt(unknown, type(generation_config).__name__, cutoff=0.8)


def take_from_caller(
    prepared: GenerationConfig, recorded: GenerationConfig, given: GenerationConfig | None, options: dict[str, Any]
) -> None:
    """Take back from a prepared configuration what only a caller may ask for, and the target's file asks for.

    `generate` merges the target's generation_config.json into every call, and pipelines hand it over as the caller's.

    Args:
        prepared (`GenerationConfig`): Of the call; changed in place.
        recorded (`GenerationConfig`): The target's. No file is loaded as a [`DFlowGenerationConfig`], so that one is
            the caller's.
        given (`GenerationConfig`, *optional*): What the caller passed.
        options (`dict`): Keywords that the caller passed.
    """
    if isinstance(recorded, DFlowGenerationConfig):
        return
    for name in CALLERS_OWN:
        from_file, own = getattr(recorded, name, None), getattr(given, name, None)
        if from_file is None or options.get(name) is not None:
            continue
        if own is not None and (own != from_file or isinstance(given, DFlowGenerationConfig)):
            continue
        setattr(prepared, name, None)
        _warn_of_file("target's generation_config.json", name, from_file)


def _warn_of_file(file: str, name: str, value: Any) -> None:
    logger.warning_once(
        f"The {file} sets {name}={value!r}, which would {CALLERS_OWN[name]}; it is ignored. Pass {name} "
        "yourself if you want it."
    )


def resolve_options(
    drafter: DFlowDrafter, generation_config: GenerationConfig, overrides: dict[str, Any] | None = None
) -> DFlowOptions:
    """Options of one call: `overrides` > `generation_config` > the drafter's recorded defaults > the package's.

    `CALLERS_OWN` are never taken from the drafter's defaults: a checkpoint cannot make output lossy.

    Raises:
        UnsupportedGenerationError: An option has an impossible value for this drafter, or contradicts another.
    """
    recorded = drafter.config.generation_defaults or {}
    for name in recorded:
        if name in CALLERS_OWN and recorded[name] is not None:
            _warn_of_file("drafter's config.json", name, recorded[name])
        if name not in OPTION_NAMES:
            logger.warning_once(
                f"The drafter's config.json sets {name!r} among its generation_defaults, which is no option; it is "
                f"ignored. Options are {', '.join(OPTION_NAMES)}."
            )
    recorded = {name: value for name, value in recorded.items() if name not in CALLERS_OWN}
    sources = [overrides or {}, vars(generation_config), recorded]
    chosen = {
        name: next((source[name] for source in sources if source.get(name) is not None), None) for name in OPTION_NAMES
    }
    for name in SWITCHED_OFF:
        chosen[name] = None if chosen[name] is False else chosen[name]
    options = DFlowOptions(**chosen)
    options.fitted = drafter.config.fitted_decisions or {}
    if options.use_relay is None:
        options.use_relay = drafter.relay is not None
    if options.use_correction is None:
        options.use_correction = drafter.causal_correction is not None
    if options.num_draft_tokens is None:
        options.num_draft_tokens = drafter.config.drafts_per_block
    _check(options, drafter)
    return options


def _is_bool(value: Any) -> bool:
    return isinstance(value, int) and value in (True, False)


def _is_text_of(allowed: Sequence[str], value: Any) -> bool:
    return isinstance(value, str) and value in allowed


def _is_integer(value: Any, smallest: int, largest: int) -> bool:
    return type(value) is int and smallest <= value <= largest


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value <= 1.0


def _is_list_of(is_item: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(is_item, value))


# What each option may be once it is set, and in words. `StepCosts.read` checks the costs.
ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "use_relay": (_is_bool, "use True or False"),
    "use_correction": (_is_bool, "use True or False"),
    "verification": (partial(_is_text_of, SAMPLING_RULES), f"use one of {', '.join(SAMPLING_RULES)}"),
    "adaptive_length": (_is_bool, "use True or False"),
    "tree_budget": (
        lambda value: _is_text_of((AUTO,), value) or _is_integer(value, 1, LARGEST_TREE),
        f'use a whole number of drafts, 1 … {LARGEST_TREE}, "{AUTO}", or False',
    ),
    "acceptance_threshold": (_is_share, "use a probability in (0, 1], or False"),
    "stale_mixture": (
        lambda value: isinstance(value, bool) or _is_text_of((LEARNED,), value) or _is_share(value),
        f'use True, False, "{LEARNED}" or a fixed weight in (0, 1]',
    ),
    "acceptance_processors": (
        lambda value: _is_list_of(lambda item: isinstance(item, AcceptanceProcessor), value),
        "give a list of AcceptanceProcessor objects. A LogitsProcessor goes into generate's own logits_processor",
    ),
    "kernel_backend": (partial(_is_text_of, BACKENDS), f"use one of {', '.join(BACKENDS)}"),
    "seeds": (
        lambda value: _is_list_of(lambda item: _is_integer(item, 0, 2**63 - 1), value),
        "give a list of integers from 0 to 2**63 - 1",
    ),
    "monitor": (
        lambda value: isinstance(value, MonitoredRoute),
        "give one route of an AcceptanceMonitor: monitor.route('chat')",
    ),
    "chat_mode": (partial(_is_text_of, CHAT_MODES), f"use one of {', '.join(CHAT_MODES)}"),
}


def _check(options: DFlowOptions, drafter: DFlowDrafter) -> None:
    """Refuse values that are not allowed, then what does not fit the drafter, then what contradicts another option."""
    for name, (is_allowed, allowed) in ALLOWED.items():
        value = getattr(options, name)
        if value is not None and not is_allowed(value):
            raise UnsupportedGenerationError(f"{name}={value!r}; {allowed}.")
    block_size, longest = drafter.config.block_size, drafter.config.drafts_per_block
    refusals = {
        "use_relay=True, but this drafter has no relay weights; load one with a relay or leave use_relay out.": (
            options.use_relay and drafter.relay is None
        ),
        "use_correction=True, but this drafter has no causal correction; load one that has, or leave it out.": (
            options.use_correction and drafter.causal_correction is None
        ),
        f"num_draft_tokens={options.num_draft_tokens!r}; this drafter's block of {block_size} allows 1 … {longest}.": (
            not _is_integer(options.num_draft_tokens, 1, longest)
        ),
        f'stale_mixture="{LEARNED}", but nothing was fitted for this drafter; run hf-dflow calibrate, or use True or a '
        "fixed weight in (0, 1].": options.stale_mixture == LEARNED and "mixture" not in options.fitted,
        "tree_budget does not go with adaptive_length; leave one of them out.": (
            options.tree_budget is not None and options.adaptive_length
        ),
    }
    for reason, holds in refusals.items():
        if holds:
            raise UnsupportedGenerationError(reason)
    if options.step_costs is not None:
        StepCosts.read(options.step_costs, LARGEST_AUTO if options.tree_budget == AUTO else longest)
    if options.lossy_names and options.verification == "block":
        raise UnsupportedGenerationError(
            f"{', '.join(options.lossy_names)} relaxes acceptance token by token, which block verification does not "
            "have; use verification='token'."
        )
