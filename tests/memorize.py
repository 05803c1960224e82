"""Trains a tiny drafter on one text, for loops that a scripted drafter cannot follow: right often, but not always."""

import torch

WRONG_SHARE = 0.2


def memorize(drafter, target, text: torch.Tensor, *, prompt_length: int, steps: int = 40) -> None:
    """Fit `drafter` to `text` `[1, T]`, which `target` wrote, for each anchor after the prompt.

    Masks and positions are written out here rather than taken from the loop. At a few positions of the text it learns
    another token, so that blocks end in partial rejections.
    """
    config, length = drafter.config, text.shape[1]
    target.requires_grad_(False)
    with torch.no_grad():
        states = target(text, output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in config.target_layer_ids], dim=-1)
    anchors = torch.arange(prompt_length, length - config.block_size)
    offsets = torch.arange(config.block_size)
    positions = anchors[:, None] + offsets
    block = torch.full((len(anchors), config.block_size), config.mask_token_id)
    block[:, 0] = text[0, anchors]
    is_wrong = torch.rand(length, generator=torch.Generator().manual_seed(0)) < WRONG_SHARE
    learned = torch.where(is_wrong, (text[0] + 1) % config.mask_token_id, text[0])
    first = drafter.first_drafting_row
    labels = learned[positions[:, first:] + 1 - first]
    # What it cannot say, it cannot learn.
    if config.vocab_size is not None:
        labels = labels.where(labels < config.vocab_size, -100)
    if drafter.draft_token_ids is not None:
        labels = labels.where(torch.isin(labels, drafter.draft_token_ids), -100)
    keys = torch.cat([torch.arange(length).expand(len(anchors), -1), positions], dim=1)  # [A, T + L]
    is_block = torch.arange(keys.shape[1]) >= length
    distance = positions[:, :, None] - keys[:, None]
    visible = is_block | (keys[:, None] < anchors[:, None, None])
    previous = drafter.embed(text[0, positions[:, first:] - first], target.get_input_embeddings()).detach()
    embeds = drafter.embed(block, target.get_input_embeddings()).detach()

    def mask_for(layer_idx, _):
        mask = visible
        sliding = config.layer_types[layer_idx] == "sliding_attention"
        if sliding and config.window_from_anchor:
            mask = mask & (is_block | (anchors[:, None, None] - keys[:, None] <= config.window_reach))
        elif sliding:
            mask = mask & (distance.abs() <= config.window_reach)
        if config.sliding_is_causal if sliding else config.full_is_causal:
            mask = mask & (distance >= 0)
        return mask[:, None]

    drafter.requires_grad_(True)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=5e-3)
    for _ in range(steps):
        context = drafter.project_context(features)
        key_values = drafter.context_key_values(context, torch.arange(length)[None])

        def extend(layer_idx, keys, values, key_values=key_values):
            held = [states.expand(len(anchors), -1, -1, -1) for states in key_values[layer_idx]]
            return torch.cat([held[0], keys], dim=2), torch.cat([held[1], values], dim=2)

        hidden = drafter.draft_hidden(embeds, positions, extend, mask_for)[:, first:]
        if drafter.causal_correction is not None:
            hidden = drafter.causal_correction(hidden, previous)
        logits = drafter.compute_logits(hidden, target.get_output_embeddings())
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drafter.requires_grad_(False)
