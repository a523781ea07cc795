import os

# `import torch` would load an installed torch_npu by itself and die with it where CANN is missing; platform.py loads it instead.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
