"""The target at work in one call: its prefill, one forward for each step, and its cache between them."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache

from hf_dflow.generation import _compat
from hf_dflow.generation import cache as caches
from hf_dflow.generation.checks import check_states, refuse_layers
from hf_dflow.generation.plan import CallPlan
from hf_dflow.generation.recurrent import RecurrentStates
from hf_dflow.generation.rows import Row
from hf_dflow.generation.step import Emission, Proposal, TargetForward


class TargetSession:
    """Runs the target, taps its states and keeps its cache, mask and positions up to the anchors.

    On a static cache, blocks run compiled where plain decoding compiles.

    Args:
        plan (`CallPlan`): Of the call.
        model_kwargs (`dict`): What `generate` prepared for the target's forward, its cache included.
    """

    def __init__(self, plan: CallPlan, model_kwargs: dict[str, Any]):
        self.plan, self.model, self.kwargs = plan, plan.model, model_kwargs
        self.layer_ids = plan.drafter.config.target_layer_ids
        self.num_forwards = 0
        self.has_prefilled = False
        self._num_new = 0  # rows of the forwards since the last commit
        self.columns: caches.TargetColumns | None = None  # None where a row is alone and has no holes
        self.cached_rows = caches.length(self.cache) or 0  # columns of committed tokens
        self.ahead = 0  # tokens that the cache held from the start and that the rows' ids leave out
        self._prompt_cache: list | None = None  # the cache after a batch's prefill, where the caller gets it back
        self.recurrent = RecurrentStates(self.model, self.cache)
        self._prompt_states: list[torch.Tensor] = []  # those of its recurrent layers
        self._compiled = _compat.compiled_call(self.model, plan.generation_config, model_kwargs)
        if self.recurrent:
            self._compiled = None  # what its mixers are called with is recorded
        caches.record_past(self.cache)

    @property
    def cache(self) -> Cache:
        """The target's cache."""
        return _compat.get_cache(self.kwargs)

    def room_behind(self, row: Row) -> int:
        """How many drafts the cache can take behind the row's anchor."""
        capacity = caches.capacity(self.cache)
        return sys.maxsize if capacity is None else capacity - self.cached_tokens(row) - 1

    def cached_tokens(self, row: Row) -> int:
        """Tokens of the row that are cached, its prompt's padding counted: all but the anchor."""
        return row.length - 1 + self.ahead

    @property
    def _num_columns(self) -> int:
        """Columns of the cache, rows that are not committed yet counted."""
        held = caches.length(self.cache)
        return self.cached_rows + self._num_new if held is None else held

    @property
    def _is_read_later(self) -> bool:
        """Whether somebody sees the cache after the call."""
        return self.plan.returns_dict or bool(getattr(self.cache, "_is_user_defined", False))

    # -- forwards

    def forward(self, rows: list[Row], proposal: Proposal) -> TargetForward:
        """One target forward over the prompts, later over anchors and drafts or over anchor and tree.

        Of a tree one path stays, along which the target agrees longest; from there on the step is that of a chain.

        Raises:
            UnsupportedGenerationError: The first forward shows that the target cannot be rolled back.
        """
        self.num_forwards += 1
        device = proposal.token_ids.device
        if not self.has_prefilled:
            outputs, features = self._prefill(torch.cat([row.ids for row in rows]))
            return TargetForward(outputs, outputs.logits[:, -1:].to(device), features.to(device), proposal)
        num_drafts, tree, cached = proposal.num_drafts, proposal.tree, self._num_columns
        inputs = _compat.model_inputs(
            self.model,
            self._last_ids(rows, proposal.token_ids),
            self.kwargs,
            new_tokens=num_drafts + 1,
            num_drafts=num_drafts,
            is_prefill=False,
            furthest=self._furthest_positions(proposal),
        )
        inputs["output_hidden_states"] = True
        if tree is not None:
            _compat.shape_as_tree(inputs, tree, self.model.dtype, rows[0].next_position, cached)
        if tree is None and self._compiled is not None and self._recurs(rows, num_drafts):
            self._num_new += num_drafts + 1
            outputs = self._compiled(**inputs)
            logits = outputs.logits[:, -num_drafts - 1 :].clone()  # a CUDA graph overwrites its outputs
        else:
            outputs = self._run(inputs, num_drafts + 1, is_recorded=True)
            logits = outputs.logits[:, -num_drafts - 1 :]
        features = _compat.capture_features(outputs.hidden_states, self.layer_ids)
        if tree is None:
            return TargetForward(outputs, logits.to(device), features.to(device), proposal)
        path = tree.path(logits[0].float().argmax(dim=-1).tolist())
        caches.keep_path(self.cache, cached, path, num_drafts)
        nodes = torch.tensor(path, device=device) - 1
        kept = torch.tensor([0, *path], device=logits.device)
        chain = Proposal(
            proposal.token_ids[:, nodes], proposal.logits[:, : len(path)], proposal.is_finite, (len(path),)
        )
        return TargetForward(
            outputs, logits[:, kept].to(device), features[:, kept.to(features.device)].to(device), chain
        )

    def _prefill(self, token_ids: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Run the target over what it has not seen of `token_ids` `[B, T]`.

        With `prefill_chunk_size` it runs chunk by chunk, as plain decoding does; features are kept of every chunk, so
        drafts do not depend on the size.

        Returns:
            `tuple[Any, torch.Tensor]`: Outputs of the last forward, whose last row of logits predicts the first token,
            and tapped states `[B, new tokens, taps * target_hidden_size]`.
        """
        cached = self.cached_rows
        new_tokens = self._num_uncached(token_ids)
        width = token_ids.shape[1] if new_tokens is None else new_tokens
        chunk_size = self.plan.generation_config.prefill_chunk_size or width
        features: list[torch.Tensor] = []
        outputs = None
        for start in range(0, width, chunk_size):
            end = min(start + chunk_size, width)
            kwargs = self.kwargs if end == width else _shortened(self.kwargs, width - end, cached + end)
            inputs = _compat.model_inputs(
                self.model,
                token_ids[:, : token_ids.shape[1] - width + end],
                kwargs,
                new_tokens=None if new_tokens is None and start == 0 else end - start,
                num_drafts=0,
                is_prefill=True,
            )
            inputs["output_hidden_states"] = True
            outputs = self._run(inputs, end - start, is_recorded=False)
            if start == 0:
                self._check_outputs(outputs.hidden_states)
            caches.crop(self.cache, 0)  # sliding layers that record their past shrink to the window
            features.append(_compat.capture_features(outputs.hidden_states, self.layer_ids))
        return outputs, torch.cat(features, dim=1)

    def _run(self, inputs: dict[str, Any], length: int, *, is_recorded: bool) -> Any:
        """One forward over `length` tokens, with its recurrent states looked after."""
        self._num_new += length
        with self.recurrent.forward(length, is_recorded=is_recorded):
            return self.model(**inputs)

    def _num_uncached(self, token_ids: torch.Tensor) -> int | None:
        """How many of the prompt's tokens the target has not seen; `None` for all.

        Behind a filled cache `token_ids` may be the whole sequence or only what is new. As in `generate`'s own prefill
        the attention mask, which is always whole, decides; a mask of ones has been dropped, its length noted.
        """
        mask = self.kwargs.get("attention_mask")
        mask_length = getattr(self.plan.generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
        is_whole = mask_length == token_ids.shape[1]
        return token_ids.shape[1] - self.cached_rows if self.cached_rows and is_whole else None

    def _check_outputs(self, hidden_states: Sequence[torch.Tensor]) -> None:
        """Refuse what only the first forward shows."""
        if not caches.is_croppable(self.cache):
            refuse_layers(type(self.model).__name__)
        check_states(type(self.model).__name__, [states.shape for states in hidden_states])

    def _last_ids(self, rows: list[Row], draft_ids: torch.Tensor) -> torch.Tensor:
        """Token ids that end with anchors and drafts `[B, N]`: a single row's are whole; a batch's begin with the
        anchors, as its rows are not equally long."""
        if self.columns is None:
            return torch.cat([rows[0].ids, draft_ids], dim=1)
        anchors = torch.cat([row.ids[:, -1:] for row in rows])
        return torch.cat([anchors, draft_ids.to(anchors.device)], dim=1)

    def _furthest_positions(self, proposal: Proposal) -> torch.Tensor | None:
        """The last position `[B, 1]` that each row has room for; `None` where all verify equally much."""
        if proposal.row_lengths is None:
            return None
        return self.kwargs["position_ids"][..., -1:] + proposal.row_lengths[:, None]

    def _recurs(self, rows: list[Row], num_drafts: int) -> bool:
        """Whether a forward has one of the two shapes that come again: a full block, or one token while drafting
        pauses. Blocks that a limit cuts short are of many lengths, each of which would compile for longer than it
        runs."""
        full_length, max_length = self.plan.options.num_draft_tokens or 0, self.plan.stop.max_length
        left = min(min(self.room_behind(row), max_length - row.length - 1) for row in rows)
        return num_drafts == full_length or (num_drafts == 0 and left >= full_length)

    # -- between forwards

    def prompt_context(self, features: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
        """Context features of the prompts without their padding.

        Args:
            features (`torch.Tensor` of shape `(B, T, taps * target_hidden_size)`): Of all tokens of the prefill.

        Returns:
            `tuple`: Features `[B, longest, …]`, each row's packed to the left; how many each row has; the absolute
            position of each row's first.
        """
        batch_size, new_tokens = features.shape[:2]
        mask = self.kwargs.get("attention_mask")
        if mask is None:
            return features, [new_tokens] * batch_size, [self.cached_rows] * batch_size
        is_real = mask.bool()
        is_new = is_real[:, -new_tokens:]
        totals, counts = torch.stack([is_real.sum(1), is_new.sum(1)]).tolist()
        packed = caches.pack(features, is_new.to(features.device))[:, : max(counts)]
        return packed, counts, [total - count for total, count in zip(totals, counts, strict=True)]

    def keep(self, rows: list[Row], forward: TargetForward, emissions: list[Emission]) -> None:
        """Take out of the cache what no row commits, and lengthen mask and positions to the new anchors.

        The row that emits most decides how many columns stay; the others get holes.
        """
        counts = [emission.count for emission in emissions]
        num_drafts, is_prefill, self.has_prefilled = forward.chain.num_drafts, not self.has_prefilled, True
        if len(rows) == 1 and self.columns is None:
            kept = self._num_new if is_prefill else counts[0]
            caches.crop(self.cache, 0 if is_prefill else num_drafts + 1 - kept)
            self._advance([kept], emissions)
            self.cached_rows += kept
            self._num_new = 0
            if is_prefill:
                self.ahead = self.cached_rows - rows[0].length
            self.kwargs = _compat.advance(self.model, forward.outputs, self.kwargs, counts[0])
            return
        if is_prefill:
            self._open_columns(rows)
            self._advance([self._num_new] * len(rows), emissions)
            self._num_new = 0
            return
        self._num_new = 0
        width = max(0 if emission.is_last else emission.count for emission in emissions)
        if not width:  # all rows end here, and nobody reads the cache
            return
        assert self.columns is not None
        caches.crop(self.cache, num_drafts + 1 - width)
        self._advance(counts, emissions)
        self.columns.append([self.cached_tokens(row) for row in rows], [min(count, width) for count in counts])
        positions = self.kwargs["position_ids"]
        self.kwargs["position_ids"] = positions + torch.tensor(counts, device=positions.device)[:, None]

    def _advance(self, counts: list[int], emissions: list[Emission]) -> None:
        """Let recurrent states keep what the rows keep; those of rows that end here, only where somebody reads them."""
        if not self.recurrent:
            return
        is_idle = [emission.is_last and not (self.columns is None and self._is_read_later) for emission in emissions]
        everything = self.recurrent.length
        self.recurrent.advance([everything if idle else count for idle, count in zip(is_idle, counts, strict=True)])

    def _open_columns(self, rows: list[Row]) -> None:
        """Begin to keep columns, after the prefill of a batch. Of what grows with the text only the last column stays:
        the target is given that of the anchors."""
        kwargs = dict(self.kwargs)
        mask, width = kwargs.get("attention_mask"), self._num_columns
        if mask is None:
            mask = torch.ones(len(rows), width, dtype=torch.long, device=rows[0].ids.device)
        self.columns, self.ahead = caches.TargetColumns.of_prompt(mask), width - rows[0].length
        positions = kwargs["position_ids"][..., -1:]
        kwargs["position_ids"] = positions.expand(*positions.shape[:-2], len(rows), 1) + 1
        if kwargs.get("token_type_ids") is not None:
            kwargs["token_type_ids"] = kwargs["token_type_ids"][:, -1:]
        if self._is_read_later:
            self._prompt_cache = caches.contents(self.cache)
            self._prompt_states = self.recurrent.contents()
        self.kwargs = kwargs

    def select(self, rows: torch.Tensor) -> None:
        """Keep only `rows` of the batch."""
        if self.columns is not None:
            self.columns.select(rows)
            caches.select_rows(self.cache, rows)
            self.recurrent.select(rows)
        for name in ("position_ids", "token_type_ids"):
            if self.kwargs.get(name) is not None:
                self.kwargs[name] = self.kwargs[name][..., rows, :]

    def squeeze(self, rows: list[Row]) -> None:
        """Take holes out of the cache where they are too many, and bring the mask up to the anchors."""
        if self.columns is not None:
            self.columns.compact(self.cache, max(row.next_position for row in rows), self.plan.backend)
            self.kwargs["attention_mask"] = self.columns.attention_mask()

    def close(self) -> None:
        """Leave in the cache, which may be the caller's own, nothing but committed tokens.

        A batch leaves its prompts and no more, as its rows end at different lengths.
        """
        if self.columns is None:
            self.recurrent.take_back()
            caches.crop_to(self.cache, self.cached_rows)
        elif self._prompt_cache is not None:
            caches.restore(self.cache, self._prompt_cache)
            self.recurrent.restore(self._prompt_states)
        caches.stop_past_recording(self.cache)


def _shortened(model_kwargs: dict[str, Any], missing: int, mask_length: int) -> dict[str, Any]:
    """`model_kwargs` of a prompt that ends `missing` tokens earlier."""
    kwargs = dict(model_kwargs)
    for name in ("position_ids", "token_type_ids", "mm_token_type_ids"):
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name][..., : kwargs[name].shape[-1] - missing]
    if kwargs.get("attention_mask") is not None:
        kwargs["attention_mask"] = kwargs["attention_mask"][:, :mask_length]
    return kwargs
