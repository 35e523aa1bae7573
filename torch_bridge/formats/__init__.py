"""File formats: how tensors lie in files. Nothing here knows a model."""
