"""Generate text with Hugging Face's Llama and a paged KV cache, token for token as with the library's own caches.

The weights are random and nothing is downloaded. Needs torch and transformers. Runs on a GPU, where a decode step is
also captured in a CUDA graph, and, tiny, on Numba's simulator.

    python examples/generate.py --tokens 64
    NUMBA_ENABLE_CUDASIM=1 python examples/generate.py
"""

import argparse
import inspect
import random
import sys
from collections.abc import Callable
from typing import Any

from numba import config

from numba_kvcache import store_kvcache

try:
    import torch
    import transformers
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, StaticCache
except ImportError as error:
    sys.exit(f"generate.py needs torch and transformers (4.57 or newer): {error}")

PAGE = 16  # slots of a page
PROMPT = 13  # tokens; not a whole page, so that pages are left half full and filled up later

SIMULATED = bool(config.ENABLE_CUDASIM)
# A simulated thread is a Python thread, so the simulator gets a model that is no more than a sketch of one.
LAYERS, HIDDEN, HEADS, KV_HEADS, TOKENS = (2, 64, 4, 2, 10) if SIMULATED else (4, 1024, 16, 4, 64)

# transformers 5 renamed the argument on its way.
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaModel.forward).parameters else "past_key_values"


class PagedLayer(CacheLayerMixin):
    """One layer's keys and values, in pages that lie anywhere in the layer's pool.

    `slots` (max_length,) int64 is where each position of the sequence lies: all layers share it.
    """

    is_sliding = False

    def __init__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> None:
        super().__init__()
        self.k_cache, self.v_cache, self.slots = k_cache, v_cache, slots
        self.length = 0
        self.is_initialized = True

    def lazy_initialization(self, *states: torch.Tensor) -> None:
        """Nothing is left to do: the pool was there before the sequence."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens' keys and values (1, heads, tokens, d); return those of the whole sequence."""
        start, self.length = self.length, self.length + keys.shape[2]
        return self.store_and_gather(keys, values, self.slots[start : self.length], self.slots[: self.length])

    def store_and_gather(
        self, keys: torch.Tensor, values: torch.Tensor, new_slots: torch.Tensor, visible_slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One launch stores K and V of this layer. The gather is for transformers, whose attention wants one piece.

        An engine does not gather: its attention kernel takes the page table and reads the pages where they lie.
        """
        store_kvcache(as_rows(keys), as_rows(values), self.k_cache, self.v_cache, new_slots)
        heads = keys.shape[1]
        return gather(self.k_cache, visible_slots, heads), gather(self.v_cache, visible_slots, heads)

    def get_seq_length(self) -> int:
        """How many tokens have been stored."""
        return self.length

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """How many positions attention sees with `query` (a count, or positions) more tokens; and the first of them."""
        return self.length + (query if isinstance(query, int) else query.shape[0]), 0

    def get_max_length(self) -> int:
        """How long the sequence may become."""
        return self.slots.shape[0]

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


class FixedPagedLayer(PagedLayer):
    """The same for a CUDA graph: every shape is fixed, and how long the sequence is, only the device knows.

    Attention sees all max_length positions; the mask hides those to come.
    """

    is_compileable = True  # tells transformers to make that mask even for one token

    def __init__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> None:
        super().__init__(k_cache, v_cache, slots)
        self.length = torch.zeros((), dtype=torch.int64, device=slots.device)

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """As above; Python runs it once, while the graph is captured."""
        positions = self.length + torch.arange(keys.shape[2], device=keys.device)
        self.length.add_(keys.shape[2])
        return self.store_and_gather(keys, values, self.slots.index_select(0, positions), self.slots)

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """All positions, from the first."""
        return self.slots.shape[0], 0


def as_rows(states: torch.Tensor) -> torch.Tensor:
    """(1, heads, tokens, d) -> (tokens, heads * d): a row per token. A view where the memory allows it."""
    return states[0].transpose(0, 1).reshape(states.shape[2], -1)


def gather(cache: torch.Tensor, slots: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a sequence -> (1, heads, positions, d), laid out as the library's own caches are."""
    return cache.index_select(0, slots).view(1, slots.shape[0], heads, -1).transpose(1, 2).contiguous()


class PagedCache(Cache):
    """The cache of one sequence, and what hands out its pages."""

    def __init__(self, model: Any, max_length: int, layer: type[PagedLayer]) -> None:
        pages, settings = max_length // PAGE + 3, model.config  # three more than this sequence will need
        width = settings.num_key_value_heads * settings.head_dim
        pool = torch.zeros(2, settings.num_hidden_layers, pages * PAGE, width, dtype=model.dtype, device=model.device)
        self.slots = torch.zeros(max_length, dtype=torch.int64, device=model.device)
        super().__init__(layers=[layer(k_cache, v_cache, self.slots) for k_cache, v_cache in zip(*pool, strict=True)])
        # Shuffled, as they are in a server after a while.
        self.free_pages = random.Random(0).sample(range(pages), pages)
        self.pages: list[int] = []
        self.tokens = 0

    def make_room(self, tokens: int) -> None:
        """Give the next tokens their slots, and the sequence a page whenever its last one is full."""
        start, self.tokens = self.tokens, self.tokens + tokens
        while len(self.pages) * PAGE < self.tokens:
            self.pages.append(self.free_pages.pop())
        new_slots = [self.pages[i // PAGE] * PAGE + i % PAGE for i in range(start, self.tokens)]
        self.slots[start : self.tokens] = torch.tensor(new_slots)


def next_token(model: Any, cache: Cache, tokens: torch.Tensor) -> torch.Tensor:
    """Run `tokens` (1, n) after what is in the cache; return the likeliest token to follow them (1, 1)."""
    positions = torch.arange(tokens.shape[1], device=tokens.device) + cache.get_seq_length()
    output = model(tokens, position_ids=positions[None], cache_position=positions, use_cache=True, **{CACHE: cache})
    return output.logits[:, -1:].argmax(-1)


def generate(model: Any, cache: Cache, prompt: torch.Tensor, count: int, use_graph: bool = False) -> list[int]:
    """Greedy decoding: `count` tokens after the prompt (1, n)."""
    make_room: Callable[[int], None] = getattr(cache, "make_room", lambda tokens: None)
    make_room(prompt.shape[1])
    token = next_token(model, cache, prompt)  # this tensor stays: a graph remembers addresses
    generated = [token.clone()]

    def step() -> None:
        token.copy_(next_token(model, cache, token))

    for i in range(1, count):
        make_room(1)  # changes the slots in place; not part of the graph
        step()
        generated.append(token.clone())
        if use_graph and i == 1:  # that step was eager: libraries set themselves up in their first call
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()  # noted down, not run
            step = graph.replay
    return torch.cat(generated).flatten().tolist()


def make_model(layers: int, device: str) -> Any:
    """A Llama with random weights: bf16 on a GPU, fp32 on the simulator."""
    torch.manual_seed(0)
    settings = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=1000, max_position_embeddings=4096,
        initializer_range=1.6 * HIDDEN**-0.5,  # more than usual: the tokens then depend on what the cache holds
    )  # fmt: skip
    dtype = torch.float32 if SIMULATED else torch.bfloat16
    return transformers.AutoModelForCausalLM.from_config(settings, dtype=dtype).to(device).eval()


def main() -> None:
    """Generate with the library's caches and with pages, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=TOKENS, help="how many to generate")
    parser.add_argument("--layers", type=int, default=LAYERS)
    options = parser.parse_args()
    if not SIMULATED and not torch.cuda.is_available():
        sys.exit("generate.py needs a GPU that torch can use, or NUMBA_ENABLE_CUDASIM=1")

    model = make_model(options.layers, "cpu" if SIMULATED else "cuda")
    prompt = torch.randint(model.config.vocab_size, (1, PROMPT), device=model.device)
    max_length = -(-(PROMPT + options.tokens) // PAGE) * PAGE  # whole pages
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"Llama, {options.layers} layers, {model.dtype}, on {model.device}, {options.tokens} tokens; {versions}")

    # Equal tokens need equal arithmetic, so each kind of layer is held against the library's cache of the same shapes.
    def compare(name: str, layer: type[PagedLayer], library: Cache, use_graph: bool = False) -> bool:
        expected = generate(model, library, prompt, options.tokens)
        cache = PagedCache(model, max_length, layer)
        tokens = generate(model, cache, prompt, options.tokens, use_graph)
        verdict = "equal to" if tokens == expected else f"NOT equal to {expected[:8]}... of"
        print(f"{name}: {tokens[:8]}... on pages {cache.pages}, {verdict} {type(library).__name__}")
        return tokens == expected

    def static_cache() -> Cache:
        return StaticCache(config=model.config, max_cache_len=max_length)

    with torch.inference_mode():
        equal = compare("eager", PagedLayer, DynamicCache())
        equal &= compare("eager, fixed shapes", FixedPagedLayer, static_cache())
        if not SIMULATED:
            equal &= compare("CUDA graph", FixedPagedLayer, static_cache(), use_graph=True)
    if not equal:
        sys.exit("the paged cache gave other tokens")


if __name__ == "__main__":
    main()
