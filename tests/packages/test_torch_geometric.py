"""torch-geometric: neighbours of a node as a sequence, layers of a graph as one, sets."""

from __future__ import annotations

from typing import Any

import torch
from replaced import check

EDGES = torch.tensor([[1, 2, 3, 0, 4, 2, 0, 1], [0, 0, 0, 1, 1, 2, 3, 4]])  # sorted by where they end


def test_a_graph_network(package: Any):
    nn = package("torch_geometric.nn")
    torch.manual_seed(0)

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.SAGEConv(6, 10, aggr="lstm")
            self.second = nn.SAGEConv(10, 10, aggr=nn.aggr.GRUAggregation(10, 10))
            self.jump = nn.JumpingKnowledge("lstm", channels=10, num_layers=2)
            self.pool = nn.aggr.Set2Set(10, processing_steps=3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one = self.first(x, EDGES).relu()
            two = self.second(one, EDGES).relu()
            return self.pool(self.jump([one, two]), torch.tensor([0, 0, 0, 1, 1]), dim_size=2)

    x = torch.randn(5, 6)
    check(Network(), lambda model, cast: model(cast(x)), (
        "first.aggr_module.lstm", "second.aggr_module.gru", "jump.lstm", "pool.lstm"))
