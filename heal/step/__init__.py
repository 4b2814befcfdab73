"""One optimizer step: forward in pieces, clip, judge on the device, step or refuse, tell ranks."""
