"""Solutions of 06_tensors."""

import torch


def pack(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat(samples), torch.tensor([len(sample) for sample in samples])


def row_only(row: torch.Tensor) -> torch.Tensor:
    return row.clone()
