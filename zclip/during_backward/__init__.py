"""Statistics of gradients taken while backward runs, where each gradient becomes final.

The row of a gradient in stats depends on that gradient alone, and on nothing else in the call that
measures it. So a row taken early has the bits of one taken after backward, and all that has to be
proven in the step is that the gradient has not changed since. ``docs/during-backward.md`` says
where this pays.
"""

from zclip.during_backward.attachment import Attachment

__all__ = ["Attachment"]
