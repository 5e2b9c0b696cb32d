"""Products of DTensors, and layers that torch shards, in two processes: run by test_torch_dtensor.py.

python sharded_tensors.py PORT
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dispatch
from dispatch.testing import FakeBackend, fake_timings, registered

PLACEMENTS = (Shard(0), Shard(1), Replicate())


class Linear(torch.nn.Linear):
    """nn.Linear, dispatched."""

    def forward(self, x: Any) -> Any:
        return dispatch.matmul(x, self.weight.mT, bias=self.bias)


def products(mesh: Any) -> None:
    for m, k, n in ((8, 6, 4), (7, 5, 3)):
        a, b, bias = torch.randn(m, k), torch.randn(k, n), torch.randn(n)
        for place_a in PLACEMENTS:
            for place_b in PLACEMENTS:
                x = distribute_tensor(a, mesh, [place_a]).requires_grad_()
                y, z = distribute_tensor(b, mesh, [place_b]), distribute_tensor(bias, mesh, [Replicate()])
                found, wanted = dispatch.matmul(x, y), torch.matmul(x, y)
                assert found.placements == wanted.placements, (place_a, place_b, found.placements)
                same(found.full_tensor(), a @ b)
                same(dispatch.matmul(x, dispatch.prepare(y)).full_tensor(), a @ b)
                same(dispatch.matmul(x, y, bias=z, activation="relu").full_tensor(), torch.relu(a @ b + bias))
                found.sum().backward()
                same(x.grad.full_tensor(), b.sum(1).expand(m, k))


def compiled(mesh: Any) -> None:
    a, b = torch.randn(7, 5), torch.randn(5, 3)
    x, y = distribute_tensor(a, mesh, [Shard(1)]), distribute_tensor(b, mesh, [Shard(0)])
    found = torch.compile(lambda x, y: dispatch.matmul(x, y), backend="aot_eager", fullgraph=True)(x, y)
    assert found.placements == torch.matmul(x, y).placements
    same(found.full_tensor(), a @ b)


def layers(mesh: Any) -> None:
    x = torch.randn(3, 8)
    for shard in (_tensor_parallel, _fully_sharded):
        net = torch.nn.Sequential(Linear(8, 16), Linear(16, 4))
        wanted = net(x)
        shard(net, mesh)
        same(net(x), wanted)
        net(x).square().sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        assert not torch.allclose(net(x), wanted)


def _tensor_parallel(net: Any, mesh: Any) -> None:
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


def _fully_sharded(net: Any, mesh: Any) -> None:
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def work(rank: int, port: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "2"}
    init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    parts: tuple[Callable[[Any], None], ...] = (products, compiled, layers)
    times = fake_timings({"other": 1.0, "baseline": 100.0})
    with registered(FakeBackend("other")), times:  # it would win, were it asked
        for part in parts:
            torch.manual_seed(0)
            part(mesh)
    destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (sys.argv[1],), nprocs=2)
    print("done")
