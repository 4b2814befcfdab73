"""Sees slow failures coming: features of the record stream, a small model, a calibrated limit.

The half that runs beside training (``features``, ``score``, ``conformal``, ``watch``) needs nothing
but the standard library; the half that makes the model (``corpus``, ``train``, ``evaluate``) needs
torch, numpy and scikit-learn, and is imported by ``heal forecast`` only.
"""
