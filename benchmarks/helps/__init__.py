"""Does it help? The forecast, every probe and the anchor, beside a healer that has none of them."""
