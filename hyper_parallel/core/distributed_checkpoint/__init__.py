"""A checkpoint on disk: chunks of tensors in safetensors files, pickled metadata that says where each lies, a manifest.

metadata (the classes in the pickles) -> storage (one file) -> chunks (tensors over files) -> optimizer (AdamW's moments)
-> manifest (which files belong, and whether they are whole). The Trainer composes these into its ``step_<N>`` directories.
"""
