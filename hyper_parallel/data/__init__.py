"""Samples, batches and the resumable loader; knows of a model only what DataSpec says."""
