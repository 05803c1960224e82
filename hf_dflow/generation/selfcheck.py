"""What a target can do, measured before it decodes for the first time; names and configurations do not tell.

Each part is measured when a call needs it, and remembered for all targets that compute alike.
"""

import hashlib
import time
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from hf_dflow.errors import UnsupportedGenerationError
from hf_dflow.generation.trials import Comparison, TargetTrial, rounding_unit
from hf_dflow.generation.untouched import has_own_hooks, in_turn, untouched


@dataclass
class TargetCheck:
    """What was measured of a target so far. `None`: not yet, or it could not be (`failures` then says why).

    Args:
        block (`Comparison`, *optional*): A block behind a cache against single tokens.
        rollback (`Comparison`, *optional*): The next block, once rejected rows were taken out of the cache.
        padding (`Comparison`, *optional*): A block against single tokens, in a row with padding before it.
        holes (`Comparison`, *optional*): Rows with masked holes against the same rows without.
        tree (`Comparison`, *optional*): A path of a tree against single tokens.
        state_shapes (`tuple`): Shapes of the hidden states of all layers, the embedding's first.
        failures (`dict[str, str]`): Of each part that raised, the error.
        window (`int`): The largest number that is named like a window; 0 for none.
        columns (`int`): How many the cache held.
        num_forwards (`int`), seconds (`float`): What it has cost.
    """

    block: Comparison | None = None
    rollback: Comparison | None = None
    padding: Comparison | None = None
    holes: Comparison | None = None
    tree: Comparison | None = None
    state_shapes: tuple[torch.Size, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)
    window: int = 0
    columns: int = 0
    num_forwards: int = 0
    seconds: float = 0.0

    def lacks(self, part: str) -> str | None:
        """Why the target cannot do `part` ("block", "rollback", "padding", "holes" or "tree"); `None` where it can."""
        if part in self.failures:
            return f"it fails: {self.failures[part]}"
        measured = getattr(self, part)
        return None if measured is None or measured.passes else f"logits differ by {measured}"

    def __str__(self) -> str:
        lines = [
            f"self-check: {self.num_forwards} forwards of at most 16 tokens behind {self.columns} cached ones, "
            f"{self.seconds:.2f} s, once a process for each kind of target"
        ]
        for part, what in PARTS.items():
            measured = getattr(self, part)
            if part in self.failures or measured is not None:
                lacks = self.lacks(part)
                lines.append(f"  {what}: {f'NO, {lacks}' if lacks else f'yes, within {measured}'}")
        return "\n".join(lines)


PARTS = {
    "block": "a block equals single tokens",
    "rollback": "rejected drafts leave no trace",
    "padding": "so do they behind padding",
    "holes": "rows of a batch keep their own pace",
    "tree": "a tree's path equals a chain",
}
_CHECKED: WeakKeyDictionary[type, dict[tuple, TargetCheck]] = WeakKeyDictionary()


def check_of(
    model: PreTrainedModel,
    device: torch.device | None = None,
    *,
    padding: bool = False,
    holes: bool = False,
    tree: bool = False,
) -> TargetCheck:
    """What `model` can do: a block always, holes and trees where they are asked for.

    A few forwards of at most 16 tokens the first time, behind a cache that is filled past every window. The model, its
    hooks and the random generators stay as they are.

    Args:
        device (`torch.device`, *optional*, defaults to the model's): Where its inputs go.
        padding (`bool`, *optional*, defaults to `False`): Measure a padded row, if `holes`, which include it, are not.
        holes (`bool`, *optional*, defaults to `False`): Measure whether masked holes change what follows.
        tree (`bool`, *optional*, defaults to `False`): Measure holes, and whether a path of a tree equals the chain.
    """
    device = device or model.device
    known, key = _CHECKED.setdefault(type(model), {}), _key(model, device)
    wanted = {"block": True, "padding": padding and not holes, "holes": holes or tree, "tree": tree}
    parts = [part for part in wanted if wanted[part]]
    with in_turn(model):  # another thread may be measuring the same
        check = known.get(key, TargetCheck())
        missing = [part for part in parts if getattr(check, part) is None and part not in check.failures]
        if missing and _measure_all(model, device, check, missing):
            known[key] = check
    return check


def _measure_all(model: PreTrainedModel, device: torch.device, check: TargetCheck, missing: list[str]) -> bool:
    """Measure what is missing into `check`; returns whether that is worth remembering."""
    started = time.perf_counter()
    trial_error = None
    for with_hooks in (False, True):  # the caller's own hooks stay out, unless nothing works without them
        with untouched(model, with_hooks=with_hooks):
            trial_error = _measure(model, device, check, missing)
        if trial_error is None or not has_own_hooks(model):
            break
    check.seconds += time.perf_counter() - started
    if trial_error is not None:
        check.failures["block"] = trial_error
        return False
    return check.block is not None and check.block.is_finite


def _measure(model: PreTrainedModel, device: torch.device, check: TargetCheck, parts: list[str]) -> str | None:
    """Measure `parts` into `check`; returns the error where not even a block could be."""
    try:
        trial = TargetTrial(model, device)
        check.block, check.rollback, outputs = trial.block()
        check.window, check.columns = trial.window, trial.columns
        check.state_shapes = tuple(states.shape for states in outputs.hidden_states or ())
    except torch.OutOfMemoryError:
        raise
    except UnsupportedGenerationError as error:  # no hook of the caller's could change that
        check.failures["block"] = str(error)
        return None
    except Exception as error:
        return _in_words(error)
    for part in parts:
        if part == "block":
            continue
        try:
            if part == "padding":
                padded = TargetTrial(model, device, is_padded=True)
                check.padding = max(padded.block()[:2], key=lambda compared: compared.error - compared.limit)
                check.num_forwards += padded.num_forwards
            else:
                setattr(check, part, getattr(trial, part)())
        except UnsupportedGenerationError as error:
            check.failures[part] = str(error)
        except Exception as error:
            check.failures[part] = _in_words(error)
    check.num_forwards += trial.num_forwards
    return None


def _in_words(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__} ({lines[0][:120]})"


def _key(model: PreTrainedModel, device: torch.device) -> tuple:
    """What decides how a target computes, beside its weights."""
    text = model.config.get_text_config()
    modules: list[Any] = list(model.modules())
    adapters = [
        (type(module).__qualname__, tuple(module.active_adapters), module.disable_adapters)
        for module in modules
        if isinstance(getattr(module, "active_adapters", None), list | tuple | str)
        and isinstance(getattr(module, "disable_adapters", None), bool)
    ]
    return (
        hashlib.sha256(model.config.to_json_string(use_diff=False).encode()).hexdigest(),
        (model.config._attn_implementation, text._attn_implementation),
        (model.dtype, rounding_unit(model, device), torch.is_autocast_enabled(device.type)),
        (device, model.device, str(getattr(model, "hf_device_map", None))),
        frozenset(type(module) for module in modules),
        frozenset(_code(kind.forward) for kind in {type(module) for module in modules}),
        frozenset(_code(vars(module)["forward"]) for module in modules if "forward" in vars(module)),
        frozenset(adapters),
    )


def _code(forward: Any) -> Any:
    """What a `forward` runs, which somebody may have put in the place of a class's own."""
    function = getattr(forward, "func", forward)  # of a functools.partial
    return getattr(function, "__code__", type(function))
