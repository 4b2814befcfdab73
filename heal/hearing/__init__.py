"""What the device said, on the host: records, read late, heard by the detectors and passed on."""
