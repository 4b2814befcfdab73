"""Damage to weights, optimizer, learning rate and data, with and without healing."""
