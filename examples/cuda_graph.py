"""Capture a store in a CUDA graph, as an LLM server does with a decode step, and replay it. Needs a GPU and torch.

python examples/cuda_graph.py
"""

import sys

from numba_kvcache import store_kvcache, warmup

SLOTS, WIDTH, TOKENS, STEPS = 1024, 1024, 8, 3


def main() -> None:
    """Capture once, replay with new data, compare."""
    try:
        import torch
    except ImportError:
        sys.exit("cuda_graph.py needs torch, which is not installed")
    if not torch.cuda.is_available():
        sys.exit("cuda_graph.py needs a GPU that torch can use, and there is none")

    def zeros(rows: int) -> torch.Tensor:
        return torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device="cuda")

    # A graph remembers addresses: the arrays stay, and each step writes its data into them.
    k, v, k_cache, v_cache = zeros(TOKENS), zeros(TOKENS), zeros(SLOTS), zeros(SLOTS)
    slots = torch.zeros(TOKENS, dtype=torch.int64, device="cuda")

    # A first call compiles; ahead of time it costs no request, and launches nothing.
    warmup(WIDTH * k.element_size())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store_kvcache(k, v, k_cache, v_cache, slots)

    k_expected, v_expected = torch.zeros_like(k_cache), torch.zeros_like(v_cache)
    all_slots = torch.randperm(SLOTS, device="cuda")
    for step in range(STEPS):
        slots.copy_(all_slots[step * TOKENS : (step + 1) * TOKENS])
        k.normal_()
        v.normal_()
        graph.replay()
        k_expected[slots], v_expected[slots] = k, v
    assert torch.equal(k_cache, k_expected)
    assert torch.equal(v_cache, v_expected)
    print(f"{STEPS} replays stored {STEPS * TOKENS} tokens, every one where it belongs")


if __name__ == "__main__":
    main()
