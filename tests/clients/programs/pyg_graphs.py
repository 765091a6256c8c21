"""PyTorch Geometric: its DataLoader subclasses torch's and collates graphs."""

import torch
from seen import logged
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader


def main() -> None:
    torch.manual_seed(3)
    edges = torch.zeros((2, 0), dtype=torch.long)
    graphs = [Data(x=torch.full((1, 1), float(i)), edge_index=edges) for i in range(400)]
    loader = DataLoader(graphs, batch_size=25, shuffle=True, num_workers=1)
    logged(loader, lambda batch: batch.x).write(0)


if __name__ == "__main__":
    main()
