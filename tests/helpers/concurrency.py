"""Call the operators from several threads and processes; the results must equal those of single calls.

Spawned processes import this file, so it imports little.
"""

import multiprocessing
import threading

import torch

import matbackprop


def operators(seed: int) -> list[torch.Tensor]:
    """Values and gradients of the operators on random inputs."""
    generator = torch.Generator().manual_seed(seed)
    f = (torch.rand(2, 9, 5, generator=generator, dtype=torch.float64) + 0.1).requires_grad_()
    labels = torch.arange(9).remainder(3).expand(2, 9)
    gram = f.mT @ f + torch.diag(torch.arange(1.0, 6.0, dtype=torch.float64))
    calls = [
        matbackprop.second_order_pool(f),
        matbackprop.matrix_log(gram),
        matbackprop.matrix_power(gram, 0.3),
        matbackprop.eigh(gram)[0],
        matbackprop.svd(f)[1],
        matbackprop.projector(f[..., :3]),
        matbackprop.normalized_cut_j1(f, labels),
        matbackprop.normalized_cut_j2(f, labels),
        matbackprop.normalized_cut_soft(f, labels),
    ]
    out = []
    for value in calls:
        (gradient,) = torch.autograd.grad(value.square().sum(), f, retain_graph=True)
        out += [value.detach(), gradient]
    return out


def same(seed: int, expected: list[torch.Tensor]) -> bool:
    """Whether the operators repeat their results."""
    return all(torch.equal(a, b) for a, b in zip(operators(seed), expected, strict=True))


def call_in_threads(threads: int, rounds: int) -> dict[str, int]:
    """Call all operators from several threads at once, each on its own inputs, and compare with calls one by one."""
    expected = [operators(seed) for seed in range(threads)]
    start, wrong = threading.Barrier(threads), []

    def work(seed: int) -> None:
        start.wait()
        try:
            wrong.extend(seed for _ in range(rounds) if not same(seed, expected[seed]))
        except Exception as error:
            wrong.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(600)
    assert not any(worker.is_alive() for worker in workers), "a thread hangs"
    return {"threads": threads, "calls": threads * rounds * len(expected[0]) // 2, "wrong": len(wrong)}


def call_in_processes(method: str, processes: int = 2) -> dict[str, object]:
    """Use the operators here, then in processes that are forked or spawned, and compare."""
    expected = operators(7)
    context = multiprocessing.get_context(method)
    workers = [context.Process(target=_compare, args=(7, expected)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
    return {"method": method, "processes": processes, "wrong": sum(code != 0 for code in codes)}


def _compare(seed: int, expected: list[torch.Tensor]) -> None:
    torch.set_num_threads(1)
    raise SystemExit(0 if same(seed, expected) else 3)
