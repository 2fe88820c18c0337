"""The tests of the whole call on Numba's simulator, in a process of its own: Numba chooses its back end at import."""

from support import SIMULATED, needs_compiler, optional, run_whole_calls


@needs_compiler
def test_whole_calls_on_the_simulator():
    # Fewer would mean that files were lost or skipped; the count was above 280 when this was written.
    run_whole_calls(at_least=250, NUMBA_ENABLE_CUDASIM="1")


@needs_compiler
def test_torch_on_the_simulator():
    optional("torch")
    run_whole_calls(("test_torch.py", "test_sglang.py"), at_least=90, NUMBA_ENABLE_CUDASIM="1")


def test_support_agrees_with_numba():
    from numba import config

    assert bool(config.ENABLE_CUDASIM) is SIMULATED
