"""Times the forwards of a step, for policies that weigh drafts against what they cost."""

import statistics
import time
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache

from hf_dflow.generation import _compat
from hf_dflow.generation import cache as caches
from hf_dflow.generation.drafting import DraftSession
from hf_dflow.generation.policy.costs import StepCosts
from hf_dflow.generation.recurrent import RecurrentStates
from hf_dflow.model.drafter import DFlowDrafter

_MEASURED: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[Any, StepCosts]]] = WeakKeyDictionary()


def step_costs(
    target: Any, drafter: DFlowDrafter, longest: int | None = None, device: torch.device | None = None
) -> StepCosts:
    """[`measure_step_costs`] of a pair, measured once for the devices that it is on, and again for more drafts."""
    by_devices = _MEASURED.setdefault(target, WeakKeyDictionary()).setdefault(drafter, {})
    num_drafts, devices = longest or drafter.config.drafts_per_block, (device or target.device, drafter.device)
    if devices not in by_devices or len(by_devices[devices].verify) <= num_drafts:
        by_devices[devices] = measure_step_costs(target, drafter, longest=num_drafts, device=device)
    return by_devices[devices]


@torch.no_grad()
def measure_step_costs(
    target: Any,
    drafter: DFlowDrafter,
    *,
    longest: int | None = None,
    device: torch.device | None = None,
    context_length: int = 64,
    repeats: int = 3,
) -> StepCosts:
    """Time the two forwards of a step, behind a context of random tokens; the target's with the rollback of its cache.

    Args:
        longest (`int`, *optional*, defaults to a full block's): Drafts of the longest forward.
        device (`torch.device`, *optional*, defaults to the target's): Where its inputs go.
        context_length (`int`, *optional*, defaults to 64): Tokens in the caches.
        repeats (`int`, *optional*, defaults to 3): Forwards of each length, of which the median counts. Lengths between
            1, 2, 4, 8 … tokens are interpolated.
    """
    device, vocab_size = device or target.device, target.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    limit = getattr(target.config.get_text_config(), "max_position_embeddings", None) or context_length * 4
    most = (longest or drafter.config.drafts_per_block) + 1
    room = max(most, drafter.config.block_size) + 1
    context_length = max(1, min(context_length, limit - room))
    width = context_length + room
    token_ids = torch.randint(vocab_size, (1, width), generator=generator).to(device)
    held = DynamicCache(config=target.config.get_text_config())
    caches.record_past(held)
    recurrent = RecurrentStates(target, held)

    def forward(start: int, length: int) -> Any:
        with recurrent.forward(length, is_recorded=start > 0):
            return target(
                token_ids[:, start : start + length],
                output_hidden_states=True,
                use_cache=True,
                **{_compat.cache_argument(target): held},
            )

    output = forward(0, context_length)
    caches.crop(held, 0)
    recurrent.advance([context_length])
    features = _compat.capture_features(output.hidden_states, drafter.config.target_layer_ids)
    lengths = sorted({min(2**i, most) for i in range(most.bit_length() + 1)})

    def verify(length: int) -> None:
        forward(context_length, length)
        caches.crop(held, length)
        recurrent.advance([(length + 1) // 2])  # as a step does that keeps half of the block

    session = DraftSession(
        drafter,
        target.get_input_embeddings(),
        target.get_output_embeddings(),
        vocab_size=vocab_size,
        use_relay=False,
        device=device,
    )
    session.cache.append_context(features, [0], [context_length])

    def draft() -> None:
        hidden = session.block_hidden(token_ids[:, context_length], [context_length], None)
        drafter.compute_logits(hidden, session.head)

    places = {device, output.logits.device, drafter.device}
    times = {length: _seconds(lambda length=length: verify(length), repeats, places) for length in lengths}
    verify_times, slowest = [], 0.0
    for length in range(1, most + 1):
        above = min(timed for timed in lengths if timed >= length)
        below = max(timed for timed in lengths if timed <= length)
        share = 0.0 if above == below else (length - below) / (above - below)
        slowest = max(slowest, times[below] + share * (times[above] - times[below]))  # more tokens never cost less
        verify_times.append(slowest)
    return StepCosts(_seconds(draft, repeats, places), tuple(verify_times))


def _seconds(run: Any, repeats: int, places: set[torch.device]) -> float:
    """Median time of a call, after one that warms up."""
    taken = []
    for _ in range(repeats + 1):
        _wait(places)
        started = time.perf_counter()
        run()
        _wait(places)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def _wait(places: set[torch.device]) -> None:
    for device in places:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
