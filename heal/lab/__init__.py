"""Optional instruments, off by default: forecast, probes, weight anchor. Imported when used."""
