"""What bench.py runs: shapes of real models, every store checked before it is timed, peers measured the same way."""
