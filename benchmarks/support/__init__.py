"""Code shared by several benchmarks, such as a model with known completion lengths, measured runs, and the TRL baseline."""
