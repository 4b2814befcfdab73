"""Healing under Lightning's loop: one callback.

Needs Lightning (``pip install 'zclip-heal[lightning]'``), which is imported with this package.
"""

from heal.integrations.lightning.callback import SelfHealingLightningCallback

__all__ = ["SelfHealingLightningCallback"]
