"""Random numbers: each row draws its own from a generator of its own."""

from dataclasses import dataclass

import torch

from hf_dflow.errors import UnsupportedGenerationError


@dataclass(frozen=True)
class Uniforms:
    """Numbers in [0, 1) for one step with N drafts."""

    draft: torch.Tensor  # [B, N]
    verify: torch.Tensor  # [B, N + 1] acceptance tests, then the bonus

    def for_drafts(self, num_drafts: int) -> torch.Tensor:
        """`verify` where only the first `num_drafts` drafts are verified, `[B, num_drafts + 1]`."""
        if self.verify.shape[1] == num_drafts + 1:
            return self.verify
        return torch.cat([self.verify[:, :num_drafts], self.verify[:, -1:]], dim=1)


def row_generators(seeds: list[int] | None, batch_size: int, device: torch.device) -> list[torch.Generator]:
    """One generator for each row of the batch.

    Without `seeds` they are s, s + 1, … where s is the one number that a call draws from torch's global generator
    (`torch.randint(2**62, ())`, on the CPU). So `set_seed` decides, and row i of a batch samples what a call for it
    alone samples with `seeds=[s + i]`, whatever its neighbours are.

    Raises:
        UnsupportedGenerationError: Not one seed for each row.
    """
    if seeds is None:
        first = int(torch.randint(2**62, ()))
        seeds = [first + row for row in range(batch_size)]
    if len(seeds) != batch_size:
        raise UnsupportedGenerationError(
            f"seeds has {len(seeds)} entries for {batch_size} sequences; give one for each (num_return_sequences "
            "counts), or leave it out."
        )
    return [torch.Generator(device).manual_seed(seed) for seed in seeds]


def draw_uniforms(
    generators: list[torch.Generator | None], lengths: list[int], device: torch.device
) -> Uniforms | None:
    """Numbers for `lengths[b]` drafts of each row; `None` where nothing is sampled.

    A row with n drafts takes 2n + 1 numbers from its generator in order, as if it were alone; zeros fill the rest.
    float64 where the device has it: a float32 uniform moves in steps of 6e-8, as large as rare tokens' probabilities.
    """
    if generators[0] is None:
        return None
    dtype = torch.float32 if device.type == "mps" else torch.float64
    num_drafts = max(lengths)
    rows = []
    for generator, length in zip(generators, lengths, strict=True):
        numbers = torch.rand(2 * length + 1, generator=generator, dtype=dtype, device=device)
        if length < num_drafts:
            gap = numbers.new_zeros(num_drafts - length)
            numbers = torch.cat([numbers[:length], gap, numbers[length : 2 * length], gap, numbers[-1:]])
        rows.append(numbers)
    drawn = torch.stack(rows)
    return Uniforms(drawn[:, :num_drafts], drawn[:, num_drafts:])
