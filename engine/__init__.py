"""The in-process engine: continuous batching over a paged L1 pool, models by transformers."""
