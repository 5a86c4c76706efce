"""Plain Flax models, the reference workload: nothing here imports the library under test."""
