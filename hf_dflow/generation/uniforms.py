"""Random numbers, each row's from a generator of its own."""

import torch

from hf_dflow.errors import UnsupportedGenerationError


def row_seeds(seeds: list[int] | None, batch_size: int) -> list[int]:
    """One seed for each row of the batch.

    Without `seeds` they are s, s + 1, … where s is the one number that a call draws from torch's global generator
    (`torch.randint(2**62, ())`, on CPU). So `set_seed` decides, and row i of a batch says what a call for it alone says
    with `seeds=[s + i]`, whatever its neighbours are.

    Raises:
        UnsupportedGenerationError: Not one seed for each row.
    """
    if seeds is None:
        first = int(torch.randint(2**62, ()))
        return [first + i for i in range(batch_size)]
    if len(seeds) != batch_size:
        raise UnsupportedGenerationError(
            f"seeds has {len(seeds)} entries for {batch_size} sequences; give one for each (num_return_sequences "
            "counts), or leave it out."
        )
    return list(seeds)


def generator_of(seed: int, device: torch.device) -> torch.Generator:
    """A row's own generator."""
    return torch.Generator(device).manual_seed(seed)


def draw(
    generators: list[torch.Generator | None], lengths: list[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers in [0, 1) for N drafts `[B, N]`, N acceptance tests and the bonus `[B, N + 1]`; N is `max(lengths)`.

    A row with n drafts takes 2n + 1 numbers from its generator in that order, as if it were alone; 0 fills the rest.
    float64 where there is one: a float32 uniform moves in steps of 6e-8, as large as rare tokens' probabilities.
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64
    num_drafts = max(lengths)
    drawn = [
        torch.rand(2 * n + 1, generator=generator, dtype=dtype, device=device)
        for generator, n in zip(generators, lengths, strict=True)
    ]
    uniforms = torch.stack([_widen(row, n, num_drafts) for row, n in zip(drawn, lengths, strict=True)])
    return uniforms[:, :num_drafts], uniforms[:, num_drafts:]


def cut(uniforms: torch.Tensor | None, num_drafts: int) -> torch.Tensor | None:
    """Numbers `[B, num_drafts + 1]` for the first acceptance tests, and the bonus's, of `[B, N + 1]`."""
    if uniforms is None or uniforms.shape[1] == num_drafts + 1:
        return uniforms
    return torch.cat([uniforms[:, :num_drafts], uniforms[:, -1:]], dim=1)


def _widen(row: torch.Tensor, length: int, num_drafts: int) -> torch.Tensor:
    if length == num_drafts:
        return row
    gap = row.new_zeros(num_drafts - length)
    return torch.cat([row[:length], gap, row[length : 2 * length], gap, row[-1:]])
