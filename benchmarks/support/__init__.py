"""What several benchmarks share: a model of known completion lengths, a run under measurement, TRL's side."""
