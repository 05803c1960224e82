"""The forwards of a target's self-check: small, on fixed random tokens, behind a cache of mostly made-up columns.

What a target computes there is compared with what it should equal, and with what a known fault would give.
"""

import contextlib
import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationConfig, PreTrainedModel

from hf_dflow.errors import UnsupportedGenerationError
from hf_dflow.generation import _compat
from hf_dflow.generation import cache as caches
from hf_dflow.generation.recurrent import RecurrentStates
from hf_dflow.generation.step import DraftTree

PROMPT = 8  # real tokens in the cache
BLOCK = 8  # tokens of a block
KEPT = 2  # of which so many are kept where the others are rolled back
SIBLINGS = 12  # nodes of a tree which the path must not see
MARGIN = 4  # columns past the largest window
LARGEST_WINDOW = 8192  # columns that are made up at most
SHARE = 0.1  # of a known fault's error that passes
ROUNDING, LARGEST_ROUNDING = 8, 1000  # machine epsilons that always pass, and up to which 32 bits are rounding
LARGEST_NOISE = 30  # times what rounding does to one and the same block of two lengths


@dataclass(frozen=True)
class Comparison:
    """How far two computations of the same logits are apart, in their spread over the vocabulary.

    Args:
        error (`float`): Of what was tried.
        control (`float`): Of a known fault.
        limit (`float`): The largest error that is taken for rounding.
    """

    error: float
    control: float
    limit: float

    @property
    def passes(self) -> bool:
        """Whether it is no more than rounding. What is no number shows nothing."""
        return not self.error > self.limit

    @property
    def is_finite(self) -> bool:
        """Whether numbers came out."""
        return math.isfinite(self.error) and math.isfinite(self.control)

    def __str__(self) -> str:
        return (
            f"{self.error:.2g} of their spread (a known fault: {self.control:.2g}, rounding: at most {self.limit:.2g})"
        )


class TargetTrial:
    """Runs a target behind a cache that is filled past every window.

    Args:
        model (`PreTrainedModel`): The target, which `untouched` keeps as it is.
        device (`torch.device`): Where its inputs go.
        is_padded (`bool`, *optional*, defaults to `False`): Instead behind a few tokens and more padding than any
            window.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, *, is_padded: bool = False):
        self.model, self.device, self.num_forwards = model, device, 0
        self.unit = rounding_unit(model, device)
        self._noise: float | None = None
        self.window = largest_window(model)
        self.limit = last_position(model)
        width = self.window + MARGIN if self.window else 0
        self.padding = max(width, 2 * PROMPT) if is_padded else 0
        self.hole, self.columns = width or PROMPT, max(PROMPT, width)
        self._kwargs: dict[str, Any] = {"use_cache": True}
        if _compat.takes(model, "attention_mask"):
            self._kwargs["attention_mask"] = None
        self._positions: torch.Tensor | None = None
        room = sys.maxsize if self.limit is None else self.limit - SIBLINGS - BLOCK
        if has_position_table(model) or not _compat.takes(model, "position_ids"):
            self.columns = max(PROMPT, min(self.columns, room))
            self.hole = max(1, min(self.hole, room - self.columns))
            self.padding = max(0, min(self.padding, room - PROMPT))
        self.columns = PROMPT + self.padding if is_padded else self.columns
        self.start = PROMPT if is_padded else max(0, min(self.columns, room))
        self._ids = random_ids(model, self.columns + SIBLINGS + BLOCK + 1).to(self.device)
        self.tokens = self._ids[:, self.columns : self.columns + BLOCK]
        self.others = self._ids[:, self.columns + BLOCK :]
        self.filled = self._prefill()
        self.singles = self._singles()

    # -- what is compared

    def block(self) -> tuple[Comparison, Comparison, Any]:
        """A block behind the cache against single tokens, and the same once its last rows were rolled back.

        Returns:
            `tuple`: Both comparisons, and the block's outputs with the states of all layers.
        """
        held = caches.fork(self.filled)
        caches.record_past(held)
        recurrent = RecurrentStates(self.model, held)
        self._block = torch.cat([self.tokens[:, :KEPT], self.others[:, : BLOCK - KEPT]], dim=1)
        outputs = self._forward(held, self._block, states=True, recurrent=recurrent)
        fault = self._forward(self._empty_cache(), self._block, columns=0, start=0).logits[:, -BLOCK:]
        self.reference = outputs.logits[:, -BLOCK:]
        caches.crop(held, BLOCK - KEPT)
        recurrent.advance([KEPT])
        again = torch.cat([self.tokens[:, KEPT : KEPT + 1], self.others[:, : BLOCK - 1]], dim=1)
        start, columns = self.start + KEPT, self.columns + KEPT
        later = self._forward(held, again, columns=columns, start=start, recurrent=recurrent).logits[:, -BLOCK:]
        singles = self.singles[:, :KEPT]
        control = distance(fault[:, :KEPT], singles)
        return (
            self._judge(distance(self.reference[:, :KEPT], singles), control),
            self._judge(distance(later[:, :1], self.singles[:, KEPT:]), control),
            outputs,
        )

    def holes(self) -> Comparison:
        """A masked hole in the middle of a row, and before it as padding, against no hole. The fault: not masked."""
        at = self.columns - 2
        held = caches.with_holes(self.filled, [at, 0], self.hole)
        mask = torch.ones(2, self.columns + self.hole + 1, dtype=torch.long, device=self.device)
        for row, first in enumerate((at, 0)):
            mask[row, first : first + self.hole] = 0
        tokens = self._block.expand(2, -1)
        masked = self._forward(caches.fork(held), tokens, mask=mask).logits[:, -BLOCK:]
        fault = self._forward(held, tokens, mask=torch.ones_like(mask)).logits[:, -BLOCK:]
        holes = self._compare(masked, self.reference.expand(2, -1, -1), fault)
        if not RecurrentStates(self.model, self.filled):
            return holes
        # A recurrent state has no columns, so what comes before a prompt has to leave no trace in it.
        alone, padded, unmasked = (self._prompt_logits(*case) for case in ((0, True), (BLOCK, True), (BLOCK, False)))
        return max(holes, self._compare(padded, alone, unmasked), key=lambda measured: measured.error / measured.limit)

    def _prompt_logits(self, padding: int, is_masked: bool) -> torch.Tensor:
        """Logits `[1, 1, V]` behind a prompt with `padding` tokens before it."""
        ids = self._ids[:, -padding - PROMPT :]
        mask = torch.ones_like(ids)
        mask[:, :padding] = not is_masked
        return self._prefill_of(self._empty_cache(), ids, mask).logits[:, -1:]

    def tree(self) -> Comparison:
        """A path of a tree against single tokens. The fault: nodes that see their siblings."""
        if RecurrentStates(self.model, self.filled):
            raise UnsupportedGenerationError("its recurrent layers hold one state for all paths")
        siblings = self.others[0, :SIBLINGS].tolist()
        path = self.tokens[0, 1 : KEPT + 1].tolist()
        nodes = [SIBLINGS + 1 + i for i in range(len(path))]
        tree = DraftTree(
            token_ids=[*siblings, *path],
            parents=[0] * (SIBLINGS + 1) + nodes[:-1],
            depths=[1] * (SIBLINGS + 1) + list(range(2, len(path) + 1)),
            children=[],
        )
        rows = [0, *nodes]
        tokens = torch.tensor([[int(self.tokens[0, 0]), *tree.token_ids]], device=self.device)
        held = caches.fork(self.filled)
        right = self._forward(held, tokens, tree=tree).logits[:, -tokens.shape[1] :][:, rows]
        fault = self._forward(caches.fork(self.filled), tokens, tree=tree, hides=False)
        caches.keep_path(held, self.columns, nodes[: KEPT - 1], tree.size)
        next_row = self._forward(
            held, self.tokens[:, KEPT : KEPT + 1], columns=self.columns + KEPT, start=self.start + KEPT
        ).logits[:, -1:]
        wrong = fault.logits[:, -tokens.shape[1] :][:, rows]
        expected = torch.cat([self.singles, self.singles[:, -1:]], dim=1)
        return self._compare(torch.cat([right, next_row], 1), expected, torch.cat([wrong, wrong[:, -1:]], 1))

    def _compare(self, tried: torch.Tensor, expected: torch.Tensor, fault: torch.Tensor) -> Comparison:
        return self._judge(distance(tried, expected), distance(fault, expected))

    def _judge(self, error: float, control: float) -> Comparison:
        """What passes is a tenth of the known fault's error, and in 32 bits no more than rounding can explain."""
        share, least = SHARE * control, ROUNDING * self.unit
        if self.unit > 1e-5:
            return Comparison(error, control, max(least, share))
        most = LARGEST_ROUNDING * self.unit
        if most < error <= share:  # some targets amplify rounding: by how much, a block of another length shows
            most = max(most, LARGEST_NOISE * self._rounding_noise())
        return Comparison(error, control, max(least, min(share, most)))

    def _rounding_noise(self) -> float:
        if self._noise is None:
            shorter = self._forward(caches.fork(self.filled), self._block[:, : KEPT + 1]).logits[:, -KEPT - 1 :]
            self._noise = distance(shorter, self.reference[:, : KEPT + 1])
        return self._noise

    # -- forwards

    def _empty_cache(self) -> Cache:
        kwargs: dict[str, Any] = {}
        _compat.fresh_cache(self.model, GenerationConfig(max_length=self.columns + BLOCK), kwargs)
        (self._cache_name,) = kwargs
        return kwargs[self._cache_name]

    def _prefill(self) -> Cache:
        """Run a few tokens, and repeat their columns up to the largest window."""
        held = self._empty_cache()
        self._prefill_of(held, self._ids[:, :PROMPT])
        if self.padding:
            return caches.with_holes(held, [0], self.padding)
        caches.repeat_columns(held, self.columns - PROMPT)
        return held

    def _prefill_of(self, held: Cache, ids: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        kwargs = {**self._kwargs, self._cache_name: held}
        if mask is not None:
            kwargs["attention_mask"] = mask
        if _compat.takes(self.model, "position_ids"):
            prepare: Any = self.model._prepare_position_ids_for_generation
            self._positions = prepare(ids, kwargs)
            kwargs["position_ids"] = self._positions
        inputs = _compat.model_inputs(self.model, ids, kwargs, new_tokens=None, num_drafts=0, is_prefill=True)
        return self._run(inputs)

    def _singles(self) -> torch.Tensor:
        """Logits `[1, KEPT + 1, V]` of tokens one by one, as plain decoding computes them."""
        held, rows = caches.fork(self.filled), []
        for i in range(KEPT + 1):
            outputs = self._forward(held, self.tokens[:, i : i + 1], columns=self.columns + i, start=self.start + i)
            rows.append(outputs.logits[:, -1:])
        return torch.cat(rows, dim=1)

    def _forward(
        self,
        held: Cache,
        tokens: torch.Tensor,
        *,
        columns: int | None = None,
        start: int | None = None,
        mask: torch.Tensor | None = None,
        tree: DraftTree | None = None,
        hides: bool = True,
        states: bool = False,
        recurrent: RecurrentStates | None = None,
    ) -> Any:
        """A forward as the loop makes it, over `tokens` `[B, N + 1]` behind `columns` of the cache.

        Args:
            start (`int`, *optional*): The first token's position.
            mask (`torch.LongTensor` of shape `(B, columns + 1)`, *optional*): Of rows that have holes.
            tree (`DraftTree`, *optional*): What the tokens behind the first are; `hides=False` lets all be seen.
            recurrent (`RecurrentStates`, *optional*): Of the cache, to be rolled back afterwards.
        """
        columns, start = self.columns if columns is None else columns, self.start if start is None else start
        num_drafts, kwargs = tokens.shape[1] - 1, {**self._kwargs, self._cache_name: held}
        ids = tokens if mask is not None else torch.cat([self._ids[:, :columns], tokens], dim=1)
        if mask is not None:
            kwargs["attention_mask"] = mask
        elif self.padding and columns:
            kwargs["attention_mask"] = self._mask(columns + 1)
        if self._positions is not None:
            length = 1 if mask is not None else columns + 1
            offsets = torch.arange(length, device=self.device) - (length - 1) + start
            shape = [*self._positions.shape[:-2], tokens.shape[0], length]
            kwargs["position_ids"] = offsets.clamp(min=0).to(self._positions).expand(shape).clone()
        inputs = _compat.model_inputs(
            self.model, ids, kwargs, new_tokens=num_drafts + 1, num_drafts=num_drafts, is_prefill=columns == 0
        )
        if tree is not None:
            _compat.shape_as_tree(inputs, tree, self.model.dtype, start, columns)
            if not hides:
                inputs["attention_mask"] = None
        if states:
            inputs["output_hidden_states"] = True
        is_kept = recurrent is None  # nothing will be rolled back
        with (recurrent or RecurrentStates(self.model, held)).forward(num_drafts + 1, is_recorded=columns > 0):
            outputs = self._run(inputs)
        if is_kept:
            caches.shrink_recurrent(held)
        return outputs

    def _mask(self, width: int) -> torch.Tensor:
        mask = torch.ones(1, width, dtype=torch.long, device=self.device)
        mask[:, : self.padding] = 0
        return mask

    def _run(self, inputs: dict[str, Any]) -> Any:
        self.num_forwards += 1
        model: Any = self.model
        return model(**inputs)


def distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest distance of a row of `logits` from that of `expected`, in the latter's spread."""
    logits, expected = logits.float(), expected.float().to(logits.device)
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((logits - expected).norm(dim=-1) / spread).max())


def rounding_unit(model: PreTrainedModel, device: torch.device) -> float:
    """The machine epsilon of what the model computes in: norms and softmax never run in more than 32 bits."""
    kind, dtype = device.type, model.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    has_tf32 = kind == "cuda" and torch.backends.cuda.matmul.allow_tf32
    is_quantized = getattr(model, "hf_quantizer", None) is not None
    return max(unit, 2**-11) if has_tf32 or is_quantized else unit


def random_ids(model: PreTrainedModel, count: int) -> torch.Tensor:
    """Token ids `[1, count]` that are always the same, none of which the configuration gives a meaning."""
    config, text = model.config, model.config.get_text_config()
    special = {
        value
        for part in (config, text)
        for name, value in vars(part).items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    ordinary = [token for token in range(min(text.vocab_size, 4096)) if token not in special]
    picks = torch.randint(len(ordinary), (count,), generator=torch.Generator().manual_seed(0))
    return torch.tensor(ordinary)[picks][None]


WINDOW_NAMES = ("window", "local", "chunk", "keep", "segment", "topk_blocks", "index_topk")
NO_WINDOWS = ("layer", "pattern", "head", "expert", "dropout", "forward", "num_", "n_", "conv", "ids", "prob", "theta")


def largest_window(model: PreTrainedModel) -> int:
    """The largest number of the configuration, or of a module, that is named like a window of tokens; 0 for none."""
    config = model.config.get_text_config()
    kinds = {type(module): module for module in model.modules()}
    named = {**vars(config)}
    for module in kinds.values():
        named |= {f"{type(module).__name__}.{name}": value for name, value in vars(module).items()}
    sizes = [value for name, value in named.items() if type(value) is int and _is_window(name.rpartition(".")[2])]
    blocks = [getattr(config, name) for name in vars(config) if name.endswith("_blocks") and "layer" not in name]
    size = next((value for name, value in vars(config).items() if name.endswith("block_size")), None)
    sizes += [blocks_each * size for blocks_each in blocks if type(blocks_each) is int and type(size) is int]
    return max((size for size in sizes if 0 < size <= LARGEST_WINDOW), default=0)


def _is_window(name: str) -> bool:
    return any(word in name for word in WINDOW_NAMES) and not any(word in name for word in NO_WINDOWS)


def last_position(model: PreTrainedModel) -> int | None:
    """Behind how many tokens positions end, or rotary tables change; `None` where the configuration does not say."""
    config = model.config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
    stated = [getattr(config, name, None) for name in names]
    limits = [*stated, _compat.fixed_rope_length(model)]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def has_position_table(model: PreTrainedModel) -> bool:
    """Whether the model looks its positions up in a table of as many rows."""
    limit = last_position(model)
    tokens = model.get_input_embeddings()
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module is not tokens]
    return limit is not None and any(limit <= table.num_embeddings <= limit + 8 for table in tables)


def reads(head: Any, states: torch.Tensor) -> int | None:
    """Width of what `head` makes of `states`; `None` where it cannot read them."""
    with contextlib.suppress(RuntimeError):
        return int(head(states).shape[-1])
    return None
