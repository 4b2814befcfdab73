"""Hugging Face trainers that heal: ``transformers.Trainer`` and every trainer of TRL.

Needs transformers; ``import heal`` does not, and imports this when one of the names is used.
"""

try:
    import transformers  # noqa: F401
except ImportError:
    raise ImportError(
        "SelfHealingTrainer needs transformers: pip install 'zclip-heal[hf]'"
    ) from None

from heal.integrations.transformers.trainer import SelfHealingCallback, SelfHealingTrainer

__all__ = ["SelfHealingCallback", "SelfHealingTrainer"]
