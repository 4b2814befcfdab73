"""The namespace ``torch.ops.zclip``, alone in a file so that each group of ops can import it."""

import torch

library = torch.library.Library("zclip", "DEF")
