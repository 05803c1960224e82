"""The options of `speculation_type="dflow"` and the one place where their precedence is decided."""

from dataclasses import dataclass, field, fields
from typing import Any

from transformers import GenerationConfig

from hf_dflow.errors import UnsupportedGenerationError
from hf_dflow.generation import SPECULATION_TYPE
from hf_dflow.generation.acceptance import AcceptanceProcessor, AcceptanceThreshold
from hf_dflow.generation.mixture import LEARNED, StaleMixture, is_mixture_weight
from hf_dflow.generation.policy.costs import StepCosts
from hf_dflow.generation.policy.monitor import MonitoredRoute
from hf_dflow.generation.policy.trees import AUTO, LARGEST_AUTO, LARGEST_TREE
from hf_dflow.kernels import BACKENDS
from hf_dflow.model.drafter import DFlowDrafter

SAMPLING_RULES = ("token", "block")
SWITCHED_OFF = ("tree_budget", "acceptance_threshold")  # by False, whatever the drafter's defaults say
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
        super().__init__(**kwargs)
        for name, value in options.items():
            setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        record = super().to_dict()
        for name in ("acceptance_processors", "monitor"):
            record.pop(name, None)
        return record


def resolve_options(
    drafter: DFlowDrafter, generation_config: GenerationConfig, overrides: dict[str, Any] | None = None
) -> DFlowOptions:
    """Options of one call: `overrides` > `generation_config` > the drafter's recorded defaults > the package's.

    Raises:
        UnsupportedGenerationError: An option has an impossible value for this drafter, or contradicts another.
    """
    sources = [overrides or {}, vars(generation_config), drafter.config.generation_defaults or {}]
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
    longest = drafter.config.drafts_per_block
    if options.num_draft_tokens is None:
        options.num_draft_tokens = longest
    _check(options, drafter, longest)
    return options


def _check(options: DFlowOptions, drafter: DFlowDrafter, longest: int) -> None:
    if options.use_relay and drafter.relay is None:
        raise UnsupportedGenerationError(
            "use_relay=True, but this drafter has no relay weights; load one with a relay or leave use_relay out."
        )
    if options.use_correction and drafter.causal_correction is None:
        raise UnsupportedGenerationError(
            "use_correction=True, but this drafter has no causal correction; load one that has, or leave it out."
        )
    if options.verification is not None and options.verification not in SAMPLING_RULES:
        raise UnsupportedGenerationError(
            f"verification='{options.verification}' is unknown; use one of {', '.join(SAMPLING_RULES)}."
        )
    if type(options.num_draft_tokens) is not int or not 1 <= options.num_draft_tokens <= longest:
        raise UnsupportedGenerationError(
            f"num_draft_tokens={options.num_draft_tokens}; this drafter's block of {drafter.config.block_size} "
            f"allows 1 … {longest}."
        )
    if options.adaptive_length not in (None, True, False):
        raise UnsupportedGenerationError(f"adaptive_length={options.adaptive_length!r}; use True or False.")
    budget = options.tree_budget
    if budget not in (None, AUTO) and (type(budget) is not int or not 1 <= budget <= LARGEST_TREE):
        raise UnsupportedGenerationError(
            f'tree_budget={budget!r}; use a whole number of drafts, 1 … {LARGEST_TREE}, "{AUTO}", or False.'
        )
    if budget is not None and options.adaptive_length:
        raise UnsupportedGenerationError("tree_budget does not go with adaptive_length; leave one of them out.")
    if options.step_costs is not None:
        StepCosts.read(options.step_costs, LARGEST_AUTO if budget == AUTO else longest)
    if options.kernel_backend is not None and options.kernel_backend not in BACKENDS:
        raise UnsupportedGenerationError(
            f"kernel_backend='{options.kernel_backend}' is unknown; use one of {', '.join(BACKENDS)}."
        )
    mixture = options.stale_mixture
    if mixture == LEARNED and "mixture" not in options.fitted:
        raise UnsupportedGenerationError(
            f'stale_mixture="{LEARNED}", but nothing was fitted for this drafter; run hf-dflow calibrate, or use True '
            "or a fixed weight in (0, 1]."
        )
    if not (mixture is None or isinstance(mixture, bool) or mixture == LEARNED or is_mixture_weight(mixture)):
        raise UnsupportedGenerationError(
            f'stale_mixture={mixture!r}; use True, False, "{LEARNED}" or a fixed weight in (0, 1].'
        )
    threshold = options.acceptance_threshold
    is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if threshold is not None and not (is_number and 0.0 < threshold <= 1.0):
        raise UnsupportedGenerationError(f"acceptance_threshold={threshold!r}; use a probability in (0, 1], or False.")
    given = [] if options.acceptance_processors is None else options.acceptance_processors
    if not isinstance(given, list | tuple) or not all(isinstance(one, AcceptanceProcessor) for one in given):
        raise UnsupportedGenerationError(
            f"acceptance_processors={given!r}; give a list of AcceptanceProcessor objects. A LogitsProcessor goes into "
            "generate's own logits_processor."
        )
    if options.chat_mode is not None and options.chat_mode not in CHAT_MODES:
        raise UnsupportedGenerationError(
            f"chat_mode={options.chat_mode!r} is unknown; use one of {', '.join(CHAT_MODES)}."
        )
    if options.seeds is not None and not _are_seeds(options.seeds):
        raise UnsupportedGenerationError(f"seeds={options.seeds!r}; give a list of integers from 0 to 2**63 - 1.")
    if options.monitor is not None and not isinstance(options.monitor, MonitoredRoute):
        raise UnsupportedGenerationError(
            f"monitor is a {type(options.monitor).__name__}; give one route of an AcceptanceMonitor: "
            "monitor.route('chat')."
        )
    if options.lossy_names and options.verification == "block":
        raise UnsupportedGenerationError(
            f"{', '.join(options.lossy_names)} relaxes acceptance token by token, which block verification does not "
            "have; use verification='token'."
        )


def _are_seeds(seeds: Any) -> bool:
    return isinstance(seeds, list | tuple) and all(type(seed) is int and 0 <= seed < 2**63 for seed in seeds)
