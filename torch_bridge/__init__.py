"""Weights from torch to jaxpar and back, element by element, and the proof that both sides compute the same."""
