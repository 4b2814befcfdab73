"""Healthy trainings that a healer must leave alone, bit by bit."""
