"""The tests of the whole call on Numba's simulator, in a process of its own: Numba chooses its back end at import."""

from fuzzing import SEED
from support import SIMULATED, needs_compiler, optional, run_whole_calls


@needs_compiler
def test_whole_calls_on_the_simulator():
    # Fewer would mean that files were lost or skipped; the count was above 280 when this was written.
    run_whole_calls(at_least=250, NUMBA_ENABLE_CUDASIM="1")


@needs_compiler
def test_torch_on_the_simulator():
    optional("torch")
    run_whole_calls(("test_torch.py", "test_sglang.py"), at_least=90, NUMBA_ENABLE_CUDASIM="1")


@needs_compiler
def test_fuzz_and_threads_on_the_simulator():
    """test_fuzz.py's five tests and test_processes.py's two, under this process's seed."""
    files = ("test_fuzz.py", "test_processes.py")
    run_whole_calls(files, at_least=7, NUMBA_ENABLE_CUDASIM="1", NUMBA_KVCACHE_FUZZ_SEED=str(SEED))


def test_support_agrees_with_numba():
    from numba import config

    assert bool(config.ENABLE_CUDASIM) is SIMULATED
