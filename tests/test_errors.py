"""Errors of the whole call: the right exception, and not a byte written. (Every check by itself: test_contract.py.)"""

import numpy as np
import pytest
from support import (
    Memory,
    Rows,
    expect_store,
    index_array,
    interface_of,
    make_rows,
    needs_compiler,
    needs_kernels,
    optional,
    synchronize,
)

from numba_kvcache import store_kvcache


class Scene:
    """A valid call of 8 rows into 64 slots, whose arguments a test replaces."""

    def __init__(self):
        self.rows = dict(zip(("k", "v", "k_cache", "v_cache"), make_rows(8, 64, 128, dtype="float16"), strict=True))
        # REPORTS 9: behind the six slots lie two that look valid.
        self.index_memory, self.indices = index_array([5, 1, 0, 63, 20, 33, 60, 61])
        self.arrays = {name: rows.array for name, rows in self.rows.items()} | {"indices": self.indices}

    def index_view(self, shape, strides=None, dtype="int64"):
        return self.index_memory.array(256, shape, strides or (8,) * len(shape), np.dtype(dtype))

    def refuse(self, error, match, **arguments):
        with pytest.raises(error, match=match):
            store_kvcache(**{**self.arrays, **arguments})
        synchronize()
        for memory in (*(rows.memory for rows in self.rows.values()), self.index_memory):
            memory.check()


@pytest.fixture
def scene():
    return Scene()


@needs_kernels
def test_the_scene_is_valid(scene):
    slots = [5, 1, 0, 63, 20, 33, 60, 61]
    expect_store(scene.rows["k"], scene.rows["k_cache"], slots)
    expect_store(scene.rows["v"], scene.rows["v_cache"], slots)
    store_kvcache(**scene.arrays)
    synchronize()
    for rows in scene.rows.values():
        rows.memory.check()


@needs_kernels
def test_fewer_slots_than_rows(scene):
    scene.refuse(ValueError, "8 rows in k and 6 in indices", indices=scene.index_view((6,)))


@needs_kernels
def test_fewer_rows_of_v(scene):
    scene.refuse(ValueError, "6 rows in v and 8 in indices", v=Rows(6, 128, seed=9, dtype="float16").array)


@needs_kernels
@pytest.mark.parametrize("shape", [(8, 1), ()])
def test_index_shapes(scene, shape):
    scene.refuse(ValueError, "indices must have 1 dimension", indices=scene.index_view(shape))


@needs_kernels
def test_cache_of_another_width(scene):
    wide = Rows(64, 256, seed=9, dtype="float16")
    scene.refuse(ValueError, r"k and k_cache must have one row shape, got \(64,\) .* \(128,\)", k_cache=wide.array)


@needs_kernels
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_heads_on_one_side_only(scene, name):
    rows = scene.rows[name]
    heads = rows.memory.array(rows.start, (64, 4, 16), (128, 32, 2), np.dtype("float16"))
    scene.refuse(ValueError, rf"{name} \(64, 4, 16\).* view {name[0]} or {name} like the other", **{name: heads})


@needs_kernels
@pytest.mark.parametrize("name", ["k", "k_cache"])
def test_heads_with_gaps(scene, name):
    memory = Memory(64 * 256, seed=9)
    shapes = {"k": (8, 4, 16), "k_cache": (64, 4, 16)}
    arrays = {
        name: rows.memory.array(rows.start, shapes[name], (128, 32, 2), np.dtype("float16"))
        for name, rows in scene.rows.items()
        if name in shapes
    }
    arrays[name] = memory.array(0, shapes[name], (256, 64, 2), np.dtype("float16"))
    scene.refuse(ValueError, f"{name} must have dense rows", **arrays)
    memory.check()


@needs_kernels
def test_interleaved_pages(scene):
    pool = Memory(16 * 2 * 4 * 128, seed=9)
    pages = pool.array(0, (16, 4, 64), (1024, 128, 2), np.dtype("float16"))
    scene.refuse(ValueError, "k_cache must have one stride for the slots of all pages", k_cache=pages)
    pool.check()


@needs_kernels
def test_limit_past_the_smaller_cache(scene):
    small = Rows(32, 128, seed=9, dtype="float16")
    scene.refuse(ValueError, "64 rows in k_cache and 32 in v_cache", v_cache=small.array, size_limit=64)
    small.memory.check()


@needs_kernels
@pytest.mark.parametrize(("limit", "message"), [(100, "got 100 with 64"), (-1, "must not be negative, got -1")])
def test_limits(scene, limit, message):
    scene.refuse(ValueError, message, size_limit=limit)


@needs_kernels
@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("k_cache", "int16", "k and k_cache .* float16 and int16"),
        ("v", "uint16", "v and k_cache .* uint16 and float16"),
        ("v_cache", "int16", "v_cache and k_cache .* int16 and float16"),
    ],
)
def test_types_of_equal_size(scene, name, dtype, message):
    other = Rows(scene.rows[name].count, 128, seed=9, dtype=dtype)
    scene.refuse(TypeError, message, **{name: other.array})


@needs_kernels
def test_equal_row_bytes_of_other_types(scene):
    scene.refuse(TypeError, "k and k_cache .* float32 and float16", k=Rows(8, 128, seed=9, dtype="float32").array)


@needs_kernels
@pytest.mark.parametrize("dtype", ["uint64", "float64"])
def test_index_types(scene, dtype):
    scene.refuse(TypeError, f"indices must be int32 or int64, got {dtype}", indices=scene.index_view((8,), dtype=dtype))


@needs_kernels
def test_transposed_source(scene):
    memory = Memory(4096, seed=9)
    k = memory.array(256, (8, 64), (2, 16), np.dtype("float16"))
    scene.refuse(ValueError, "k must have dense rows", k=k)


@needs_kernels
def test_cache_of_one_repeated_row(scene):
    rows = Rows(64, 128, pitch=0, seed=9, dtype="float16")
    scene.refuse(ValueError, "rows of k_cache must not overlap", k_cache=rows.array)


@needs_kernels
def test_rows_of_half_words():
    rows = [Rows(2 if i < 2 else 4, 6, pitch=8, seed=i, dtype="int8") for i in range(4)]
    with pytest.raises(ValueError, match=r"rows of k must be a multiple of 4 bytes.* got 6"):
        store_kvcache(*(r.array for r in rows), index_array([1, 0])[1])
    for r in rows:
        r.memory.check()


@needs_kernels
@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache"])
def test_base_off_the_word_grid(scene, name):
    rows = Rows(scene.rows[name].count, 128, shift=2, seed=9, dtype="float16")
    scene.refuse(ValueError, f"{name} must be aligned to 4 bytes, got address 0x", **{name: rows.array})


@needs_kernels
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_read_only_cache(scene, name):
    rows = scene.rows[name]
    locked = interface_of(rows, "<f2", data=(rows.memory.address(rows.start), True))
    scene.refuse(ValueError, f"{name} must be writable", **{name: locked})


@needs_kernels
@pytest.mark.parametrize("name", ["k", "v_cache"])
def test_masked_array(scene, name):
    masked = interface_of(scene.rows[name], "<f2", mask=scene.rows[name].array)
    scene.refuse(ValueError, f"{name} is a masked array", **{name: masked})


@needs_kernels
@pytest.mark.parametrize(("options", "error"), [
    ({"num_split": 3}, ValueError), ({"num_split": 2}, ValueError), ({"num_split": True}, TypeError),
    ({"num_split": None}, TypeError), ({"num_split": 1.0}, TypeError), ({"size_limit": "8"}, TypeError),
    ({"skip_index": True}, TypeError), ({"skip_index": 1.0}, TypeError), ({"skip_index": 2**63}, ValueError),
    ({"skip_index": -(2**63) - 1}, ValueError),
    ({"stream": "0"}, TypeError), ({"stream": -1}, ValueError), ({"stream": True}, TypeError),
])  # fmt: skip
def test_options(scene, options, error):
    scene.refuse(error, next(iter(options)), **options)


@needs_kernels
@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache", "indices"])
def test_lists_are_refused(scene, name):
    scene.refuse(TypeError, f"{name} must be an array that a kernel can reach, got list", **{name: [[0.0] * 64] * 8})


@needs_compiler
@needs_kernels
@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache", "indices"])
def test_host_arrays_are_refused(scene, name):
    host = np.zeros(8, np.int64) if name == "indices" else np.zeros((8, 64), np.float16)
    scene.refuse(TypeError, f"{name} must be an array that a kernel can reach, got numpy.ndarray", **{name: host})


@needs_kernels
def test_arguments_missing_or_unknown(scene):
    scene.refuse(TypeError, "unexpected keyword argument 'split'", split=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'indices'"):
        store_kvcache(*(rows.array for rows in scene.rows.values()))
    with pytest.raises(TypeError, match="positional arguments"):
        store_kvcache(*scene.arrays.values(), 0, 0, 0)


@needs_compiler
def test_host_arrays_need_no_gpu_to_be_refused():
    host = [np.zeros((8, 64), np.float16) for _ in range(4)]
    with pytest.raises(TypeError, match=r"k must be an array that a kernel can reach, got numpy\.ndarray"):
        store_kvcache(*host, np.zeros(8, np.int64))


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int32])
def test_numpy_integers_are_plain_integers_to_the_helpers(kind):
    """They hash like ints: one in a cached layout would come back for every later call of that width."""
    from numba_kvcache import can_use_store_kvcache, make_store_kernel
    from numba_kvcache.layout import plan_store

    assert can_use_store_kvcache(kind(52))
    layout = make_store_kernel(kind(52), num_split=kind(1), alignment=kind(4)).layout
    assert type(layout.k.row_bytes) is type(layout.parts) is int
    assert type(plan_store(52).k.row_bytes) is int


@needs_kernels
@pytest.mark.parametrize("option", ["num_split", "size_limit", "skip_index"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_options_in_arrays(scene, option, shape):
    """One on a GPU would be waited for. (NumPy's 0-d array stands for all that have an array's protocol.)"""
    scene.refuse(TypeError, f"{option} must be an integer, got an array", **{option: np.ones(shape, np.int64)})


def test_helpers_refuse_tensors():
    torch = optional("torch")
    from numba_kvcache import can_use_store_kvcache

    with pytest.raises(TypeError, match=r"row_bytes must be an integer, got an array \(Tensor\)"):
        can_use_store_kvcache(torch.tensor(256))


@pytest.mark.parametrize("value", [None, "256", 256.0, True, [256]])
def test_helpers_refuse_what_is_no_integer(value):
    from numba_kvcache import can_use_store_kvcache, make_store_kernel, warmup

    for helper in (can_use_store_kvcache, make_store_kernel, warmup):
        with pytest.raises(TypeError, match="_bytes must be an integer"):
            helper(value)
