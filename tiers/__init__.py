"""The tiers: bookkeeping and bytes of each place a KV block can live. Imports nothing of ours above it."""
