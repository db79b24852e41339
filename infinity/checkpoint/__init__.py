"""State that outlives the process: complete checkpoints, and exported weights. Works on named tensors; knows no nn.Module."""

from infinity.checkpoint.export import export_weights
from infinity.checkpoint.format import Manifest, NamedState, StateSink, StateSource
from infinity.checkpoint.load import load, verify
from infinity.checkpoint.save import save
from infinity.checkpoint.values import from_json, to_json

__all__ = ["Manifest", "NamedState", "StateSink", "StateSource", "export_weights", "from_json", "load", "save", "to_json", "verify"]
